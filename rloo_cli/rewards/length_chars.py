"""Number of characters of the completion's text. For trying things out."""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts


class Config(RewardConfig):
    type: Literal["length_chars"] = key("length_chars")


def score(completions: list[Completion]) -> list[float]:
    """(B,) characters.

    >>> score(["four", [{"role": "assistant", "content": "ab"}]])
    [4.0, 2.0]
    """
    return [float(len(text)) for text in texts(completions)]
