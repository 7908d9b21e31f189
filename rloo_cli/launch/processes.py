"""The processes that do the work: started, watched, their signals passed on, their trees ended.

One that ends wrongly takes the others along: ranks that wait for it would wait for ever. What is
then said is the first cause, not what the others made of it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rloo_cli.utils.errors import GenerationError, Problem, print_error
from rloo_cli.utils.signals import AGAIN_S, SIGNALS

# Threads that spin long while they wait for each other make a machine that is shared many times
# slower.
CALM = {
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of compilers
}
LIMIT_S = 600.0  # after a signal: code that holds Python's lock would never let a run end
MOMENT_S = 0.5  # after a first wrong end: one that says why may be on its way
PATIENCE_S = 8.0  # after a first wrong end the others are killed: gone within 10 s
SAVING_S = 60.0  # the same while a save is being written
STOPPED, LOST = 75, 6
FAMILY = "RLOO_FAMILY"  # marks all that the processes of one run have started
# Until the worker can say how it ended, an interrupt ends it without a traceback.
BOOT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); " \
    "from {package}{module} import main; main()"  # fmt: skip


@dataclass(frozen=True)
class Start:
    """One process: what its environment has besides ours, and the open files it is given."""

    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return int(self.env.get("RANK", 0))


def say(why: str) -> None:
    """Print that a process was killed, as an error."""
    print_error(GenerationError(Problem(why, why="nobody asked it to end")))


@dataclass(frozen=True)
class Watch:
    """What is done while processes run. `look` and `elsewhere` are called twice a second."""

    started: Callable[[list[int]], None] = lambda pids: None  # all of them run
    busy: Callable[[], bool] = lambda: False  # a save is being written
    look: Callable[[], None] = lambda: None
    elsewhere: Callable[[], int | None] = lambda: None  # the code of one that is not ours
    died: Callable[[str], None] = say  # why, in words, when one was killed


def run(
    module: str,
    words: Sequence[str],
    watch: Watch = Watch(),
    starts: Sequence[Start] = (Start(),),
    package: str = "rloo_cli.",
) -> int:
    """Run `rloo_cli.<module>`.main with these arguments in each of these processes; the exit code.

    TERM, INT, USR1 and USR2 reach each of them once; a second Ctrl-C within 5 s ends all at once
    (130). They are ended LIMIT_S after the first signal unless `busy`. The code is that of the
    first that ended wrongly (not with 0); one that a signal killed counts as 75 where an end was
    asked for, else as 6. `package`: where the module is (tests have workers of their own).
    """
    boot = BOOT.format(module=module, package=package)
    children: list[subprocess.Popen[bytes]] = []
    family = f"{os.getpid()}.{time.time_ns()}"  # what they start has it in its environment, too
    with _passing_signals_on(children, family) as heard:
        for start in starts:
            child = subprocess.Popen(
                # -P: no file in the current folder can pass for a package.
                [sys.executable, "-P", "-c", boot, *words],
                env={**CALM, **os.environ, **start.env, FAMILY: family},
                pass_fds=start.files,
                start_new_session=True,  # a Ctrl-C reaches it once, from us
                preexec_fn=die_with_parent(),
            )
            children.append(child)
            for number, _ in list(heard):  # it came before this one was there
                _send(child, number)
        watch.started([child.pid for child in children])
        ranks = [start.rank for start in starts]
        return _Family(children, ranks, heard, watch).end()


class _Family:
    """Processes that stand and fall together."""

    def __init__(
        self,
        children: list[subprocess.Popen[bytes]],
        ranks: list[int],
        heard: list[tuple[int, float]],
        watch: Watch,
    ):
        self.children, self.ranks, self.heard, self.watch = children, ranks, heard, watch
        self.ended: dict[int, float] = {}  # place in the list -> when, in the order of the ends
        self.outside: tuple[int, float] | None = None  # the code of one elsewhere, when
        self.told = False
        self.late = inf  # when those that did not stop as they were asked were ended
        self.looked = 0.0

    def end(self) -> int:
        """Wait until all have ended; the code of the first cause."""
        while alive := [c for c in self.children if c.poll() is None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                alive[0].wait(0.5 if len(self.children) == 1 else 0.1)
            self._note()
            if time.monotonic() - self.looked >= 0.5:
                self.looked = time.monotonic()
                self.watch.look()
                if self.outside is None and (code := self.watch.elsewhere()) is not None:
                    self.outside = code, time.monotonic()
            self._hurry()
        self._note()
        code = self._code()
        if code == STOPPED:  # whoever asked for it may have done so for what went wrong elsewhere
            other = self.watch.elsewhere() if self.outside is None else self.outside[0]
            code = code if other in (None, LOST) else other
        return code

    def _note(self) -> None:
        for place, child in enumerate(self.children):
            if place not in self.ended and child.poll() is not None:
                self.ended[place] = time.monotonic()

    def _wrong(self) -> float | None:
        """When the first of them ended in a way that leaves the others nothing to wait for."""
        when = [t for p, t in self.ended.items() if self._returned(p) not in (0, STOPPED)]
        return min([*when, *([self.outside[1]] if self.outside else [])], default=None)

    def _returned(self, place: int) -> int:
        code: int = self.children[place].returncode
        return code

    def _hurry(self) -> None:
        """End those that are left, where it is time."""
        now, wrong = time.monotonic(), self._wrong()
        # One that was sent a signal itself has told the others: they save and end together.
        stopped = [t for p, t in self.ended.items() if self._returned(p) == STOPPED]
        asked = [t for _, t in self.heard] + stopped
        if asked and now - asked[0] > LIMIT_S and not self.watch.busy():
            self.late = min(self.late, now)
            self._each(signal.SIGKILL)
        if wrong is None:
            return
        if now - wrong >= MOMENT_S and not self.told:
            self.told = True
            self._each(signal.SIGTERM)
        if now - wrong > SAVING_S or (now - wrong > PATIENCE_S and not self.watch.busy()):
            self._each(signal.SIGKILL)

    def _each(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.poll() is None:
                if number == signal.SIGKILL:
                    kill(child.pid)
                else:
                    _send(child, number)

    def _code(self) -> int:
        """The code of the first cause. A lost connection (6) gives way to a cause that follows at
        once: that process was only slower to end. A stop (75) gives way to a save that failed.
        """
        if len([n for n, _ in self.heard if n == signal.SIGINT]) > 1 and self._killed(inf):
            return 130
        wrong = self._wrong()
        until = inf if wrong is None else wrong + MOMENT_S
        killed = [] if self.heard else self._killed(min(until, self.late))
        if killed:
            place = killed[0]
            name = signal.Signals(-self._returned(place)).name
            guess = " (out of memory?)" if name == "SIGKILL" else ""
            who = f"rank {self.ranks[place]}" if len(self.children) > 1 or self.ranks[0] else ""
            self.watch.died(
                f"{who or 'the process that does the work'} was killed by {name}{guess}"
            )
        codes = [
            code if code >= 0 else STOPPED if self.heard or t > self.late else LOST
            for code, t in ((self._returned(p), t) for p, t in self.ended.items() if t <= until)
            if code
        ]
        if self.outside and self.outside[1] <= until:
            codes.append(self.outside[0])
        failed = [code for code in codes if code != STOPPED]
        known = [code for code in failed if code != LOST]
        if killed:
            return failed[0]
        return known[0] if known else STOPPED if STOPPED in codes else [*codes, 0][0]

    def _killed(self, until: float) -> list[int]:
        """Those that a signal ended before we ended any, in the order of their ends."""
        return [p for p, t in self.ended.items() if t <= until and self._returned(p) < 0]


def kill(group: int) -> None:
    """End a process group at once; nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


@contextmanager
def _passing_signals_on(
    children: list[subprocess.Popen[bytes]],
    family: str,
) -> Iterator[list[tuple[int, float]]]:
    """While inside, signals go to the children; afterwards nothing that they started is left."""
    heard: list[tuple[int, float]] = []  # signal, when

    def forward(number: int, frame: Any) -> None:
        now = time.monotonic()
        again = [n for n, then in heard if n == number == signal.SIGINT and now - then < AGAIN_S]
        heard.append((number, now))
        for child in list(children):
            if again:
                kill(child.pid)  # the second Ctrl-C means now
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
            kill(child.pid)  # whatever it started and left
            child.wait()
        end_family(family)


def end_family(family: str) -> None:
    """Kill every process with this mark in its environment: what left the group by setsid, too."""
    mark = f"{FAMILY}={family}".encode()
    for _ in range(3):  # one that was just being forked is there at the second look
        found = [
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if mark in _environment(entry).split(b"\0") and entry.name != str(os.getpid())
        ]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _environment(process: Path) -> bytes:
    """The environment that a process began with; empty where it is gone or somebody else's."""
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def _ignore(number: int, frame: Any) -> None:
    """In place of SIG_IGN, which a process that is started later would inherit."""


def die_with_parent() -> Callable[[], None] | None:
    """For the child: be killed when the process that started us dies (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
