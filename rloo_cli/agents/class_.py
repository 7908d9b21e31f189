"""Environments: classes with `reset(**row)`, whose public methods are tools.

`reset` gets the row's columns and may return a text, which is appended to the prompt's last
message. A method `get_reward()`, if there is one, scores the finished episode
(`reward=environment`), and a true attribute `done` ends it. These are the classes that
TRL's environment_factory takes. With several, the row's column `environment` selects one.
"""

from typing import TYPE_CHECKING, Literal

from rloo_cli.config import registry
from rloo_cli.config.agent import ProcessAgentConfig
from rloo_cli.config.schema import Name, PathText, key

TEXT_GAMES = "rloo_cli.data.synthetic.text_games"

if TYPE_CHECKING:
    from rloo_cli.agents.common.tool_set import ToolSet


class Config(ProcessAgentConfig):
    kind: Literal["class"] = key("class: environments")
    environments: dict[Name, PathText] = key("The classes: {name: file.py:Class}", min_length=1)

    def code_specs(self) -> dict[str, str]:
        """Key -> `file.py:Class`."""
        return {f"agent.environments.{name}": spec for name, spec in self.environments.items()}

    def scores_episodes(self) -> bool:
        """Whether its environments may define their own reward: `get_reward`."""
        return True

    def opens_prompts(self) -> bool:
        """Whether an environment's reset may provide the whole first turn of an episode."""
        return True


def preflight(config: Config) -> None:
    """Raises MachineError if a built-in environment needs a package that is not installed."""
    for where, spec in config.code_specs().items():
        if spec.startswith(f"{TEXT_GAMES}:"):
            registry.load_code(f"{TEXT_GAMES}:require_textworld")(where)


def load_tools(config: Config) -> "ToolSet":
    """The classes' tools. Raises ConfigError, which names a method without types."""
    from rloo_cli.agents.common import tool_set  # lazy: the registry reads schemas without torch

    return tool_set.load_environments(config.environments)
