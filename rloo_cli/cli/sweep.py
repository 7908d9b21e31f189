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
from typing import Any, NoReturn

from rloo_cli.config import compose
from rloo_cli.config.compose import Composed
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.launch import launcher
from rloo_cli.launch.sweep import commands, rules, state
from rloo_cli.launch.sweep.scheduler import Control
from rloo_cli.launch.sweep.state import OPEN, Book, Member, setting
from rloo_cli.launch.sweep.table import Show
from rloo_cli.planning import device
from rloo_cli.utils.errors import ConfigError, Problem

USAGE = "rloo sweep +recipe=NAME key=a,b [--chunk N] [--jobs N] [--name NAME] [--keep N --at STEP]"
Compose = Callable[[list[str]], list[Composed]]
CHUNK = 10  # steps of a turn
OURS = ("name", "resume")  # keys that the sweep gives to its members


class Flags(argparse.ArgumentParser):
    """Reads the verb's flags; what it cannot read is a ConfigError (exit 2)."""

    def __init__(self, usage: str = USAGE) -> None:
        super().__init__(prog="rloo sweep", usage=usage, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(Problem(f"{self.prog}: {message}", "command line", fix=str(self.usage)))


def _count(word: str) -> int:
    """A number from 1 on. Raises ValueError."""
    if not 0 < int(word) <= 10**9:
        raise ValueError
    return int(word)


_count.__name__ = "count"  # as argparse names it in its message


def run(words: list[str], composed: Compose) -> int:
    """The verb; its exit code. `composed`: the jobs of Hydra's sweep over some words."""
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    return _begin(words, composed)


def _begin(words: list[str], composed: Compose) -> int:
    flags = _pace(Flags())
    flags.add_argument("--name")
    for name in ("--keep", "--at"):
        flags.add_argument(name, type=_count, action="append", default=[])
    flags.add_argument("--by", action="append", default=[])
    flags.add_argument("--dry-run", action="store_true")
    given, rest = flags.parse_known_args(words)
    rest = [w for w in rest if w not in ("-m", "--multirun")]
    if not rest:
        raise ConfigError(Problem("rloo sweep takes a recipe and keys", "command line", fix=USAGE))
    rules.words(rest)
    jobs = composed(rest)
    runs = rules.checked([launcher.apart(job) for job in jobs])
    names = [str(run.name) for run in runs]
    rules.apart(names)
    members = [
        Member(number, name, _own(job.words), _start(run))
        for number, (job, name, run) in enumerate(zip(jobs, names, runs, strict=True), 1)
    ]
    place = _place(given.name, rest, jobs)
    found = _known(place, rest, members)
    found.chunk, found.jobs = given.chunk or CHUNK, given.jobs or default_jobs()
    found.rungs = rules.asked(given.keep, given.at, given.by, found.rungs)
    return _go(found, dict(zip(names, runs, strict=True)), given.dry_run)


def default_jobs() -> int:
    """Members that train at the same time where nobody says: one on each GPU, one without."""
    return max(1, len(device_count.gpus()))


def _check_jobs(jobs: int, gpus: Sequence[str]) -> None:
    """Raises ConfigError for more members at a time than GPUs: each plans for a whole one."""
    if gpus and jobs > len(gpus):
        why = f"{len(gpus)} GPUs are visible, and each member takes one with all its memory"
        what = f"{jobs} members cannot train at the same time"
        raise ConfigError(Problem(what, "--jobs", why, f"--jobs {len(gpus)}"))


def _fit(jobs: int, gpus: Sequence[str]) -> int | None:
    """Members that the GPUs in use can hold; None without one."""
    return rules.members_that_fit(min(jobs, len(gpus)), device.of(None).memory) if gpus else None


def _pace(flags: Flags) -> Flags:
    flags.add_argument("--chunk", type=_count)
    flags.add_argument("--jobs", type=_count)
    return flags


def _own(words: Sequence[str]) -> list[str]:
    """The words of a job that are its config's, not the sweep's."""
    return [w for w in words if setting(w) not in OURS and not setting(w).startswith("hydra")]


def _start(run: RunConfig) -> str | None:
    """The checkpoint that its words say it begins from."""
    if run.resume in ("auto", "never"):
        return None
    return str(Path(run.resume).expanduser().absolute())


def _place(name: str | None, words: list[str], jobs: list[Composed]) -> Path:
    """The sweep's folder: named after its members and its words, so that it is found again."""
    roots = sorted({str(job.values["root"]) for job in jobs})
    if len(roots) > 1:
        what = "a sweep has one root"
        raise ConfigError(Problem(what, "root", f"found {', '.join(roots)}", "root=FOLDER"))
    base = jobs[0].values.get("name") or "sweep"
    return Path(roots[0], name or f"{base}-sweep-{rules.digest(words)}")


def _known(place: Path, words: list[str], members: list[Member]) -> Book:
    """The sweep of this folder, if it is of these words; else a new one. Raises ConfigError."""
    if not place.exists():
        return Book(place, words, os.getcwd(), members=members)
    fix = f"--name OTHER, or move it away: mv {place} {place}.old"
    if not (place / state.FILE).is_file():
        raise ConfigError(Problem(f"{place} exists", "--name", "it is not a sweep", fix))
    found = state.read(place)
    if rules.digest(found.words) != rules.digest(words):
        why = f"it was started with: {' '.join(found.words)}"
        fix = f"rloo sweep resume {place}, or {fix}"
        raise ConfigError(Problem(f"{place} is a sweep of other words", "--name", why, fix))
    now = {member.name: member.words for member in members}
    for member in found.members:  # what is no part of a name may have changed: checkpoint, logging
        member.words = now.get(member.name, member.words)
    return found


def _go(found: Book, known: dict[str, RunConfig], dry: bool = False) -> int:
    """Check every member that is to go on, then run the sweep; its exit code. `known`: configs."""
    _not_running(found.folder)
    _check_jobs(found.jobs, device_count.gpus())
    left = [m for m in found.members if m.state in (*OPEN, "failed")]
    others = [m for m in left if m.name not in known]  # of earlier, clones too
    jobs = [compose.compose([*m.words, f"name={state.quoted(m.name)}"]) for m in others]
    known |= dict(zip([m.name for m in others], rules.checked(jobs), strict=True))
    runs = [rules.named(known[m.name], m) for m in left]
    rules.able(list(zip(left, runs, strict=True)))
    new = [rung for rung in found.rungs if not rung.done]
    problems = [*rules.rungs(new, len(left), [run.max_steps for run in runs])] if left else []
    fit = _fit(found.jobs, device_count.gpus())
    problems += rules.too_many(len(left), fit)
    if problems:
        raise ConfigError(*problems)
    show = Show(found)
    if dry or not left:
        show.console.print(show.whole())
        print(f"{found.folder}: " + ("it would start" if left else "nothing to do"))
        return 0
    new_root = not found.folder.exists()
    found.folder.mkdir(parents=True, exist_ok=True)
    with launcher.locked(found.folder):
        if new_root or not state.running(found.folder):
            found.save()
        code = Control(found, show, device_count.gpus(), fit).run()
    _say_end(found, show, code)
    return code


def _not_running(folder: Path) -> None:
    if facts := state.running(folder):
        what = f"{folder} is being run by process {facts['pid']} on {facts['host']}"
        raise ConfigError(Problem(what, "command line", fix=f"rloo sweep show {folder}"))


def _say_end(found: Book, show: Show, code: int) -> None:
    if show.screen is None:
        show.console.print(show.whole())
    failed = sum(m.state == "failed" for m in found.members)
    left = sum(m.state in OPEN for m in found.members)
    if left or failed:
        print(f"go on   rloo sweep resume {found.folder}")
    waiting = f", {left} to go on with" if left else ""
    print(f"{len(found.members)} members, {failed} failed{waiting}")


def _resume(words: list[str]) -> int:
    """`rloo sweep resume SWEEP`: all members that are not stopped or finished."""
    flags = _pace(Flags("rloo sweep resume SWEEP [--chunk N] [--jobs N]"))
    flags.add_argument("sweep")
    given = flags.parse_args(words)
    folder = state.find(given.sweep, "resume").absolute()
    found = state.read(folder)
    with contextlib.chdir(found.cwd):
        found.folder = _short(folder)
        found.chunk, found.jobs = given.chunk or found.chunk, given.jobs or found.jobs
        return _go(found, {})


def _short(folder: Path) -> Path:
    """A path as it is from here."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _show(words: list[str]) -> int:
    """`rloo sweep show SWEEP [--json]`."""
    flags = Flags("rloo sweep show SWEEP [--json]")
    flags.add_argument("sweep")
    flags.add_argument("--json", action="store_true")
    given = flags.parse_args(words)
    found = state.read(state.find(given.sweep, "show"))
    if given.json:
        values = asdict(found) | {"folder": str(found.folder)}
        print(json.dumps(values | {"running": bool(state.running(found.folder))}, indent=2))
        return 0
    show = Show(found)
    show.console.print(show.whole())
    facts = state.running(found.folder)
    print(f"{found.folder}: " + (f"run by process {facts['pid']}" if facts else _state(found)))
    return 0


def _asked(verb: str, words: list[str]) -> tuple[Book, Member, list[str]]:
    """The sweep and the member that a command names, and the words behind them."""
    usage = f"rloo sweep {verb} SWEEP MEMBER" + (" key=value ..." if verb == "clone" else "")
    if len(words) < 2 or (len(words) > 2) != (verb == "clone") or words[0].startswith("-"):
        raise ConfigError(
            Problem(f"rloo sweep {verb} needs other words", "command line", fix=usage)
        )
    found = state.read(state.find(words[0], verb))
    member = found.find(words[1])
    if not state.running(found.folder):
        raise ConfigError(_idle(verb, found, member, words[2:]))
    return found, member, words[2:]


def _idle(verb: str, found: Book, member: Member, changes: list[str]) -> Problem:
    """What to do instead with a sweep that does not run."""
    fix = f"rloo sweep resume {found.folder}, then this again"
    if verb == "stop":
        fix = "nothing: it does not train"
    if verb == "clone":
        place = found.place(member)
        fix += (
            f", or for one run: rloo train {' '.join(commands.with_changes(member.words, changes))}"
        )
        fix += f" name=OTHER resume={place}/checkpoint-STEP resume_allow_changes=true"
    return Problem(f"{found.folder} is not running", "command line", f"it is {_state(found)}", fix)


def _state(found: Book) -> str:
    """How a sweep stands that does not run."""
    return "killed" if found.state in ("training", "stopping") else found.state


def _plain(verb: str) -> Callable[[list[str]], int]:
    """`rloo sweep stop|promote SWEEP MEMBER`."""

    def command(words: list[str]) -> int:
        found, member, _ = _asked(verb, words)
        print(commands.ask(found.folder, do=verb, member=member.number))
        return 0

    return command


def _clone(words: list[str]) -> int:
    """The clone's config is composed and checked here, before the sweep hears of it."""
    found, member, changes = _asked("clone", words)
    folder = found.folder.absolute()
    with contextlib.chdir(found.cwd):
        names = [w.partition("=")[2] for w in changes if setting(w) == "name"]
        changes = _own(changes)
        name = names[-1] if names else f"{member.name}-{rules.digest(changes)}"
        given = commands.with_changes(member.words, changes)
        job = compose.compose([*given, f"name={state.quoted(name)}", "resume=auto"])
        (settings,) = rules.checked([job])
        problems = []
        if Path(settings.root).resolve() != folder.parent.resolve():
            problems.append(Problem("a clone stays in its sweep's root", "root"))
        if not changes:
            fix = f"rloo sweep clone {words[0]} {words[1]} train.learning_rate=3e-5"
            problems.append(Problem("a clone needs a changed key", "command line", fix=fix))
        if problems:
            raise ConfigError(*problems)
    request: dict[str, Any] = {"name": str(settings.name), "words": given}
    print(commands.ask(folder, do="clone", member=member.number, **request))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "show": _show,
    "resume": _resume,
    "stop": _plain("stop"),
    "promote": _plain("promote"),
    "clone": _clone,
}
