"""Number of different characters in the completion's text: learnable by a tiny model in minutes."""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts


class Config(RewardConfig):
    type: Literal["unique_chars"] = key("unique_chars")


def score(completions: list[Completion]) -> list[float]:
    """(B,) characters.

    >>> score(["abba", ""])
    [2.0, 0.0]
    """
    return [float(len(set(text))) for text in texts(completions)]
