"""Number of tokens of the completion, stop token included. For trying things out."""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key


class Config(RewardConfig):
    type: Literal["length_tokens"] = key("length_tokens")


def score(sampled_ids: list[list[int]]) -> list[float]:
    """(B,) tokens.

    >>> score([[5, 6, 7], []])
    [3.0, 0.0]
    """
    return [float(len(ids)) for ids in sampled_ids]
