"""The processes that do the work: started, watched, their signals passed on, their trees ended.

One that ends wrongly takes the others along: ranks that wait for it would wait for ever. What is
then said is the first cause, not what the others made of it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rloo_cli.utils.child_process import (
    kill_group,
    kill_marked_processes,
    python_command,
    start_child,
)
from rloo_cli.utils.errors import GenerationError, Problem, print_error
from rloo_cli.utils.signals import AGAIN_S, SIGNALS

# Threads that spin long while they wait for each other make a machine that is shared many times
# slower.
DEFAULT_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of compilers
}
STOP_TIMEOUT_S = 600.0  # after a signal: code that holds Python's lock would never let a run end
CAUSE_GRACE_S = 0.5  # after a first wrong end: one that says why may be on its way
KILL_TIMEOUT_S = 8.0  # after a first wrong end the others are killed: gone within 10 s
SAVE_TIMEOUT_S = 60.0  # the same while a save is being written
STOPPED_CODE, LOST_CODE = 75, 6
RUN_MARK_VARIABLE = "RLOO_FAMILY"  # marks all that the processes of one run have started
# Until the worker can say how it ended, an interrupt ends it without a traceback.
WORKER_BOOT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); " \
    "from {package}{module} import main; main()"  # fmt: skip


def default_environment() -> dict[str, str]:
    """`DEFAULT_ENVIRONMENT`, but for what our environment says otherwise."""
    return {name: os.environ.get(name, value) for name, value in DEFAULT_ENVIRONMENT.items()}


@dataclass(frozen=True)
class ProcessSpec:
    """One process: what its environment has besides ours, and the open files it is given."""

    env: Mapping[str, str] = field(default_factory=dict)
    open_files: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return int(self.env.get("RANK", 0))


def print_killed(why: str) -> None:
    """Print that a process was killed, as an error."""
    print_error(GenerationError(Problem(why, why="nobody asked it to end")))


@dataclass(frozen=True)
class ProcessCallbacks:
    """What is done while processes run. `look` and `elsewhere` are called twice a second."""

    on_started: Callable[[list[int]], None] = lambda pids: None  # all of them run
    is_saving: Callable[[], bool] = lambda: False  # a save is being written
    poll: Callable[[], None] = lambda: None
    poll_remote_failure: Callable[[], int | None] = lambda: None  # the code of one that is not ours
    on_killed: Callable[[str], None] = print_killed  # why, in words, when one was killed


def run_processes(
    module: str,
    arguments: Sequence[str],
    callbacks: ProcessCallbacks = ProcessCallbacks(),
    specs: Sequence[ProcessSpec] = (ProcessSpec(),),
    package: str = "rloo_cli.",
) -> int:
    """Run `rloo_cli.<module>`.main with these arguments in each of these processes; the exit code.

    TERM, INT, USR1 and USR2 reach each of them once; a second Ctrl-C within 5 s ends all at once
    (130). They are ended LIMIT_S after the first signal unless `busy`. The code is that of the
    first that ended wrongly (not with 0); one that a signal killed counts as 75 where an end was
    asked for, else as 6. `package`: where the module is (tests have workers of their own).
    """
    boot = WORKER_BOOT.format(module=module, package=package)
    children: list[subprocess.Popen[bytes]] = []
    family = f"{os.getpid()}.{time.time_ns()}"  # what they start has it in its environment, too
    with _forward_signals(children, family) as heard:
        for start in specs:
            child = start_child(
                python_command("-c", boot, *arguments),
                env=default_environment() | {**start.env, RUN_MARK_VARIABLE: family},
                pass_fds=start.open_files,
                death_signal=signal.SIGKILL,
            )
            children.append(child)
            for number, _ in list(heard):  # it came before this one was there
                _send(child, number)
        callbacks.on_started([child.pid for child in children])
        ranks = [start.rank for start in specs]
        return _ProcessGroup(children, ranks, heard, callbacks).wait_for_end()


class _ProcessGroup:
    """Processes that stand and fall together."""

    def __init__(
        self,
        children: list[subprocess.Popen[bytes]],
        ranks: list[int],
        signals: list[tuple[int, float]],
        callbacks: ProcessCallbacks,
    ):
        self.children, self.ranks, self.signals, self.callbacks = (
            children,
            ranks,
            signals,
            callbacks,
        )
        self.ended_at: dict[int, float] = {}  # place in the list -> when, in the order of the ends
        self.remote_failure: tuple[int, float] | None = None  # the code of one elsewhere, when
        self.terminate_sent = False
        self.timed_out_at = inf  # when those that did not stop as they were asked were ended
        self.polled_at = 0.0

    def wait_for_end(self) -> int:
        """Wait until all have ended; the code of the first cause."""
        while alive := [c for c in self.children if c.poll() is None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                alive[0].wait(0.5 if len(self.children) == 1 else 0.1)
            self._record_ended()
            if time.monotonic() - self.polled_at >= 0.5:
                self.polled_at = time.monotonic()
                self.callbacks.poll()
                if (
                    self.remote_failure is None
                    and (code := self.callbacks.poll_remote_failure()) is not None
                ):
                    self.remote_failure = code, time.monotonic()
            self._end_remaining()
        self._record_ended()
        code = self._exit_code()
        if (
            code == STOPPED_CODE
        ):  # whoever asked for it may have done so for what went wrong elsewhere
            other = (
                self.callbacks.poll_remote_failure()
                if self.remote_failure is None
                else self.remote_failure[0]
            )
            code = code if other in (None, LOST_CODE) else other
        return code

    def _record_ended(self) -> None:
        for place, child in enumerate(self.children):
            if place not in self.ended_at and child.poll() is not None:
                self.ended_at[place] = time.monotonic()

    def _first_failure_at(self) -> float | None:
        """When the first of them ended in a way that leaves the others nothing to wait for."""
        when = [
            t for p, t in self.ended_at.items() if self._exit_code_of(p) not in (0, STOPPED_CODE)
        ]
        return min(
            [*when, *([self.remote_failure[1]] if self.remote_failure else [])], default=None
        )

    def _exit_code_of(self, index: int) -> int:
        code: int = self.children[index].returncode
        return code

    def _end_remaining(self) -> None:
        """End those that are left, where it is time."""
        now, wrong = time.monotonic(), self._first_failure_at()
        # One that was sent a signal itself has told the others: they save and end together.
        stopped = [t for p, t in self.ended_at.items() if self._exit_code_of(p) == STOPPED_CODE]
        asked = [t for _, t in self.signals] + stopped
        if asked and now - asked[0] > STOP_TIMEOUT_S and not self.callbacks.is_saving():
            self.timed_out_at = min(self.timed_out_at, now)
            self._signal_running(signal.SIGKILL)
        if wrong is None:
            return
        if now - wrong >= CAUSE_GRACE_S and not self.terminate_sent:
            self.terminate_sent = True
            self._signal_running(signal.SIGTERM)
        if now - wrong > SAVE_TIMEOUT_S or (
            now - wrong > KILL_TIMEOUT_S and not self.callbacks.is_saving()
        ):
            self._signal_running(signal.SIGKILL)

    def _signal_running(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.poll() is None:
                if number == signal.SIGKILL:
                    kill_group(child.pid)
                else:
                    _send(child, number)

    def _exit_code(self) -> int:
        """The code of the first cause. A lost connection (6) gives way to a cause that follows at
        once: that process was only slower to end. A stop (75) gives way to a save that failed.
        """
        if len([n for n, _ in self.signals if n == signal.SIGINT]) > 1 and self._killed(inf):
            return 130
        wrong = self._first_failure_at()
        until = inf if wrong is None else wrong + CAUSE_GRACE_S
        killed = [] if self.signals else self._killed(min(until, self.timed_out_at))
        if killed:
            place = killed[0]
            name = signal.Signals(-self._exit_code_of(place)).name
            guess = " (out of memory?)" if name == "SIGKILL" else ""
            who = f"rank {self.ranks[place]}" if len(self.children) > 1 or self.ranks[0] else ""
            self.callbacks.on_killed(
                f"{who or 'the process that does the work'} was killed by {name}{guess}"
            )
        codes = [
            code
            if code >= 0
            else STOPPED_CODE
            if self.signals or t > self.timed_out_at
            else LOST_CODE
            for code, t in (
                (self._exit_code_of(p), t) for p, t in self.ended_at.items() if t <= until
            )
            if code
        ]
        if self.remote_failure and self.remote_failure[1] <= until:
            codes.append(self.remote_failure[0])
        failed = [code for code in codes if code != STOPPED_CODE]
        known = [code for code in failed if code != LOST_CODE]
        if killed:
            return failed[0]
        return known[0] if known else STOPPED_CODE if STOPPED_CODE in codes else [*codes, 0][0]

    def _killed(self, until: float) -> list[int]:
        """Those that a signal ended before we ended any, in the order of their ends."""
        return [p for p, t in self.ended_at.items() if t <= until and self._exit_code_of(p) < 0]


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


@contextmanager
def _forward_signals(
    children: list[subprocess.Popen[bytes]],
    run_mark: str,
) -> Iterator[list[tuple[int, float]]]:
    """While inside, signals go to the children; afterwards nothing that they started is left."""
    heard: list[tuple[int, float]] = []  # signal, when

    def forward(number: int, frame: Any) -> None:
        now = time.monotonic()
        again = [n for n, then in heard if n == number == signal.SIGINT and now - then < AGAIN_S]
        heard.append((number, now))
        for child in list(children):
            if again:
                kill_group(child.pid)  # the second Ctrl-C means now
            else:
                _send(child, number)

    before = {n: signal.signal(n, forward) for n in SIGNALS}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            # Who asked once was heard: a scheduler that asks again must not end us while we say so.
            deaf = heard and handler == signal.SIG_DFL
            signal.signal(number, _ignore if deaf else handler)
        for child in children:
            kill_group(child.pid)  # whatever it started and left
            child.wait()
        kill_marked_processes(RUN_MARK_VARIABLE, run_mark)


def _ignore(number: int, frame: Any) -> None:
    """In place of SIG_IGN, which a process that is started later would inherit."""
