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
import sys
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
from rloo_cli.distributed.device_count import VISIBLE, wanted_by_server
from rloo_cli.generation.vllm import arguments, process_group, server_file
from rloo_cli.generation.vllm.server_file import Server
from rloo_cli.launch.processes import BOOT, CALM, kill
from rloo_cli.utils import pids
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem, RunError
from rloo_cli.utils.files import update_json, write_text

SCRATCH = "rloo-server-"  # how the names of its temporary folders begin
ERROR = "error.json"  # in the scratch folder, by the server that could not start
PATIENCE_S = 20.0  # from TERM to KILL


@dataclass(frozen=True)
class Process:
    """A server's process, from its start on; `ready` tells whether it answers."""

    folder: Path
    child: subprocess.Popen[bytes]
    log: Path
    scratch: Path
    began: float  # time.monotonic

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.child.poll()


def start(folder: Path, run: RunConfig, by: str, env: Mapping[str, str] | None = None) -> Process:
    """Start the server of a run's folder. Call it from the main thread, and `stop` in the end.

    The kernel ends the server when the thread that started it is gone. `by`: train, vllm-serve.
    """
    logs = folder / SERVER_LOGS
    logs.mkdir(parents=True, exist_ok=True)
    node = server_file.number()
    own = f"node_{node}_" if node > 1 else ""
    given = logs / f"{own}config.yaml"
    write_text(given, yaml.safe_dump(check.dump(run), sort_keys=False))
    number = 1 + sum(1 for _ in logs.glob(f"{own}server_*.log"))
    log = logs / f"{own}server_{number}.log"
    stale = server_file.read(folder)
    if stale is not None and (stale.failed or stale.alive() is False):
        server_file.place(folder).unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=temporary()))  # ours alone: mode 0700
    inside = {"RLOO_SERVER_SCRATCH": str(scratch), "RLOO_SERVER_LOG": str(log.absolute())}
    boot = BOOT.format(package="rloo_cli.", module="generation.vllm.server")
    try:
        with log.open("wb") as out:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", boot, str(folder.absolute()), by, str(given)],
                env={**CALM, **os.environ, **(env or {}), **inside},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=process_group.told_by_parent(signal.SIGTERM),
            )
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Process(folder, child, log, scratch, time.monotonic())


def temporary() -> str:
    """The folder for temporary files, or one with a shorter path where that is too long: a socket's
    path holds 107 bytes, and vLLM's take 37 of them in a folder of ours.
    """
    usual = tempfile.gettempdir()
    named = (usual, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    longest = 107 - 37 - 1 - len(SCRATCH) - 8
    fit = [d for d in named if d and len(os.fsencode(d)) <= longest and os.access(d, os.W_OK)]
    return fit[0] if fit else usual


def ready(process: Process) -> Server | None:
    """The server once it answers; None until then. Does not wait."""
    server = server_file.read(process.folder)
    mine = server is not None and server.pid == process.child.pid and process.code is None
    return server if mine and server is not None and server.alive() else None


def wait(
    process: Process, run: RunConfig, asked: Callable[[], bool] = lambda: False
) -> Server | None:
    """Wait until it answers; None when `asked` (to end) comes first. Raises RunError.

    GenerationError with the log's last lines when it ends or the time is over; what the server's
    process itself found wrong is raised as it is. The process is ended first in either case.
    """
    limit: float = run.generation.server.ready_timeout_s  # type: ignore[attr-defined]
    while not asked():
        if (server := ready(process)) is not None:
            return server
        gone = process.code is not None
        if gone or time.monotonic() - process.began > limit:
            error = why(process, limit)
            stop(process)
            raise error
        time.sleep(0.1)
    return None


def why(process: Process, limit: float) -> RunError:
    """Why it does not answer: what its process found wrong, else its log's last lines."""
    with contextlib.suppress(OSError, ValueError):
        blocks = json.loads((process.scratch / ERROR).read_text())
        kinds = {kind.code: kind for kind in (ConfigError, MachineError)}
        kind = kinds.get(blocks[0]["code"], GenerationError)
        return kind(*[Problem(**{k: v for k, v in b.items() if k != "code"}) for b in blocks])
    after = f"after {time.monotonic() - process.began:.0f} s"
    more = f"log: {process.log}"
    if process.code is not None:
        what = f"the server's process ended with {process.code} {after}"
        return GenerationError(Problem(what, "", tail(process), more=more))
    key = "generation.server.ready_timeout_s"
    what, fix = f"the server does not answer {after}", f"{key}={2 * limit:g}"
    return GenerationError(Problem(what, key, tail(process), fix, more))


def tail(process: Process, lines: int = 15) -> str:
    """The last lines of its log."""
    with contextlib.suppress(OSError):
        said = process.log.read_text(errors="replace").rstrip().splitlines()
        return "\n".join(line[:300] for line in said[-lines:])
    return ""


def stop(process: Process, patience: float = PATIENCE_S) -> list[int]:
    """End it and all it started, and clear away what it left; pids that would not go.

    TERM first; after `patience` seconds KILL, to the whole group.
    """
    child = process.child
    if process.code is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
    if process.code is None:
        process_group.kill(child.pid)
        child.wait()
    if _left(child.pid, 2):  # who waits for a pipe to close has had the time
        process_group.kill(child.pid)
    if _left(child.pid, 10):
        kill(child.pid)
    left = _left(child.pid, 10)
    mine = server_file.read(process.folder)
    if mine is not None and mine.pid == child.pid:
        server_file.place(process.folder).unlink(missing_ok=True)
    shutil.rmtree(process.scratch, ignore_errors=True)
    return left


def _left(group: int, limit: float) -> list[int]:
    """Processes of a group that are still there after so many seconds."""
    until = time.monotonic() + limit
    while (left := process_group.members(group)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


Environment = dict[str, str]


@contextmanager
def server(
    folder: Path, run: RunConfig, note: Callable[[str], None] = print, here: int = 1
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
    there, gpus = server_file.live(folder), arguments.gpus()
    if keys.server.num_nodes:
        yield lambda: None, apart(gpus, there) if there is not None else {}
        return
    if there is not None and there.by != "train":
        note(f"samples with the server at {there.url} (process {there.pid} on {there.host})")
        yield lambda: None, apart(gpus, there, here)
        return
    ours, theirs = share(gpus, here, wanted_by_server(run))
    watched = Watched(folder, run, theirs, note)
    try:
        watched.look()
        yield watched.look, ours
    finally:
        watched.end()


@contextmanager
def in_background(folder: Path, run: RunConfig) -> Iterator[None]:
    """The same for a run in this process: a thread looks after its server."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            look()

    with server(folder, run) as (look, env):
        os.environ.update(env)  # before anything asks torch for its GPUs
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def share(gpus: list[str], ranks: int, wanted: int) -> tuple[Environment, Environment]:
    """Which GPUs the trainer sees, and which its server: the first `ranks`, and the next ones.

    Raises MachineError where there are GPUs but too few for both.
    """
    if not gpus:
        return {}, {}
    if len(gpus) < ranks + wanted:
        left = len(gpus) - wanted
        alone = "generation=vllm_colocate" + (" distributed=single" if ranks > 1 else "")
        raise MachineError(
            Problem(
                f"server and trainer would share a GPU: there are {len(gpus)}",
                "generation.backend",
                f"the trainer takes {ranks}, a server {wanted}; each would take the other's memory",
                f"distributed.num_processes={left}" if left > 0 else alone,
            )
        )
    ours, theirs = gpus[:ranks], gpus[ranks : ranks + wanted]
    return {VISIBLE: ",".join(ours)}, {VISIBLE: ",".join(theirs)}


def apart(gpus: list[str], there: server_file.Server, here: int = 1) -> Environment:
    """The GPUs that a server which runs already leaves to the trainer's `here` processes.

    Raises ConfigError.
    """
    if not gpus or there.alive() is None:  # on another machine
        return {}
    left = [gpu for gpu in gpus if gpu not in there.devices]
    if not left:
        raise ConfigError(
            Problem(
                f"server and trainer would share GPU {', '.join(gpus)}",
                "generation.backend",
                f"the server at {there.url} has {', '.join(there.devices)}",
                "generation=vllm_colocate, or start the server under CUDA_VISIBLE_DEVICES=OTHERS",
            )
        )
    if len(left) < here:
        raise ConfigError(
            Problem(
                f"server and trainer would share a GPU: {len(left)} are left for {here} processes",
                "distributed.num_processes",
                f"the server at {there.url} has {', '.join(there.devices)}",
                f"distributed.num_processes={len(left)}",
            )
        )
    return {VISIBLE: ",".join(left)}


class Watched:
    """One server after the other, until the restarts are used up."""

    def __init__(self, folder: Path, run: RunConfig, env: Environment, note: Callable[[str], None]):
        self.folder, self.run, self.env, self.note = folder, run, env, note
        keys: Any = run.generation
        self.keys = keys.server
        self.process: Process | None = None
        self.answered = False
        self.restarts = 0
        self.due = 0.0  # time.monotonic of the next start
        self.failed = False

    def look(self) -> None:
        """Start it, or see that it is well; returns at once but for the end of a dead one."""
        if self.failed:
            return
        if self.process is None:
            if time.monotonic() >= self.due:
                self._start()
            return
        if not self.answered:
            self.answered = ready(self.process) is not None
        late = time.monotonic() - self.process.began > self.keys.ready_timeout_s
        if self.process.code is not None or (late and not self.answered):
            self._again()

    def _start(self) -> None:
        self.process = start(self.folder, self.run, "train", self.env)
        self.answered = False
        pid = self.process.child.pid
        facts = {"pid": pid, "group": pid, "pid_started": pids.started(pid)}
        if (self.folder / "run.json").exists():  # an evaluation has none
            update_json(self.folder / "run.json", server=facts)

    def _again(self) -> None:
        """It died, or never answered: what is left of it goes, and another may come."""
        assert self.process is not None
        process, self.process = self.process, None
        error = why(process, self.keys.ready_timeout_s)
        stop(process)
        final = isinstance(error, ConfigError | MachineError)
        if final or self.restarts >= self.keys.max_restarts:
            self._give_up(error, process.log)
            return
        self.restarts += 1
        pause = 2.0 ** (self.restarts - 1)  # what killed it may take a moment to pass
        self.due = time.monotonic() + pause
        first = error.problems[0].what
        self.note(
            f"warning: {first}; it is started again in {pause:g} s"
            f" (restart {self.restarts} of {self.keys.max_restarts})"
        )

    def _give_up(self, error: RunError, log: Path) -> None:
        """Tell the trainer, which waits for server.json, that none will come."""
        self.failed = True
        server_file.write_failure(self.folder, "train", error, log)

    def end(self) -> None:
        """End it with all it started, and its server.json."""
        if self.process is not None:
            left = stop(self.process)
            if left:
                self.note(f"warning: processes {', '.join(map(str, left))} would not end")
            self.process = None
        last = server_file.read(self.folder)
        if last is not None and last.by == "train":
            with contextlib.suppress(OSError):
                os.unlink(server_file.place(self.folder))
