"""The score of a task's own scorer, usually 0 to 1: for `data.path=reasoning_gym:NAME`.

Its tasks score in degrees: most give 1.0 for the right answer, some a part for a nearly
right one, and many 0.01 for any answer at all. A completion without an answer to extract gets
the task's score for no answer.
"""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.data import tasks
from rloo_cli.rewards.common.text import (
    Columns,
    Completion,
    ExtractMethod,
    extract_answer,
    gold_texts,
    texts,
)

EXTRA = "rloo-cli[tasks]"


class Config(RewardConfig):
    type: Literal["reasoning_gym"] = key("reasoning_gym")
    column: str = key("Data column with the entry from data.path=reasoning_gym:NAME")
    extract: ExtractMethod = key(
        "The answer: all the text, the last of: \\boxed{}, <answer> block, line, number"
    )


def needs(config: Config) -> list[str]:
    return [config.column]


def preflight(config: Config) -> None:
    """Raises MachineError when reasoning-gym is not installed."""
    tasks.require_reasoning_gym(f"reward.{config.type}")


def score(completions: list[Completion], columns: Columns, config: Config) -> list[float | None]:
    """(B,) of the scorers' numbers; None if the row is not from a task."""
    answers = [extract_answer(text, config.extract) for text in texts(completions)]
    pairs = zip(answers, columns[config.column], strict=True)
    return [
        None if not gold_texts(entry) else _score_answer(answer, str(entry))
        for answer, entry in pairs
    ]


def _score_answer(answer: str | None, entry: str) -> float:
    return tasks.entry_score(entry, None if answer is None else answer.strip())
