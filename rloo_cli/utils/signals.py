"""Records signals that ask the run to stop; every wait calls `raise_if_stopped`.

Checking only at the ends of steps is not enough: a step can take longer than a scheduler waits
before it kills.
"""

import os
import signal
import time
from types import FrameType

from rloo_cli.utils import heartbeat
from rloo_cli.utils.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
AGAIN_S = 5.0  # a second Ctrl-C within these seconds exits at once
STOPPED_FIX = "run the same command again; rloo train resumes with resume=auto"

_received_signals: list[tuple[int, float]] = []  # signal, when
_raise_at_once = [False]
_forks_reset: list[bool] = []  # has an entry once `_reset_signals` is registered to run at forks


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop, including a closed terminal (SIGHUP) except under
    nohup, which ignores it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or not ignores_hangup)


def install_signal_handlers(at_once: bool = False) -> None:
    """Handle the stop signals. `at_once`: raise Stopped where they arrive."""
    _raise_at_once[0] = at_once
    for number in stop_signals():
        signal.signal(number, _on_signal)
    if not _forks_reset:
        _forks_reset.append(True)
        os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    """In a forked child, restore the default handlers.

    A reward's multiprocessing pool ends its children by SIGTERM and waits; with our handler
    they would live on, and the reward would wait until its timeout.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


def defer_signals() -> None:
    """From now on a signal waits for the next `raise_if_stopped`: what follows must complete."""
    _raise_at_once[0] = False


def forget_signals() -> None:
    """Forget all received signals (for tests)."""
    _received_signals.clear()


def stop_requested_at() -> float | None:
    """When a stop was requested (time.monotonic), or None."""
    return _received_signals[0][1] if _received_signals else None


def raise_if_stopped() -> None:
    """Raises Stopped (exit 75) if a signal has asked the run to stop."""
    if _received_signals:
        name = signal.Signals(_received_signals[0][0]).name
        raise Stopped(f"stopped by {name}: {STOPPED_FIX}")


def _on_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    recent = [n for n, then in _received_signals if now - then < AGAIN_S]
    if number == signal.SIGINT and signal.SIGINT in recent:
        heartbeat.mark_end()
        os._exit(130)
    _received_signals.append((number, now))
    if _raise_at_once[0]:
        try:
            raise_if_stopped()
        except Stopped as stopped:
            stopped.at_once = True
            raise


def stop_behind(error: Exception) -> Exception:
    """The Stopped of an at-once signal, if `error` was raised because of it; else `error`. Handlers
    for any error of a template or a library also catch Stopped."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, Stopped) and link.at_once:
            return link
        link = link.__cause__ or link.__context__
    return error
