"""What another terminal may ask of a sweep that runs, and what is done of it at a boundary.

Nothing is done in the middle of a chunk: what is asked for waits until the member has ended it.
"""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import manifest
from rloo_cli.launch.sweep import rules
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import SweepState, Trial, override_key, running_process
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.launch.sweep.trial import TrialPhase, TrialProcess
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem
from rloo_cli.utils.files import JsonObject, read_json, write_json

BOUNDARY_PHASES = (TrialPhase.BOUNDARY, TrialPhase.OFFLOADED)


def answer_request(sweep: Sweep, request: JsonObject) -> str:
    """Take one request; what is said to who asked. Raises ConfigError."""
    member = sweep.sweep_state.find_trial(str(request["member"]))
    if sweep.signals:
        raise ConfigError(Problem("the sweep is ending", "command line", "it was asked to"))
    live = next((x for x in sweep.trial_processes if x.trial is member and x.is_open), None)
    match request["do"]:
        case "stop":
            return _stop(sweep, member, live)
        case "promote":
            return _promote(sweep, member, live)
        case _:
            return _clone(sweep, member, live, request)


def _stop(sweep: Sweep, trial: Trial, trial_process: TrialProcess | None) -> str:
    if trial_process is None or trial_process.stop_reason:
        raise ConfigError(_ended(trial, trial_process))
    trial_process.stop_reason = "rloo sweep stop"
    if trial_process.phase == TrialPhase.NEW:
        trial_process.phase, trial.state, trial.why = (
            TrialPhase.DONE,
            "stopped",
            trial_process.stop_reason,
        )
        sweep.show.report_end(trial_process)
        sweep.save_state()
        return f"{trial.name} is stopped before it began"
    return f"{trial.name} saves and stops {_when(trial_process)}"


def _promote(sweep: Sweep, trial: Trial, trial_process: TrialProcess | None) -> str:
    if trial_process is None or trial_process.stop_reason:
        raise ConfigError(_ended(trial, trial_process))
    trial.share += 1
    trial_process.fair_share.share = trial.share
    sweep.save_state()
    sweep.show.print_note(
        f"{trial.name} gets {trial.share} chunks for each of the others' from here"
    )
    return f"{trial.name} gets {trial.share} chunks for each of the others', {_when(trial_process)}"


def _clone(
    sweep: Sweep, trial: Trial, trial_process: TrialProcess | None, request: JsonObject
) -> str:
    coming = sum(len(other.requested_clones) for other in sweep.trial_processes)
    open_now = sum(other.is_open for other in sweep.trial_processes)
    if problems := [*rules.too_many_trials_problems(open_now + coming + 1, sweep.max_trials)]:
        raise ConfigError(*problems)
    taken = {m.name for m in sweep.sweep_state.members}
    taken |= {clone["name"] for other in sweep.trial_processes for clone in other.requested_clones}
    names = (f"{request['name']}{f'-{i}' if i > 1 else ''}" for i in range(1, 10**6))
    root = sweep.sweep_state.root
    name = next(n for n in names if n not in taken and not (root / n).exists())
    clone = {"name": name, "words": request["words"]}
    if trial_process is not None:
        if (
            trial_process.phase not in BOUNDARY_PHASES
            and trial_process.max_steps is not None
            and trial_process.slice_end >= trial_process.max_steps
        ):
            why = f"it is in its last chunk, and ends at step {trial_process.max_steps}"
            what = f"{trial.name} has no boundary any more"
            raise ConfigError(Problem(what, "command line", why, "the same, once it has ended"))
        trial_process.requested_clones.append(clone)
        return f"{name} begins where {trial.name} stands {_when(trial_process)}"
    newest, _ = manifest.newest_checkpoint(sweep.sweep_state.trial_folder(trial))
    if newest is None:
        why = "it has no checkpoint"
        raise ConfigError(Problem(f"{trial.name} cannot be cloned", "command line", why))
    _add_clone(sweep, trial, clone, newest)
    return f"{name} begins from {newest}"


def _when(trial_process: TrialProcess) -> str:
    if trial_process.phase in BOUNDARY_PHASES:
        return f"now, at step {trial_process.trial.step}"
    if trial_process.phase == TrialPhase.NEW or trial_process.connection is None:
        return "at its next boundary, once it has begun"
    last = (
        trial_process.max_steps is not None and trial_process.slice_end >= trial_process.max_steps
    )
    return (
        f"at the end, step {trial_process.max_steps}"
        if last
        else f"at its next boundary, step {trial_process.slice_end}"
    )


def _ended(trial: Trial, trial_process: TrialProcess | None) -> Problem:
    state = "ending" if trial_process is not None else trial.state
    why = f"it is {state}" + (
        f" ({trial_process.stop_reason if trial_process else trial.why})"
        if state != "finished"
        else ""
    )
    return Problem(f"{trial.name} does not train any more", "command line", why, "rloo sweep show")


def act_at_boundary(trial_process: TrialProcess, show: SweepDisplay) -> None:
    """What is due at a boundary: checkpoints for clones first, then its end."""
    if trial_process.phase not in BOUNDARY_PHASES:
        return
    fresh = (
        trial_process.trial.step == 0 and trial_process.trial.start is None
    )  # nothing to save yet
    if trial_process.requested_clones and not fresh:
        trial_process.save_checkpoint()
    elif trial_process.stop_reason:
        if trial_process.requested_clones:
            drop_clones(trial_process, show)
        trial_process.save_and_stop()


def add_clones(sweep: Sweep, trial_process: TrialProcess, path: str | None) -> None:
    """The checkpoint for the clones is there: they are members from here on."""
    for clone in trial_process.requested_clones:
        if path is None:
            sweep.show.print_note(
                f"{clone['name']} is not made: its parent's checkpoint was not saved"
            )
        else:
            _add_clone(sweep, trial_process.trial, clone, Path(path))
    trial_process.requested_clones.clear()


def drop_clones(trial_process: TrialProcess, show: SweepDisplay) -> None:
    """Say of clones that cannot be made any more that they are not."""
    for clone in trial_process.requested_clones:
        show.print_note(
            f"{clone['name']} is not made: {trial_process.trial.name} ended before its next "
            "boundary"
        )
    trial_process.requested_clones.clear()


def _add_clone(sweep: Sweep, parent: Trial, clone: JsonObject, checkpoint: Path) -> None:
    book, name = sweep.sweep_state, str(clone["name"])
    place = manifest.checkpoint_position(checkpoint) or (parent.step, -1)
    kept = link_checkpoint(book, name, checkpoint)
    number = max(m.number for m in book.members) + 1
    member = Trial(number, name, clone["words"], str(kept), parent.name, place[0], step=place[0])
    book.members.append(member)
    sweep.add_trial(member)
    sweep.show.print_note(f"{name} is number {number}, from step {place[0]} of {parent.name}")
    sweep.save_state()


def link_checkpoint(sweep_state: SweepState, name: str, checkpoint: Path) -> Path:
    """The checkpoint where its own run cannot remove it. Links where the disk has them: it costs
    room only once its run has removed its own."""
    place = sweep_state.folder / "from" / name / checkpoint.name
    shutil.rmtree(place, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, place, copy_function=os.link)
    except (OSError, shutil.Error):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)
        shutil.copytree(checkpoint, place)
    return place.absolute()


def replace_overrides(overrides: list[str], changes: list[str]) -> list[str]:
    """The words of a clone: its parent's, those of the same keys replaced."""
    changed = {override_key(word) for word in changes}
    return [*[word for word in overrides if override_key(word) not in changed], *changes]


ANSWER_TIMEOUT_S = 60.0  # for an answer: the loop may be linking a large checkpoint
_count = itertools.count()


def send_request(folder: Path, **request: Any) -> str:
    """Ask the sweep that runs there; what it says.

    Raises ConfigError where it refuses, GenerationError where it does not answer.
    """
    name = f"{time.time_ns()}-{os.getpid()}-{next(_count)}"
    question = folder / "requests" / f"{name}.json"
    answer = question.with_suffix(".answer")
    write_json(question, request)
    end = time.monotonic() + ANSWER_TIMEOUT_S
    try:
        while time.monotonic() < end and (running_process(folder) or answer.is_file()):
            if answer.is_file():
                said = read_json(answer)
                if "problem" in said:
                    raise ConfigError(Problem(**said["problem"]))
                return str(said["said"])
            time.sleep(0.05)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    why = (
        "it ended meanwhile"
        if not running_process(folder)
        else f"no answer in {ANSWER_TIMEOUT_S:.0f} s"
    )
    fix = f"rloo sweep show {folder}"
    raise GenerationError(Problem(f"{folder} did not take it", "command line", why, fix))


def serve_requests(folder: Path, handler: Callable[[JsonObject], str]) -> None:
    """Answer what was asked. `answer` raises ConfigError for what it refuses."""
    for question in sorted((folder / "requests").glob("[0-9]*.json")):
        request = read_json(question)
        if not request:  # who asked has gone
            continue
        said: JsonObject
        try:
            said = {"said": handler(request)}
        except ConfigError as error:
            problem = error.problems[0]
            said = {"problem": {k: getattr(problem, k) for k in ("what", "where", "why", "fix")}}
        write_json(question.with_suffix(".answer"), said)
        question.unlink(missing_ok=True)


def clear_requests(folder: Path) -> None:
    """Questions to an earlier process, which nobody waits for."""
    for path in (folder / "requests").glob("*"):
        path.unlink(missing_ok=True)
