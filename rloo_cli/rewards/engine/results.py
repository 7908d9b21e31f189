"""One call to a reward, and its result: scores, or why a completion has none."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from rloo_cli.config.user_code import exception_text, format_running_frames, format_user_frames
from rloo_cli.rewards.engine.arguments import RewardCallLog
from rloo_cli.rewards.engine.build import Reward

MAX_ABS_SCORE = 1e30  # so that sums of squares stay far below float64's largest number

ScoreValues = list[float | None]


class InvalidReturn(ValueError):
    """The return value is not a list of scores."""


def validate_scores(
    returned: object, num_completions: int, nan_is_none: bool
) -> tuple[ScoreValues, dict[int, str]]:
    """The scores of a call's completions, and why some have none: {position in the call: reason}.

    Accepts a list, a tuple, a 1-d array or tensor. Raises InvalidReturn for anything else and for
    a wrong number of values.
    """
    entries = _score_entries(returned)
    if len(entries) != num_completions:
        raise InvalidReturn(f"returned {len(entries)} values for {num_completions} completions")
    values: ScoreValues = []
    reasons: dict[int, str] = {}
    for i, entry in enumerate(entries):
        value, reason = _score_or_reason(entry, nan_is_none)
        values.append(value)
        if reason:
            reasons[i] = reason
    return values, reasons


def _score_entries(returned: object) -> list[object]:
    if isinstance(returned, list | tuple):
        return list(returned)
    if hasattr(returned, "shape") and hasattr(returned, "tolist"):  # numpy, torch, pandas
        if len(returned.shape) == 1:
            return list(returned.tolist())
        kind = f"a {type(returned).__name__} of shape {tuple(returned.shape)}"
        raise InvalidReturn(f"returned {kind}, not a list of one score per completion")
    kind = _short_repr(returned)
    raise InvalidReturn(f"returned {kind}, not a list of one score per completion")


def _score_or_reason(entry: object, nan_is_none: bool) -> tuple[float | None, str]:
    """The score, or None and the reason. (None, "") means that the reward does not apply."""
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


def _short_repr(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


@dataclass(frozen=True)
class CallFailure:
    """Why a completion has no score."""

    kind: str  # exception, timeout, invalid
    message: str
    frames: str = ""  # of the user's code
    trace: str = ""  # the full traceback


@dataclass
class CallResult:
    """The scores of one call. Those that failed are None and have an entry in `failures`."""

    indices: list[int]  # of the call's completions, in the step
    values: ScoreValues
    failures: dict[int, CallFailure] = field(default_factory=dict)  # by position in `indices`
    log: RewardCallLog = field(default_factory=lambda: RewardCallLog(0))


@dataclass(frozen=True)
class RewardCall:
    """One call to make: which completions, and how to make its arguments (again for each retry)."""

    indices: list[int]
    make_arguments: Callable[[], tuple[dict[str, object], RewardCallLog]]


def to_call_result(
    reward: Reward, indices: list[int], returned: object, log: RewardCallLog
) -> CallResult:
    """Validate the return value for these completions (a CallFailure if it raised)."""
    if not isinstance(returned, CallFailure):
        try:
            values, reasons = validate_scores(returned, len(indices), reward.config.nan_is_none)
        except InvalidReturn as error:
            returned = CallFailure("invalid", str(error))
        except Exception as error:  # .item() or .tolist() may raise
            returned = failure_of_error(error)
        else:
            failures = {i: CallFailure("invalid", why) for i, why in reasons.items()}
            return CallResult(indices, values, failures, log)
    no_scores: ScoreValues = [None] * len(indices)
    return CallResult(indices, no_scores, dict.fromkeys(range(len(indices)), returned))


def failure_of_error(error: BaseException) -> CallFailure:
    """The failure of a call that raised, with the frames of the user's code."""
    message = exception_text(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        message += " (a reward must not end the process)"
    trace = "".join(traceback.format_exception(error))
    return CallFailure("exception", message, format_user_frames(error), trace)


def timeout_failure(reward: Reward, thread_id: int | None) -> CallFailure:
    """The failure of a call that took too long, with the current frames of its thread."""
    message = f"no answer within timeout_s = {reward.config.timeout_s:g} s"
    return CallFailure("timeout", message, format_running_frames(thread_id))
