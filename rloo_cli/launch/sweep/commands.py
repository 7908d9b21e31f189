"""Requests from another terminal to a running sweep, and their execution at slice boundaries.

Requests never interrupt a time slice: they wait until the trial has ended it.
"""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rloo_cli.checkpoint import manifest
from rloo_cli.launch.sweep import rules
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import SweepState, Trial, override_key, running_process
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.launch.sweep.trial import TrialPhase, TrialProcess
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem, refuse
from rloo_cli.utils.files import JsonObject, read_json, write_json

BOUNDARY_PHASES = (TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)


def answer_request(sweep: Sweep, request: JsonObject) -> str:
    """Carry out a request, or queue it for the next boundary. -> the answer. Raises ConfigError"""
    trial = sweep.sweep_state.find_trial(str(request["trial"]))
    if sweep.signals:
        fix = f"when it has ended: rloo sweep resume {sweep.sweep_state.folder}, then repeat this"
        refuse("command line", "the sweep is ending", fix, "it was asked to stop")
    process = next((p for p in sweep.trial_processes if p.trial is trial and p.is_open), None)
    match request["do"]:
        case "stop":
            return _stop(sweep, trial, process)
        case "promote":
            return _promote(sweep, trial, process)
        case _:
            return _clone(sweep, trial, process, request)


def _stop(sweep: Sweep, trial: Trial, trial_process: TrialProcess | None) -> str:
    if trial_process is None or trial_process.stop_reason:
        _refuse_ended_trial(trial, trial_process)
    trial_process.stop_reason = "rloo sweep stop"
    if trial_process.phase == TrialPhase.NEW:
        trial_process.phase = TrialPhase.DONE
        trial.state, trial.why = "stopped", trial_process.stop_reason
        sweep.show.report_end(trial_process)
        sweep.save_state()
        return f"{trial.name} is stopped before its first step"
    return f"{trial.name} saves and stops {_when(trial_process)}"


def _promote(sweep: Sweep, trial: Trial, trial_process: TrialProcess | None) -> str:
    if trial_process is None or trial_process.stop_reason:
        _refuse_ended_trial(trial, trial_process)
    trial.share += 1
    trial_process.fair_share.share = trial.share
    sweep.save_state()
    text = f"{trial.name} gets {trial.share} chunks for each of the others'"
    sweep.show.print_note(f"{text} from here")
    return f"{text}, {_when(trial_process)}"


def _clone(
    sweep: Sweep, trial: Trial, trial_process: TrialProcess | None, request: JsonObject
) -> str:
    coming = sum(len(other.requested_clones) for other in sweep.trial_processes)
    open_now = sum(other.is_open for other in sweep.trial_processes)
    if problems := [*rules.too_many_trials_problems(open_now + coming + 1, sweep.max_trials)]:
        raise ConfigError(*problems)
    taken = {m.name for m in sweep.sweep_state.trials}
    taken |= {clone["name"] for other in sweep.trial_processes for clone in other.requested_clones}
    names = (f"{request['name']}{f'-{i}' if i > 1 else ''}" for i in range(1, 10**6))
    root = sweep.sweep_state.root
    name = next(n for n in names if n not in taken and not (root / n).exists())
    clone = {"name": name, "words": request["words"]}
    if trial_process is not None:
        if trial_process.phase not in BOUNDARY_PHASES and _in_last_slice(trial_process):
            why = f"its last chunk is running and ends at step {trial_process.max_steps}"
            what = f"{trial.name} has no boundary left"
            refuse("command line", what, "repeat this when it has ended", why)
        trial_process.requested_clones.append(clone)
        return f"{name} starts from {trial.name} {_when(trial_process)}"
    newest, _ = manifest.newest_checkpoint(sweep.sweep_state.trial_folder(trial))
    if newest is None:
        fix = f"start from scratch: rloo train {' '.join(request['words'])} name={name}"
        refuse("command line", f"{trial.name} cannot be cloned", fix, "it has no checkpoint")
    _add_clone(sweep, trial, clone, newest)
    return f"{name} starts from {newest}"


def _in_last_slice(trial_process: TrialProcess) -> bool:
    max_steps = trial_process.max_steps
    return max_steps is not None and trial_process.slice_end >= max_steps


def _when(trial_process: TrialProcess) -> str:
    if trial_process.phase in BOUNDARY_PHASES:
        return f"now, at step {trial_process.trial.step}"
    if trial_process.phase == TrialPhase.NEW or trial_process.connection is None:
        return "at its next boundary, after it has started"
    if _in_last_slice(trial_process):
        return f"at the end, step {trial_process.max_steps}"
    return f"at its next boundary, step {trial_process.slice_end}"


def _refuse_ended_trial(trial: Trial, trial_process: TrialProcess | None) -> NoReturn:
    state = "ending" if trial_process is not None else trial.state
    reason = trial_process.stop_reason if trial_process is not None else trial.why
    why = f"its state is {state}" + ("" if state == "finished" else f" ({reason})")
    refuse("command line", f"{trial.name} is no longer training", "rloo sweep show", why)


def act_at_boundary(trial_process: TrialProcess, show: SweepDisplay) -> None:
    """Execute a trial's queued requests at a boundary: save for its clones first, then stop."""
    if trial_process.phase not in BOUNDARY_PHASES:
        return
    trial = trial_process.trial
    fresh = trial.step == 0 and trial.start is None  # nothing to save yet
    if trial_process.requested_clones and not fresh:
        trial_process.save_checkpoint()
    elif trial_process.stop_reason:
        if trial_process.requested_clones:
            drop_clones(trial_process, show)
        trial_process.save_and_stop()


def add_clones(sweep: Sweep, trial_process: TrialProcess, path: str | None) -> None:
    """Add a trial's requested clones to the sweep, from the checkpoint at `path` (None if the save
    failed)."""
    for clone in trial_process.requested_clones:
        if path is None:
            why = "its parent's checkpoint was not saved"
            sweep.show.print_note(f"{clone['name']} is not created: {why}")
        else:
            _add_clone(sweep, trial_process.trial, clone, Path(path))
    trial_process.requested_clones.clear()


def drop_clones(trial_process: TrialProcess, show: SweepDisplay) -> None:
    """Report the requested clones that cannot be created because their parent has ended."""
    why = f"{trial_process.trial.name} ended before its next boundary"
    for clone in trial_process.requested_clones:
        show.print_note(f"{clone['name']} is not created: {why}")
    trial_process.requested_clones.clear()


def _add_clone(sweep: Sweep, parent: Trial, clone: JsonObject, checkpoint: Path) -> None:
    book, name = sweep.sweep_state, str(clone["name"])
    step, _ = manifest.checkpoint_position(checkpoint) or (parent.step, -1)
    kept = link_checkpoint(book, name, checkpoint)
    number = max(m.number for m in book.trials) + 1
    trial = Trial(number, name, clone["words"], str(kept), parent.name, step, step=step)
    book.trials.append(trial)
    sweep.add_trial(trial)
    sweep.show.print_note(f"{name} is trial {number}, cloned from step {step} of {parent.name}")
    sweep.save_state()


def link_checkpoint(sweep_state: SweepState, name: str, checkpoint: Path) -> Path:
    """Copy a checkpoint to where its own run cannot remove it. -> the copy's path

    The files are hard links where the file system supports them: they take no
    space until the run removes its own.
    """
    copy = sweep_state.folder / "from" / name / checkpoint.name
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, copy, copy_function=os.link)
    except (OSError, shutil.Error):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(copy)
        shutil.copytree(checkpoint, copy)
    return copy.absolute()


def replace_overrides(overrides: list[str], changes: list[str]) -> list[str]:
    """The overrides of a clone: its parent's, with the same keys replaced."""
    changed = {override_key(change) for change in changes}
    return [*[o for o in overrides if override_key(o) not in changed], *changes]


ANSWER_TIMEOUT_S = 60.0  # the sweep's loop may be linking a large checkpoint
_count = itertools.count()


def send_request(folder: Path, **request: object) -> str:
    """Send a request to the running sweep in this folder. -> its answer

    Raises ConfigError if it refuses, GenerationError if it does not answer.
    """
    name = f"{time.time_ns()}-{os.getpid()}-{next(_count)}"
    question = folder / "requests" / f"{name}.json"
    answer = question.with_suffix(".answer")
    write_json(question, request)
    end = time.monotonic() + ANSWER_TIMEOUT_S
    try:
        while time.monotonic() < end and (running_process(folder) or answer.is_file()):
            if answer.is_file():
                reply = read_json(answer)
                if "problem" in reply:
                    raise ConfigError(Problem(**reply["problem"]))
                return str(reply["said"])
            time.sleep(0.05)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    runs = running_process(folder)
    why = f"no answer in {ANSWER_TIMEOUT_S:.0f} s" if runs else "the sweep ended in the meantime"
    fix = f"rloo sweep show {folder}"
    refuse("command line", f"{folder} did not answer", fix, why, error=GenerationError)


def serve_requests(folder: Path, handler: Callable[[JsonObject], str]) -> None:
    """Answer the requests of other terminals; `handler` raises ConfigError to refuse one."""
    for question in sorted((folder / "requests").glob("[0-9]*.json")):
        request = read_json(question)
        if not request:  # the sender has exited
            continue
        reply: dict[str, object]
        try:
            reply = {"said": handler(request)}
        except ConfigError as error:
            problem = error.problems[0]
            reply = {"problem": {k: getattr(problem, k) for k in ("what", "where", "why", "fix")}}
        write_json(question.with_suffix(".answer"), reply)
        question.unlink(missing_ok=True)


def clear_requests(folder: Path) -> None:
    """Remove requests to an earlier process of this sweep, whose senders have exited."""
    for path in (folder / "requests").glob("*"):
        path.unlink(missing_ok=True)
