"""Reads a completion for rewards: its text, its last \\boxed{}, the text after a delimiter."""

import re
from typing import Any

from rloo_cli.utils.files import JsonObject

BOXED_START = re.compile(r"\\boxed\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \\{ and \\} are printed braces and need not balance
Completion = str | list[JsonObject]  # plain text, or the messages of an answer
Columns = dict[str, list[Any]]  # data column -> its value for each completion


def texts(completions: list[Completion]) -> list[str]:
    """The text of each completion: the string itself, or the last assistant message's content.

    Raises ValueError for messages without one of the assistant: an empty text would be scored.
    """
    return [c if isinstance(c, str) else _last_assistant_text(c) for c in completions]


def _last_assistant_text(messages: list[JsonObject]) -> str:
    for message in reversed(messages):
        if message.get("role", "assistant") == "assistant":
            return str(message.get("content") or "")
    raise ValueError(f"no assistant message in {messages!r}")


def last_boxed_content(text: str) -> str | None:
    """The content of the last closed \\boxed{...}, braces matched; None when there is none.

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


def text_after_last(text: str, delimiter: str) -> str | None:
    """The text after the last `delimiter`; None when the delimiter does not occur."""
    _, separator, rest = text.rpartition(delimiter)
    return rest if separator else None
