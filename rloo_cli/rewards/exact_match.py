"""1.0 if the answer is, as a string, one of the gold answers, else 0.0.

The column has one gold answer or a list of accepted ones; None if none of them can be read, or
all are white space.
White space around answers does not count. A completion without an answer to extract (no \\boxed{},
no number) gets 0.0. A number may be .5, 1/2, 1e5, 1,234 or 1 234; it is compared as written,
except for the marks between thousands, the kind of minus, and the 0 before the point.
"""

import re
from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import (
    Columns,
    Completion,
    ExtractMethod,
    extract_answer,
    gold_texts,
    texts,
)


class Config(RewardConfig):
    type: Literal["exact_match"] = key("exact_match")
    column: str = key("Data column with the gold answer, or a list of them")
    extract: ExtractMethod = key(
        "The answer: all the text, the last of: \\boxed{}, <answer> block, line, number"
    )
    gold_extract: ExtractMethod = key(
        "The part of the gold answer to use, if the column has a whole solution"
    )
    ignore_case: bool = key("Ignore case")


def needs(config: Config) -> list[str]:
    return [config.column]


def score(completions: list[Completion], columns: Columns, config: Config) -> list[float | None]:
    """(B,) of 1.0, 0.0 or None.

    >>> config = Config.model_construct(
    ...     column="answer", extract="last_number", gold_extract="text", ignore_case=False
    ... )
    >>> score(["so 1,234", "so 5", "none"], {"answer": ["1234", "6", None]}, config)
    [1.0, 0.0, None]
    """
    answers = [extract_answer(text, config.extract) for text in texts(completions)]
    pairs = zip(answers, columns[config.column], strict=True)
    return [_matches_gold(answer, gold, config) for answer, gold in pairs]


def _matches_gold(answer: str | None, gold: object, config: Config) -> float | None:
    found = [extract_answer(text, config.gold_extract) for text in gold_texts(gold)]
    normalized = [_normalize_answer(text, config) for text in found if text is not None]
    accepted = [text for text in normalized if text]  # an empty \boxed{} does not count
    if not accepted:
        return None  # like accuracy for an unreadable gold answer
    return float(answer is not None and _normalize_answer(answer, config) in accepted)


def _normalize_answer(answer: str, config: Config) -> str:
    if config.extract == "last_number":
        answer = re.sub(r"[,\s]", "", answer).replace("\u2212", "-").lower()  # 1,234 is 1234
        answer = re.sub(r"^(-?)\.", r"\g<1>0.", answer)  # .5 is 0.5
    return answer.strip().casefold() if config.ignore_case else answer.strip()
