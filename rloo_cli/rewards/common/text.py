"""What rewards read in a completion: its text, the last \\boxed{}, what follows a delimiter."""

import re
from typing import Any

BOXED_START = re.compile(r"\\boxed\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \\{ and \\} are printed braces and need not balance
Completion = str | list[dict[str, Any]]


def texts(completions: list[Completion]) -> list[str]:
    """Text of each completion: the string itself, or the last assistant message's content.

    Raises ValueError for a message list without an assistant message: "" would be scored.
    """
    return [c if isinstance(c, str) else _last_assistant_text(c) for c in completions]


def _last_assistant_text(messages: list[dict[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role", "assistant") == "assistant":
            return str(message.get("content") or "")
    raise ValueError(f"no assistant message in {messages!r}")


def last_boxed_content(text: str) -> str | None:
    """Content of the last closed \\boxed{...}, braces matched; None when there is none.

    One pass: a model that repeats \\boxed{ without end does not hold the step up.
    """
    starts = {found.end() for found in BOXED_START.finditer(text)}
    opened: list[int] = []  # where the content of each open brace begins
    last: tuple[int, int] | None = None
    for found in BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.end())
        elif found[0] == "}" and opened:
            begin = opened.pop()
            if begin in starts and (last is None or begin > last[0]):
                last = begin, found.start()
    return text[last[0] : last[1]] if last is not None else None


def text_after_last(text: str, delimiter: str) -> str | None:
    """What follows the last `delimiter`; None when it is not there."""
    _, found, rest = text.rpartition(delimiter)
    return rest if found else None
