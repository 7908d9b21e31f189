"""From a composed config to a running process: check, make the run's folder, start it, watch it.

Imports no torch. The folder is made only after the check; a run that was refused before its
first step (data, rewards, a model that is not there) leaves none, and one that is resumed is
left as it was.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from rloo_cli import config, faults, machine, managed, pids, processes, resume, server_file, serving
from rloo_cli.compose import Composed
from rloo_cli.errors import ConfigError, Problem
from rloo_cli.files import read_json, update_json, write_json, write_text
from rloo_cli.resume import Start
from rloo_cli.schema import RunConfig
from rloo_cli.tools import plan

PACKAGES = ("rloo-cli", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "pydantic")
REFUSED = (2, 3, 4, 5)
# Words that do not make a job of a sweep another one.
SAME_JOB = ("resume", "resume_allow_changes", "root", "logging", "checkpoint", "hydra")


def train(composed: Composed, multirun: bool = False, dry_run: bool = False) -> int:
    """One experiment, from its composed config to its end; the exit code. Raises RunError."""
    faults.check()
    run = config.check(_apart(composed) if multirun else composed)
    machine.check(run, downloads=not dry_run)
    if dry_run:
        print(plan.text(run))
        return 0
    folder = Path(run.root, str(run.name))
    _alone(folder)
    with contextlib.ExitStack() as held:
        if folder.exists():
            held.enter_context(locked(folder))
        start = begin(run)
        if start.done:
            print(start.done)
            return 0
        before, new_root = read_json(folder / "run.json"), not folder.parent.exists()
        if not folder.exists():
            folder.mkdir(parents=True)
            held.enter_context(locked(folder))
        prepare(start, run, composed)
        words = [str(folder), str(start.attempt), str(start.checkpoint or "")]
        with managed.server(folder, run) as (look, env):
            code = processes.run("worker", words, _note_rank(folder), _saving(folder), look, env)
        if code in REFUSED and not _begun(start):
            _take_back(start, before, new_root)
        else:
            _say_end(start, code, _again(composed, run))
    return code


def _begun(start: Start) -> bool:
    """Whether this attempt came to train: its worker then wrote which checkpoint it is from."""
    facts = read_json(start.folder / "run.json")
    return facts.get("began") == start.attempt


def begin(run: RunConfig) -> Start:
    """Where this attempt at a run begins; what is said about it is printed. Raises ConfigError."""
    start = resume.plan(Path(run.root, str(run.name)), run)
    for note in start.notes:
        print(note)
    if start.changes:
        print("\n".join(["changed since the checkpoint:", *resume.text(start.changes)]))
    return start


def _alone(folder: Path) -> None:
    """Raises ConfigError when this folder's run is alive; ends a rank that lost its launcher."""
    facts = read_json(folder / "run.json")
    if facts.get("host", platform.node()) != platform.node():
        return
    if facts.get("state") in ("starting", "training") and pids.alive(facts):
        raise ConfigError(_busy(folder, facts["pid"]))
    for left in [*facts.get("ranks", []), *[s for s in [facts.get("server")] if s]]:
        pids.end(left)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder itself; the kernel lets go of it when we end, however we end.

    Raises ConfigError when somebody else holds it: two that started at the same moment.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(_busy(folder, "?")) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def _busy(folder: Path, pid: Any) -> Problem:
    return Problem(f"{folder} is being trained by process {pid}", "name", fix="name=OTHER")


def _apart(composed: Composed) -> Composed:
    """In a sweep, jobs with one name get a name each: the hash of their own overrides."""
    name = composed.values.get("name")
    if name is None:
        return composed
    words = [w for w in _words(composed) if _key(w).partition(".")[0] not in SAME_JOB]
    tail = hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:6]
    return replace(composed, values=composed.values | {"name": f"{name}-{tail}"})


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _words(composed: Composed) -> list[str]:
    return [w for w in composed.words if not w.startswith("hydra.")]


def _again(composed: Composed, run: RunConfig) -> str:
    """The command that goes on with this run."""
    words = [w for w in _words(composed) if _key(w) != "resume"]
    if composed.values.get("name") != run.name:  # a job of a sweep
        words = [*[w for w in words if _key(w) != "name"], f"name={run.name}"]
    return shlex.join(["rloo", "train", *words, "resume=auto"])


def prepare(start: Start, run: RunConfig, composed: Composed) -> None:
    """Make the folder of an attempt: its config (what ranks read), environment, run.json."""
    folder = start.folder
    given = resume.config_file(folder, start.attempt)
    given.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config.dump(run), sort_keys=False)
    write_text(given, text)
    if start.attempt == 1:
        write_text(folder / "config.yaml", text)
    words = [w for w in _words(composed) if _key(w) != "resume"]
    write_text(folder / "overrides.txt", "".join(f"{w}\n" for w in words))
    with contextlib.suppress(OSError):  # a file system without links has the folder all the same
        link = given.parent.with_name("latest")
        link.unlink(missing_ok=True)
        link.symlink_to(given.parent.name)
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine_facts = {"python": platform.python_version(), "platform": platform.platform()}
    write_json(folder / "env.json", {**machine_facts, "cpus": os.cpu_count(), "packages": versions})
    facts = read_json(folder / "run.json")
    changes = [{"attempt": start.attempt, **start.changes}] if start.changes else []
    write_json(
        folder / "run.json",
        facts
        | {
            "name": run.name,
            "recipe": composed.recipe,
            "state": "starting",
            "attempt": start.attempt,
            "hash": config.config_hash(run),
            "pid": os.getpid(),
            "pid_started": pids.started(os.getpid()),
            "host": platform.node(),
            "ranks": [],
            "code": None,
            "started": facts.get("started", time.time()),
            "changes": [*facts.get("changes", []), *changes],
        },
    )


def _note_rank(folder: Path) -> Callable[[int], None]:
    def note(pid: int) -> None:
        rank = {"pid": pid, "group": pid, "pid_started": pids.started(pid)}
        update_json(folder / "run.json", ranks=[rank])

    return note


def _saving(folder: Path) -> Callable[[], bool]:
    return lambda: any(folder.glob(".tmp-*"))


def _take_back(start: Start, before: dict[str, Any], new_root: bool) -> None:
    """Leave things as they were before a run that was refused."""
    folder = start.folder
    if not before:
        _clear(folder)
        if new_root:
            with contextlib.suppress(OSError):  # another run came to it meanwhile
                folder.parent.rmdir()
        return
    shutil.rmtree(resume.config_file(folder, start.attempt).parent)
    write_json(folder / "run.json", before)


def _clear(folder: Path) -> None:
    """Remove a run's folder, but for what a server has in it that waits there for the run."""
    if server_file.live(folder) is None:
        shutil.rmtree(folder)
        return
    kept = {folder / server_file.NAME, folder / serving.LOGS, folder / serving.LOGS.parent}
    for entry in [*folder.iterdir(), *(folder / serving.LOGS.parent).iterdir()]:
        if entry in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _say_end(start: Start, code: int, command: str) -> None:
    """Why the run ended, the last checkpoint, how to go on, and where things are."""
    folder = start.folder
    facts, log = read_json(folder / "run.json"), resume.config_file(folder, start.attempt).parent
    known = {0: "finished", 75: "stopped, as it was asked to", 130: "ended by a second Ctrl-C"}
    why = known.get(code, f"ended with {code}")
    if facts.get("code") is None and code not in (75, 130):
        why = "its process ended without a word: killed, out of memory, or by code of a reward"
    step = facts.get("progress", {}).get("step", 0)
    last = facts.get("checkpoint") or "none yet: it begins anew"
    lines = [
        f"{folder}: {why}, after step {step}",
        f"  checkpoint  {last}",
        f"  go on       {command}",
        f"  log         {log}",
    ]
    if code:
        print("\n".join(lines), file=sys.stderr)
    state = {0: "finished", 75: "stopped", 130: "stopped"}.get(code, "failed")
    ended = {"why": why, "checkpoint": facts.get("checkpoint"), "resume": command}
    update_json(folder / "run.json", state=state, code=code, ended=ended)
    with contextlib.suppress(OSError), (log / "rank_0.log").open("a") as file:
        file.write("\n".join(lines) + "\n")
