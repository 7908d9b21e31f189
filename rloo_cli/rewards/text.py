"""What rewards read in a completion: its text, the last \\boxed{}, what follows a delimiter."""

from typing import Any

Completion = str | list[dict[str, Any]]


def texts(completions: list[Completion]) -> list[str]:
    """Text of each completion: the string itself, or the last assistant message's content.

    Raises ValueError for a message list without an assistant message: "" would be scored.
    """
    return [c if isinstance(c, str) else _said(c) for c in completions]


def _said(messages: list[dict[str, Any]]) -> str:
    for message in reversed(messages):
        if message.get("role", "assistant") == "assistant":
            return str(message.get("content") or "")
    raise ValueError(f"no assistant message in {messages!r}")


def boxed(text: str) -> str | None:
    """Content of the last closed \\boxed{...}, braces matched; None when there is none."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        begin = start + len("\\boxed{")
        end = _closing(text, begin)
        if end is not None:
            return text[begin:end]
    return None


def _closing(text: str, begin: int) -> int | None:
    depth, place = 1, begin
    while place < len(text):
        if text[place] == "\\":  # \{ and \} are printed braces and need not balance
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
        place += 1
    return None


def after(text: str, delimiter: str) -> str | None:
    """What follows the last `delimiter`; None when it is not there."""
    _, found, rest = text.rpartition(delimiter)
    return rest if found else None
