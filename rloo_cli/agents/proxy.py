"""External agents, in any language, that talk to the policy through OpenAI's API.

The run listens on its own port, and gives each episode a key. The run's generator samples the
agent's requests, token ids in and token ids out; exactly those ids are trained on. The agent is a
command that is started per episode or plays all episodes, or it connects on its own and asks for
one.
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
    kind: Literal["proxy"] = key("proxy: external agents behind an OpenAI API")
    command: Text | None = key("Command, run without a shell; null = agents connect on their own")
    lifetime: Literal["episode", "run"] = key(
        "episode: the command is started for each episode. run: one process plays all episodes of"
        " the run and fetches them from RLOO_PROXY_URL, with RLOO_TOKEN"
    )
    token_env: Text | None = key(
        "Environment variable with the token for agents that connect on their own; else null"
    )
    max_seconds: float = key(
        "Kill an agent after this many seconds per episode, not counting its waits for the policy."
        " Also how long a run without active agents waits for one to connect",
        gt=0,
        le=1e6,
    )
    max_rows: Positive = key(
        "Most rows per episode: how many histories its agent may use (after truncating one, or for"
        " a second agent). All share its score and advantage; 1 = a request with another history"
        " is refused"
    )
    host: Text = key("Address that the proxy listens on")
    port: int = key("Its port; 0 = any free one", ge=0, le=65535)
    workers: Positive = key("Most agents at a time; other episodes wait")

    def scores_episodes(self) -> bool:
        """An agent may post a reward for its episode."""
        return True


def load_tools(config: Config) -> None:
    """Nothing: the agent brings its own tools. Raises ConfigError if no agent can start."""
    if config.command is None:
        if config.lifetime == "run":
            what, why = "agent.lifetime = run needs agent.command", "it plays all episodes"
            fix = "agent.command='python agent.py', or agent.lifetime=episode"
            refuse("agent.lifetime", what, fix, why)
        _check_token(config.token_env)
    else:
        if config.token_env is not None:
            what = "agent.token_env is set, and agents are started by agent.command"
            why = "only agents that connect on their own need a token"
            refuse("agent.token_env", what, "agent.token_env=null", why)
        program = _split_command(config.command)[0]
        if shutil.which(program) is None:
            what, why = f"agent.command: program {program} not found", "it plays the episodes"
            refuse("agent.command", what, "a path, or a name in PATH", why)
    bind_or_refuse("agent", config.host, config.port, error=ConfigError).close()


def _split_command(command: str) -> list[str]:
    """The words of a command. Raises ConfigError for an unclosed quote, or an empty command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        what, fix = f"agent.command cannot be read: {command}", "close the quotes in agent.command"
        refuse("agent.command", what, fix, error)
    if not words:
        why, fix = "that command plays the episodes", "agent.command='python agent.py'"
        refuse("agent.command", "agent.command is empty", fix, why)
    return words


def _check_token(variable: str | None) -> None:
    why = "without agent.command, agents connect on their own with a token"
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

    Raises ConfigError, also for a chat template that cannot continue after an answer.
    """
    from rloo_cli.agents.external import generator  # lazy: the registry reads schemas without torch

    command = None if config.command is None else _split_command(config.command)
    per_run = config.lifetime == "run"
    token = secrets.token_urlsafe(32) if per_run else os.environ.get(config.token_env or "", "")
    launch = generator.AgentLaunch(command, token, per_run)
    return generator.build_proxy(config, launch, setup)
