"""DAPO's soft penalty for long completions (arXiv 2503.14476, equation 13).

It is 0 up to max_length - soft_cache tokens, falls in a straight line to -1 at max_length, and is
-1 beyond.
"""

from typing import Literal, Self

from pydantic import model_validator

from rloo_cli.config.schema import Positive, RewardConfig, key


class Config(RewardConfig):
    type: Literal["overlong"] = key("overlong")
    max_length: Positive = key("Tokens at which the penalty is full")
    soft_cache: int = key("Tokens over which it grows; 0 = -1 beyond max_length only", ge=0)

    @model_validator(mode="after")
    def _check_soft_cache(self) -> Self:
        if self.soft_cache > self.max_length:
            raise ValueError(f"soft_cache {self.soft_cache} is above max_length {self.max_length}")
        return self


def score(sampled_ids: list[list[int]], config: Config) -> list[float]:
    """(B,), each in [-1, 0].

    >>> config = Config.model_construct(max_length=10, soft_cache=4)
    >>> score([[1] * 6, [1] * 8, [1] * 12], config)
    [0.0, -0.5, -1.0]
    """
    return [
        _overlong_penalty(len(ids), config.max_length, config.soft_cache) for ids in sampled_ids
    ]


def _overlong_penalty(length: int, max_length: int, soft_cache: int) -> float:
    if length <= max_length - soft_cache:
        return 0.0
    return (max_length - soft_cache - length) / soft_cache if length <= max_length else -1.0
