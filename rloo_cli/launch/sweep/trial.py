"""One member while the sweep runs: its process, its line, and what it is doing."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rloo_cli.launch.processes import default_environment
from rloo_cli.launch.sweep.state import SweepState, Trial, quote_override
from rloo_cli.utils import environment, sweep_time_slices
from rloo_cli.utils.child_process import python_command, start_child
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.sweep_time_slices import JsonLineSocket


@dataclass
class FairShare:
    """What one member has had, and may have."""

    number: int
    share: int = 1
    weighted_slices: float = 0.0  # chunks, divided by the share at that time
    device: int = 0
    slice_owed: bool = (
        False  # it was let in and has not yet had its chunk: it comes before all others
    )

    def use_slice(self) -> None:
        """It gets a chunk."""
        if not self.slice_owed:
            self.weighted_slices += 1 / self.share
        self.slice_owed = False


def slice_order(fair_share: FairShare) -> tuple[bool, float, int]:
    """The order in which they are next."""
    return not fair_share.slice_owed, round(fair_share.weighted_slices, 9), fair_share.number


def select_next(waiting: Sequence[FairShare], capacity: Sequence[int]) -> list[FairShare]:
    """Those who go on now: `room` more on each device."""
    left, found = list(capacity), []
    for turns in sorted(waiting, key=slice_order):
        if left[turns.device] > 0:
            left[turns.device] -= 1
            found.append(turns)
    return found


def trials_per_device(jobs: int, devices: int) -> list[int]:
    """How many train at the same time on each device: as evenly as it goes."""
    return [jobs // devices + (d < jobs % devices) for d in range(devices)]


def least_used_device(fair_shares: Sequence[FairShare], jobs: int, devices: int) -> int:
    """The device for one more member: the one with the fewest, among those that are used."""
    counts = [sum(m.device == d for m in fair_shares) for d in range(min(jobs, max(1, devices)))]
    return counts.index(min(counts))


class TrialPhase(Enum):
    """What a member is doing."""

    NEW = "it has no process yet"
    RUNNING = "it loads, or does its chunk"
    BOUNDARY = "its chunk is done, it is still on the device"
    SAVING = "it writes a checkpoint for a clone"
    OFFLOADING = "it leaves the device"
    OFFLOADED = "it waits, off the device"
    ENDING = "it was told to end"
    DONE = "it has ended, or will never begin"


class TrialProcess:
    """A member that is to be trained."""

    def __init__(self, sweep_state: SweepState, trial: Trial, fair_share: FairShare):
        self.sweep_state, self.trial, self.fair_share = sweep_state, trial, fair_share
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: JsonLineSocket | None = None
        self.phase = self.phase_before_save = (
            TrialPhase.NEW
        )  # before: where it goes back to after saving
        self.slice_end = trial.step
        self.stop_reason = ""  # why it is to end at its next boundary
        self.requested_clones: list[JsonObject] = []  # asked for, to be made at its next boundary
        self.on_device = False  # its place on the device
        self.signalled = False  # a signal was passed on to it

    @property
    def is_open(self) -> bool:
        """Whether it is still to be trained."""
        return self.phase != TrialPhase.DONE

    @property
    def is_ready(self) -> bool:
        """Whether it could go on now."""
        return (
            self.phase in (TrialPhase.NEW, TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)
            and not self.stop_reason
        )

    @property
    def max_steps(self) -> int | None:
        """The step at which it is finished; None while that is not known."""
        return self.sweep_state.trial_steps(self.trial)

    def start(self, socket: Path, gpu: str | None, num_beside: int = 0) -> None:
        """Start its run, as `rloo train` does; what it prints goes to its log. `beside`: other
        members on its device."""
        log = self.sweep_state.trial_log(self.trial)
        env = default_environment()
        env[sweep_time_slices.SOCKET_VARIABLE] = f"{socket}:{self.trial.number}"
        env[environment.WAITING_TRIALS_VARIABLE] = str(num_beside)
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        self.process = start_child(
            python_command("-m", "rloo_cli", "train", *self.train_overrides()),
            env=env,
            log=log,
            death_signal=signal.SIGKILL,
        )
        self.phase, self.on_device = TrialPhase.RUNNING, True

    def train_overrides(self) -> list[str]:
        """The run as `rloo train` takes it."""
        member, begun = (
            self.trial,
            (self.sweep_state.trial_folder(self.trial) / "run.json").is_file(),
        )
        start = member.start if member.start is not None and not begun else "auto"
        words = [*member.words, f"name={quote_override(member.name)}"]
        words.append(f"resume={quote_override(start)}" if start != "auto" else "resume=auto")
        if member.parent is not None:
            words.append("resume_allow_changes=true")
        return words

    def send_order(self, **order: Any) -> None:
        """Send an order; one that is gone is noticed by its exit code."""
        if self.connection is not None:
            try:
                self.connection.send(**order)
            except OSError:
                self.connection = None

    def run_until(self, slice_end: int) -> None:
        """Let it do its next chunk."""
        self.slice_end, self.phase, self.on_device = slice_end, TrialPhase.RUNNING, True
        self.send_order(do="go", until=slice_end)

    def offload(self) -> None:
        """Make it leave the device."""
        self.phase = TrialPhase.OFFLOADING
        self.send_order(do="park")

    def save_checkpoint(self) -> None:
        """Make it write a checkpoint of where it stands."""
        self.phase_before_save, self.phase = self.phase, TrialPhase.SAVING
        self.send_order(do="save")

    def save_and_stop(self) -> None:
        """Make it save and end."""
        self.phase = TrialPhase.ENDING
        self.send_order(do="stop", why=self.stop_reason)

    def send_signal(self, number: int) -> None:
        """Pass a signal on."""
        if self.process is not None and self.process.poll() is None:
            self.signalled = True
            self.process.send_signal(number)

    def exit_code(self) -> int | None:
        """Its exit code, once it has ended."""
        return None if self.process is None else self.process.poll()
