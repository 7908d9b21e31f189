"""Reads a completion for rewards: its text, its answer, the text after a delimiter."""

import re
from typing import Any, Literal

from rloo_cli.utils.files import JsonObject

BOXED_START = re.compile(r"\\boxed\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \\{ and \\} are printed braces and need not balance
Completion = str | list[JsonObject]  # plain text, or the messages of an answer
Columns = dict[str, list[Any]]  # data column -> its value for each completion
ExtractMethod = Literal["text", "boxed", "answer_tag", "last_line", "last_number"]
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THOUSANDS_GROUPS = r"\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d)\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)"
# A - after a digit, a letter or a bracket is a minus between two numbers: 5-3 ends in 3.
NUMBER_PATTERN = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?"
    rf"(?:(?<!\d)\.\d+|(?:{THOUSANDS_GROUPS}|\d+)(?:/\d+|(?:\.\d+)?))"
    r"(?:[eE][-+]?\d+(?!\w))?"
)


def texts(completions: list[Completion]) -> list[str]:
    """The text of each completion: the string itself, or the last assistant message's content.

    Raises ValueError for messages without an assistant message: an empty text would be scored.
    """
    return [c if isinstance(c, str) else _last_assistant_text(c) for c in completions]


def _last_assistant_text(messages: list[JsonObject]) -> str:
    for message in reversed(messages):
        if message.get("role", "assistant") == "assistant":
            return str(message.get("content") or "")
    raise ValueError(f"no assistant message in {messages!r}")


def last_boxed_content(text: str) -> str | None:
    """The content of the last closed \\boxed{...}, braces matched; None if there is none.

    It takes one pass: a model that repeats \\boxed{ without end does not hold up the step.
    """
    starts = {match.end() for match in BOXED_START.finditer(text)}
    opened: list[int] = []  # where the content of each open brace begins
    last: tuple[int, int] | None = None
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            begin = opened.pop()
            if begin in starts and (last is None or begin > last[0]):
                last = begin, match.start()
    return text[last[0] : last[1]] if last is not None else None


def extract_answer(text: str, method: ExtractMethod) -> str | None:
    """The answer in `text`, extracted in this way; None if there is none."""
    if method == "boxed":
        return last_boxed_content(text)
    if method == "answer_tag":
        return _last_or_none(ANSWER_TAG.findall(text))
    if method == "last_line":
        return _last_or_none(text.strip().splitlines())
    if method == "last_number":
        return _last_or_none(NUMBER_PATTERN.findall(text))
    return text


def gold_texts(gold: object) -> list[str]:
    """The gold answers in a value of a column: one, or those of a list.

    None and white space are not answers: a completion would contain or equal them by chance. An
    empty result means that the reward does not apply.

    >>> gold_texts(["", "x", None, 4]), gold_texts("  "), gold_texts(0)
    (['x', '4'], [], ['0'])
    """
    values = gold if isinstance(gold, list | tuple) else [gold]
    return [text for text in (str(v) for v in values if v is not None) if text.strip()]


def _last_or_none(matches: list[str]) -> str | None:
    return matches[-1] if matches else None


def text_after_last(text: str, delimiter: str) -> str | None:
    """The text after the last `delimiter`; None if the delimiter does not occur."""
    _, separator, rest = text.rpartition(delimiter)
    return rest if separator else None
