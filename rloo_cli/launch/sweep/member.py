"""One member while the sweep runs: its process, its line, and what it is doing."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rloo_cli.launch.processes import CALM, die_with_parent
from rloo_cli.launch.sweep.state import Book, Member, quoted
from rloo_cli.train import sweep_turns
from rloo_cli.train.sweep_turns import Line
from rloo_cli.utils import environment


@dataclass
class Turns:
    """What one member has had, and may have."""

    number: int
    share: int = 1
    had: float = 0.0  # chunks, divided by the share at that time
    device: int = 0
    due: bool = False  # it was let in and has not yet had its chunk: it comes before all others

    def take(self) -> None:
        """It gets a chunk."""
        if not self.due:
            self.had += 1 / self.share
        self.due = False


def rank(turns: Turns) -> tuple[bool, float, int]:
    """The order in which they are next."""
    return not turns.due, round(turns.had, 9), turns.number


def next_ones(waiting: Sequence[Turns], room: Sequence[int]) -> list[Turns]:
    """Those who go on now: `room` more on each device."""
    left, found = list(room), []
    for turns in sorted(waiting, key=rank):
        if left[turns.device] > 0:
            left[turns.device] -= 1
            found.append(turns)
    return found


def places(jobs: int, devices: int) -> list[int]:
    """How many train at the same time on each device: as evenly as it goes."""
    return [jobs // devices + (d < jobs % devices) for d in range(devices)]


def spread(members: Sequence[Turns], jobs: int, devices: int) -> int:
    """The device for one more member: the one with the fewest, among those that are used."""
    counts = [sum(m.device == d for m in members) for d in range(min(jobs, max(1, devices)))]
    return counts.index(min(counts))


class Phase(Enum):
    """What a member is doing."""

    NEW = "it has no process yet"
    RUNNING = "it loads, or does its chunk"
    BOUNDARY = "its chunk is done, it is still on the device"
    SAVING = "it writes a checkpoint for a clone"
    PARKING = "it leaves the device"
    PARKED = "it waits, off the device"
    ENDING = "it was told to end"
    DONE = "it has ended, or will never begin"


class Live:
    """A member that is to be trained."""

    def __init__(self, book: Book, member: Member, fair: Turns):
        self.book, self.member, self.fair = book, member, fair
        self.process: subprocess.Popen[bytes] | None = None
        self.line: Line | None = None
        self.phase = self.before = Phase.NEW  # before: where it goes back to after saving
        self.until = member.step
        self.ending = ""  # why it is to end at its next boundary
        self.clones: list[dict[str, Any]] = []  # asked for, to be made at its next boundary
        self.holds = False  # its place on the device
        self.told = False  # a signal was passed on to it

    @property
    def open(self) -> bool:
        """Whether it is still to be trained."""
        return self.phase != Phase.DONE

    @property
    def waits(self) -> bool:
        """Whether it could go on now."""
        return self.phase in (Phase.NEW, Phase.BOUNDARY, Phase.PARKED) and not self.ending

    @property
    def steps(self) -> int | None:
        """The step at which it is finished; None while that is not known."""
        return self.book.steps(self.member)

    def start(self, socket: Path, gpu: str | None, beside: int = 0) -> None:
        """Start its run, as `rloo train` does; what it prints goes to its log. `beside`: other
        members on its device."""
        log = self.book.log(self.member)
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {**CALM, **os.environ, sweep_turns.PLACE: f"{socket}:{self.member.number}"}
        env[environment.BESIDE] = str(beside)
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rloo_cli", "train", *self.words()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it once, from us
                preexec_fn=die_with_parent(),
            )
        self.phase, self.holds = Phase.RUNNING, True

    def words(self) -> list[str]:
        """The run as `rloo train` takes it."""
        member, begun = self.member, (self.book.place(self.member) / "run.json").is_file()
        start = member.start if member.start is not None and not begun else "auto"
        words = [*member.words, f"name={quoted(member.name)}"]
        words.append(f"resume={quoted(start)}" if start != "auto" else "resume=auto")
        if member.parent is not None:
            words.append("resume_allow_changes=true")
        return words

    def tell(self, **order: Any) -> None:
        """Send an order; one that is gone is noticed by its exit code."""
        if self.line is not None:
            try:
                self.line.send(**order)
            except OSError:
                self.line = None

    def go(self, until: int) -> None:
        """Let it do its next chunk."""
        self.until, self.phase, self.holds = until, Phase.RUNNING, True
        self.tell(do="go", until=until)

    def park(self) -> None:
        """Make it leave the device."""
        self.phase = Phase.PARKING
        self.tell(do="park")

    def save(self) -> None:
        """Make it write a checkpoint of where it stands."""
        self.before, self.phase = self.phase, Phase.SAVING
        self.tell(do="save")

    def end(self) -> None:
        """Make it save and end."""
        self.phase = Phase.ENDING
        self.tell(do="stop", why=self.ending)

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if self.process is not None and self.process.poll() is None:
            self.told = True
            self.process.send_signal(number)

    def ended(self) -> int | None:
        """Its exit code, once it has ended."""
        return None if self.process is None else self.process.poll()
