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
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint import resume, run_folder
from rloo_cli.checkpoint.resume import Start
from rloo_cli.config import check, messages, rules
from rloo_cli.config.compose import Composed
from rloo_cli.config.idle_keys import idle_notes
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch import nodes, preflight, processes, rollout_server, topology
from rloo_cli.launch.nodes import Leader
from rloo_cli.launch.topology import Place
from rloo_cli.utils import fault_injection, pids
from rloo_cli.utils.errors import ConfigError, Problem, RunError
from rloo_cli.utils.files import read_json, update_json, write_json, write_text

# What an attempt writes before its worker comes to train; anything else in a folder is not ours.
FILES = ("run.json", "config.yaml", "overrides.txt", "env.json")
HALF_WRITTEN = re.compile(r"\.[\w.]+\.\d+\.tmp")


@dataclass(frozen=True)
class Before:
    """What was there before an attempt wrote anything."""

    made: list[Path] = field(default_factory=list)  # folders that were not there, deepest first
    entries: frozenset[Path] = frozenset()  # of the run's folder, and of its logs
    texts: dict[Path, str] = field(default_factory=dict)  # of files that every attempt writes anew
    latest: str | None = None  # where logs/latest pointed


def remember(start: Start) -> Before:
    """Look at the folder of an attempt before anything of it is written."""
    folder, logs = start.folder, start.folder / "logs"
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    if made[:1] == [folder]:
        return Before(made)
    entries = [*folder.iterdir(), *(logs.iterdir() if logs.is_dir() else [])]
    texts = {p: p.read_text() for p in (folder / name for name in FILES) if p.is_file()}
    link = logs / "latest"
    latest = os.readlink(link) if link.is_symlink() else None
    return Before(made, frozenset(entries), texts, latest)


def take_back(start: Start, before: Before) -> None:
    """Leave things as they were before a run that was refused: what this attempt made is taken
    away, and nothing that was there before, or that somebody else has put there since.
    """
    folder, logs = start.folder, start.folder / "logs"
    ours = [p for p in _written(start) if p not in before.entries]
    strange = [p for p in folder.iterdir() if p not in (*ours, *before.entries, logs)]
    if strange and not before.texts:  # with a run.json it stays a run's folder
        update_json(folder / "run.json", state="failed")
        return
    for path in ours:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path, text in before.texts.items():
        write_text(path, text)
    if before.latest is not None:
        with contextlib.suppress(OSError):
            (logs / "latest").unlink(missing_ok=True)
            (logs / "latest").symlink_to(before.latest)
    emptied = [] if logs in before.entries else [logs]
    for empty in (*emptied, *before.made):
        with contextlib.suppress(OSError):  # somebody has put something into it
            empty.rmdir()


def _written(start: Start) -> list[Path]:
    """What an attempt may have written before it came to train."""
    folder, logs = start.folder, start.folder / "logs"
    found = [folder / name for name in (*FILES, "debug", "adapter")]
    found += [p for p in folder.iterdir() if HALF_WRITTEN.fullmatch(p.name)]
    found += [resume.config_file(folder, start.attempt).parent, logs / "latest"]
    if server_file.live(folder) is None:  # else one waits there for the run
        found += [*server_file.places(folder), folder / run_folder.SERVER_LOGS]
    return [p for p in found if p.exists() or p.is_symlink()]


def say_end(start: Start, code: int, command: str, died: list[str]) -> None:
    """Why the run ended, the last checkpoint, how to go on, and where things are."""
    folder = start.folder
    facts, log = read_json(folder / "run.json"), resume.config_file(folder, start.attempt).parent
    if not facts:
        print(f"{folder}: it was taken away while the run was going on", file=sys.stderr)
        return
    known = {0: "finished", 75: "stopped, as it was asked to", 130: "ended by a second Ctrl-C"}
    why = known.get(code, f"ended with {code}")
    if died:
        why = died[0]
    elif facts.get("code") is None and code not in (75, 130):
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


PACKAGES = ("rloo-cli", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "pydantic")
REFUSED = (2, 3, 4, 5)
LEFT_S = 10.0  # ranks that lost their launcher end by themselves, or are ended then
GROUPS = ("model", "data", "reward", "algorithm", "generation", "distributed")  # named by choice
# Words that do not make a job of a sweep another one.
SAME_JOB = ("resume", "resume_allow_changes", "root", "logging", "checkpoint", "hydra")


@dataclass
class Attempt:
    """One attempt at a run, and how it ended."""

    start: Start
    code: int = 0
    died: list[str] = field(default_factory=list)  # why, in words, where processes were killed


def train(composed: Composed, multirun: bool = False) -> int:
    """One experiment, from its composed config to its end; the exit code. Raises RunError."""
    fault_injection.check()
    run = check.check(apart(composed) if multirun else composed)
    place, run = _placed(run, composed)
    if not place.leads:
        return nodes.follow(run, place)
    with nodes.leading(Path(run.root), str(run.name), place) as leader:
        preflight.check(run, here=place.on_node)
        with _attempt(run, composed) as attempt:
            if not attempt.start.done:
                with _ranks(attempt, run, place, leader) as (words, watch, starts):
                    attempt.code = processes.run("train.worker", words, watch, starts)
        leader.code = attempt.code
    return leader.code


def _placed(run: RunConfig, composed: Composed) -> tuple[Place, RunConfig]:
    """Where we stand, and the config as it holds there. Raises ConfigError."""
    try:
        place, run, notes = topology.find(os.environ, run)
        if problems := [*rules.enough_prompts(run, place.total)]:
            raise ConfigError(*problems)
    except ConfigError as error:
        placed = [messages.placed(p, composed.sources) for p in error.problems]
        raise ConfigError(*placed) from None
    if place.leads:
        print("".join(f"{note}\n" for note in notes), end="")
    return topology.alone_on_gpu(place, os.environ), run


@contextmanager
def _attempt(run: RunConfig, composed: Composed) -> Iterator[Attempt]:
    """Around what rank 0's launcher does: makes the folder before, says afterwards how it ended."""
    folder = Path(run.root, str(run.name))
    run_folder.check_free(folder)
    _alone(folder)
    with contextlib.ExitStack() as held:
        if folder.exists():
            held.enter_context(locked(folder))
        start = begin(run)
        attempt = Attempt(start)
        if start.done:
            print(start.done)
            yield attempt
            return
        before = remember(start)
        if not folder.exists():
            folder.mkdir(parents=True)
            held.enter_context(locked(folder))
        prepare(start, run, composed)
        print(_opening(run, composed, start), flush=True)
        notes = idle_notes(composed.written, check.dump(run))
        print("".join(f"{note}\n" for note in notes), end="")
        try:
            yield attempt
        except RunError as error:
            if error.code in REFUSED and not _begun(start):
                take_back(start, before)
            raise
        if attempt.code in REFUSED and not _begun(start):
            take_back(start, before)
        else:
            say_end(start, attempt.code, _again(composed, run), attempt.died)


def _opening(run: RunConfig, composed: Composed, start: Start) -> str:
    """What a run says first: what is trained, where; and what it now waits for."""
    of = f" (recipe {composed.recipe})" if composed.recipe else ""
    how = f", from {start.checkpoint.name}" if start.checkpoint else ""
    return (
        f"training {run.name}{of}: {run.model.path} with {run.algorithm.name}, "
        f"into {start.folder}{how}\nstarting: torch and transformers are imported first ..."
    )


@contextmanager
def _ranks(
    attempt: Attempt, run: RunConfig, place: Place, leader: Leader
) -> Iterator[tuple[list[str], processes.Watch, list[processes.Start]]]:
    """What our ranks are started with, and how they are watched; a server if one is wanted."""
    folder, words = attempt.start.folder, [attempt.start.to_json()]
    with contextlib.ExitStack() as held:
        listening = topology.listen(run, place)
        host, port = rules.address(place.store) or ("", 0)
        if listening is not None:
            held.enter_context(listening)
            host, port = listening.getsockname()[:2]
        look, env = held.enter_context(rollout_server.server(folder, run, here=place.on_node))
        leader.say(start=words[0], store=[host, port], env=env)

        def started(pids: list[int]) -> None:
            _note_ranks(folder, place.first, pids)
            if listening is not None:
                listening.close()  # rank 0 has it: if it dies, others are not kept waiting by us

        def say(why: str) -> None:
            attempt.died.append(why)
            processes.say(why)

        starts = nodes.with_env(topology.starts(place, host, port, listening), env)
        yield words, processes.Watch(started, nodes.saving(folder), look, leader.heard, say), starts


def _begun(start: Start) -> bool:
    """Whether this attempt came to train: its worker then wrote which checkpoint it is from. A
    folder that somebody took away meanwhile is nothing to take back either."""
    if not (start.folder / "run.json").exists():
        return True
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
    facts = run_folder.facts_of(folder)
    if facts.get("host", platform.node()) != platform.node():
        return
    if facts.get("state") in ("starting", "training") and pids.alive(facts):
        raise ConfigError(_busy(folder, facts["pid"]))
    limit = time.monotonic() + LEFT_S
    for left in [*facts.get("ranks", []), *[s for s in [facts.get("server")] if s]]:
        pids.end(left, max(0.0, limit - time.monotonic()))


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


def apart(composed: Composed) -> Composed:
    """In a sweep, jobs with one name get a name each, of the keys that the sweep goes over.

    `x-beta-0.01`. Other words that make it another experiment are told by their hash behind it. A
    job whose folder has the name that an earlier version gave it (the hash alone for what the
    command line sweeps over) keeps that name.
    """
    name = composed.values.get("name")
    if name is None:
        return composed
    root = Path(str(composed.values.get("root")))
    before = "-".join([str(name), *_tails(composed, composed.swept)])
    if not (root / before).is_dir():
        keys = (*composed.swept, *composed.swept_here)
        before = "-".join([str(name), *_tails(composed, keys)])
    return replace(composed, values=composed.values | {"name": before})


def _tails(composed: Composed, keys: Sequence[str]) -> list[str]:
    """What the name of a job of a sweep over these keys ends in.

    What the sweep goes over stands there as it is, `compare-ppo-seed-3`: without words beside
    these there is no hash of all the words.
    """
    words = [w for w in _words(composed) if _key(w).partition(".")[0] not in SAME_JOB]
    own = {_key(w): w.partition("=")[2] for w in words if _key(w) in keys}
    tails = [v if k in GROUPS else f"{k.rpartition('.')[2]}-{v}" for k, v in own.items()]
    beside = [w for w in words if _key(w) not in (*own, "recipe", "name")]
    plain = [tail for tail in tails if re.fullmatch(r"[\w.+-]{1,60}", tail, re.ASCII)]
    plain = plain if len("".join(plain)) <= 100 else []
    if beside or not own or plain != tails:
        plain.append(hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:6])
    return plain


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
    """Make the folder of an attempt: run.json, its config (what ranks read), environment.

    run.json is the first: where this is cut short, it says whose folder it is.
    """
    folder = start.folder
    _write_facts(start, run, composed)
    given = resume.config_file(folder, start.attempt)
    given.parent.mkdir(parents=True, exist_ok=True)
    text = check.config_text(run)
    write_text(given, text)
    if not (folder / "config.yaml").exists():
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


def _write_facts(start: Start, run: RunConfig, composed: Composed) -> None:
    folder = start.folder
    facts = run_folder.facts_of(folder)
    changes = [{"attempt": start.attempt, **start.changes}] if start.changes else []
    write_json(
        folder / "run.json",
        facts
        | {
            "name": run.name,
            "recipe": composed.recipe,
            "state": "starting",
            "attempt": start.attempt,
            "hash": check.config_hash(run),
            "pid": os.getpid(),
            "pid_started": pids.started(os.getpid()),
            "host": platform.node(),
            "ranks": [],
            "code": None,
            "started": facts.get("started", time.time()),
            "changes": [*facts.get("changes", []), *changes],
        },
    )


def _note_ranks(folder: Path, first: int, found: list[int]) -> None:
    ranks = [
        {"pid": pid, "group": pid, "pid_started": pids.started(pid), "rank": first + i}
        for i, pid in enumerate(found)
    ]
    update_json(folder / "run.json", ranks=ranks)
