"""The rollout server that belongs to a run: started beside its worker, watched, started again when
it dies, ended with the run. Imports no torch.

A server that `rloo vllm-serve` started for the same run is used instead, and left as it is; where
nodes of their own serve (`generation.server.num_nodes`), the trainer waits for theirs.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_cli.utils import pids
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch import rollout_server
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, RunError
from rloo_cli.utils.files import update_json
from rloo_cli.distributed.device_count import VISIBLE, wanted_by_server
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation.vllm import arguments

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
        self.process: rollout_server.Process | None = None
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
            self.answered = rollout_server.ready(self.process) is not None
        late = time.monotonic() - self.process.began > self.keys.ready_timeout_s
        if self.process.code is not None or (late and not self.answered):
            self._again()

    def _start(self) -> None:
        self.process = rollout_server.start(self.folder, self.run, "train", self.env)
        self.answered = False
        pid = self.process.child.pid
        facts = {"pid": pid, "group": pid, "pid_started": pids.started(pid)}
        if (self.folder / "run.json").exists():  # an evaluation has none
            update_json(self.folder / "run.json", server=facts)

    def _again(self) -> None:
        """It died, or never answered: what is left of it goes, and another may come."""
        assert self.process is not None
        process, self.process = self.process, None
        error = rollout_server.why(process, self.keys.ready_timeout_s)
        rollout_server.stop(process)
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
            left = rollout_server.stop(self.process)
            if left:
                self.note(f"warning: processes {', '.join(map(str, left))} would not end")
            self.process = None
        last = server_file.read(self.folder)
        if last is not None and last.by == "train":
            with contextlib.suppress(OSError):
                os.unlink(server_file.place(self.folder))
