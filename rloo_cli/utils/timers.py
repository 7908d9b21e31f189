"""Measures the seconds of a step's phases.

A call that starts GPU work only queues it. Waiting for it at the end of each phase would keep the
CPU from preparing the next micro-batch; so a phase's start and end are marks in the device's own
queue, read once, when the step ends.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch

METRICS = {"Progress and time": [  # read by utils.metrics
    ("step_time", "s", "mean", "seconds of the step"),
    ("time/<phase>", "s", "mean",
     "seconds of a phase: data, generation, reward, reference, old_logp, value, update, "
     "optimizer, sync (weights to the sampler), waiting (for other ranks), exposed (for a "
     "sampler beside the training), save (checkpoints, records, curves), evaluation"),
    ("time/idle", "s", "mean", "seconds of the step that no phase took"),
]}  # fmt: skip


class PhaseClock(Protocol):
    """Marks moments; the seconds between them are available later."""

    def mark(self) -> Any:
        """This moment; on a GPU, the moment when it has done all work queued so far."""

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        """Wait for the last mark. -> the seconds from each mark to the next"""


class HostClock:
    """The CPU's clock, for synchronous work."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, marks: Sequence[float]) -> list[float]:
        return [end - begin for begin, end in pairwise(marks)]


class DeviceClock:
    """The current GPU's clock: events in the queue of the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(marks)]


def choose_phase_clock(device: torch.device) -> DeviceClock | None:
    """The clock of a GPU; None = the host's."""
    return DeviceClock() if device.type == "cuda" else None


class StepTimer:
    """Seconds per phase of a step. `on_phase` is called with each phase's name at its start.

    `clock`: of the device that does the work; None = the CPU's. The phases of one timer start and
    end in one thread.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] = lambda name: None,
        clock: PhaseClock | None = None,
    ):
        self.on_phase, self.clock = on_phase, clock or HostClock()
        self.failed_phase = ""  # the innermost that raised an exception in this step
        self.started_at = self.step_started_at = time.perf_counter()
        self._running: list[str] = []  # running phases, the innermost last
        self._marks: list[tuple[Any, str]] = []  # and the phase from there on, "" = none

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. An inner phase's seconds are its own, not the outer one's."""
        self.on_phase(name)
        self._running.append(name)
        self._mark()
        try:
            yield
        except BaseException:
            self.failed_phase = self.failed_phase or name
            raise
        finally:
            self._running.pop()
            self._mark()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase since the last lap. Waits for the device."""
        self._mark()
        gaps = self.clock.seconds_between([mark for mark, _ in self._marks])
        seconds: dict[str, float] = defaultdict(float)
        for (_, name), spent in zip(self._marks[:-1], gaps, strict=True):
            if name:
                seconds[name] += spent
        return seconds

    def lap(self) -> dict[str, float]:
        """`step_time` and `time/<phase>` since the last lap; `time/idle` is outside phases.

        A step waits for the device only here in this class.
        """
        seconds = self.seconds
        self._marks = self._marks[-1:]
        now = time.perf_counter()
        total, self.step_started_at = now - self.step_started_at, now
        times = {f"time/{name}": spent for name, spent in seconds.items()}
        times["time/idle"] = max(0.0, total - sum(seconds.values()))
        self.failed_phase = ""
        return {"step_time": total, **times}

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, in which this run waited for its time slice in a sweep."""
        self.step_started_at += seconds
        self.started_at += seconds

    def elapsed(self) -> float:
        """Seconds since the timer was created, without the excluded ones."""
        return time.perf_counter() - self.started_at

    def _mark(self) -> None:
        self._marks.append((self.clock.mark(), self._running[-1] if self._running else ""))
