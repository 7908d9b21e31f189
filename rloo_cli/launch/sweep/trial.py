"""One trial while the sweep runs: its process, its connection, its phase."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rloo_cli.launch.processes import default_environment
from rloo_cli.launch.sweep.state import SweepState, Trial, quote_override
from rloo_cli.utils import environment, sweep_time_slices
from rloo_cli.utils.child_process import python_command, start_child
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.sweep_time_slices import JsonLineSocket


@dataclass
class FairShare:
    """The time slices that one trial has had, and its share of them."""

    number: int
    share: int = 1
    weighted_slices: float = 0.0  # time slices, each divided by the share at that time
    device: int = 0
    slice_owed: bool = False  # started, without a time slice so far: it goes first

    def use_slice(self) -> None:
        """Count a time slice, unless it is the one that the trial is owed."""
        if not self.slice_owed:
            self.weighted_slices += 1 / self.share
        self.slice_owed = False


def slice_order(fair_share: FairShare) -> tuple[bool, float, int]:
    """Sort key: trials that are owed a time slice come first, then those that had the fewest."""
    return not fair_share.slice_owed, round(fair_share.weighted_slices, 9), fair_share.number


def select_next(waiting: Sequence[FairShare], capacity: Sequence[int]) -> list[FairShare]:
    """Choose the trials that run now, at most `capacity` more on each device."""
    left, chosen = list(capacity), []
    for turns in sorted(waiting, key=slice_order):
        if left[turns.device] > 0:
            left[turns.device] -= 1
            chosen.append(turns)
    return chosen


def trials_per_device(jobs: int, devices: int) -> list[int]:
    """How many of `jobs` trials train at the same time on each device, spread evenly."""
    return [jobs // devices + (d < jobs % devices) for d in range(devices)]


def least_used_device(fair_shares: Sequence[FairShare], jobs: int, devices: int) -> int:
    """The device with the fewest trials, for one more; only `jobs` devices are used."""
    counts = [sum(m.device == d for m in fair_shares) for d in range(min(jobs, max(1, devices)))]
    return counts.index(min(counts))


class TrialPhase(Enum):
    """What a trial is doing."""

    NEW = "not started"
    RUNNING = "loading, or training in its time slice"
    BOUNDARY = "time slice over, still on the device"
    SAVING = "writing a checkpoint for a clone"
    OFFLOADING = "leaving the device"
    OFFLOADED = "waiting, off the device"
    ENDING = "asked to end"
    DONE = "ended, or never to start"


class TrialProcess:
    """A trial to train, with its process once that is started."""

    def __init__(self, sweep_state: SweepState, trial: Trial, fair_share: FairShare):
        self.sweep_state, self.trial, self.fair_share = sweep_state, trial, fair_share
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: JsonLineSocket | None = None
        self.phase = self.phase_before_save = TrialPhase.NEW  # the second holds after a save
        self.slice_end = trial.step
        self.stop_reason = ""  # why it must end at its next boundary
        self.requested_clones: list[JsonObject] = []  # to create at its next boundary
        self.on_device = False  # counts against the device's capacity
        self.signalled = False  # a signal was passed on to it

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.phase != TrialPhase.DONE

    @property
    def is_ready(self) -> bool:
        """Whether it can run now."""
        phases = (TrialPhase.NEW, TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)
        return self.phase in phases and not self.stop_reason

    @property
    def max_steps(self) -> int | None:
        """Its last step; None while that is not known."""
        return self.sweep_state.trial_steps(self.trial)

    def start(self, socket: Path, gpu: str | None, num_beside: int = 0) -> None:
        """Start its run, as `rloo train` does; its output goes to its log.

        `num_beside`: the number of other trials on its device.
        """
        env = default_environment()
        env[sweep_time_slices.SOCKET_VARIABLE] = f"{socket}:{self.trial.number}"
        env[environment.WAITING_TRIALS_VARIABLE] = str(num_beside)
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        self.process = start_child(
            python_command("-m", "rloo_cli", "train", *self.train_overrides()),
            env=env,
            log=self.sweep_state.trial_log(self.trial),
            death_signal=signal.SIGKILL,
        )
        self.phase, self.on_device = TrialPhase.RUNNING, True

    def train_overrides(self) -> list[str]:
        """The overrides with which `rloo train` starts or resumes this trial."""
        trial = self.trial
        began = (self.sweep_state.trial_folder(trial) / "run.json").is_file()
        start = "auto" if trial.start is None or began else quote_override(trial.start)
        overrides = [*trial.words, f"name={quote_override(trial.name)}", f"resume={start}"]
        if trial.parent is not None:
            overrides.append("resume_allow_changes=true")
        return overrides

    def send_order(self, **order: object) -> None:
        """Send an order to the process; its exit code shows if it has ended."""
        if self.connection is not None:
            try:
                self.connection.send(**order)
            except OSError:
                self.connection = None

    def run_until(self, slice_end: int) -> None:
        """Let it train up to this step."""
        self.slice_end, self.phase, self.on_device = slice_end, TrialPhase.RUNNING, True
        self.send_order(do="go", until=slice_end)

    def offload(self) -> None:
        """Make it leave the device."""
        self.phase = TrialPhase.OFFLOADING
        self.send_order(do="park")

    def save_checkpoint(self) -> None:
        """Make it write a checkpoint of its current step."""
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
