"""1.0 if the completion opens with <think>, closes it once, and never opens another, else 0.0."""

import re
from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts

PATTERN = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


class Config(RewardConfig):
    type: Literal["think_format"] = key("think_format")


def score(completions: list[Completion]) -> list[float]:
    """(B,) of 1.0 or 0.0.

    >>> score(["<think>why</think>so", "so"])
    [1.0, 0.0]
    """
    return [1.0 if PATTERN.match(text) else 0.0 for text in texts(completions)]
