"""Notes signals that ask the run to end: every wait then calls `raise_if_stopped`.

To ask only at the ends of steps would not do: a step may take longer than a scheduler waits before
it kills.
"""

import os
import signal
import time
from types import FrameType

from rloo_cli.utils import heartbeat
from rloo_cli.utils.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
AGAIN_S = 5.0  # a second Ctrl-C within these seconds means now
STOPPED_FIX = "give the same command again; rloo train goes on with resume=auto"

_received_signals: list[tuple[int, float]] = []  # signal, when
_raise_at_once = [False]
_forks_reset: list[bool] = []  # has an entry once `_reset_signals` is registered to run at forks


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end. A closed terminal (SIGHUP) does, except under
    nohup, which has it ignored."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or not ignores_hangup)


def install_signal_handlers(at_once: bool = False) -> None:
    """Handle the signals that ask for an end. `at_once`: raise Stopped where they arrive."""
    _raise_at_once[0] = at_once
    for number in stop_signals():
        signal.signal(number, _on_signal)
    if not _forks_reset:
        _forks_reset.append(True)
        os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    """In a forked child, restore the default handlers.

    A pool that a reward makes with multiprocessing ends its children by SIGTERM and waits for them;
    with our handler they would live on, and the reward would wait until its time is over.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


def defer_signals() -> None:
    """From now on a signal waits for the next `raise_if_stopped`: what follows must be whole."""
    _raise_at_once[0] = False


def forget_signals() -> None:
    """Forget all signals that came (for tests)."""
    _received_signals.clear()


def stop_requested_at() -> float | None:
    """When the end was asked for (time.monotonic), or None."""
    return _received_signals[0][1] if _received_signals else None


def raise_if_stopped() -> None:
    """Raises Stopped (exit 75) when a signal has asked the run to end."""
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
    """The Stopped that came of a signal at once, where `error` was raised because of it; else
    `error`. What handles every error of a template or of a library takes Stopped for one, too."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, Stopped) and link.at_once:
            return link
        link = link.__cause__ or link.__context__
    return error
