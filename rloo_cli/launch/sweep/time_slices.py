"""Giving turns: who goes on, who leaves the device for it, and who is stopped at a rung."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from rloo_cli.launch.sweep import trial
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import Rung
from rloo_cli.launch.sweep.trial import TrialPhase, TrialProcess

MINIMIZE_SUFFIX = ":min"  # behind a metric of which less is better


def pending_rung(rungs: Sequence[Rung]) -> Rung | None:
    """The next one that is not decided."""
    return next((rung for rung in rungs if not rung.done), None)


def slice_end_step(step: int, chunk: int, rung: Rung | None) -> int:
    """Where the chunk after `step` ends: at multiples of the chunk, and at the rung."""
    end = (step // chunk + 1) * chunk
    return min(end, rung.at) if rung is not None and step < rung.at else end


def metric_at_rung(metrics: Sequence[Mapping[str, Any]], rung: Rung, chunk: int) -> float:
    """What a member is worth at a rung, more is better; NaN where it has no such metric."""
    name = rung.by.removesuffix(MINIMIZE_SUFFIX)
    known = [row for row in metrics if row["step"] <= rung.at and isfinite(row.get(name, nan))]
    recent = [row[name] for row in known if row["step"] > rung.at - chunk]
    values = recent or [row[name] for row in known[-1:]]
    if not values:
        return nan
    mean: float = sum(values) / len(values)
    return -mean if rung.by.endswith(MINIMIZE_SUFFIX) else mean


def trials_below_rung(metric_by_trial: Mapping[int, float], rung: Rung) -> list[int]:
    """Numbers of the members that stop, the best of them first; an unknown worth is the worst."""

    def order(number: int) -> tuple[bool, float, int]:
        value = metric_by_trial[number]
        return not isfinite(value), -value if isfinite(value) else 0.0, number

    return sorted(metric_by_trial, key=order)[rung.keep :]


READY_PHASES = (TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)


def halve_trials(sweep: Sweep) -> None:
    """Decide the rung that all have reached: the best go on, the others stop."""
    book, rung = sweep.sweep_state, pending_rung(sweep.sweep_state.rungs)
    going = [live for live in sweep.trial_processes if live.is_open and not live.stop_reason]
    if rung is None or not going:
        return
    if any(live.phase not in READY_PHASES or live.trial.step < rung.at for live in going):
        return
    rows = {live.trial.number: sweep.show.training_metrics(live.trial) for live in going}
    worths = {number: metric_at_rung(found, rung, book.chunk) for number, found in rows.items()}
    out = trials_below_rung(worths, rung)
    for live in going:
        if live.trial.number in out:
            place = rung.keep + out.index(live.trial.number) + 1
            live.stop_reason = f"--keep {rung.keep} --at {rung.at}: place {place} by {rung.by}"
    rung.done = True
    sweep.show.print_note(f"step {rung.at}: the best {rung.keep} by {rung.by} go on")
    sweep.save_state()


def schedule_slices(sweep: Sweep) -> None:
    """Let the next ones go on, and make those leave the device that are not among them."""
    rung = pending_rung(sweep.sweep_state.rungs)
    free = [live for live in sweep.trial_processes if live.is_ready and not _blocked(live, rung)]
    room = list(sweep.capacity)
    for live in sweep.trial_processes:  # one at a boundary stays only if it is the next again
        room[live.fair_share.device] -= live.on_device and not (
            live in free and live.phase == TrialPhase.BOUNDARY
        )
    chosen = trial.select_next([live.fair_share for live in free], room)
    for live in sweep.trial_processes:
        if (
            live.phase == TrialPhase.BOUNDARY
            and live.fair_share not in chosen
            and not live.stop_reason
        ):
            live.offload()
    for live in free:
        if live.fair_share in chosen and (
            live.on_device or _has_capacity(sweep, live.fair_share.device)
        ):
            _start_slice(sweep, live, rung)


def _blocked(trial_process: TrialProcess, rung: Rung | None) -> bool:
    """It has come to the rung, and waits there for the others."""
    if rung is None or trial_process.phase == TrialPhase.NEW:
        return False
    return trial_process.trial.step >= rung.at


def _has_capacity(sweep: Sweep, device: int) -> bool:
    held = sum(live.on_device for live in sweep.trial_processes if live.fair_share.device == device)
    return held < sweep.capacity[device]


def _start_slice(sweep: Sweep, trial_process: TrialProcess, rung: Rung | None) -> None:
    trial_process.fair_share.use_slice()
    trial_process.trial.state = "training"
    if trial_process.phase != TrialPhase.NEW:
        trial_process.run_until(
            slice_end_step(trial_process.trial.step, sweep.sweep_state.chunk, rung)
        )
        return
    trial_process.fair_share.slice_owed = (
        True  # where it stands it says itself: that is when its chunk begins
    )
    names = sweep.gpus[: len(sweep.capacity)]
    there = [
        x
        for x in sweep.trial_processes
        if x.is_open and x.fair_share.device == trial_process.fair_share.device
    ]
    gpu = names[trial_process.fair_share.device] if len(names) > 1 else None
    trial_process.start(sweep.socket, gpu, len(there) - 1)
