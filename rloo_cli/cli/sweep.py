"""`rloo sweep`: trains several configurations of one experiment interleaved, in chunks of steps.

Its trials are the jobs that `--multirun` would run one after the other. Each is a run, in
root/<its name>.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rloo_cli.cli import answers, multirun
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.cli.verbs import NEW
from rloo_cli.config import compose
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch import launcher
from rloo_cli.launch.sweep import commands, rules, state
from rloo_cli.launch.sweep.scheduler import SweepScheduler
from rloo_cli.launch.sweep.state import OPEN_STATES, SweepState, Trial, override_key
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.planning import device
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject

DEFAULT_CHUNK_STEPS = 10  # steps of a time slice
SWEEP_KEYS = ("name", "resume")  # keys that the sweep sets for its trials


def run(args: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = parse_verb("sweep", args)
    if options.action == "show":
        return _show_sweep(options)
    with answers.json_answer(options.json) as answer:
        code = ACTIONS[options.action](options, answer)
        answer["code"] = code
    return code


def _run_new_sweep(options: argparse.Namespace, answer: JsonObject) -> int:
    overrides = options.overrides
    rules.check_sweep_overrides(overrides)
    jobs = [job.composed for job in multirun.sweep_jobs(overrides)]
    runs = rules.check_trial_configs([launcher.name_sweep_job(job) for job in jobs])
    names = [str(run.name) for run in runs]
    rules.check_distinct_names(names)
    trials = [
        Trial(number, name, _trial_overrides(job.user_overrides), _resumed_checkpoint(run.resume))
        for number, (job, name, run) in enumerate(zip(jobs, names, runs, strict=True), 1)
    ]
    folder = _sweep_folder(options.name, overrides, jobs)
    sweep = _existing_or_new_sweep(folder, overrides, trials)
    sweep.chunk = options.chunk or DEFAULT_CHUNK_STEPS
    sweep.jobs = options.jobs or default_jobs()
    sweep.rungs = rules.early_stopping_rungs(options.keep, options.at, options.by, sweep.rungs)
    code = _run_sweep(sweep, dict(zip(names, runs, strict=True)), options.dry_run)
    answer |= _sweep_values(sweep)
    return code


def default_jobs() -> int:
    """The default number of trials that train at the same time: one per GPU, or one on the CPU."""
    return max(1, len(device_count.visible_gpus()))


def _check_jobs(jobs: int, gpus: Sequence[str]) -> None:
    """Raises ConfigError for more concurrent trials than GPUs: each needs a whole GPU."""
    if gpus and jobs > len(gpus):
        why = f"{len(gpus)} GPUs are visible, and each trial takes one with all its memory"
        what = f"{jobs} trials cannot train at the same time"
        refuse("--jobs", what, f"--jobs {len(gpus)}", why)


def _trials_that_fit(jobs: int, gpus: Sequence[str], with_engines: bool = False) -> int | None:
    """How many trials the GPUs in use can hold; None without a GPU.

    `with_engines`: a trial's inference engine shares its device.
    """
    if not gpus:
        return None
    memory = device.find_device(None).memory_bytes
    return rules.max_open_trials(min(jobs, len(gpus)), memory, with_engines)


def _trial_overrides(overrides: Sequence[str]) -> list[str]:
    """A job's overrides, without those of the sweep and of Hydra."""
    keys = {w: override_key(w) for w in overrides}
    return [w for w in overrides if keys[w] not in SWEEP_KEYS and not keys[w].startswith("hydra")]


def _resumed_checkpoint(resume: str) -> str | None:
    """The path of the checkpoint that a trial starts from; None if `resume` names none."""
    if resume in ("auto", "never"):
        return None
    return str(Path(resume).expanduser().absolute())


def _sweep_folder(name: str | None, overrides: list[str], jobs: list[ComposedConfig]) -> Path:
    """The sweep's folder, named after its trials and overrides, so that it is found again."""
    roots = sorted({str(job.values["root"]) for job in jobs})
    if len(roots) > 1:
        refuse("root", "a sweep needs a single root", "root=FOLDER", f"found {', '.join(roots)}")
    base = jobs[0].values.get("name") or "sweep"
    return Path(roots[0], name or f"{base}-sweep-{rules.overrides_digest(overrides)}")


def _existing_or_new_sweep(folder: Path, overrides: list[str], trials: list[Trial]) -> SweepState:
    """The sweep in this folder, or a new one. Raises ConfigError if it has other overrides."""
    if not folder.exists():
        return SweepState(folder, overrides, os.getcwd(), trials=trials)
    fix = f"--name OTHER, or move it away: mv {folder} {folder}.old"
    if not (folder / state.SWEEP_FILE).is_file():
        refuse("--name", f"{folder} exists", fix, "it does not hold a sweep")
    found = state.read_sweep(folder)
    if rules.overrides_digest(found.words) != rules.overrides_digest(overrides):
        fix = f"rloo sweep resume {folder}, or {fix}"
        what = f"{folder} is a sweep with other overrides"
        refuse("--name", what, fix, f"it was started with: {' '.join(found.words)}")
    overrides_now = {trial.name: trial.words for trial in trials}
    for trial in found.trials:  # keys outside the name may have changed, like logging
        trial.words = overrides_now.get(trial.name, trial.words)
    return found


def _run_sweep(sweep_state: SweepState, configs: dict[str, RunConfig], dry: bool = False) -> int:
    """Check every trial with steps left, then run the sweep and return its exit code."""
    _refuse_running_sweep(sweep_state.folder)
    _check_jobs(sweep_state.jobs, device_count.visible_gpus())
    left = [trial for trial in sweep_state.trials if trial.state in (*OPEN_STATES, "failed")]
    others = [trial for trial in left if trial.name not in configs]  # earlier starts, clones
    jobs = [compose.compose_config([*trial.words, _name_override(trial.name)]) for trial in others]
    new_configs = rules.check_trial_configs(jobs)
    configs |= {trial.name: run for trial, run in zip(others, new_configs, strict=True)}
    runs = [rules.trial_config(configs[trial.name], trial) for trial in left]
    rules.check_trials_can_start(list(zip(left, runs, strict=True)))
    new = [rung for rung in sweep_state.rungs if not rung.done]
    problems: list[Problem] = []
    if left:
        problems += rules.rung_problems(new, len(left), [run.max_steps for run in runs])
    with_engines = any(run.generation.shares_device for run in runs)
    fit = _trials_that_fit(sweep_state.jobs, device_count.visible_gpus(), with_engines)
    problems += rules.too_many_trials_problems(len(left), fit)
    if problems:
        raise ConfigError(*problems)
    show = SweepDisplay(sweep_state)
    if dry or not left:
        show.console.print(show.current_table())
        print(f"{sweep_state.folder}: " + ("would start" if left else "nothing to do"))
        return 0
    new_root = not sweep_state.folder.exists()
    sweep_state.folder.mkdir(parents=True, exist_ok=True)
    with launcher.lock_folder(sweep_state.folder):
        if new_root or not state.running_process(sweep_state.folder):
            sweep_state.save()
        code = SweepScheduler(sweep_state, show, device_count.visible_gpus(), fit).run()
    _print_sweep_end(sweep_state, show, code)
    return code


def _name_override(name: str) -> str:
    return f"name={state.quote_override(name)}"


def _refuse_running_sweep(folder: Path) -> None:
    if facts := state.running_process(folder):
        what = f"{folder} is already run by process {facts['pid']} on {facts['host']}"
        why = "a second process would train the same trials again"
        refuse("command line", what, f"rloo sweep show {folder}", why)


def _print_sweep_end(sweep_state: SweepState, show: SweepDisplay, code: int) -> None:
    if show.screen is None:
        show.console.print(show.current_table())
    failed = sum(trial.state == "failed" for trial in sweep_state.trials)
    left = sum(trial.state in OPEN_STATES for trial in sweep_state.trials)
    if left or failed:
        print(f"resume  rloo sweep resume {sweep_state.folder}")
    waiting = f", {left} waiting" if left else ""
    print(f"{len(sweep_state.trials)} trials, {failed} failed{waiting}")


def _sweep_values(sweep: SweepState) -> JsonObject:
    """The whole state of a sweep as plain values."""
    return sweep.as_values() | {"folder": str(sweep.folder)}


def _resume_sweep(options: argparse.Namespace, answer: JsonObject) -> int:
    """`rloo sweep resume SWEEP`: resume all trials that are not stopped or finished."""
    folder = state.find_sweep(options.sweep, "resume").absolute()
    sweep = state.read_sweep(folder)
    with contextlib.chdir(sweep.cwd):
        sweep.folder = _relative_folder(folder)
        sweep.chunk, sweep.jobs = options.chunk or sweep.chunk, options.jobs or sweep.jobs
        code = _run_sweep(sweep, {})
    answer |= _sweep_values(sweep)
    return code


def _relative_folder(folder: Path) -> Path:
    """The path relative to the working folder if it is below it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _show_sweep(options: argparse.Namespace) -> int:
    """`rloo sweep show SWEEP [--json]`."""
    sweep = state.read_sweep(state.find_sweep(options.sweep, "show"))
    if options.json:
        running = bool(state.running_process(sweep.folder))
        print(json.dumps(_sweep_values(sweep) | {"running": running}, indent=2))
        return 0
    show = SweepDisplay(sweep)
    show.console.print(show.current_table())
    process = state.running_process(sweep.folder)
    status = f"run by process {process['pid']}" if process else _sweep_status(sweep)
    print(f"{sweep.folder}: {status}")
    return 0


def _running_sweep_and_trial(options: argparse.Namespace) -> tuple[SweepState, Trial]:
    """The sweep and the trial that a command names."""
    found = state.read_sweep(state.find_sweep(options.sweep, options.action))
    trial = found.find_trial(options.trial)
    if not state.running_process(found.folder):
        changes = getattr(options, "overrides", [])
        _refuse_stopped_sweep(options.action, found, trial, changes)
    return found, trial


def _refuse_stopped_sweep(
    verb: str, sweep_state: SweepState, trial: Trial, changes: list[str]
) -> NoReturn:
    """Refuse a command for a sweep that is not running, with the alternative."""
    fix = f"rloo sweep resume {sweep_state.folder}, then repeat this"
    if verb == "stop":
        fix = "nothing: it is not training"
    if verb == "clone":
        overrides = " ".join(commands.replace_overrides(trial.words, changes))
        fix += f", or as a single run: rloo train {overrides} name=OTHER"
        fix += f" resume={sweep_state.trial_folder(trial)}/checkpoint-STEP"
        fix += " resume_allow_changes=true"
    why = f"its state is {_sweep_status(sweep_state)}"
    refuse("command line", f"{sweep_state.folder} is not running", fix, why)


def _sweep_status(sweep_state: SweepState) -> str:
    """The state of a sweep that is not running."""
    return "killed" if sweep_state.state in ("training", "stopping") else sweep_state.state


def _send_command(options: argparse.Namespace, answer: JsonObject) -> int:
    """`rloo sweep stop|promote SWEEP TRIAL`."""
    sweep, trial = _running_sweep_and_trial(options)
    answer["said"] = commands.send_request(sweep.folder, do=options.action, trial=trial.number)
    print(answer["said"])
    return 0


def _clone_trial(options: argparse.Namespace, answer: JsonObject) -> int:
    """Compose and check the clone's config, then send it to the sweep."""
    sweep, trial = _running_sweep_and_trial(options)
    changes = options.overrides
    folder = sweep.folder.absolute()
    with contextlib.chdir(sweep.cwd):
        names = [w.partition("=")[2] for w in changes if override_key(w) == "name"]
        changes = _trial_overrides(changes)
        name = names[-1] if names else f"{trial.name}-{rules.overrides_digest(changes)}"
        overrides = commands.replace_overrides(trial.words, changes)
        job = compose.compose_config([*overrides, _name_override(name), "resume=auto"])
        (settings,) = rules.check_trial_configs([job])
        problems = []
        if Path(settings.root).resolve() != folder.parent.resolve():
            what, why = "a clone must use its sweep's root", f"that is {folder.parent}"
            problems.append(Problem(what, "root", why, "omit root"))
        if not changes:
            fix = f"rloo sweep clone {options.sweep} {trial.number} train.learning_rate=3e-5"
            given = " ".join(options.overrides) or "no override"
            what, why = "a clone needs a changed key", f"found {given}; it does not change training"
            problems.append(Problem(what, "command line", why, fix))
        if problems:
            raise ConfigError(*problems)
    request: JsonObject = {"name": str(settings.name), "words": overrides}
    answer["said"] = commands.send_request(folder, do="clone", trial=trial.number, **request)
    print(answer["said"])
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace, JsonObject], int]] = {
    NEW: _run_new_sweep,
    "resume": _resume_sweep,
    "stop": _send_command,
    "promote": _send_command,
    "clone": _clone_trial,
}
