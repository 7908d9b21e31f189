"""Episodes that a user function plays: TRL's `rollout_func`.

The function gets the prompts, one for each completion, and a sampler that takes token ids and gives
token ids with their log-probabilities. Its rows are checked, and trained on as returned.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rloo_cli.config.agent import EpisodeConfig
from rloo_cli.config.schema import PathText, key
from rloo_cli.config.user_code import load_user_code
from rloo_cli.rewards.engine.arguments import HIDDEN_COLUMNS, REWARD_KWARGS
from rloo_cli.utils.errors import refuse

if TYPE_CHECKING:
    from rloo_cli.agents.common.build import EpisodeSetup
    from rloo_cli.generation import Generator


class Config(EpisodeConfig):
    kind: Literal["rollout"] = key("rollout: a user function plays the episodes")
    rollout: PathText = key("The function: file.py:name, which takes (prompts, sampler)")
    fields: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = key(
        "Further fields that it returns, passed to rewards as columns"
    )

    def code_specs(self) -> dict[str, str]:
        """Key -> `file.py:name`."""
        return {"agent.rollout": self.rollout}

    def reward_columns(self) -> list[str]:
        """The fields, with one value per episode."""
        return self.fields


def load_tools(config: Config) -> None:
    """Nothing: the function brings its own tools. Raises ConfigError if it cannot be loaded."""
    from rloo_cli.agents.rollout_function.returned_rows import OWN_FIELDS  # lazy: imports torch

    taken = {*OWN_FIELDS, *HIDDEN_COLUMNS, *REWARD_KWARGS}
    for field in sorted(taken & {*config.fields}):
        what, fix = f"agent.fields names {field!r}, a reserved name", f"my_{field}"
        why = "it is a field of every episode, or a standard argument of rewards"
        refuse("agent.fields", what, fix, why)
    load_user_code(config.rollout, "agent.rollout")


def build_generator(config: Config, setup: "EpisodeSetup") -> "Generator":
    """A generator of episodes that the function plays. Raises ConfigError."""
    from rloo_cli.agents.rollout_function import generator  # lazy: it imports torch

    function = load_user_code(config.rollout, "agent.rollout")
    setup.note(f"episodes of up to {config.max_turns} turns are played by {config.rollout}")
    return generator.build_function_generator(config, function, setup)
