"""Number of tokens of the completion, stop token included. For trying things out."""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key


class Config(RewardConfig):
    type: Literal["length_tokens"] = key("length_tokens")


def score(sampled_ids: list[list[int]]) -> list[float]:
    """(B,) tokens."""
    return [float(len(ids)) for ids in sampled_ids]
