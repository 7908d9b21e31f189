"""min(words / full_length, 1) + different words / words: long and varied. Empty text: 0.0."""

from typing import Literal

from rloo_cli.config.schema import Positive, RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts


class Config(RewardConfig):
    type: Literal["length_diversity"] = key("length_diversity")
    full_length: Positive = key("Words from which on length is worth its full 1.0")


def score(completions: list[Completion], config: Config) -> list[float]:
    """(B,), each in [0, 2].

    >>> config = Config.model_construct(full_length=4)
    >>> score(["a b c d", "a a", ""], config)
    [2.0, 1.0, 0.0]
    """
    return [_diversity_score(text.split(), config.full_length) for text in texts(completions)]


def _diversity_score(words: list[str], full_length: int) -> float:
    return min(len(words) / full_length, 1.0) + len(set(words)) / len(words) if words else 0.0
