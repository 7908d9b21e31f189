"""Starts a rollout server's process, waits for it, and ends it with all its children.

Imports neither torch nor vLLM. Used by `rloo vllm-serve`, and by the launcher of a run that needs
its own server.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from rloo_cli.checkpoint.run_folder import SERVER_LOGS
from rloo_cli.config import check
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed.device_count import (
    VISIBLE_DEVICES_VARIABLE,
    gpu_uuids,
    gpus_per_server,
)
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
from rloo_cli.utils.errors import (
    ConfigError,
    GenerationError,
    MachineError,
    Problem,
    RunError,
    refuse,
)
from rloo_cli.utils.files import JsonObject, update_json, write_text
from rloo_cli.utils.scratch_folder import ScratchFolder

if TYPE_CHECKING:
    from rloo_cli.generation.vllm_server import Config as ServerConfig
    from rloo_cli.generation.vllm_server import ServerSection

SCRATCH_PREFIX = "rloo-server-"  # prefix of its temporary folders
ERROR_FILE = "error.json"  # in the scratch folder, written by a server that failed to start
SERVER_KILL_TIMEOUT_S = 20.0  # from TERM to KILL


@dataclass(frozen=True)
class ServerProcess:
    """A server's process after its start; `answering_server` checks whether it answers."""

    folder: Path
    child: subprocess.Popen[bytes]
    log: Path
    scratch: ScratchFolder
    started_at: float  # time.monotonic

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.child.poll()


def start_server(
    folder: Path, values: JsonObject, by: str, env: Mapping[str, str] | None = None
) -> ServerProcess:
    """Start the server of a run's folder, from the main thread; `stop_server` must follow.

    The kernel ends the server when the thread that started it is gone. `values`: of the run's
    config. `by`: train, vllm-serve.
    """
    logs = folder / SERVER_LOGS
    logs.mkdir(parents=True, exist_ok=True)
    node = server_file.serving_node_number()
    prefix = f"node_{node}_" if node > 1 else ""
    config_path = logs / f"{prefix}config.yaml"
    write_text(config_path, yaml.safe_dump(values, sort_keys=False))
    number = 1 + sum(1 for _ in logs.glob(f"{prefix}server_*.log"))
    log = logs / f"{prefix}server_{number}.log"
    stale = server_file.read_server_file(folder)
    if stale is not None and (stale.failed or stale.is_alive() is False):
        server_file.server_file_path(folder).unlink(missing_ok=True)
    scratch = ScratchFolder(SCRATCH_PREFIX, short_temporary_folder())
    variables = {"RLOO_SERVER_SCRATCH": str(scratch.path), "RLOO_SERVER_LOG": str(log.absolute())}
    boot = WORKER_BOOT.format(package="rloo_cli.", module="generation.vllm.server")
    try:
        child = start_child(
            python_command("-c", boot, str(folder.absolute()), by, str(config_path)),
            env=default_environment() | {**(env or {}), **variables},
            log=log,
            death_signal=signal.SIGTERM,
        )
    except BaseException:
        scratch.remove()
        raise
    return ServerProcess(folder, child, log, scratch, time.monotonic())


def short_temporary_folder() -> str:
    """The folder for temporary files, or another one if its path is too long.

    A socket's path holds 107 bytes, and vLLM needs 37 of them for names in our scratch folder.
    """
    usual = tempfile.gettempdir()
    folders = (usual, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    max_bytes = 107 - 37 - 1 - len(SCRATCH_PREFIX) - 8
    fit = (d for d in folders if d and len(os.fsencode(d)) <= max_bytes and os.access(d, os.W_OK))
    return next(fit, usual)


def answering_server(process: ServerProcess) -> ServerRecord | None:
    """The server if it answers, else None. Does not wait."""
    server = server_file.read_server_file(process.folder)
    if server is None or server.pid != process.child.pid or process.exit_code is not None:
        return None
    return server if server.is_alive() else None


def wait_for_server(
    process: ServerProcess, limit: float, stop_requested: Callable[[], bool] = lambda: False
) -> ServerRecord | None:
    """Wait until the server answers; None if `stop_requested` comes first.

    Raises RunError after ending the server: the error that the server's process reported, or
    GenerationError with the log's last lines if it died or `limit` seconds
    (generation.server.ready_timeout_s) are over.
    """
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
    """Why a server does not answer: the error of its process, else its log's last lines."""
    with contextlib.suppress(OSError, ValueError):
        blocks = json.loads((process.scratch.path / ERROR_FILE).read_text())
        kinds = {kind.code: kind for kind in (ConfigError, MachineError)}
        kind = kinds.get(blocks[0]["code"], GenerationError)
        return kind(*[Problem(**{k: v for k, v in b.items() if k != "code"}) for b in blocks])
    after = f"after {time.monotonic() - process.started_at:.0f} s"
    more = f"log: {process.log}"
    if process.exit_code is not None:
        what = f"the server exited with code {process.exit_code} {after}"
        tail, fix = server_log_tail(process), "fix the error in its log, then run this again"
        return GenerationError(Problem(what, "the rollout server", tail, fix, more))
    key = "generation.server.ready_timeout_s"
    what, fix = f"the server did not answer {after}", f"{key}={2 * limit:g}"
    return GenerationError(Problem(what, key, server_log_tail(process), fix, more))


def server_log_tail(process: ServerProcess, lines: int = 15) -> str:
    """The last lines of a server's log; "" if unreadable."""
    with contextlib.suppress(OSError):
        text = process.log.read_text(errors="replace").rstrip()
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])
    return ""


def stop_server(process: ServerProcess, kill_timeout_s: float = SERVER_KILL_TIMEOUT_S) -> list[int]:
    """End a server and all it started, and remove its files. -> pids that did not exit

    SIGTERM comes first; after `kill_timeout_s` seconds the whole group is killed.
    """
    child = process.child
    if process.exit_code is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(kill_timeout_s)
    if process.exit_code is None:
        kill_group_except(child.pid)
        child.wait()
    if wait_for_group(child.pid, 2):  # time for a process that waits for a pipe to close
        kill_group_except(child.pid)
    if wait_for_group(child.pid, 10):
        kill_group(child.pid)
    left = wait_for_group(child.pid, 10)
    mine = server_file.read_server_file(process.folder)
    if mine is not None and mine.pid == child.pid:
        server_file.server_file_path(process.folder).unlink(missing_ok=True)
    process.scratch.remove()
    return left


Environment = dict[str, str]


@contextmanager
def managed_server(
    folder: Path, run: RunConfig, note: Callable[[str], None] = print, local_ranks: int = 1
) -> Iterator[tuple[Callable[[], None], Environment]]:
    """While inside, a run that needs its own server has one.

    `local_ranks`: processes on this machine that need a GPU each. Yields a function to call a few
    times a second, and variables for the worker's environment. Raises ConfigError and MachineError
    if GPUs would be shared.
    """
    keys = cast("ServerConfig", run.generation)
    if not keys.is_server or keys.server.base_url is not None:
        yield lambda: None, {}
        return
    running, gpus = server_file.running_server(folder), arguments.visible_gpus()
    if keys.server.num_nodes:
        yield lambda: None, gpus_left_by_server(gpus, running) if running is not None else {}
        return
    if running is not None and running.by != "train":
        note(f"sampling with the server at {running.url} (process {running.pid} on {running.host})")
        yield lambda: None, gpus_left_by_server(gpus, running, local_ranks)
        return
    trainer_env, server_env = split_gpus(gpus, local_ranks, gpus_per_server(run.generation))
    values = check.dump_config(run)
    supervisor = ServerSupervisor(folder, values, keys.server, server_env, note)
    try:
        supervisor.check_server_alive()
        yield supervisor.check_server_alive, trainer_env
    finally:
        supervisor.end_server()


@contextmanager
def background_server(folder: Path, run: RunConfig) -> Iterator[None]:
    """`managed_server` for a run in this process: a thread watches its server."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            check_alive()

    with managed_server(folder, run) as (check_alive, env):
        os.environ.update(env)  # before torch looks for GPUs
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def split_gpus(gpus: list[str], ranks: int, server_gpus: int) -> tuple[Environment, Environment]:
    """The trainer's and the server's environment: the first `ranks` GPUs, and the next ones.

    Raises MachineError if there are GPUs, but too few for both.
    """
    if not gpus:
        return {}, {}
    if len(gpus) < ranks + server_gpus:
        left = len(gpus) - server_gpus
        alone = "generation=vllm_colocate" + (" distributed=single" if ranks > 1 else "")
        what = f"server and trainer would share a GPU: found {len(gpus)}"
        why = (
            f"the trainer takes {ranks}, a server {server_gpus}; they would compete for its memory"
        )
        fix = f"distributed.num_processes={left}" if left > 0 else alone
        refuse("generation.backend", what, fix, why, error=MachineError)
    ours, theirs = gpus[:ranks], gpus[ranks : ranks + server_gpus]
    return {VISIBLE_DEVICES_VARIABLE: ",".join(ours)}, {VISIBLE_DEVICES_VARIABLE: ",".join(theirs)}


def gpus_left_by_server(
    gpus: list[str], server: server_file.ServerRecord, local_ranks: int = 1
) -> Environment:
    """The environment of a trainer's `local_ranks` processes beside a running server.

    Raises ConfigError if the server leaves them too few GPUs.
    """
    if not gpus or server.is_alive() is None:  # on another machine
        return {}
    uuids = zip(gpus, gpu_uuids(gpus), strict=True)
    left = [gpu for gpu, uuid in uuids if uuid not in server.devices]
    why = f"the server at {server.url} has {', '.join(server.devices)}"
    if not left:
        what = f"server and trainer would share GPU {', '.join(gpus)}"
        fix = "generation=vllm_colocate, or start the server under CUDA_VISIBLE_DEVICES=OTHERS"
        refuse("generation.backend", what, fix, why)
    if len(left) < local_ranks:
        key, processes = "distributed.num_processes", f"{local_ranks} processes"
        what = f"server and trainer would share a GPU: {len(left)} left for {processes}"
        refuse(key, what, f"{key}={len(left)}", why)
    return {VISIBLE_DEVICES_VARIABLE: ",".join(left)}


class ServerSupervisor:
    """Starts a run's server, and restarts it when it dies, until the restarts are used up."""

    def __init__(
        self,
        folder: Path,
        values: JsonObject,
        keys: "ServerSection",
        env: Environment,
        note: Callable[[str], None],
    ):
        self.folder, self.values, self.keys, self.env, self.note = folder, values, keys, env, note
        self.process: ServerProcess | None = None
        self.has_answered = False
        self.restarts = 0
        self.next_start_at = 0.0  # time.monotonic of the next start
        self.failed = False

    def check_server_alive(self) -> None:
        """Start the server, or check that it runs. Only waits to clean up a dead server."""
        if self.failed:
            return
        if self.process is None:
            if time.monotonic() >= self.next_start_at:
                self._start()
            return
        if not self.has_answered:
            self.has_answered = answering_server(self.process) is not None
        timed_out = time.monotonic() - self.process.started_at > self.keys.ready_timeout_s
        if self.process.exit_code is not None or (timed_out and not self.has_answered):
            self._restart_or_fail()

    def _start(self) -> None:
        self.process = start_server(self.folder, self.values, "train", self.env)
        self.has_answered = False
        pid = self.process.child.pid
        record = {"pid": pid, "group": pid, "pid_started": process_start_time(pid)}
        if (self.folder / "run.json").exists():  # an evaluation has none
            update_json(self.folder / "run.json", server=record)

    def _restart_or_fail(self) -> None:
        """Clean up a server that died or never answered, and start another if allowed."""
        assert self.process is not None
        process, self.process = self.process, None
        error = server_failure(process, self.keys.ready_timeout_s)
        stop_server(process)
        final = isinstance(error, ConfigError | MachineError)
        if final or self.restarts >= self.keys.max_restarts:
            self._give_up(error, process.log)
            return
        self.restarts += 1
        pause = 2.0 ** (self.restarts - 1)  # the cause may be temporary
        self.next_start_at = time.monotonic() + pause
        count = f"restart {self.restarts} of {self.keys.max_restarts}"
        what = error.problems[0].what
        self.note(f"warning: {what}; restarting it in {pause:g} s ({count})")

    def _give_up(self, error: RunError, log: Path) -> None:
        """Record in server.json, for the waiting trainer, that no server will start."""
        self.failed = True
        server_file.write_server_failure(self.folder, "train", error, log)

    def end_server(self) -> None:
        """End the server with all its children, and remove its server.json."""
        if self.process is not None:
            if left := stop_server(self.process):
                self.note(f"warning: processes {', '.join(map(str, left))} did not exit")
            self.process = None
        last = server_file.read_server_file(self.folder)
        if last is not None and last.by == "train":
            with contextlib.suppress(OSError):
                os.unlink(server_file.server_file_path(self.folder))
