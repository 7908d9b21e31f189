"""Renders conversations by a tokenizer's chat template, with one clock for the whole run.

A template may write the date (`strftime_now`). It gets the date of the run's start: otherwise the
prompts would change overnight, and the run could not resume. This file imports no torch.
"""

import importlib
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOCK_FUNCTION = "strftime_now"  # as transformers names it in a template

_clock: datetime | None = None  # of the run in this process; None: the machine's


def local_time(seconds: float | None = None) -> str:
    """A local time in ISO format, without a zone. `seconds`: since 1970; None: now."""
    moment = datetime.now() if seconds is None else datetime.fromtimestamp(seconds)
    return moment.isoformat()


def template_clock() -> str | None:
    """The time that templates get, in `local_time`'s format. None: the machine's."""
    return None if _clock is None else _clock.isoformat()


def set_template_clock(time: str | None) -> None:
    """Set the time that templates get, in `local_time`'s format. None: the machine's."""
    global _clock
    _clock = datetime.fromisoformat(time) if time else None


def has_clock(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer's chat template reads the time."""
    return CLOCK_FUNCTION in str(getattr(tokenizer, "chat_template", None))


class RunClock(datetime):
    """Replaces `datetime` in transformers' module that renders templates."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """The run's clock, or the machine's outside of a run."""
        return datetime.now(tz) if _clock is None else _clock


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase", messages: object, **options: object
) -> str:
    """The text of a conversation. Raises what its template raises."""
    if _clock is not None and has_clock(tokenizer):
        # Not as an option: transformers 5.22 and later turn a function there into text.
        module = importlib.import_module("transformers.utils.chat_template_utils")
        vars(module)["datetime"] = RunClock
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text
