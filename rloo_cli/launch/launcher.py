"""From a composed config to a running process: check, create the run's folder, start, watch.

Imports no torch. The folder is created only after the check. A run that is refused before its first
step (data, rewards, a missing model) leaves no folder, and a resumed one is left unchanged.
"""

import contextlib
import fcntl
import hashlib
import json
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

from rloo_cli.checkpoint import resume, run_folder
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check, messages, rules
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.idle_keys import idle_notes
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch import leftovers, nodes, preflight, processes, rollout_server
from rloo_cli.launch.nodes import NodeCoordinator
from rloo_cli.launch.topology import (
    ProcessTopology,
    find_topology,
    open_store_socket,
    rank_process_specs,
    with_private_gpu,
)
from rloo_cli.utils import child_process, fault_injection
from rloo_cli.utils.errors import ConfigError, GuardError, Problem, RunError, StorageError
from rloo_cli.utils.files import (
    read_json,
    update_json,
    write_json,
    write_text,
    write_whole_file,
)

# What an attempt writes before its worker starts training; other files in a folder are not ours.
ATTEMPT_FILES = ("run.json", "config.yaml", "overrides.txt", "env.json")
HALF_WRITTEN = re.compile(r"\.[\w.]+\.\d+\.tmp")


@dataclass(frozen=True)
class FolderSnapshot:
    """The run folder's content before an attempt wrote anything."""

    missing_folders: list[Path] = field(default_factory=list)  # missing folders, deepest first
    entries: frozenset[Path] = frozenset()  # of the run folder, and of its logs
    contents: dict[Path, bytes] = field(default_factory=dict)  # of files rewritten by every attempt
    latest_log_link: str | None = None  # where logs/latest pointed


def snapshot_attempt_folder(plan: ResumePlan) -> FolderSnapshot:
    """Record the folder's content before the attempt writes anything."""
    folder, logs = plan.folder, plan.folder / "logs"
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    if missing[:1] == [folder]:
        return FolderSnapshot(missing)
    entries = [*folder.iterdir(), *(logs.iterdir() if logs.is_dir() else [])]
    files = [folder / name for name in ATTEMPT_FILES]
    contents = {path: path.read_bytes() for path in files if path.is_file()}
    link = logs / "latest"
    latest = os.readlink(link) if link.is_symlink() else None
    return FolderSnapshot(missing, frozenset(entries), contents, latest)


def restore_attempt_folder(plan: ResumePlan, snapshot: FolderSnapshot) -> None:
    """Remove what a refused attempt wrote, and nothing that existed before or that another process
    has put there since.
    """
    folder, logs = plan.folder, plan.folder / "logs"
    ours = [p for p in _attempt_paths(plan) if p not in snapshot.entries]
    foreign = [p for p in folder.iterdir() if p not in (*ours, *snapshot.entries, logs)]
    if foreign and not snapshot.contents:  # with a run.json it stays a run's folder
        update_json(folder / "run.json", state="failed")
        return
    for path in ours:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path, content in snapshot.contents.items():
        write_whole_file(path, content)
    if snapshot.latest_log_link is not None:
        with contextlib.suppress(OSError):
            (logs / "latest").unlink(missing_ok=True)
            (logs / "latest").symlink_to(snapshot.latest_log_link)
    new_logs = [] if logs in snapshot.entries else [logs]
    for empty in (*new_logs, *snapshot.missing_folders):
        with contextlib.suppress(OSError):  # it is not empty
            empty.rmdir()


def _attempt_paths(plan: ResumePlan) -> list[Path]:
    """The files that an attempt may have written before training."""
    folder, logs = plan.folder, plan.folder / "logs"
    paths = [folder / name for name in (*ATTEMPT_FILES, "debug", "adapter")]
    paths += [p for p in folder.iterdir() if HALF_WRITTEN.fullmatch(p.name)]
    paths += [resume.attempt_config_path(folder, plan.attempt).parent, logs / "latest"]
    if server_file.running_server(folder) is None:  # else a server waits for the run there
        paths += [*server_file.server_file_paths(folder), folder / run_folder.SERVER_LOGS]
    return [p for p in paths if p.exists() or p.is_symlink()]


def report_run_end(plan: ResumePlan, code: int, command: str, died: list[str]) -> int:
    """Print why the run ended, its last checkpoint, how to resume, and the log's path.

    `code` is the exit code; `died` lists why processes were killed. -> the exit code: 8 if a
    finished run cannot record its end because its disk is full.
    """
    folder = plan.folder
    recorded = read_json(folder / "run.json")
    step = max(recorded.get("progress", {}).get("step", 0), _last_logged_step(folder))
    log = resume.attempt_config_path(folder, plan.attempt).parent
    if not recorded:
        print(f"{folder}: the folder was removed during the run", file=sys.stderr)
        return code
    target = {} if code else read_json(folder / "summary.json").get("target", {})
    reasons = {
        0: "its target was reached" if target.get("reached") else "finished",
        8: "its disk is full", 75: "stopped on request", 130: "ended by a second Ctrl-C",
    }  # fmt: skip
    why = reasons.get(code, f"exited with code {code}")
    if died:
        why = died[0]
    elif recorded.get("code") is None and code not in (8, 75, 130):
        why = "the process exited without an error: killed, out of memory, or os._exit in a reward"
    elif code == GuardError.code and recorded.get("guards"):
        why = " and ".join(f"guards.{guard['name']}=fail" for guard in recorded["guards"])
        why = f"stopped by {why}"
    lines = [
        f"{folder}: {why}, after step {step}",
        f"  checkpoint  {recorded.get('checkpoint') or 'none: it starts over'}",
        f"  resume      {command}",
        f"  log         {log}",
    ]
    if code:
        print("\n".join(lines), file=sys.stderr)
    state = {0: "finished", 75: "stopped", 130: "stopped"}.get(code, "failed")
    ended = {"why": why, "checkpoint": recorded.get("checkpoint"), "resume": command}
    try:
        update_json(folder / "run.json", state=state, code=code, ended=ended)
    except OSError as error:  # the disk is full, or has become read-only
        print(f"warning: cannot record the run's end in run.json: {error}", file=sys.stderr)
        code = code or StorageError.code
    with contextlib.suppress(OSError), (log / "rank_0.log").open("a") as file:
        file.write("\n".join(lines) + "\n")
    return code


def _last_logged_step(folder: Path) -> int:
    """The step of the last line of metrics.jsonl; 0 without one.

    A killed process did not record its progress.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    return 0


PACKAGES = ("rloo-cli", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "pydantic")
REFUSED_CODES = (2, 3, 4, 5)
LEFTOVER_TIMEOUT_S = 10.0  # ranks that lost their launcher are killed after this time
# Config groups whose choice appears in a job's name without the group's name.
GROUPS_IN_NAMES = ("model", "data", "reward", "algorithm", "generation", "distributed")
# Keys whose overrides do not make a sweep's job a different experiment.
KEYS_OF_SAME_JOB = (
    "resume",
    "resume_allow_changes",
    "root",
    "logging",
    "guards",
    "checkpoint",
    "hydra",
)


@dataclass
class Attempt:
    """One attempt at a run, and how it ended."""

    plan: ResumePlan
    exit_code: int = 0
    died: list[str] = field(default_factory=list)  # why processes were killed, if any were


def launch_run(composed: ComposedConfig, multirun: bool = False) -> int:
    """Run one experiment from its composed config to its end. -> its exit code. Raises RunError."""
    fault_injection.arm_faults()
    run = check.check_config(name_sweep_job(composed) if multirun else composed)
    topology, run = find_run_topology(run, composed)
    if not topology.is_coordinator:
        return nodes.run_worker_node(run, topology)
    with nodes.coordinate_nodes(Path(run.root), str(run.name), topology) as coordinator:
        preflight.check_machine(run, local_ranks=topology.local_world_size)
        with _run_attempt(run, composed) as attempt:
            if not attempt.plan.done:
                with _rank_processes(attempt, run, topology, coordinator) as ranks:
                    attempt.exit_code = processes.run_processes("train.worker", *ranks)
        coordinator.exit_code = attempt.exit_code
    return coordinator.exit_code


def find_run_topology(
    run: RunConfig, composed: ComposedConfig
) -> tuple[ProcessTopology, RunConfig]:
    """This process's topology, and the config adapted to it. Raises ConfigError."""
    try:
        topology, run, notes = find_topology(os.environ, run)
        prompts = run.train.prompts_per_step
        if problems := [*rules.prompts_per_rank_problems(prompts, topology.world_size)]:
            raise ConfigError(*problems)
    except ConfigError as error:
        located = [messages.locate_problem(p, composed.sources) for p in error.problems]
        raise ConfigError(*located) from None
    if topology.is_coordinator:
        print("".join(f"{note}\n" for note in notes), end="")
    return with_private_gpu(topology, os.environ), run


@contextmanager
def _run_attempt(run: RunConfig, composed: ComposedConfig) -> Iterator[Attempt]:
    """The context of rank 0's launcher: creates the folder before, reports the end afterwards."""
    folder = run.folder
    run_folder.check_folder_free(folder)
    _check_not_running(folder)
    with contextlib.ExitStack() as stack:
        if folder.exists():
            stack.enter_context(lock_folder(folder))
        start = plan_attempt(run)
        attempt = Attempt(start)
        if start.done:
            print(start.done)
            yield attempt
            return
        before = snapshot_attempt_folder(start)
        if not folder.exists():
            folder.mkdir(parents=True)
            stack.enter_context(lock_folder(folder))
        write_attempt_files(start, run, composed)
        recipe = f" (recipe {composed.recipe})" if composed.recipe else ""
        begins = f", from {start.checkpoint.name}" if start.checkpoint else ""
        print(
            f"training {run.name}{recipe}: {run.model.path} with {run.algorithm.name}, "
            f"into {folder}{begins}\nstarting: importing torch and transformers first ...",
            flush=True,
        )
        notes = idle_notes(composed.changed_keys, type(run), check.dump_config(run))
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
            command = _resume_command(composed, str(run.name))
            attempt.exit_code = report_run_end(start, attempt.exit_code, command, attempt.died)


@contextmanager
def _rank_processes(
    attempt: Attempt, run: RunConfig, topology: ProcessTopology, coordinator: NodeCoordinator
) -> Iterator[tuple[list[str], processes.ProcessCallbacks, list[processes.ProcessSpec]]]:
    """The last three arguments of `run_processes` for this node's ranks, while their rollout server
    runs."""
    folder, plan = attempt.plan.folder, attempt.plan.to_json()
    with contextlib.ExitStack() as stack:
        listening = open_store_socket(run.distributed.rdzv, topology)
        host, port = rules.parse_address(topology.store_address) or ("", 0)
        if listening is not None:
            stack.enter_context(listening)
            host, port = listening.getsockname()[:2]
        poll_server, env = stack.enter_context(
            rollout_server.managed_server(folder, run, local_ranks=topology.local_world_size)
        )
        coordinator.send_message(start=plan, store=[host, port], env=env)

        def on_started(pids: list[int]) -> None:
            _record_rank_pids(folder, topology.first_rank, pids)
            if listening is not None:
                listening.close()  # rank 0 has it: if it dies, we do not keep the others waiting

        def on_lost(problem: Problem) -> None:
            attempt.died.append(problem.what)
            fix = f"{problem.fix}; rloo train resumes with resume=auto"
            processes.print_lost(replace(problem, fix=fix))

        is_saving = nodes.checkpoint_save_probe(folder)
        callbacks = processes.ProcessCallbacks(
            on_started, is_saving, poll_server, coordinator.poll_failure, on_lost,
            silence_timeout_s=run.distributed.timeout_s,
        )  # fmt: skip
        specs = rank_process_specs(topology, host, port, listening)
        yield [plan], callbacks, nodes.add_environment(specs, env)


def _training_began(plan: ResumePlan) -> bool:
    """Whether this attempt started training: its worker then wrote its number to run.json.

    Also True if the folder was removed in the meantime: then there is nothing to undo.
    """
    path = plan.folder / "run.json"
    return not path.exists() or read_json(path).get("began") == plan.attempt


def plan_attempt(run: RunConfig) -> ResumePlan:
    """Decide where this attempt resumes from, and print notes about it. Raises ConfigError."""
    plan = resume.plan_resume(run.folder, run)
    for note in plan.notes:
        print(note)
    if plan.changes:
        print("\n".join(["changed since the checkpoint:", *resume.describe_changes(plan.changes)]))
    return plan


def _check_not_running(folder: Path) -> None:
    """Raises ConfigError if this folder's run is alive; kills a rank that lost its launcher."""
    facts = run_folder.read_run_metadata(folder)
    if facts.get("host", platform.node()) != platform.node():
        return
    if leftovers.is_run_alive(facts):
        leftovers.refuse_busy_folder(folder, facts["pid"])
    limit = time.monotonic() + LEFTOVER_TIMEOUT_S
    for process in filter(None, [*facts.get("ranks", []), facts.get("server")]):
        child_process.kill_leftover_process(process, max(0.0, limit - time.monotonic()))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder itself; the kernel releases it when this process ends.

    Raises ConfigError if another process holds it: two were started at the same moment.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        leftovers.refuse_busy_folder(folder, "?")
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def name_sweep_job(composed: ComposedConfig) -> ComposedConfig:
    """Name a sweep's job by its swept keys, such as `x-beta-0.01`.

    A hash is added if other overrides make it a different experiment too.
    """
    name = composed.values.get("name")
    if name is None:
        return composed
    job_name = "-".join([str(name), *_name_suffixes(composed, composed.swept_keys)])
    return replace(composed, values=composed.values | {"name": job_name})


def _name_suffixes(composed: ComposedConfig, keys: Sequence[str]) -> list[str]:
    """The suffix of a job's name in a sweep over these keys, as in `compare-ppo-seed-3`.

    A hash of all overrides is added if other keys than the swept ones are set, or if a value cannot
    be part of a name.
    """
    overrides = [
        (_override_key(w), w)
        for w in _run_overrides(composed)
        if _override_key(w).partition(".")[0] not in KEYS_OF_SAME_JOB
    ]
    own = {key: override.partition("=")[2] for key, override in overrides if key in keys}
    tails = [v if k in GROUPS_IN_NAMES else f"{k.rpartition('.')[2]}-{v}" for k, v in own.items()]
    beside = [key for key, _ in overrides if key not in (*own, "recipe", "name")]
    plain = [tail for tail in tails if re.fullmatch(r"[\w.+-]{1,60}", tail, re.ASCII)]
    plain = plain if len("".join(plain)) <= 100 else []
    if beside or not own or plain != tails:
        text = "\n".join(sorted(override for _, override in overrides))
        plain.append(hashlib.sha256(text.encode()).hexdigest()[:6])
    return plain


def _override_key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _run_overrides(composed: ComposedConfig, without: str = "") -> list[str]:
    """The user's overrides, without Hydra's own and those of the key `without`."""
    overrides = (w for w in composed.user_overrides if not w.startswith("hydra."))
    return [w for w in overrides if not without or _override_key(w) != without]


def _resume_command(composed: ComposedConfig, name: str) -> str:
    """The command that resumes this run."""
    overrides = _run_overrides(composed, without="resume")
    if composed.values.get("name") != name:  # a job of a sweep
        overrides = [w for w in overrides if _override_key(w) != "name"] + [f"name={name}"]
    return shlex.join(["rloo", "train", *overrides, "resume=auto"])


def write_attempt_files(plan: ResumePlan, run: RunConfig, composed: ComposedConfig) -> None:
    """Write an attempt's files: run.json, the config (which ranks read), overrides, environment.

    run.json is the first: it identifies the folder if writing is interrupted.
    """
    folder = plan.folder
    _write_run_json(plan, str(run.name), composed.recipe, check.config_hash(run))
    config_path = resume.attempt_config_path(folder, plan.attempt)
    config_path.parent.mkdir(parents=True, exist_ok=True)
    text = check.config_text(run)
    write_text(config_path, text)
    if not (folder / "config.yaml").exists():
        write_text(folder / "config.yaml", text)
    overrides = _run_overrides(composed, without="resume")
    write_text(folder / "overrides.txt", "".join(f"{w}\n" for w in overrides))
    with contextlib.suppress(OSError):  # on a file system without links the folder suffices
        link = config_path.parent.with_name("latest")
        link.unlink(missing_ok=True)
        link.symlink_to(config_path.parent.name)
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine = {"python": platform.python_version(), "platform": platform.platform()}
    write_json(folder / "env.json", {**machine, "cpus": os.cpu_count(), "packages": versions})


def _write_run_json(plan: ResumePlan, name: str, recipe: str | None, config_hash: str) -> None:
    before = run_folder.read_run_metadata(plan.folder)
    changes = [{"attempt": plan.attempt, **plan.changes}] if plan.changes else []
    values = {
        "name": name,
        "recipe": recipe,
        "state": "starting",
        "attempt": plan.attempt,
        "hash": config_hash,
        "pid": os.getpid(),
        "pid_started": child_process.process_start_time(os.getpid()),
        "host": platform.node(),
        "ranks": [],
        "code": None,
        "guards": [],
        "started": before.get("started", time.time()),
        "changes": [*before.get("changes", []), *changes],
    }
    write_json(plan.folder / "run.json", before | values)


def _record_rank_pids(folder: Path, first: int, pids_of_ranks: list[int]) -> None:
    starts = map(child_process.process_start_time, pids_of_ranks)
    ranks = [
        {"pid": pid, "group": pid, "pid_started": start, "rank": rank}
        for rank, (pid, start) in enumerate(zip(pids_of_ranks, starts, strict=True), first)
    ]
    update_json(folder / "run.json", ranks=ranks)
