"""What a task's own scorer gives the answer, usually 0 to 1: for `data.path=reasoning_gym:NAME`.

Its tasks score in degrees: most give 1.0 for the right answer, some a part for one that is nearly
right, and many 0.01 for any answer at all. A completion without an answer to extract is scored as
the task scores no answer.
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
    column: str = key("Data column with the entry that data.path=reasoning_gym:NAME made")
    extract: ExtractMethod = key(
        "The answer: all the text, the last of: \\boxed{}, <answer> block, line, number"
    )


def needs(config: Config) -> list[str]:
    return [config.column]


def preflight(config: Config) -> None:
    """Raises MachineError when reasoning-gym is not installed."""
    tasks.require_reasoning_gym(f"reward.{config.type}")


def score(completions: list[Completion], columns: Columns, config: Config) -> list[float | None]:
    """(B,) of the scorers' numbers; None where the row is of no task."""
    answers = [extract_answer(text, config.extract) for text in texts(completions)]
    pairs = zip(answers, columns[config.column], strict=True)
    return [
        None if not gold_texts(entry) else _score_answer(answer, str(entry))
        for answer, entry in pairs
    ]


def _score_answer(answer: str | None, entry: str) -> float:
    return tasks.entry_score(entry, None if answer is None else answer.strip())
