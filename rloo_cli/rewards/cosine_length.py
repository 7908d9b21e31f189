"""Right answers are worth more the shorter they are, wrong ones cost more the shorter they are.

The score is half a cosine from 0 to `max_length` tokens, then flat (arXiv 2502.03373, appendix
C.1). `accuracy` decides whether an answer is right; None if the gold answer cannot be read.
"""

import math
from collections.abc import Callable
from typing import Literal

from rloo_cli.config.schema import Positive, RewardConfig, key
from rloo_cli.rewards.common import math_equal
from rloo_cli.rewards.common.text import Columns, Completion, texts

EXTRA = "rloo-cli[math]"


class Config(RewardConfig):
    type: Literal["cosine_length"] = key("cosine_length")
    column: str = key("Data column with the gold answer")
    answer_timeout_s: Positive = key("Seconds to compare one answer; longer = not correct")
    max_length: Positive = key("Tokens from which on the score no longer changes")
    correct_short: float = key("Score of a right answer of 0 tokens")
    correct_long: float = key("Score of a right answer of max_length tokens")
    wrong_short: float = key("Score of a wrong answer of 0 tokens")
    wrong_long: float = key("Score of a wrong answer of max_length tokens")


def needs(config: Config) -> list[str]:
    return [config.column]


def preflight(config: Config) -> None:
    """Raises MachineError when math-verify is not installed."""
    math_equal.require_math_verify()


def cosine_score(short: float, long: float, length: int, max_length: int) -> float:
    """From `short` at 0 tokens to `long` at `max_length` and beyond (a cosine would rise again)."""
    progress = min(length / max_length, 1.0)
    return long + 0.5 * (short - long) * (1.0 + math.cos(progress * math.pi))


def score(
    completions: list[Completion],
    sampled_ids: list[list[int]],
    columns: Columns,
    config: Config,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float | None]:
    """(B,) scores, or None."""
    golds = columns[config.column]
    right = math_equal.grade_answers(list(texts(completions)), golds, config, log_metric)
    ends = {
        True: (config.correct_short, config.correct_long),
        False: (config.wrong_short, config.wrong_long),
    }
    return [
        None if r is None else cosine_score(*ends[r], len(ids), config.max_length)
        for r, ids in zip(right, sampled_ids, strict=True)
    ]
