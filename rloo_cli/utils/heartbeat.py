"""A process's signs of life for the one that started it, and the mark of its end, through a pipe.

A thread of its own sends a byte a second, so a long step is alive. A process that was stopped
(SIGSTOP), or whose thread never gets Python's lock again, is silent. The mark is the process's last
act: an exit code without it is not ours, but that of user code which ended the process, by
`sys.exit`, `os._exit`, an exec, or a C library's `exit`.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

HEARTBEAT_VARIABLE = "RLOO_HEARTBEAT_FD"  # the pipe's end that is written to
INTERVAL_S = 1.0
MOST_COUNTED_S = 2.0  # of the time between two looks: who did not look was stopped, too
BEAT, END_MARK = b".", b"E"
_pipe: list[int] = []  # the pipe's end, once this process has taken it from its environment


def start_heartbeat() -> None:
    """Send signs of life from now on, if the process that started this one wants them."""
    if (handle := _take_pipe()) is not None:
        threading.Thread(target=_beat, args=(handle,), name="heartbeat", daemon=True).start()


def mark_end() -> None:
    """Say that the exit code which follows at once is this process's own. Call it last."""
    if (handle := _take_pipe()) is not None:
        with contextlib.suppress(OSError):  # the process that reads is gone
            os.write(handle, END_MARK)


@contextlib.contextmanager
def mark_failed_start() -> Iterator[None]:
    """Mark the end where what is inside fails: the imports of a worker, before any user code."""
    try:
        yield
    except BaseException:
        mark_end()
        raise


def _take_pipe() -> int | None:
    """The pipe's end, which no child of this process inherits; None without such a pipe."""
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)
    if number is not None:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
        _pipe[:] = [int(number)]
    return _pipe[0] if _pipe else None


def _beat(handle: int) -> None:
    with contextlib.suppress(OSError):  # the process that reads is gone
        while True:
            with contextlib.suppress(BlockingIOError):  # full: it is read late, and that is enough
                os.write(handle, BEAT)
            time.sleep(INTERVAL_S)


class HeartbeatReader:
    """The other side: how long a process has been silent, and whether it has marked its end.

    `write_end` is for that process.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._has_begun = False  # until its imports are done it sends nothing
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._has_marked_end = False

    def silent_seconds(self) -> float:
        """Seconds without a sign of life; 0 before the first. To be asked every second or so.

        Time in which nobody asked hardly counts: a whole job that was stopped and goes on, or a
        machine that slept, must not look as if its processes had died.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, MOST_COUNTED_S)
        self._looked_at = now
        self._read_pipe()
        return self._silent_s if self._has_begun else 0.0

    def has_marked_end(self) -> bool:
        """Whether a process that has ended gave its exit code itself."""
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
        """Close what is open here."""
        self.close_write_end()
        os.close(self._read_end)
