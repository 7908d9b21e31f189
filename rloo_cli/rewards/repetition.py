"""Penalty for repeated n-grams of tokens: max_penalty * (1 - distinct / all).

It is 0.0 if nothing repeats and if there are fewer than `ngram` tokens (arXiv 2502.03373,
appendix C.2).
"""

from typing import Literal

from rloo_cli.config.schema import Positive, RewardConfig, key


class Config(RewardConfig):
    type: Literal["repetition"] = key("repetition")
    ngram: Positive = key("Tokens in an n-gram")
    max_penalty: float = key("Limit of the score of a completion that repeats one n-gram", le=0)


def score(sampled_ids: list[list[int]], config: Config) -> list[float]:
    """(B,), each in [max_penalty, 0].

    >>> config = Config.model_construct(ngram=1, max_penalty=-1.0)
    >>> score([[5, 6, 7, 8], [5, 5, 5, 5]], config)
    [0.0, -0.75]
    """
    return [_repetition_penalty(ids, config.ngram, config.max_penalty) for ids in sampled_ids]


def _repetition_penalty(ids: list[int], ngram: int, max_penalty: float) -> float:
    grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    repeated = len(grams) - len(set(grams))
    return max_penalty * repeated / len(grams) if repeated else 0.0
