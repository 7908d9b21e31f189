"""Starts worker processes, watches them, forwards signals, and ends their process trees.

A failed process takes the others along, since ranks that wait for it would wait forever. The exit
code is that of the first cause, not of its consequences.
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
from types import FrameType

from rloo_cli.utils.child_process import (
    kill_group,
    kill_marked_processes,
    python_command,
    start_child,
)
from rloo_cli.utils.errors import GenerationError, Problem, print_error
from rloo_cli.utils.heartbeat import HEARTBEAT_VARIABLE, HeartbeatReader
from rloo_cli.utils.paths import cache_folder
from rloo_cli.utils.signals import AGAIN_S, stop_signals

# Threads that spin long while waiting for each other slow a shared machine down.
DEFAULT_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of compilers
}
STOP_TIMEOUT_S = 600.0  # after a signal: code that holds Python's lock would never let a run stop
CAUSE_GRACE_S = 0.5  # after a first failure: a more informative one may follow
KILL_TIMEOUT_S = 8.0  # after a first failure the others are killed: gone within 10 s
SAVE_TIMEOUT_S = 60.0  # the same while a checkpoint is being written
STOPPED_CODE, LOST_CODE = 75, 6
RUN_MARK_VARIABLE = "RLOO_FAMILY"  # marks all processes started by one run
# Until the worker can report its end, an interrupt ends it without a traceback.
WORKER_BOOT = """\
import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
from rloo_cli.utils.heartbeat import mark_failed_start
with mark_failed_start():
    from {package}{module} import main
main()"""


def default_environment() -> dict[str, str]:
    """`DEFAULT_ENVIRONMENT` and the folder of compiled kernels, or our own environment's values.

    Torch would otherwise create that folder in the temporary directory on import, and leave it.
    """
    kernels = {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder().absolute() / "inductor")}
    defaults = DEFAULT_ENVIRONMENT | kernels
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start: variables in addition to our environment, and inherited open files."""

    env: Mapping[str, str] = field(default_factory=dict)
    open_files: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return int(self.env.get("RANK", 0))


def print_lost(problem: Problem) -> None:
    """Print that a process was killed or ended by user code, as an error."""
    print_error(GenerationError(problem))


@dataclass(frozen=True)
class ProcessCallbacks:
    """Callbacks while processes run; `poll` and `poll_remote_failure` twice a second."""

    on_started: Callable[[list[int]], None] = lambda pids: None  # with all pids
    is_saving: Callable[[], bool] = lambda: False  # whether a checkpoint is being written
    poll: Callable[[], None] = lambda: None
    poll_remote_failure: Callable[[], int | None] = lambda: None  # a failed launcher's exit code
    on_lost: Callable[[Problem], None] = print_lost  # after one was killed or ended by user code
    silence_timeout_s: float = inf  # a process without a heartbeat for this long is killed


def run_processes(
    module: str,
    arguments: Sequence[str],
    callbacks: ProcessCallbacks = ProcessCallbacks(),
    specs: Sequence[ProcessSpec] = (ProcessSpec(),),
    package: str = "rloo_cli.",
) -> int:
    """Run `rloo_cli.<module>`.main with these arguments in each of these processes. -> exit code

    TERM, INT, USR1, USR2 and HUP reach each of them once; a second Ctrl-C within 5 s ends all at
    once (130). They are killed STOP_TIMEOUT_S after the first signal, unless a checkpoint is being
    saved. The code is that of the first that failed; one killed by a signal counts as 75 if a stop
    was requested, else as 6. So does one that exited without marking its end (utils/heartbeat.py):
    user code ended it, whatever its exit code. `package`: where the module is; tests have their own
    workers.
    """
    boot = WORKER_BOOT.format(module=module, package=package)
    children: list[subprocess.Popen[bytes]] = []
    run_mark = f"{os.getpid()}.{time.time_ns()}"  # their descendants inherit it
    with contextlib.ExitStack() as stack:
        heartbeats = [HeartbeatReader() for _ in specs]
        for heartbeat in heartbeats:
            stack.callback(heartbeat.close)
        received = stack.enter_context(_forward_signals(children, run_mark))
        for spec, heartbeat in zip(specs, heartbeats, strict=True):
            marks = {RUN_MARK_VARIABLE: run_mark, HEARTBEAT_VARIABLE: str(heartbeat.write_end)}
            child = start_child(
                python_command("-c", boot, *arguments),
                env=default_environment() | {**spec.env, **marks},
                pass_fds=(*spec.open_files, heartbeat.write_end),
                death_signal=signal.SIGKILL,
            )
            heartbeat.close_write_end()
            children.append(child)
            for number, _ in list(received):  # it arrived before this process existed
                _send(child, number)
        callbacks.on_started([child.pid for child in children])
        ranks = [spec.rank for spec in specs]
        return _ProcessGroup(children, ranks, received, callbacks, heartbeats).wait_for_end()


class _ProcessGroup:
    """Processes that end together: when one fails, the others are stopped."""

    def __init__(
        self,
        children: list[subprocess.Popen[bytes]],
        ranks: list[int],
        signals: list[tuple[int, float]],
        callbacks: ProcessCallbacks,
        heartbeats: list[HeartbeatReader],
    ):
        self.children, self.ranks, self.heartbeats = children, ranks, heartbeats
        self.silent: dict[int, float] = {}  # index -> seconds, of processes killed for silence
        self.signals, self.callbacks = signals, callbacks
        self.ended_at: dict[int, float] = {}  # index -> time, in the order in which they ended
        self.remote_failure: tuple[int, float] | None = None  # another launcher's code, and when
        self.terminate_sent = False
        self.timed_out_at = inf  # when processes that did not stop on request were killed
        self.polled_at = 0.0

    def wait_for_end(self) -> int:
        """Wait until all have ended. -> the exit code of the first cause"""
        while alive := [c for c in self.children if c.poll() is None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                alive[0].wait(0.5 if len(self.children) == 1 else 0.1)
            self._record_ended()
            if time.monotonic() - self.polled_at >= 0.5:
                self.polled_at = time.monotonic()
                self.callbacks.poll()
                self._poll_remote_failure()
                self._kill_silent()
            self._end_remaining()
        self._record_ended()
        code = self._exit_code()
        if code == STOPPED_CODE:  # a failure elsewhere may have caused the stop request
            other = self._poll_remote_failure()
            code = code if other in (None, LOST_CODE) else other
        return code

    def _poll_remote_failure(self) -> int | None:
        """The exit code of a launcher that failed on another node; polled until then."""
        if self.remote_failure is None:
            code = self.callbacks.poll_remote_failure()
            self.remote_failure = None if code is None else (code, time.monotonic())
        return None if self.remote_failure is None else self.remote_failure[0]

    def _kill_silent(self) -> None:
        """Kill a process without a heartbeat for too long: it would never end."""
        for index, heartbeat in enumerate(self.heartbeats):
            seconds = heartbeat.silent_seconds()
            if seconds > self.callbacks.silence_timeout_s and self.children[index].poll() is None:
                self.silent[index] = seconds
                kill_group(self.children[index].pid)

    def _record_ended(self) -> None:
        for index, child in enumerate(self.children):
            if index not in self.ended_at and child.poll() is not None:
                self.ended_at[index] = time.monotonic()

    def _first_failure_at(self) -> float | None:
        """When the first process failed, here or on another node: the others must not wait."""
        when = [
            t for p, t in self.ended_at.items() if self._exit_code_of(p) not in (0, STOPPED_CODE)
        ]
        when += [self.remote_failure[1]] if self.remote_failure else []
        return min(when, default=None)

    def _exit_code_of(self, index: int) -> int:
        """Its exit code, negative where a signal killed it; LOST_CODE if user code ended it."""
        code: int = self.children[index].returncode
        return LOST_CODE if self._was_ended_by_user_code(index) else code

    def _was_ended_by_user_code(self, index: int) -> bool:
        """Whether a process exited by itself without marking its end."""
        return self.children[index].returncode >= 0 and not self.heartbeats[index].has_marked_end()

    def _end_remaining(self) -> None:
        """End the remaining processes after their timeout."""
        now, wrong = time.monotonic(), self._first_failure_at()
        # A process that got a signal itself has notified the others: they save and stop together.
        stopped = [t for p, t in self.ended_at.items() if self._exit_code_of(p) == STOPPED_CODE]
        asked_at = [t for _, t in self.signals] + stopped
        if asked_at and now - asked_at[0] > STOP_TIMEOUT_S and not self.callbacks.is_saving():
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
        """The exit code of the first cause.

        A lost connection (6) gives way to a failure that follows immediately: that process only
        took longer to end. A stop (75) gives way to a failed save.
        """
        if len([n for n, _ in self.signals if n == signal.SIGINT]) > 1 and self._killed(inf):
            return 130
        wrong = self._first_failure_at()
        until = inf if wrong is None else wrong + CAUSE_GRACE_S
        killed = [] if self.signals else self._killed(min(until, self.timed_out_at))
        unmarked = [
            index for index, t in self.ended_at.items()
            if t <= until and self._was_ended_by_user_code(index)
        ]  # fmt: skip
        if killed:
            self.callbacks.on_lost(self._killed_problem(killed[0]))
        elif unmarked:
            self.callbacks.on_lost(self._ended_problem(unmarked[0]))
        codes = []
        for index, t in self.ended_at.items():
            code = self._exit_code_of(index)
            if code < 0:
                code = STOPPED_CODE if self.signals or t > self.timed_out_at else LOST_CODE
            if code and t <= until:
                codes.append(code)
        if self.remote_failure and self.remote_failure[1] <= until:
            codes.append(self.remote_failure[0])
        failed = [code for code in codes if code != STOPPED_CODE]
        known = [code for code in failed if code != LOST_CODE]
        if killed:
            return failed[0]
        return known[0] if known else STOPPED_CODE if STOPPED_CODE in codes else [*codes, 0][0]

    def _name_of(self, index: int) -> str:
        many = len(self.children) > 1 or self.ranks[0]
        return f"rank {self.ranks[index]}" if many else "the worker process"

    def _killed_problem(self, index: int) -> Problem:
        name = signal.Signals(-self._exit_code_of(index)).name
        guess = " (out of memory?)" if name == "SIGKILL" else ""
        what = f"{self._name_of(index)} was killed by {name}{guess}"
        if (silent := self.silent.get(index)) is not None:
            who = self._name_of(index)
            what = f"{who} sent no heartbeat for {silent:.0f} s (stopped?) and was killed"
        return Problem(what, "this machine", "no stop was requested", "run it again")

    def _ended_problem(self, index: int) -> Problem:
        code = self.children[index].returncode
        what = f"{self._name_of(index)} exited with code {code} before its work was done"
        why = (
            "user code (a reward, data.map, an optimizer, a callback, ...) called"
            " os._exit, replaced the process by exec, or used a library that exits"
        )
        fix = "return or raise an exception in that code instead of ending the process"
        return Problem(what, "this machine", why, fix)

    def _killed(self, until: float) -> list[int]:
        """Indices of the processes killed by a signal so far, in order of their ends."""
        return [p for p, t in self.ended_at.items() if t <= until and self._exit_code_of(p) < 0]


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


@contextmanager
def _forward_signals(
    children: list[subprocess.Popen[bytes]], run_mark: str
) -> Iterator[list[tuple[int, float]]]:
    """While inside, signals go to the children; afterwards all their processes are gone."""
    heard: list[tuple[int, float]] = []  # signal, when

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = [n for n, then in heard if n == number == signal.SIGINT and now - then < AGAIN_S]
        heard.append((number, now))
        for child in list(children):
            if again:
                kill_group(child.pid)  # a second Ctrl-C ends everything at once
            else:
                _send(child, number)

    before = {n: signal.signal(n, forward) for n in stop_signals()}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            # One request suffices: a scheduler's repeated signal must not end us during the report.
            deaf = heard and handler == signal.SIG_DFL
            signal.signal(number, _ignore if deaf else handler)
        for child in children:
            kill_group(child.pid)  # its leftover children
            child.wait()
        kill_marked_processes(RUN_MARK_VARIABLE, run_mark)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replaces SIG_IGN, which later processes would inherit."""
