"""Environments of OpenEnv, by the protocol of its servers: one session an episode.

OpenEnv's packages pin others than vLLM's, so a server runs in an environment of its own; nothing of
it is needed here. `reward=environment` scores an episode by the rewards of its steps. Failures are
those of agent=http. The server has to allow as many sessions as there are episodes at once
(`max_concurrent_envs`).
"""

from typing import TYPE_CHECKING, Literal

from rloo_cli.config.agent import AgentConfig
from rloo_cli.config.judge import Address, Variable
from rloo_cli.config.schema import Text, key

if TYPE_CHECKING:
    from rloo_cli.agents.common.tool_set import ToolSet


class Config(AgentConfig):
    kind: Literal["openenv"] = key("openenv: environments of an OpenEnv server")
    url: Address = key("Where the server is, without /ws")
    token_env: Variable | None = key(
        "Environment variable that holds the token, sent as bearer; null = none"
    )
    observation: Text | None = key(
        "The observation's field that the model is told; null = all of them, as JSON"
    )
    reward: Literal["sum", "last"] = key("What the rewards of an episode's steps come to")

    def scores_episodes(self) -> bool:
        """Whether its environments may have a reward of their own: that of each step."""
        return True

    def opens_prompts(self) -> bool:
        """Whether an environment may say all of an episode's first turn: its reset."""
        return True


def preflight(config: Config) -> None:
    """Raises MachineError where the token's variable is not set, or nobody listens at the URL."""
    from rloo_cli.agents.remote import service  # lazy: the registry reads schemas only

    service.check_token(config.token_env)
    service.check_reachable(config.url)


def load_tools(config: Config) -> "ToolSet":
    """The environment's tools. Raises MachineError where the server does not answer."""
    from rloo_cli.agents.remote import openenv_caller  # lazy: the registry reads schemas only

    return openenv_caller.load_openenv_tools(
        config.url, config.token_env, config.observation, config.reward, config.max_tool_s
    )
