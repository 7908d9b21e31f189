"""A rollout server's process: started, waited for, and ended with everything it started.

Imports neither torch nor vLLM. `rloo vllm-serve` uses it, and the launcher of a run that has a
server of its own.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.checkpoint.run_folder import SERVER_LOGS
from rloo_cli.config import check
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed.device_count import VISIBLE_DEVICES_VARIABLE, gpus_per_server
from rloo_cli.generation.vllm import arguments, server_file
from rloo_cli.generation.vllm.server_file import ServerRecord
from rloo_cli.launch.processes import WORKER_BOOT, default_environment
from rloo_cli.utils.child_process import (
    kill_group,
    kill_group_except,
    process_start_time,
    python_command,
    start_child,
    wait_for_group,
)
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem, RunError
from rloo_cli.utils.files import update_json, write_text

SCRATCH_PREFIX = "rloo-server-"  # how the names of its temporary folders begin
ERROR_FILE = "error.json"  # in the scratch folder, by the server that could not start
SERVER_KILL_TIMEOUT_S = 20.0  # from TERM to KILL


@dataclass(frozen=True)
class ServerProcess:
    """A server's process, from its start on; `ready` tells whether it answers."""

    folder: Path
    child: subprocess.Popen[bytes]
    log: Path
    scratch: Path
    started_at: float  # time.monotonic

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.child.poll()


def start_server(
    folder: Path, run: RunConfig, by: str, env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start the server of a run's folder. Call it from the main thread, and `stop` in the end.

    The kernel ends the server when the thread that started it is gone. `by`: train, vllm-serve.
    """
    logs = folder / SERVER_LOGS
    logs.mkdir(parents=True, exist_ok=True)
    node = server_file.serving_node_number()
    own = f"node_{node}_" if node > 1 else ""
    given = logs / f"{own}config.yaml"
    write_text(given, yaml.safe_dump(check.dump_config(run), sort_keys=False))
    number = 1 + sum(1 for _ in logs.glob(f"{own}server_*.log"))
    log = logs / f"{own}server_{number}.log"
    stale = server_file.read_server_file(folder)
    if stale is not None and (stale.failed or stale.is_alive() is False):
        server_file.server_file_path(folder).unlink(missing_ok=True)
    scratch = Path(
        tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=short_temporary_folder())
    )  # ours alone: mode 0700
    inside = {"RLOO_SERVER_SCRATCH": str(scratch), "RLOO_SERVER_LOG": str(log.absolute())}
    boot = WORKER_BOOT.format(package="rloo_cli.", module="generation.vllm.server")
    try:
        child = start_child(
            python_command("-c", boot, str(folder.absolute()), by, str(given)),
            env=default_environment() | {**(env or {}), **inside},
            log=log,
            death_signal=signal.SIGTERM,
        )
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return ServerProcess(folder, child, log, scratch, time.monotonic())


def short_temporary_folder() -> str:
    """The folder for temporary files, or one with a shorter path where that is too long: a socket's
    path holds 107 bytes, and vLLM's take 37 of them in a folder of ours.
    """
    usual = tempfile.gettempdir()
    named = (usual, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    longest = 107 - 37 - 1 - len(SCRATCH_PREFIX) - 8
    fit = [d for d in named if d and len(os.fsencode(d)) <= longest and os.access(d, os.W_OK)]
    return fit[0] if fit else usual


def answering_server(process: ServerProcess) -> ServerRecord | None:
    """The server once it answers; None until then. Does not wait."""
    server = server_file.read_server_file(process.folder)
    mine = server is not None and server.pid == process.child.pid and process.exit_code is None
    return server if mine and server is not None and server.is_alive() else None


def wait_for_server(
    process: ServerProcess, run: RunConfig, stop_requested: Callable[[], bool] = lambda: False
) -> ServerRecord | None:
    """Wait until it answers; None when `asked` (to end) comes first. Raises RunError.

    GenerationError with the log's last lines when it ends or the time is over; what the server's
    process itself found wrong is raised as it is. The process is ended first in either case.
    """
    limit: float = run.generation.server.ready_timeout_s  # type: ignore[attr-defined]
    while not stop_requested():
        if (server := answering_server(process)) is not None:
            return server
        gone = process.exit_code is not None
        if gone or time.monotonic() - process.started_at > limit:
            error = server_failure(process, limit)
            stop_server(process)
            raise error
        time.sleep(0.1)
    return None


def server_failure(process: ServerProcess, limit: float) -> RunError:
    """Why it does not answer: what its process found wrong, else its log's last lines."""
    with contextlib.suppress(OSError, ValueError):
        blocks = json.loads((process.scratch / ERROR_FILE).read_text())
        kinds = {kind.code: kind for kind in (ConfigError, MachineError)}
        kind = kinds.get(blocks[0]["code"], GenerationError)
        return kind(*[Problem(**{k: v for k, v in b.items() if k != "code"}) for b in blocks])
    after = f"after {time.monotonic() - process.started_at:.0f} s"
    more = f"log: {process.log}"
    if process.exit_code is not None:
        what = f"the server's process ended with {process.exit_code} {after}"
        return GenerationError(Problem(what, "", server_log_tail(process), more=more))
    key = "generation.server.ready_timeout_s"
    what, fix = f"the server does not answer {after}", f"{key}={2 * limit:g}"
    return GenerationError(Problem(what, key, server_log_tail(process), fix, more))


def server_log_tail(process: ServerProcess, lines: int = 15) -> str:
    """The last lines of its log."""
    with contextlib.suppress(OSError):
        said = process.log.read_text(errors="replace").rstrip().splitlines()
        return "\n".join(line[:300] for line in said[-lines:])
    return ""


def stop_server(process: ServerProcess, kill_timeout_s: float = SERVER_KILL_TIMEOUT_S) -> list[int]:
    """End it and all it started, and clear away what it left; pids that would not go.

    TERM first; after `patience` seconds KILL, to the whole group.
    """
    child = process.child
    if process.exit_code is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(kill_timeout_s)
    if process.exit_code is None:
        kill_group_except(child.pid)
        child.wait()
    if wait_for_group(child.pid, 2):  # a process that waits for a pipe to close has had the time
        kill_group_except(child.pid)
    if wait_for_group(child.pid, 10):
        kill_group(child.pid)
    left = wait_for_group(child.pid, 10)
    mine = server_file.read_server_file(process.folder)
    if mine is not None and mine.pid == child.pid:
        server_file.server_file_path(process.folder).unlink(missing_ok=True)
    shutil.rmtree(process.scratch, ignore_errors=True)
    return left


Environment = dict[str, str]


@contextmanager
def managed_server(
    folder: Path, run: RunConfig, note: Callable[[str], None] = print, local_ranks: int = 1
) -> Iterator[tuple[Callable[[], None], Environment]]:
    """While inside, a run that needs a server of its own has one.

    `here`: processes on this machine that need a GPU each. Yields what to call a few times a
    second, and what the worker's environment must say. Raises ConfigError and MachineError where
    GPUs would have to be shared.
    """
    keys: Any = run.generation
    if keys.backend != "vllm_server" or keys.server.base_url is not None:
        yield lambda: None, {}
        return
    there, gpus = server_file.running_server(folder), arguments.visible_gpus()
    if keys.server.num_nodes:
        yield lambda: None, gpus_left_by_server(gpus, there) if there is not None else {}
        return
    if there is not None and there.by != "train":
        note(f"samples with the server at {there.url} (process {there.pid} on {there.host})")
        yield lambda: None, gpus_left_by_server(gpus, there, local_ranks)
        return
    ours, theirs = split_gpus(gpus, local_ranks, gpus_per_server(run))
    watched = ServerSupervisor(folder, run, theirs, note)
    try:
        watched.check_server_alive()
        yield watched.check_server_alive, ours
    finally:
        watched.end_server()


@contextmanager
def background_server(folder: Path, run: RunConfig) -> Iterator[None]:
    """The same for a run in this process: a thread looks after its server."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            look()

    with managed_server(folder, run) as (look, env):
        os.environ.update(env)  # before anything asks torch for its GPUs
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def split_gpus(gpus: list[str], ranks: int, server_gpus: int) -> tuple[Environment, Environment]:
    """Which GPUs the trainer sees, and which its server: the first `ranks`, and the next ones.

    Raises MachineError where there are GPUs but too few for both.
    """
    if not gpus:
        return {}, {}
    if len(gpus) < ranks + server_gpus:
        left = len(gpus) - server_gpus
        alone = "generation=vllm_colocate" + (" distributed=single" if ranks > 1 else "")
        raise MachineError(
            Problem(
                f"server and trainer would share a GPU: there are {len(gpus)}",
                "generation.backend",
                f"the trainer takes {ranks}, a server {server_gpus}; each would take the "
                "other's memory",
                f"distributed.num_processes={left}" if left > 0 else alone,
            )
        )
    ours, theirs = gpus[:ranks], gpus[ranks : ranks + server_gpus]
    return {VISIBLE_DEVICES_VARIABLE: ",".join(ours)}, {VISIBLE_DEVICES_VARIABLE: ",".join(theirs)}


def gpus_left_by_server(
    gpus: list[str], server: server_file.ServerRecord, local_ranks: int = 1
) -> Environment:
    """The GPUs that a server which runs already leaves to the trainer's `here` processes.

    Raises ConfigError.
    """
    if not gpus or server.is_alive() is None:  # on another machine
        return {}
    left = [gpu for gpu in gpus if gpu not in server.devices]
    if not left:
        raise ConfigError(
            Problem(
                f"server and trainer would share GPU {', '.join(gpus)}",
                "generation.backend",
                f"the server at {server.url} has {', '.join(server.devices)}",
                "generation=vllm_colocate, or start the server under CUDA_VISIBLE_DEVICES=OTHERS",
            )
        )
    if len(left) < local_ranks:
        raise ConfigError(
            Problem(
                f"server and trainer would share a GPU: {len(left)} are left for {local_ranks} "
                "processes",
                "distributed.num_processes",
                f"the server at {server.url} has {', '.join(server.devices)}",
                f"distributed.num_processes={len(left)}",
            )
        )
    return {VISIBLE_DEVICES_VARIABLE: ",".join(left)}


class ServerSupervisor:
    """One server after the other, until the restarts are used up."""

    def __init__(self, folder: Path, run: RunConfig, env: Environment, note: Callable[[str], None]):
        self.folder, self.run, self.env, self.note = folder, run, env, note
        keys: Any = run.generation
        self.keys = keys.server
        self.process: ServerProcess | None = None
        self.has_answered = False
        self.restarts = 0
        self.next_start_at = 0.0  # time.monotonic of the next start
        self.failed = False

    def check_server_alive(self) -> None:
        """Start it, or see that it is well; returns at once but for the end of a dead one."""
        if self.failed:
            return
        if self.process is None:
            if time.monotonic() >= self.next_start_at:
                self._start()
            return
        if not self.has_answered:
            self.has_answered = answering_server(self.process) is not None
        late = time.monotonic() - self.process.started_at > self.keys.ready_timeout_s
        if self.process.exit_code is not None or (late and not self.has_answered):
            self._restart_or_fail()

    def _start(self) -> None:
        self.process = start_server(self.folder, self.run, "train", self.env)
        self.has_answered = False
        pid = self.process.child.pid
        facts = {"pid": pid, "group": pid, "pid_started": process_start_time(pid)}
        if (self.folder / "run.json").exists():  # an evaluation has none
            update_json(self.folder / "run.json", server=facts)

    def _restart_or_fail(self) -> None:
        """It died, or never answered: what is left of it goes, and another may come."""
        assert self.process is not None
        process, self.process = self.process, None
        error = server_failure(process, self.keys.ready_timeout_s)
        stop_server(process)
        final = isinstance(error, ConfigError | MachineError)
        if final or self.restarts >= self.keys.max_restarts:
            self._give_up(error, process.log)
            return
        self.restarts += 1
        pause = 2.0 ** (self.restarts - 1)  # what killed it may take a moment to pass
        self.next_start_at = time.monotonic() + pause
        first = error.problems[0].what
        self.note(
            f"warning: {first}; it is started again in {pause:g} s"
            f" (restart {self.restarts} of {self.keys.max_restarts})"
        )

    def _give_up(self, error: RunError, log: Path) -> None:
        """Tell the trainer, which waits for server.json, that none will come."""
        self.failed = True
        server_file.write_server_failure(self.folder, "train", error, log)

    def end_server(self) -> None:
        """End it with all it started, and its server.json."""
        if self.process is not None:
            left = stop_server(self.process)
            if left:
                self.note(f"warning: processes {', '.join(map(str, left))} would not end")
            self.process = None
        last = server_file.read_server_file(self.folder)
        if last is not None and last.by == "train":
            with contextlib.suppress(OSError):
                os.unlink(server_file.server_file_path(self.folder))
