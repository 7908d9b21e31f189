"""The reward of an episode's own environment: the value of its method `get_reward()` (agent=class).

None if the environment has no such method. An environment that failed has no score at all: the
row is out of baseline and loss, and is counted in agent/failures.
"""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key


class Config(RewardConfig):
    type: Literal["environment"] = key("environment")


def score(environment_rewards: list[float | None], config: Config) -> list[float | None]:
    """(B,) of each environment's reward, or None."""
    return list(environment_rewards)
