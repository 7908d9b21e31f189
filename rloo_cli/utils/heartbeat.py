"""A process's signs of life for the one that started it: a byte a second through a pipe.

A thread of its own sends them, so a long step is alive. A process that was stopped (SIGSTOP), or
whose thread never gets Python's lock again, is silent.
"""

import contextlib
import os
import threading
import time

HEARTBEAT_VARIABLE = "RLOO_HEARTBEAT_FD"  # the pipe's end that is written to
INTERVAL_S = 1.0
MOST_COUNTED_S = 2.0  # of the time between two looks: who did not look was stopped, too


def start_heartbeat() -> None:
    """Send signs of life from now on, if the process that started this one wants them."""
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)
    if number is not None:
        handle = int(number)
        os.set_inheritable(handle, False)
        threading.Thread(target=_beat, args=(handle,), name="heartbeat", daemon=True).start()


def _beat(handle: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        os.set_blocking(handle, False)
        while True:
            with contextlib.suppress(BlockingIOError):  # full: it is read late, and that is enough
                os.write(handle, b".")
            time.sleep(INTERVAL_S)


class HeartbeatReader:
    """The other side: how long a process has been silent. `write_end` is for that process."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._has_begun = False  # until its imports are done it sends nothing
        self._silent_s = 0.0
        self._looked_at = time.monotonic()

    def silent_seconds(self) -> float:
        """Seconds without a sign of life; 0 before the first. To be asked every second or so.

        Time in which nobody asked hardly counts: a whole job that was stopped and goes on, or a
        machine that slept, must not look as if its processes had died.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, MOST_COUNTED_S)
        self._looked_at = now
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                self._has_begun, self._silent_s = True, 0.0
        return self._silent_s if self._has_begun else 0.0

    def close_write_end(self) -> None:
        """The process has its own copy."""
        if self.write_end >= 0:
            os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Close what is open here."""
        self.close_write_end()
        os.close(self._read_end)
