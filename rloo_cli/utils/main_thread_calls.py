"""Detects user code that needs the main thread: it sets a signal handler or an alarm.

Rewards and tools may run in threads of a run's process, where Python refuses `signal.signal` with a
ValueError. A reward that catches every exception would then score everything 0; `signal.alarm` and
`signal.setitimer` would interrupt the run's own main thread. math-verify, for one, limits its time
by an alarm. While `note_main_thread_calls` is entered, such calls raise ValueError and are
recorded, so that the run can stop, whatever the code does with the exception.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

WATCHED = ("signal", "alarm", "setitimer", "set_wakeup_fd")
_noted_calls: ContextVar[list[str] | None] = ContextVar("noted_calls", default=None)


@contextmanager
def note_main_thread_calls() -> Iterator[list[str]]:
    """While inside, the names of functions called by this thread, or this task of an event loop,
    that only work in a main thread."""
    calls: list[str] = []
    token = _noted_calls.set(calls)
    try:
        yield calls
    finally:
        _noted_calls.reset(token)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        calls = _noted_calls.get()
        if calls is not None and threading.current_thread() is not threading.main_thread():
            calls.append(f"signal.{function.__name__}")
            raise ValueError(f"signal.{function.__name__} only works in the main thread")
        return function(*arguments, **named)

    return call


for _name in WATCHED:
    setattr(signal, _name, _watched(getattr(signal, _name)))
