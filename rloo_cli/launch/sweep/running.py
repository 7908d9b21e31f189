"""The state of a running sweep: its trials, their devices, and received signals."""

import time
from pathlib import Path

from rloo_cli.launch.sweep.state import OPEN_STATES, SweepState, Trial
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.launch.sweep.trial import (
    FairShare,
    TrialProcess,
    least_used_device,
    trials_per_device,
)

SAVE_S = 0.5  # minimum seconds between writes of sweep.json for progress alone


class Sweep:
    """A running sweep. `gpus`: names of the devices that its trials are spread over;
    `max_trials`: how many trials those can hold."""

    def __init__(
        self,
        sweep_state: SweepState,
        show: SweepDisplay,
        gpus: list[str] | None = None,
        max_trials: int | None = None,
    ):
        self.sweep_state, self.show = sweep_state, show
        self.gpus, self.max_trials, jobs = gpus or [], max_trials, sweep_state.jobs
        self.trial_processes: list[TrialProcess] = []
        self.capacity = trials_per_device(jobs, max(1, min(jobs, len(self.gpus))))
        self.signals: list[int] = []  # received, in order
        self.socket = Path()
        self.saved_at = 0.0
        for trial in sweep_state.trials:
            if trial.state in (*OPEN_STATES, "failed"):
                trial.state, trial.code, trial.why = "waiting", None, ""
                self.add_trial(trial)

    def add_trial(self, trial: Trial) -> TrialProcess:
        """Add a trial to train; its time slices count from now on."""
        others = [process.fair_share for process in self.trial_processes if process.is_open]
        device = least_used_device(others, self.sweep_state.jobs, len(self.gpus))
        least = min((other.weighted_slices for other in others), default=0.0)
        fair_share = FairShare(trial.number, trial.share, least, device)
        self.trial_processes.append(TrialProcess(self.sweep_state, trial, fair_share))
        return self.trial_processes[-1]

    def save_state(self, now: bool = True) -> None:
        """Write sweep.json, at once, or when it is due."""
        if now or time.monotonic() - self.saved_at > SAVE_S:
            self.sweep_state.save()
            self.saved_at = time.monotonic()
