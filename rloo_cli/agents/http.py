"""Environments of a server that you wrote: in any language, on any machine, one session an episode.

The server describes its tools at `url`/tools; each episode is /reset, a /step for each call, and
/close, in JSON (docs/agents_elsewhere.md has the protocol and a server of forty lines). A step that
answers an error is told to the model; a server that is late, dies or answers nonsense leaves the
row out of baseline and loss, which agent/failures counts. No redirect is followed.
"""

from typing import TYPE_CHECKING, Literal

from rloo_cli.config.agent import AgentConfig
from rloo_cli.config.judge import Address, Variable
from rloo_cli.config.schema import key

if TYPE_CHECKING:
    from rloo_cli.agents.common.tool_set import ToolSet


class Config(AgentConfig):
    kind: Literal["http"] = key("http: environments of a server")
    url: Address = key("Where the server is, without /reset")
    token_env: Variable | None = key(
        "Environment variable that holds the token, sent as bearer; null = none"
    )

    def scores_episodes(self) -> bool:
        """Whether its environments may have a reward of their own: `reward` in an answer."""
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
    """The tools that the server describes. Raises MachineError where it does not answer."""
    from rloo_cli.agents.remote import http_caller  # lazy: the registry reads schemas only

    return http_caller.load_http_tools(config.url, config.token_env, config.max_tool_s)
