"""One call to a reward, what came of it, and why not."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.rewards.engine.arguments import Log
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results_validate import Invalid, Values, validate
from rloo_cli.config.user_code import running_frames, said, user_frames


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
