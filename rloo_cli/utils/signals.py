"""Whether the run was asked to end. A signal only sets a flag; every wait looks at it by `check`.

Looking only at the ends of steps would save nothing: a step may take longer than a scheduler
waits before it kills.
"""

import os
import signal
import time
from types import FrameType

from rloo_cli.utils.errors import Problem, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
AGAIN_S = 5.0  # a second Ctrl-C within these seconds means now

_heard: list[tuple[int, float]] = []  # signal, when
_at_once = [False]
_forks_reset: list[bool] = []  # holds one entry once `_reset_signals` is called at forks


def listen(at_once: bool = False) -> None:
    """Take the signals that ask for an end. `at_once`: raise Stopped where they arrive."""
    _at_once[0] = at_once
    for number in SIGNALS:
        signal.signal(number, _hear)
    if not _forks_reset:
        _forks_reset.append(True)
        os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    """In a forked child: a signal does what it does in any process.

    A pool that a reward makes with multiprocessing ends its children by SIGTERM and waits for them;
    with our handler they would live on, and the reward would wait until its time is over.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _hear:
            signal.signal(number, signal.SIG_DFL)


def wait_for_checks() -> None:
    """From here on a signal waits for the next `check`: what is being done must not be torn."""
    _at_once[0] = False


def forget() -> None:
    """As if nothing had been asked (for tests)."""
    _heard.clear()


def asked() -> float | None:
    """When the end was asked for (time.monotonic), or None."""
    return _heard[0][1] if _heard else None


def check() -> None:
    """Raises Stopped (exit 75) when a signal has asked the run to end."""
    if _heard:
        name = signal.Signals(_heard[0][0]).name
        raise Stopped(Problem(f"stopped by {name}"))


def _hear(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if number == signal.SIGINT and any(
        n == signal.SIGINT and now - then < AGAIN_S for n, then in _heard
    ):
        os._exit(130)
    _heard.append((number, now))
    if _at_once[0]:
        check()
