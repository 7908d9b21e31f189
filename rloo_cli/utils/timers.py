"""Measures the seconds of a step's phases."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds per phase of a step. `on_phase` is called with each phase's name as it begins.

    `wait` returns once the device has done its queued work: a GPU's work is only queued by the call
    that starts it, and would otherwise be counted to whichever phase waits for it first.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] = lambda name: None,
        wait: Callable[[], None] = lambda: None,
    ):
        self.seconds: dict[str, float] = defaultdict(float)
        self.on_phase, self.wait = on_phase, wait
        self.failed_phase = ""  # the innermost that an exception left in this step
        self.started_at = self.step_started_at = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. An inner phase's seconds are its own, not the outer one's."""
        self.on_phase(name)
        start, inside = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        except BaseException:
            self.failed_phase = self.failed_phase or name
            raise
        finally:
            self.wait()
            spent = time.perf_counter() - start
            self.seconds[name] += spent - (sum(self.seconds.values()) - inside)

    def lap(self) -> dict[str, float]:
        """`step_time` and `time/<phase>` since the last lap; `time/idle` is what no phase took."""
        now = time.perf_counter()
        total, self.step_started_at = now - self.step_started_at, now
        times = {f"time/{name}": spent for name, spent in self.seconds.items()}
        times["time/idle"] = max(0.0, total - sum(self.seconds.values()))
        self.seconds.clear()
        self.failed_phase = ""
        return {"step_time": total, **times}

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, in which this run waited for its time slice in a sweep."""
        self.step_started_at += seconds
        self.started_at += seconds

    def elapsed(self) -> float:
        """Seconds since the timer was made, but for those left out."""
        return time.perf_counter() - self.started_at
