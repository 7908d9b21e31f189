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
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check, messages, rules
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.idle_keys import idle_notes
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch import nodes, preflight, processes, rollout_server
from rloo_cli.launch.nodes import NodeCoordinator
from rloo_cli.launch.topology import (
    ProcessTopology,
    find_topology,
    open_store_socket,
    rank_process_specs,
    with_private_gpu,
)
from rloo_cli.utils import child_process, fault_injection
from rloo_cli.utils.errors import ConfigError, Problem, RunError
from rloo_cli.utils.files import read_json, update_json, write_json, write_text

# What an attempt writes before its worker comes to train; anything else in a folder is not ours.
ATTEMPT_FILES = ("run.json", "config.yaml", "overrides.txt", "env.json")
HALF_WRITTEN = re.compile(r"\.[\w.]+\.\d+\.tmp")


@dataclass(frozen=True)
class FolderSnapshot:
    """What was there before an attempt wrote anything."""

    missing_folders: list[Path] = field(
        default_factory=list
    )  # folders that were not there, deepest first
    entries: frozenset[Path] = frozenset()  # of the run's folder, and of its logs
    texts: dict[Path, str] = field(default_factory=dict)  # of files that every attempt writes anew
    latest_log_link: str | None = None  # where logs/latest pointed


def snapshot_attempt_folder(plan: ResumePlan) -> FolderSnapshot:
    """Look at the folder of an attempt before anything of it is written."""
    folder, logs = plan.folder, plan.folder / "logs"
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    if made[:1] == [folder]:
        return FolderSnapshot(made)
    entries = [*folder.iterdir(), *(logs.iterdir() if logs.is_dir() else [])]
    texts = {p: p.read_text() for p in (folder / name for name in ATTEMPT_FILES) if p.is_file()}
    link = logs / "latest"
    latest = os.readlink(link) if link.is_symlink() else None
    return FolderSnapshot(made, frozenset(entries), texts, latest)


def restore_attempt_folder(plan: ResumePlan, snapshot: FolderSnapshot) -> None:
    """Leave things as they were before a run that was refused: what this attempt made is taken
    away, and nothing that was there before, or that somebody else has put there since.
    """
    folder, logs = plan.folder, plan.folder / "logs"
    ours = [p for p in _attempt_paths(plan) if p not in snapshot.entries]
    strange = [p for p in folder.iterdir() if p not in (*ours, *snapshot.entries, logs)]
    if strange and not snapshot.texts:  # with a run.json it stays a run's folder
        update_json(folder / "run.json", state="failed")
        return
    for path in ours:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path, text in snapshot.texts.items():
        write_text(path, text)
    if snapshot.latest_log_link is not None:
        with contextlib.suppress(OSError):
            (logs / "latest").unlink(missing_ok=True)
            (logs / "latest").symlink_to(snapshot.latest_log_link)
    emptied = [] if logs in snapshot.entries else [logs]
    for empty in (*emptied, *snapshot.missing_folders):
        with contextlib.suppress(OSError):  # somebody has put something into it
            empty.rmdir()


def _attempt_paths(plan: ResumePlan) -> list[Path]:
    """What an attempt may have written before it came to train."""
    folder, logs = plan.folder, plan.folder / "logs"
    found = [folder / name for name in (*ATTEMPT_FILES, "debug", "adapter")]
    found += [p for p in folder.iterdir() if HALF_WRITTEN.fullmatch(p.name)]
    found += [resume.attempt_config_path(folder, plan.attempt).parent, logs / "latest"]
    if server_file.running_server(folder) is None:  # else one waits there for the run
        found += [*server_file.server_file_paths(folder), folder / run_folder.SERVER_LOGS]
    return [p for p in found if p.exists() or p.is_symlink()]


def report_run_end(plan: ResumePlan, code: int, command: str, died: list[str]) -> None:
    """Why the run ended, the last checkpoint, how to go on, and where things are."""
    folder = plan.folder
    facts, log = (
        read_json(folder / "run.json"),
        resume.attempt_config_path(folder, plan.attempt).parent,
    )
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
REFUSED_CODES = (2, 3, 4, 5)
LEFTOVER_TIMEOUT_S = 10.0  # ranks that lost their launcher end by themselves, or are ended then
GROUPS_IN_NAMES = (
    "model",
    "data",
    "reward",
    "algorithm",
    "generation",
    "distributed",
)  # named by choice
# Words that do not make a job of a sweep another one.
KEYS_OF_SAME_JOB = ("resume", "resume_allow_changes", "root", "logging", "checkpoint", "hydra")


@dataclass
class Attempt:
    """One attempt at a run, and how it ended."""

    plan: ResumePlan
    exit_code: int = 0
    died: list[str] = field(default_factory=list)  # why, in words, where processes were killed


def launch_run(composed: ComposedConfig, multirun: bool = False) -> int:
    """One experiment, from its composed config to its end; the exit code. Raises RunError."""
    fault_injection.arm_faults()
    run = check.check_config(name_sweep_job(composed) if multirun else composed)
    place, run = _find_topology(run, composed)
    if not place.is_coordinator:
        return nodes.run_worker_node(run, place)
    with nodes.coordinate_nodes(Path(run.root), str(run.name), place) as leader:
        preflight.check_machine(run, local_ranks=place.local_world_size)
        with _run_attempt(run, composed) as attempt:
            if not attempt.plan.done:
                with _rank_processes(attempt, run, place, leader) as (words, watch, starts):
                    attempt.exit_code = processes.run_processes(
                        "train.worker", words, watch, starts
                    )
        leader.exit_code = attempt.exit_code
    return leader.exit_code


def _find_topology(run: RunConfig, composed: ComposedConfig) -> tuple[ProcessTopology, RunConfig]:
    """Where we stand, and the config as it holds there. Raises ConfigError."""
    try:
        place, run, notes = find_topology(os.environ, run)
        if problems := [*rules.prompts_per_rank_problems(run, place.world_size)]:
            raise ConfigError(*problems)
    except ConfigError as error:
        placed = [messages.locate_problem(p, composed.sources) for p in error.problems]
        raise ConfigError(*placed) from None
    if place.is_coordinator:
        print("".join(f"{note}\n" for note in notes), end="")
    return with_private_gpu(place, os.environ), run


@contextmanager
def _run_attempt(run: RunConfig, composed: ComposedConfig) -> Iterator[Attempt]:
    """Around what rank 0's launcher does: makes the folder before, says afterwards how it ended."""
    folder = Path(run.root, str(run.name))
    run_folder.check_folder_free(folder)
    _check_not_running(folder)
    with contextlib.ExitStack() as held:
        if folder.exists():
            held.enter_context(lock_folder(folder))
        start = plan_attempt(run)
        attempt = Attempt(start)
        if start.done:
            print(start.done)
            yield attempt
            return
        before = snapshot_attempt_folder(start)
        if not folder.exists():
            folder.mkdir(parents=True)
            held.enter_context(lock_folder(folder))
        write_attempt_files(start, run, composed)
        print(_opening(run, composed, start), flush=True)
        notes = idle_notes(composed.changed_keys, check.dump_config(run))
        print("".join(f"{note}\n" for note in notes), end="")
        try:
            yield attempt
        except RunError as error:
            if error.code in REFUSED_CODES and not _training_began(start):
                restore_attempt_folder(start, before)
            raise
        if attempt.exit_code in REFUSED_CODES and not _training_began(start):
            restore_attempt_folder(start, before)
        else:
            report_run_end(start, attempt.exit_code, _resume_command(composed, run), attempt.died)


def _opening(run: RunConfig, composed: ComposedConfig, plan: ResumePlan) -> str:
    """What a run says first: what is trained, where; and what it now waits for."""
    of = f" (recipe {composed.recipe})" if composed.recipe else ""
    how = f", from {plan.checkpoint.name}" if plan.checkpoint else ""
    return (
        f"training {run.name}{of}: {run.model.path} with {run.algorithm.name}, "
        f"into {plan.folder}{how}\nstarting: torch and transformers are imported first ..."
    )


@contextmanager
def _rank_processes(
    attempt: Attempt, run: RunConfig, topology: ProcessTopology, coordinator: NodeCoordinator
) -> Iterator[tuple[list[str], processes.ProcessCallbacks, list[processes.ProcessSpec]]]:
    """What our ranks are started with, and how they are watched; a server if one is wanted."""
    folder, words = attempt.plan.folder, [attempt.plan.to_json()]
    with contextlib.ExitStack() as held:
        listening = open_store_socket(run, topology)
        host, port = rules.parse_address(topology.store_address) or ("", 0)
        if listening is not None:
            held.enter_context(listening)
            host, port = listening.getsockname()[:2]
        look, env = held.enter_context(
            rollout_server.managed_server(folder, run, local_ranks=topology.local_world_size)
        )
        coordinator.send_message(start=words[0], store=[host, port], env=env)

        def started(pids: list[int]) -> None:
            _record_rank_pids(folder, topology.first_rank, pids)
            if listening is not None:
                listening.close()  # rank 0 has it: if it dies, others are not kept waiting by us

        def say(why: str) -> None:
            attempt.died.append(why)
            processes.print_killed(why)

        starts = nodes.add_environment(rank_process_specs(topology, host, port, listening), env)
        yield (
            words,
            processes.ProcessCallbacks(
                started, nodes.checkpoint_save_probe(folder), look, coordinator.poll_failure, say
            ),
            starts,
        )


def _training_began(plan: ResumePlan) -> bool:
    """Whether this attempt came to train: its worker then wrote which checkpoint it is from. A
    folder that somebody took away meanwhile is nothing to take back either."""
    if not (plan.folder / "run.json").exists():
        return True
    facts = read_json(plan.folder / "run.json")
    return facts.get("began") == plan.attempt


def plan_attempt(run: RunConfig) -> ResumePlan:
    """Where this attempt at a run begins; what is said about it is printed. Raises ConfigError."""
    start = resume.plan_resume(Path(run.root, str(run.name)), run)
    for note in start.notes:
        print(note)
    if start.changes:
        print("\n".join(["changed since the checkpoint:", *resume.describe_changes(start.changes)]))
    return start


def _check_not_running(folder: Path) -> None:
    """Raises ConfigError when this folder's run is alive; ends a rank that lost its launcher."""
    facts = run_folder.read_run_metadata(folder)
    if facts.get("host", platform.node()) != platform.node():
        return
    if facts.get("state") in ("starting", "training") and child_process.is_process_alive(facts):
        raise ConfigError(_folder_busy_problem(folder, facts["pid"]))
    limit = time.monotonic() + LEFTOVER_TIMEOUT_S
    for left in [*facts.get("ranks", []), *[s for s in [facts.get("server")] if s]]:
        child_process.kill_leftover_process(left, max(0.0, limit - time.monotonic()))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder itself; the kernel lets go of it when we end, however we end.

    Raises ConfigError when somebody else holds it: two that started at the same moment.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(_folder_busy_problem(folder, "?")) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def _folder_busy_problem(folder: Path, pid: Any) -> Problem:
    return Problem(f"{folder} is being trained by process {pid}", "name", fix="name=OTHER")


def name_sweep_job(composed: ComposedConfig) -> ComposedConfig:
    """In a sweep, jobs with one name get a name each, of the keys that the sweep goes over.

    `x-beta-0.01`. Other words that make it another experiment are told by their hash behind it. A
    job whose folder has the name that an earlier version gave it (the hash alone for what the
    command line sweeps over) keeps that name.
    """
    name = composed.values.get("name")
    if name is None:
        return composed
    root = Path(str(composed.values.get("root")))
    before = "-".join([str(name), *_name_suffixes(composed, composed.recipe_swept_keys)])
    if not (root / before).is_dir():
        keys = (*composed.recipe_swept_keys, *composed.command_line_swept_keys)
        before = "-".join([str(name), *_name_suffixes(composed, keys)])
    return replace(composed, values=composed.values | {"name": before})


def _name_suffixes(composed: ComposedConfig, keys: Sequence[str]) -> list[str]:
    """What the name of a job of a sweep over these keys ends in.

    What the sweep goes over stands there as it is, `compare-ppo-seed-3`: without words beside
    these there is no hash of all the words.
    """
    words = [
        w
        for w in _run_overrides(composed)
        if _override_key(w).partition(".")[0] not in KEYS_OF_SAME_JOB
    ]
    own = {_override_key(w): w.partition("=")[2] for w in words if _override_key(w) in keys}
    tails = [v if k in GROUPS_IN_NAMES else f"{k.rpartition('.')[2]}-{v}" for k, v in own.items()]
    beside = [w for w in words if _override_key(w) not in (*own, "recipe", "name")]
    plain = [tail for tail in tails if re.fullmatch(r"[\w.+-]{1,60}", tail, re.ASCII)]
    plain = plain if len("".join(plain)) <= 100 else []
    if beside or not own or plain != tails:
        plain.append(hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:6])
    return plain


def _override_key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _run_overrides(composed: ComposedConfig) -> list[str]:
    return [w for w in composed.user_overrides if not w.startswith("hydra.")]


def _resume_command(composed: ComposedConfig, run: RunConfig) -> str:
    """The command that goes on with this run."""
    words = [w for w in _run_overrides(composed) if _override_key(w) != "resume"]
    if composed.values.get("name") != run.name:  # a job of a sweep
        words = [*[w for w in words if _override_key(w) != "name"], f"name={run.name}"]
    return shlex.join(["rloo", "train", *words, "resume=auto"])


def write_attempt_files(plan: ResumePlan, run: RunConfig, composed: ComposedConfig) -> None:
    """Make the folder of an attempt: run.json, its config (what ranks read), environment.

    run.json is the first: where this is cut short, it says whose folder it is.
    """
    folder = plan.folder
    _write_run_json(plan, run, composed)
    given = resume.attempt_config_path(folder, plan.attempt)
    given.parent.mkdir(parents=True, exist_ok=True)
    text = check.config_text(run)
    write_text(given, text)
    if not (folder / "config.yaml").exists():
        write_text(folder / "config.yaml", text)
    words = [w for w in _run_overrides(composed) if _override_key(w) != "resume"]
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


def _write_run_json(plan: ResumePlan, run: RunConfig, composed: ComposedConfig) -> None:
    folder = plan.folder
    facts = run_folder.read_run_metadata(folder)
    changes = [{"attempt": plan.attempt, **plan.changes}] if plan.changes else []
    write_json(
        folder / "run.json",
        facts
        | {
            "name": run.name,
            "recipe": composed.recipe,
            "state": "starting",
            "attempt": plan.attempt,
            "hash": check.config_hash(run),
            "pid": os.getpid(),
            "pid_started": child_process.process_start_time(os.getpid()),
            "host": platform.node(),
            "ranks": [],
            "code": None,
            "started": facts.get("started", time.time()),
            "changes": [*facts.get("changes", []), *changes],
        },
    )


def _record_rank_pids(folder: Path, first: int, pids_of_ranks: list[int]) -> None:
    ranks = [
        {
            "pid": pid,
            "group": pid,
            "pid_started": child_process.process_start_time(pid),
            "rank": first + i,
        }
        for i, pid in enumerate(pids_of_ranks)
    ]
    update_json(folder / "run.json", ranks=ranks)
