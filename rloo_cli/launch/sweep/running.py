"""The state of a sweep that runs: its members, who trains where, and what it was asked."""

import time
from pathlib import Path

from rloo_cli.launch.sweep import trial as sweep_member
from rloo_cli.launch.sweep.state import OPEN_STATES, SweepState, Trial
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.launch.sweep.trial import FairShare, TrialProcess

SAVE_S = 0.5  # sweep.json is written at most this often for what only shows how it goes


class Sweep:
    """A sweep that runs. `gpus`: names of the devices that members are spread over; `fit`: how many
    members those can hold."""

    def __init__(
        self,
        sweep_state: SweepState,
        show: SweepDisplay,
        gpus: list[str] | None = None,
        max_trials: int | None = None,
    ):
        self.sweep_state, self.show, self.gpus, self.max_trials = (
            sweep_state,
            show,
            gpus or [],
            max_trials,
        )
        self.trial_processes: list[TrialProcess] = []
        self.capacity = sweep_member.trials_per_device(
            sweep_state.jobs, max(1, min(sweep_state.jobs, len(self.gpus)))
        )
        self.signals: list[int] = []  # signals
        self.socket = Path()
        self.saved_at = 0.0
        for member in sweep_state.members:
            if member.state in (*OPEN_STATES, "failed"):
                member.state, member.code, member.why = "waiting", None, ""
                self.add_trial(member)

    def add_trial(self, trial: Trial) -> TrialProcess:
        """A member more that is to be trained; its turns count from now on."""
        known = [live.fair_share for live in self.trial_processes if live.is_open]
        device = sweep_member.least_used_device(known, self.sweep_state.jobs, len(self.gpus))
        had = min((turns.weighted_slices for turns in known), default=0.0)
        turns = FairShare(trial.number, trial.share, had, device)
        self.trial_processes.append(TrialProcess(self.sweep_state, trial, turns))
        return self.trial_processes[-1]

    def save_state(self, now: bool = True) -> None:
        """Write sweep.json, at once or when it is time."""
        if now or time.monotonic() - self.saved_at > SAVE_S:
            self.sweep_state.save()
            self.saved_at = time.monotonic()
