"""1.0 if the answer is mathematically equal to the gold one, else 0.0 (math-verify).

The answer has to be in \\boxed{} or announced. The gold answer may be bare LaTeX. If it cannot
be read as a whole, the reward does not apply (None).
"""

from collections.abc import Callable
from typing import Literal

from rloo_cli.config.schema import Positive, RewardConfig, key
from rloo_cli.rewards.common import math_equal
from rloo_cli.rewards.common.text import Columns, Completion, texts

EXTRA = "rloo-cli[math]"


class Config(RewardConfig):
    type: Literal["accuracy"] = key("accuracy")
    column: str = key("Data column with the gold answer")
    answer_timeout_s: Positive = key("Seconds to compare one answer; longer = not correct")


def needs(config: Config) -> list[str]:
    return [config.column]


def preflight(config: Config) -> None:
    """Raises MachineError when math-verify is not installed."""
    math_equal.require_math_verify()


def score(
    completions: list[Completion],
    columns: Columns,
    config: Config,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float | None]:
    """(B,) of 1.0, 0.0 or None."""
    golds = columns[config.column]
    right = math_equal.grade_answers(list(texts(completions)), golds, config, log_metric)
    return [None if r is None else float(r) for r in right]
