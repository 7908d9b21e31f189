"""Schedules time slices: which trials run, which leave the device, which stop at a rung."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan

from rloo_cli.launch.sweep import trial
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import Rung
from rloo_cli.launch.sweep.trial import TrialPhase, TrialProcess
from rloo_cli.reporting.metrics_lines import MetricsMapping

MINIMIZE_SUFFIX = ":min"  # marks a metric of which lower is better


def pending_rung(rungs: Sequence[Rung]) -> Rung | None:
    """The next undecided rung."""
    return next((rung for rung in rungs if not rung.done), None)


def slice_end_step(step: int, chunk: int, rung: Rung | None) -> int:
    """Where the time slice after `step` ends: at the next multiple of `chunk`, or at the rung."""
    end = (step // chunk + 1) * chunk
    return min(end, rung.at) if rung is not None and step < rung.at else end


def metric_at_rung(metrics: Sequence[MetricsMapping], rung: Rung, chunk: int) -> float:
    """A trial's mean metric over the last `chunk` steps before a rung, negated if lower is better.

    Without a value in these steps the last value counts; NaN if there are none at all.
    """
    name = rung.by.removesuffix(MINIMIZE_SUFFIX)
    finite = [line for line in metrics if line["step"] <= rung.at and isfinite(line.get(name, nan))]
    recent = [line[name] for line in finite if line["step"] > rung.at - chunk]
    values = recent or [line[name] for line in finite[-1:]]
    if not values:
        return nan
    mean: float = sum(values) / len(values)
    return -mean if rung.by.endswith(MINIMIZE_SUFFIX) else mean


def trials_below_rung(metric_by_trial: Mapping[int, float], rung: Rung) -> list[int]:
    """Numbers of the trials that stop, the best of them first; those without a metric are last."""

    def order(number: int) -> tuple[bool, float, int]:
        value = metric_by_trial[number]
        return not isfinite(value), -value if isfinite(value) else 0.0, number

    return sorted(metric_by_trial, key=order)[rung.keep :]


READY_PHASES = (TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)


def halve_trials(sweep: Sweep) -> None:
    """Decide the next rung once all trials have reached it: the best continue, the others stop."""
    rung, chunk = pending_rung(sweep.sweep_state.rungs), sweep.sweep_state.chunk
    going = [
        process for process in sweep.trial_processes if process.is_open and not process.stop_reason
    ]
    if rung is None or not going:
        return
    if any(p.phase not in READY_PHASES or p.trial.step < rung.at for p in going):
        return
    metrics = {p.trial.number: sweep.show.training_metrics(p.trial) for p in going}
    values = {number: metric_at_rung(lines, rung, chunk) for number, lines in metrics.items()}
    stopped = trials_below_rung(values, rung)
    for process in going:
        if process.trial.number in stopped:
            rank = rung.keep + stopped.index(process.trial.number) + 1
            process.stop_reason = f"--keep {rung.keep} --at {rung.at}: rank {rank} by {rung.by}"
    rung.done = True
    sweep.show.print_note(f"step {rung.at}: the best {rung.keep} by {rung.by} continue")
    sweep.save_state()


def schedule_slices(sweep: Sweep) -> None:
    """Start the time slices that are due, and offload the trials that must wait."""
    rung = pending_rung(sweep.sweep_state.rungs)
    processes = sweep.trial_processes
    free = [process for process in processes if process.is_ready and not _blocked(process, rung)]
    capacity = list(sweep.capacity)
    for process in processes:  # a trial at a boundary stays loaded only if it is due again
        may_leave = process in free and process.phase == TrialPhase.BOUNDARY
        capacity[process.fair_share.device] -= process.on_device and not may_leave
    chosen = trial.select_next([process.fair_share for process in free], capacity)
    for process in processes:
        waits = process.fair_share not in chosen and not process.stop_reason
        if process.phase == TrialPhase.BOUNDARY and waits:
            process.offload()
    for process in free:
        fits = process.on_device or _has_capacity(sweep, process.fair_share.device)
        if process.fair_share in chosen and fits:
            _start_slice(sweep, process, rung)


def _blocked(trial_process: TrialProcess, rung: Rung | None) -> bool:
    """Whether it has reached the rung and waits there for the others."""
    if rung is None or trial_process.phase == TrialPhase.NEW:
        return False
    return trial_process.trial.step >= rung.at


def _has_capacity(sweep: Sweep, device: int) -> bool:
    on_device = [p for p in sweep.trial_processes if p.fair_share.device == device and p.on_device]
    return len(on_device) < sweep.capacity[device]


def _start_slice(sweep: Sweep, trial_process: TrialProcess, rung: Rung | None) -> None:
    fair_share, step = trial_process.fair_share, trial_process.trial.step
    fair_share.use_slice()
    trial_process.trial.state = "training"
    if trial_process.phase != TrialPhase.NEW:
        trial_process.run_until(slice_end_step(step, sweep.sweep_state.chunk, rung))
        return
    fair_share.slice_owed = True  # its time slice begins when it has loaded and sends its step
    gpus = sweep.gpus[: len(sweep.capacity)]
    open_processes = [p for p in sweep.trial_processes if p.is_open]
    num_there = sum(p.fair_share.device == fair_share.device for p in open_processes)
    gpu = gpus[fair_share.device] if len(gpus) > 1 else None
    trial_process.start(sweep.socket, gpu, num_there - 1)
