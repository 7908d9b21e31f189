"""One call to a reward, what came of it, and why not."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.config.user_code import running_frames, said, user_frames
from rloo_cli.rewards.engine.arguments import Log
from rloo_cli.rewards.engine.build import Reward

LARGEST = 1e30  # beyond it a sum of squares overflows float64's range of sense

Values = list[float | None]


class Invalid(ValueError):
    """The whole return is not a list of scores."""


def validate(returned: Any, rows: int, nan_is_none: bool) -> tuple[Values, dict[int, str]]:
    """Scores of the rows, and for each row that has none the reason: {place: reason}.

    Accepts a list, a tuple, a 1-d array or tensor. Raises Invalid for anything else and for a
    wrong number of values.
    """
    entries = _entries(returned)
    if len(entries) != rows:
        raise Invalid(f"returned {len(entries)} values for {rows} rows")
    values: Values = []
    wrong: dict[int, str] = {}
    for place, entry in enumerate(entries):
        value, reason = _number(entry, nan_is_none)
        values.append(value)
        if reason:
            wrong[place] = reason
    return values, wrong


def _entries(returned: Any) -> list[Any]:
    if isinstance(returned, list | tuple):
        return list(returned)
    if hasattr(returned, "shape") and hasattr(returned, "tolist"):  # numpy, torch, pandas
        if len(returned.shape) == 1:
            return list(returned.tolist())
        kind = f"{type(returned).__name__} of shape {tuple(returned.shape)}"
        raise Invalid(f"returned a {kind}, not a list of one score per row")
    raise Invalid(f"returned {_short(returned)}, not a list of one score per row")


def _number(entry: Any, nan_is_none: bool) -> tuple[float | None, str]:
    """The value, or None and a reason. (None, "") is a reward that does not apply."""
    if entry is None:
        return None, ""
    plain = entry
    if hasattr(entry, "item") and math.prod(getattr(entry, "shape", (2,))) == 1:
        plain = entry.item()  # a 0-d or one-element array or tensor
    if not isinstance(plain, int | float):
        return None, f"gave {_short(entry)}, not a number"
    if isinstance(plain, float) and math.isnan(plain):
        return None, "" if nan_is_none else "gave nan"
    if abs(plain) > LARGEST:
        return None, f"gave {float(plain) if isinstance(plain, float) else 'an int'} (beyond 1e30)"
    return float(plain), ""


def _short(thing: Any) -> str:
    return f"{thing!r:.80} ({type(thing).__name__})"


@dataclass(frozen=True)
class Failure:
    """Why a row has no score."""

    kind: str  # exception, timeout, invalid
    message: str
    frames: str = ""  # the user's
    trace: str = ""  # all of them


@dataclass
class Outcome:
    """What one call gave. Rows that failed have the value None and an entry in `failures`."""

    rows: list[int]  # in the step
    values: Values
    failures: dict[int, Failure] = field(default_factory=dict)  # by place in `rows`
    log: Log = field(default_factory=lambda: Log(0))


@dataclass(frozen=True)
class Call:
    """One call to make: the rows, and how to make its arguments (anew for each try)."""

    rows: list[int]
    make: Callable[[], tuple[dict[str, Any], Log]]


def judge(reward: Reward, rows: list[int], returned: Any, log: Log) -> Outcome:
    """What a call on these rows returned (a Failure if it raised) as an outcome."""
    if not isinstance(returned, Failure):
        try:
            values, wrong = validate(returned, len(rows), reward.config.nan_is_none)
        except Invalid as error:
            returned = Failure("invalid", str(error))
        except Exception as error:  # an object whose own .item() or .tolist() raises
            returned = raised(error)
        else:
            failures = {place: Failure("invalid", why) for place, why in wrong.items()}
            return Outcome(rows, values, failures, log)
    nothing: Values = [None] * len(rows)
    return Outcome(rows, nothing, dict.fromkeys(range(len(rows)), returned))


def raised(error: BaseException) -> Failure:
    """What a reward raised, with the user's own frames of it."""
    message = said(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        message += " (a reward may not end the process)"
    return Failure(
        "exception", message, user_frames(error), "".join(traceback.format_exception(error))
    )


def timeout(reward: Reward, thread: int | None) -> Failure:
    """A call that took too long, with what its thread is doing now."""
    message = f"no answer within timeout_s = {reward.config.timeout_s:g} s"
    return Failure("timeout", message, running_frames(thread))
