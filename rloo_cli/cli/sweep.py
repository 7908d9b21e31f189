"""`rloo sweep`: several configurations of one experiment side by side, in chunks of steps.

    rloo sweep +recipe=NAME key=a,b [--chunk N] [--jobs N] [--name NAME] [--dry-run]
               [--keep N --at STEP [--by METRIC]]
    rloo sweep show|resume SWEEP                 from this or another terminal
    rloo sweep stop|promote SWEEP MEMBER         while it runs, at the member's next boundary
    rloo sweep clone SWEEP MEMBER key=value ...

Members are what `--multirun` would run one after the other: a run each, in root/<its name>.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

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
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

USAGE = "rloo sweep +recipe=NAME key=a,b [--chunk N] [--jobs N] [--name NAME] [--keep N --at STEP]"
ComposeJobs = Callable[[list[str]], list[ComposedConfig]]
DEFAULT_CHUNK_STEPS = 10  # steps of a turn
SWEEP_KEYS = ("name", "resume")  # keys that the sweep gives to its members


class SweepArgumentParser(argparse.ArgumentParser):
    """Reads the verb's flags; what it cannot read is a ConfigError (exit 2)."""

    def __init__(self, usage: str = USAGE) -> None:
        super().__init__(prog="rloo sweep", usage=usage, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(Problem(f"{self.prog}: {message}", "command line", fix=str(self.usage)))


def _count(text: str) -> int:
    """A number from 1 on. Raises ValueError."""
    if not 0 < int(text) <= 10**9:
        raise ValueError
    return int(text)


_count.__name__ = "count"  # as argparse names it in its message


def run(args: list[str], compose_jobs: ComposeJobs) -> int:
    """The verb; its exit code. `composed`: the jobs of Hydra's sweep over some words."""
    if args and args[0] in COMMANDS:
        return COMMANDS[args[0]](args[1:])
    return _run_new_sweep(args, compose_jobs)


def _run_new_sweep(args: list[str], compose_jobs: ComposeJobs) -> int:
    flags = _add_pace_flags(SweepArgumentParser())
    flags.add_argument("--name")
    for name in ("--keep", "--at"):
        flags.add_argument(name, type=_count, action="append", default=[])
    flags.add_argument("--by", action="append", default=[])
    flags.add_argument("--dry-run", action="store_true")
    given, rest = flags.parse_known_args(args)
    rest = [w for w in rest if w not in ("-m", "--multirun")]
    if not rest:
        raise ConfigError(Problem("rloo sweep takes a recipe and keys", "command line", fix=USAGE))
    rules.check_sweep_overrides(rest)
    jobs = compose_jobs(rest)
    runs = rules.check_trial_configs([launcher.name_sweep_job(job) for job in jobs])
    names = [str(run.name) for run in runs]
    rules.check_distinct_names(names)
    members = [
        Trial(number, name, _trial_overrides(job.user_overrides), _resumed_checkpoint(run))
        for number, (job, name, run) in enumerate(zip(jobs, names, runs, strict=True), 1)
    ]
    place = _sweep_folder(given.name, rest, jobs)
    found = _existing_or_new_sweep(place, rest, members)
    found.chunk, found.jobs = given.chunk or DEFAULT_CHUNK_STEPS, given.jobs or default_jobs()
    found.rungs = rules.early_stopping_rungs(given.keep, given.at, given.by, found.rungs)
    return _run_sweep(found, dict(zip(names, runs, strict=True)), given.dry_run)


def default_jobs() -> int:
    """Members that train at the same time where nobody says: one on each GPU, one without."""
    return max(1, len(device_count.visible_gpus()))


def _check_jobs(jobs: int, gpus: Sequence[str]) -> None:
    """Raises ConfigError for more members at a time than GPUs: each plans for a whole one."""
    if gpus and jobs > len(gpus):
        why = f"{len(gpus)} GPUs are visible, and each member takes one with all its memory"
        what = f"{jobs} members cannot train at the same time"
        raise ConfigError(Problem(what, "--jobs", why, f"--jobs {len(gpus)}"))


def _trials_that_fit(jobs: int, gpus: Sequence[str]) -> int | None:
    """Members that the GPUs in use can hold; None without one."""
    return (
        rules.max_open_trials(min(jobs, len(gpus)), device.find_device(None).memory_bytes)
        if gpus
        else None
    )


def _add_pace_flags(parser: SweepArgumentParser) -> SweepArgumentParser:
    parser.add_argument("--chunk", type=_count)
    parser.add_argument("--jobs", type=_count)
    return parser


def _trial_overrides(overrides: Sequence[str]) -> list[str]:
    """The words of a job that are its config's, not the sweep's."""
    return [
        w
        for w in overrides
        if override_key(w) not in SWEEP_KEYS and not override_key(w).startswith("hydra")
    ]


def _resumed_checkpoint(run: RunConfig) -> str | None:
    """The checkpoint that its words say it begins from."""
    if run.resume in ("auto", "never"):
        return None
    return str(Path(run.resume).expanduser().absolute())


def _sweep_folder(name: str | None, overrides: list[str], jobs: list[ComposedConfig]) -> Path:
    """The sweep's folder: named after its members and its words, so that it is found again."""
    roots = sorted({str(job.values["root"]) for job in jobs})
    if len(roots) > 1:
        what = "a sweep has one root"
        raise ConfigError(Problem(what, "root", f"found {', '.join(roots)}", "root=FOLDER"))
    base = jobs[0].values.get("name") or "sweep"
    return Path(roots[0], name or f"{base}-sweep-{rules.overrides_digest(overrides)}")


def _existing_or_new_sweep(folder: Path, overrides: list[str], trials: list[Trial]) -> SweepState:
    """The sweep of this folder, if it is of these words; else a new one. Raises ConfigError."""
    if not folder.exists():
        return SweepState(folder, overrides, os.getcwd(), members=trials)
    fix = f"--name OTHER, or move it away: mv {folder} {folder}.old"
    if not (folder / state.SWEEP_FILE).is_file():
        raise ConfigError(Problem(f"{folder} exists", "--name", "it is not a sweep", fix))
    found = state.read_sweep(folder)
    if rules.overrides_digest(found.words) != rules.overrides_digest(overrides):
        why = f"it was started with: {' '.join(found.words)}"
        fix = f"rloo sweep resume {folder}, or {fix}"
        raise ConfigError(Problem(f"{folder} is a sweep of other words", "--name", why, fix))
    now = {member.name: member.words for member in trials}
    for member in found.members:  # what is no part of a name may have changed: checkpoint, logging
        member.words = now.get(member.name, member.words)
    return found


def _run_sweep(sweep_state: SweepState, configs: dict[str, RunConfig], dry: bool = False) -> int:
    """Check every member that is to go on, then run the sweep; its exit code. `known`: configs."""
    _refuse_running_sweep(sweep_state.folder)
    _check_jobs(sweep_state.jobs, device_count.visible_gpus())
    left = [m for m in sweep_state.members if m.state in (*OPEN_STATES, "failed")]
    others = [m for m in left if m.name not in configs]  # of earlier, clones too
    jobs = [
        compose.compose_config([*m.words, f"name={state.quote_override(m.name)}"]) for m in others
    ]
    configs |= dict(zip([m.name for m in others], rules.check_trial_configs(jobs), strict=True))
    runs = [rules.trial_config(configs[m.name], m) for m in left]
    rules.check_trials_can_start(list(zip(left, runs, strict=True)))
    new = [rung for rung in sweep_state.rungs if not rung.done]
    problems = (
        [*rules.rung_problems(new, len(left), [run.max_steps for run in runs])] if left else []
    )
    fit = _trials_that_fit(sweep_state.jobs, device_count.visible_gpus())
    problems += rules.too_many_trials_problems(len(left), fit)
    if problems:
        raise ConfigError(*problems)
    show = SweepDisplay(sweep_state)
    if dry or not left:
        show.console.print(show.current_table())
        print(f"{sweep_state.folder}: " + ("it would start" if left else "nothing to do"))
        return 0
    new_root = not sweep_state.folder.exists()
    sweep_state.folder.mkdir(parents=True, exist_ok=True)
    with launcher.lock_folder(sweep_state.folder):
        if new_root or not state.running_process(sweep_state.folder):
            sweep_state.save()
        code = SweepScheduler(sweep_state, show, device_count.visible_gpus(), fit).run()
    _print_sweep_end(sweep_state, show, code)
    return code


def _refuse_running_sweep(folder: Path) -> None:
    if facts := state.running_process(folder):
        what = f"{folder} is being run by process {facts['pid']} on {facts['host']}"
        raise ConfigError(Problem(what, "command line", fix=f"rloo sweep show {folder}"))


def _print_sweep_end(sweep_state: SweepState, show: SweepDisplay, code: int) -> None:
    if show.screen is None:
        show.console.print(show.current_table())
    failed = sum(m.state == "failed" for m in sweep_state.members)
    left = sum(m.state in OPEN_STATES for m in sweep_state.members)
    if left or failed:
        print(f"go on   rloo sweep resume {sweep_state.folder}")
    waiting = f", {left} to go on with" if left else ""
    print(f"{len(sweep_state.members)} members, {failed} failed{waiting}")


def _resume_sweep(args: list[str]) -> int:
    """`rloo sweep resume SWEEP`: all members that are not stopped or finished."""
    flags = _add_pace_flags(SweepArgumentParser("rloo sweep resume SWEEP [--chunk N] [--jobs N]"))
    flags.add_argument("sweep")
    given = flags.parse_args(args)
    folder = state.find_sweep(given.sweep, "resume").absolute()
    found = state.read_sweep(folder)
    with contextlib.chdir(found.cwd):
        found.folder = _relative_folder(folder)
        found.chunk, found.jobs = given.chunk or found.chunk, given.jobs or found.jobs
        return _run_sweep(found, {})


def _relative_folder(folder: Path) -> Path:
    """A path as it is from here."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _show_sweep(args: list[str]) -> int:
    """`rloo sweep show SWEEP [--json]`."""
    flags = SweepArgumentParser("rloo sweep show SWEEP [--json]")
    flags.add_argument("sweep")
    flags.add_argument("--json", action="store_true")
    given = flags.parse_args(args)
    found = state.read_sweep(state.find_sweep(given.sweep, "show"))
    if given.json:
        values = asdict(found) | {"folder": str(found.folder)}
        print(json.dumps(values | {"running": bool(state.running_process(found.folder))}, indent=2))
        return 0
    show = SweepDisplay(found)
    show.console.print(show.current_table())
    facts = state.running_process(found.folder)
    print(
        f"{found.folder}: " + (f"run by process {facts['pid']}" if facts else _sweep_status(found))
    )
    return 0


def _running_sweep_and_trial(verb: str, args: list[str]) -> tuple[SweepState, Trial, list[str]]:
    """The sweep and the member that a command names, and the words behind them."""
    usage = f"rloo sweep {verb} SWEEP MEMBER" + (" key=value ..." if verb == "clone" else "")
    if len(args) < 2 or (len(args) > 2) != (verb == "clone") or args[0].startswith("-"):
        raise ConfigError(
            Problem(f"rloo sweep {verb} needs other words", "command line", fix=usage)
        )
    found = state.read_sweep(state.find_sweep(args[0], verb))
    member = found.find_trial(args[1])
    if not state.running_process(found.folder):
        raise ConfigError(_not_running_problem(verb, found, member, args[2:]))
    return found, member, args[2:]


def _not_running_problem(
    verb: str, sweep_state: SweepState, trial: Trial, changes: list[str]
) -> Problem:
    """What to do instead with a sweep that does not run."""
    fix = f"rloo sweep resume {sweep_state.folder}, then this again"
    if verb == "stop":
        fix = "nothing: it does not train"
    if verb == "clone":
        place = sweep_state.trial_folder(trial)
        fix += (
            ", or for one run: rloo train "
            f"{' '.join(commands.replace_overrides(trial.words, changes))}"
        )
        fix += f" name=OTHER resume={place}/checkpoint-STEP resume_allow_changes=true"
    return Problem(
        f"{sweep_state.folder} is not running",
        "command line",
        f"it is {_sweep_status(sweep_state)}",
        fix,
    )


def _sweep_status(sweep_state: SweepState) -> str:
    """How a sweep stands that does not run."""
    return "killed" if sweep_state.state in ("training", "stopping") else sweep_state.state


def _trial_command(verb: str) -> Callable[[list[str]], int]:
    """`rloo sweep stop|promote SWEEP MEMBER`."""

    def command(words: list[str]) -> int:
        found, member, _ = _running_sweep_and_trial(verb, words)
        print(commands.send_request(found.folder, do=verb, member=member.number))
        return 0

    return command


def _clone_trial(args: list[str]) -> int:
    """The clone's config is composed and checked here, before the sweep hears of it."""
    found, member, changes = _running_sweep_and_trial("clone", args)
    folder = found.folder.absolute()
    with contextlib.chdir(found.cwd):
        names = [w.partition("=")[2] for w in changes if override_key(w) == "name"]
        changes = _trial_overrides(changes)
        name = names[-1] if names else f"{member.name}-{rules.overrides_digest(changes)}"
        given = commands.replace_overrides(member.words, changes)
        job = compose.compose_config([*given, f"name={state.quote_override(name)}", "resume=auto"])
        (settings,) = rules.check_trial_configs([job])
        problems = []
        if Path(settings.root).resolve() != folder.parent.resolve():
            problems.append(Problem("a clone stays in its sweep's root", "root"))
        if not changes:
            fix = f"rloo sweep clone {args[0]} {args[1]} train.learning_rate=3e-5"
            problems.append(Problem("a clone needs a changed key", "command line", fix=fix))
        if problems:
            raise ConfigError(*problems)
    request: JsonObject = {"name": str(settings.name), "words": given}
    print(commands.send_request(folder, do="clone", member=member.number, **request))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "show": _show_sweep,
    "resume": _resume_sweep,
    "stop": _trial_command("stop"),
    "promote": _trial_command("promote"),
    "clone": _clone_trial,
}
