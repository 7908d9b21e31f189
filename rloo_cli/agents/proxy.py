"""Agents written by others, in any language, that talk to the policy as to OpenAI's API.

The run listens on an address of its own, and gives each episode a key. An agent's requests are
sampled by the run's generator, token ids in and token ids out; what was sampled is what is trained.
The agent is a command that is started for each episode or plays all of them, or comes by itself and
asks for one.
"""

import os
import secrets
import shlex
import shutil
from typing import TYPE_CHECKING, Literal

from rloo_cli.config.agent import ParsedConfig
from rloo_cli.config.schema import Positive, Text, key
from rloo_cli.utils.errors import ConfigError, refuse
from rloo_cli.utils.ports import bind_or_refuse

if TYPE_CHECKING:
    from rloo_cli.agents.common.build import EpisodeSetup
    from rloo_cli.generation import Generator

LEAST_TOKEN = 16  # characters


class Config(ParsedConfig):
    kind: Literal["proxy"] = key("proxy: agents written by others")
    command: Text | None = key("What is started, without a shell; null = agents come by themselves")
    lifetime: Literal["episode", "run"] = key(
        "episode: the command is started for each episode. run: one process plays all episodes of"
        " the run; it asks RLOO_PROXY_URL for them, with RLOO_TOKEN"
    )
    token_env: Text | None = key(
        "Environment variable with the token of agents that come by themselves; null with a command"
    )
    max_seconds: float = key(
        "Seconds of an episode in which the agent does not wait for the policy; then it is killed."
        " Also how long a run waits for one that comes by itself, while none plays",
        gt=0,
        le=1e6,
    )
    max_rows: Positive = key(
        "Most rows of an episode: how often its agent may begin with another history (one that it"
        " cut, an agent beside it). They share its score and advantage; 1 = such a request is"
        " refused"
    )
    host: Text = key("Address that the proxy listens on")
    port: int = key("Its port; 0 = any free one", ge=0, le=65535)
    workers: Positive = key("Most agents at a time; other episodes wait for one of them to end")

    def scores_episodes(self) -> bool:
        """An agent may post a reward for its episode."""
        return True


def load_tools(config: Config) -> None:
    """Nothing: the agent has its tools. Raises ConfigError where no agent could be started."""
    if config.command is None:
        if config.lifetime == "run":
            what, why = "agent.lifetime = run needs agent.command", "it is what plays all episodes"
            fix = "agent.command='python agent.py', or agent.lifetime=episode"
            refuse("agent.lifetime", what, fix, why)
        _check_token(config.token_env)
    else:
        if config.token_env is not None:
            what = "agent.token_env is set, and agents are started by agent.command"
            why = "only agents that come by themselves show a token"
            refuse("agent.token_env", what, "agent.token_env=null", why)
        program = _split_command(config.command)[0]
        if shutil.which(program) is None:
            what, why = f"agent.command: there is no program {program}", "it plays the episodes"
            refuse("agent.command", what, "a path, or a name that PATH finds", why)
    bind_or_refuse("agent", config.host, config.port, error=ConfigError).close()


def _split_command(command: str) -> list[str]:
    """The words of a command. Raises ConfigError for quotes without an end, or no word."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        what, fix = f"agent.command cannot be read: {command}", "close the quotes in agent.command"
        refuse("agent.command", what, fix, error)
    if not words:
        why, fix = "it is what plays the episodes", "agent.command='python agent.py'"
        refuse("agent.command", "agent.command is empty", fix, why)
    return words


def _check_token(variable: str | None) -> None:
    why = "without agent.command agents come by themselves, and show a token"
    if variable is None:
        what, fix = "agent.command and agent.token_env are null", "agent.command='python agent.py'"
        refuse("agent.command", what, fix, why)
    if len(os.environ.get(variable, "")) < LEAST_TOKEN:
        what = (
            f"the environment's {variable} has fewer than {LEAST_TOKEN} characters, or is not set"
        )
        fix = f"export {variable}=$(openssl rand -hex 16)"
        refuse("agent.token_env", what, fix, why)


def build_generator(config: Config, setup: "EpisodeSetup") -> "Generator":
    """A generator of episodes that agents behind the proxy play.

    Raises ConfigError, also for a chat template that cannot go on after an answer.
    """
    from rloo_cli.agents.external import generator  # lazy: the registry reads schemas without torch

    command = None if config.command is None else _split_command(config.command)
    per_run = config.lifetime == "run"
    token = secrets.token_urlsafe(32) if per_run else os.environ.get(config.token_env or "", "")
    launch = generator.AgentLaunch(command, token, per_run)
    return generator.build_proxy(config, launch, setup)
