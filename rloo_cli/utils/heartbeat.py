"""A process's heartbeats and end mark for its parent, through a pipe.

A separate thread sends a byte a second, so a long step counts as alive. A stopped process
(SIGSTOP), or one whose thread never gets Python's lock, is silent. The mark is the process's last
act: an exit code without it is from user code that ended the process, by `sys.exit`, `os._exit`, an
exec, or a C library's `exit`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

HEARTBEAT_VARIABLE = "RLOO_HEARTBEAT_FD"  # the pipe's write end
INTERVAL_S = 1.0
MOST_COUNTED_S = 2.0  # counted per check interval: a parent that did not check was stopped too
BEAT, END_MARK = b".", b"E"
_pipe: list[int] = []  # the pipe's end, after this process has taken it from its environment


def start_heartbeat() -> None:
    """Send heartbeats from now on, if the parent process wants them."""
    if (handle := _take_pipe()) is not None:
        threading.Thread(target=_beat, args=(handle,), name="heartbeat", daemon=True).start()


def mark_end() -> None:
    """Mark the exit code that follows as this process's own. Call it last."""
    if (handle := _take_pipe()) is not None:
        with contextlib.suppress(OSError):  # the reader is gone
            os.write(handle, END_MARK)


@contextlib.contextmanager
def mark_failed_start() -> Iterator[None]:
    """Mark the end if the block fails: a worker's imports, before any user code."""
    try:
        yield
    except BaseException:
        mark_end()
        raise


def _take_pipe() -> int | None:
    """The pipe's end, not inherited by children; None without a pipe."""
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)
    if number is not None:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
        _pipe[:] = [int(number)]
    return _pipe[0] if _pipe else None


def _beat(handle: int) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        while True:
            with contextlib.suppress(BlockingIOError):  # full: the reader is late, which is enough
                os.write(handle, BEAT)
            time.sleep(INTERVAL_S)


class HeartbeatReader:
    """The parent's side: how long a process has been silent, and whether it marked its end.

    `write_end` is for that process.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._has_begun = False  # it sends nothing before its imports are done
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._has_marked_end = False

    def silent_seconds(self) -> float:
        """Seconds without a heartbeat; 0 before the first. Call it about every second.

        Time between late calls hardly counts: a whole job that was stopped and continued, or a
        machine that slept, must not look as if its processes had died.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, MOST_COUNTED_S)
        self._looked_at = now
        self._read_pipe()
        return self._silent_s if self._has_begun else 0.0

    def has_marked_end(self) -> bool:
        """Whether an ended process set its exit code itself."""
        self._read_pipe()
        return self._has_marked_end

    def _read_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while sent := os.read(self._read_end, 4096):
                self._has_begun, self._silent_s = True, 0.0
                self._has_marked_end |= END_MARK in sent

    def close_write_end(self) -> None:
        """The process has its own copy."""
        if self.write_end >= 0:
            os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        os.close(self._read_end)
