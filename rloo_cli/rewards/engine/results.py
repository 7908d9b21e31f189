"""One call to a reward, what came of it, and why not."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.config.user_code import exception_text, format_running_frames, format_user_frames
from rloo_cli.rewards.engine.arguments import RewardCallLog
from rloo_cli.rewards.engine.build import Reward

MAX_ABS_SCORE = 1e30  # beyond it a sum of squares overflows float64's range of sense

ScoreValues = list[float | None]


class InvalidReturn(ValueError):
    """The whole return is not a list of scores."""


def validate_scores(
    returned: Any, num_completions: int, nan_is_none: bool
) -> tuple[ScoreValues, dict[int, str]]:
    """Scores of the rows, and for each row that has none the reason: {place: reason}.

    Accepts a list, a tuple, a 1-d array or tensor. Raises Invalid for anything else and for a
    wrong number of values.
    """
    entries = _score_entries(returned)
    if len(entries) != num_completions:
        raise InvalidReturn(f"returned {len(entries)} values for {num_completions} rows")
    values: ScoreValues = []
    wrong: dict[int, str] = {}
    for place, entry in enumerate(entries):
        value, reason = _score_or_reason(entry, nan_is_none)
        values.append(value)
        if reason:
            wrong[place] = reason
    return values, wrong


def _score_entries(returned: Any) -> list[Any]:
    if isinstance(returned, list | tuple):
        return list(returned)
    if hasattr(returned, "shape") and hasattr(returned, "tolist"):  # numpy, torch, pandas
        if len(returned.shape) == 1:
            return list(returned.tolist())
        kind = f"{type(returned).__name__} of shape {tuple(returned.shape)}"
        raise InvalidReturn(f"returned a {kind}, not a list of one score per row")
    raise InvalidReturn(f"returned {_short_repr(returned)}, not a list of one score per row")


def _score_or_reason(entry: Any, nan_is_none: bool) -> tuple[float | None, str]:
    """The value, or None and a reason. (None, "") is a reward that does not apply."""
    if entry is None:
        return None, ""
    plain = entry
    if hasattr(entry, "item") and math.prod(getattr(entry, "shape", (2,))) == 1:
        plain = entry.item()  # a 0-d or one-element array or tensor
    if not isinstance(plain, int | float):
        return None, f"gave {_short_repr(entry)}, not a number"
    if isinstance(plain, float) and math.isnan(plain):
        return None, "" if nan_is_none else "gave nan"
    if abs(plain) > MAX_ABS_SCORE:
        return None, f"gave {float(plain) if isinstance(plain, float) else 'an int'} (beyond 1e30)"
    return float(plain), ""


def _short_repr(thing: Any) -> str:
    return f"{thing!r:.80} ({type(thing).__name__})"


@dataclass(frozen=True)
class CallFailure:
    """Why a row has no score."""

    kind: str  # exception, timeout, invalid
    message: str
    frames: str = ""  # the user's
    trace: str = ""  # all of them


@dataclass
class CallResult:
    """What one call gave. Rows that failed have the value None and an entry in `failures`."""

    indices: list[int]  # in the step
    values: ScoreValues
    failures: dict[int, CallFailure] = field(default_factory=dict)  # by place in `rows`
    log: RewardCallLog = field(default_factory=lambda: RewardCallLog(0))


@dataclass(frozen=True)
class RewardCall:
    """One call to make: the rows, and how to make its arguments (anew for each try)."""

    indices: list[int]
    make_arguments: Callable[[], tuple[dict[str, Any], RewardCallLog]]


def to_call_result(
    reward: Reward, indices: list[int], returned: Any, log: RewardCallLog
) -> CallResult:
    """What a call on these rows returned (a Failure if it raised) as an outcome."""
    if not isinstance(returned, CallFailure):
        try:
            values, wrong = validate_scores(returned, len(indices), reward.config.nan_is_none)
        except InvalidReturn as error:
            returned = CallFailure("invalid", str(error))
        except Exception as error:  # an object whose own .item() or .tolist() raises
            returned = failure_of_error(error)
        else:
            failures = {place: CallFailure("invalid", why) for place, why in wrong.items()}
            return CallResult(indices, values, failures, log)
    nothing: ScoreValues = [None] * len(indices)
    return CallResult(indices, nothing, dict.fromkeys(range(len(indices)), returned))


def failure_of_error(error: BaseException) -> CallFailure:
    """What a reward raised, with the user's own frames of it."""
    message = exception_text(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        message += " (a reward may not end the process)"
    return CallFailure(
        "exception", message, format_user_frames(error), "".join(traceback.format_exception(error))
    )


def timeout_failure(reward: Reward, thread_id: int | None) -> CallFailure:
    """A call that took too long, with what its thread is doing now."""
    message = f"no answer within timeout_s = {reward.config.timeout_s:g} s"
    return CallFailure("timeout", message, format_running_frames(thread_id))
