"""Like `accuracy`, but only the text after the end of the reasoning counts.

A completion whose reasoning never ends has not answered: 0.0, unless the row has no
gold answer.
"""

from collections.abc import Callable
from typing import Literal

from rloo_cli.config.schema import Positive, RewardConfig, key
from rloo_cli.rewards.common import math_equal
from rloo_cli.rewards.common.text import Columns, Completion, gold_texts, text_after_last, texts

EXTRA = "rloo-cli[math]"


class Config(RewardConfig):
    type: Literal["reasoning_accuracy"] = key("reasoning_accuracy")
    column: str = key("Data column with the gold answer")
    delimiter: str = key("Ends the reasoning; the last one counts", min_length=1)
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
    answers = [text_after_last(text, config.delimiter) for text in texts(completions)]
    golds = columns[config.column]
    ended = [i for i, answer in enumerate(answers) if answer is not None]
    right = math_equal.grade_answers(
        [answers[i] for i in ended], [golds[i] for i in ended], config, log_metric
    )
    scores: list[float | None] = [0.0 if gold_texts(gold) else None for gold in golds]
    for i, correct in zip(ended, right, strict=True):
        scores[i] = None if correct is None else float(correct)
    return scores
