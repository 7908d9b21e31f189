"""Keeps user code from ending the process silently by `os._exit`, or by an endless import.

`os._exit(0)` in a reward would look like a successful run. While user code runs, it raises an
exception; in child processes, and for our own code, it works as usual.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REWARD_THREADS = ("reward ", "async rewards")  # prefixes of the names of reward threads
_exit = os._exit
_pid = os.getpid()
_importing: list[int] = []  # identifiers of the threads that import user code now


def _refuse(code: int) -> None:
    thread = threading.current_thread()
    ours = thread.name.startswith(REWARD_THREADS) or thread.ident in _importing
    if ours and os.getpid() == _pid:
        raise SystemExit(f"os._exit({code})")
    _exit(code)


def refuse_os_exit() -> None:
    """From now on `os._exit` in a reward raises SystemExit."""
    global _pid
    _pid = os.getpid()
    os._exit = _refuse  # type: ignore[assignment]


@contextmanager
def guard_import(seconds: float) -> Iterator[None]:
    """Guard an import of user code: it has a timeout and cannot end the process.

    Raises TimeoutError inside. The limit only exists in the main thread: other threads cannot be
    interrupted.
    """
    refuse_os_exit()
    thread = threading.current_thread()
    _importing.append(thread.ident or 0)
    main = thread is threading.main_thread() and hasattr(signal, "setitimer")

    def on_alarm(number: int, frame: object) -> None:
        raise TimeoutError(f"its import did not finish within timeout_s = {seconds:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm) if main else None
    try:
        if main:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        if main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        _importing.remove(thread.ident or 0)
