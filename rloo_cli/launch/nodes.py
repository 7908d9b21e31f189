"""The node handshake: how a run's launchers on several nodes find each other through files.

Rank 0's launcher makes the run's folder; the others wait for its message, `.go-KEY.json` beside
that folder. Each first writes a file with a random nonce and only accepts a message that answers
it, so files left by a killed start are ignored. A launcher that fails writes its exit code, so that
the others do not wait for it.
"""

import contextlib
import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rloo_cli.config.rules import parse_address
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import preflight, processes
from rloo_cli.launch.topology import ProcessTopology, rank_process_specs
from rloo_cli.utils.errors import GenerationError, MachineError, RunError, refuse
from rloo_cli.utils.files import JsonObject, read_json, write_json

POLL_S = 0.2
EXIT_REPORT_TIMEOUT_S = 15.0  # rank 0's launcher waits for the others to read its exit code
HARMLESS_CODES = (0, 75)  # exit codes with which all launchers end together
NodeMessage = JsonObject
P = TypeVar("P", "NodeCoordinator", "NodeWorker")


def coordinator_file(root: Path, name: str, key: str) -> Path:
    """The message file of rank 0's launcher, for one start (`key`) of one run."""
    digest = hashlib.sha256(f"{name}\n{key}".encode()).hexdigest()[:12]
    return root / f".go-{digest}.json"


def _read_message(path: Path) -> NodeMessage:
    try:
        return read_json(path)
    except (OSError, ValueError):  # removed, or a network file system with a delay
        return {}


class NodeCoordinator:
    """Rank 0's launcher, which instructs and polls the others. Does nothing on a single node."""

    def __init__(self, root: Path, name: str, topology: ProcessTopology):
        self.path = coordinator_file(root, name, topology.launch_id)
        self.num_others, total = topology.num_launchers - 1, topology.world_size
        self.message: NodeMessage = {
            "key": topology.launch_id, "host": platform.node(), "total": total,
        }  # fmt: skip
        self.answered_nonces: dict[str, str] = {}  # another launcher's file -> its nonce
        self.running_nodes: set[str] = set()
        self.new_root = False
        self.exit_code = 0  # how it ended
        if self.num_others:
            with contextlib.suppress(OSError):  # not writable: reported elsewhere
                self.new_root = not root.exists()
                root.mkdir(parents=True, exist_ok=True)
                self._remove_messages()

    def send_message(self, **fields: object) -> None:
        """Add fields to the message that the other launchers read."""
        self.message |= fields
        self._write_message()

    def poll_failure(self) -> int | None:
        """Answer new launchers. -> the exit code of a failed one, or None"""
        if not self.num_others:
            return None
        paths = self.path.parent.glob(f"{self.path.stem}-*.json")
        messages = {p.name: _read_message(p) for p in paths}
        self.running_nodes = {name for name, message in messages.items() if "code" not in message}
        nonces = {name: m["nonce"] for name, m in messages.items() if "nonce" in m}
        if nonces.items() - self.answered_nonces.items():
            self.answered_nonces |= nonces
            self._write_message()
        codes = (message["code"] for message in messages.values() if "code" in message)
        return next((code for code in codes if code not in HARMLESS_CODES), None)

    def report_exit(self, code: int) -> None:
        """Write its exit code, wait until the others have read it, and remove the files."""
        if not self.num_others:
            return
        with contextlib.suppress(OSError):
            self.send_message(code=code)
            limit = time.monotonic() + EXIT_REPORT_TIMEOUT_S
            self.poll_failure()
            while time.monotonic() < limit and (
                self.running_nodes or len(self.answered_nonces) < self.num_others
            ):
                time.sleep(POLL_S)
                self.poll_failure()
            self._remove_messages()
            if self.new_root:
                self.path.parent.rmdir()

    def _write_message(self) -> None:
        if self.num_others:
            answered = sorted(self.answered_nonces.values())
            write_json(self.path, self.message | {"answered": answered})

    def _remove_messages(self) -> None:
        for path in self.path.parent.glob(f"{self.path.stem}*.json"):
            path.unlink(missing_ok=True)


@contextmanager
def _report_exit_code(node: P) -> Iterator[P]:
    """Report this launcher's exit code to the others, also after an error."""
    code = 1
    try:
        yield node
        code = node.exit_code
    except RunError as error:
        code = error.code
        raise
    finally:
        node.report_exit(code)


@contextmanager
def coordinate_nodes(root: Path, name: str, topology: ProcessTopology) -> Iterator[NodeCoordinator]:
    """While inside, the other launchers can reach us, and learn of a refusal."""
    with _report_exit_code(NodeCoordinator(root, name, topology)) as coordinator:
        yield coordinator


class NodeWorker:
    """Another launcher, which waits for rank 0's message. It never touches the run's folder."""

    def __init__(self, root: Path, name: str, topology: ProcessTopology):
        self.coordinator_path = path = coordinator_file(root, name, topology.launch_id)
        self.worker_path = path.with_name(f"{path.stem}-{topology.first_rank}.json")
        self.first_rank, self.nonce = topology.first_rank, secrets.token_hex(8)
        self.exit_code = 0  # how it ended

    def wait_for_message(self, limit: float) -> NodeMessage:
        """Wait for a message with a start command or an exit code.

        Raises GenerationError after `limit` seconds.
        """
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.coordinator_path.parent.is_dir() and not self.worker_path.exists():
                with contextlib.suppress(OSError):  # only rank 0's launcher creates the folder
                    write_json(self.worker_path, {"nonce": self.nonce})
            message = self._read_answered_message()
            if "start" in message or "code" in message:
                return message
            time.sleep(min(POLL_S, limit))
        rank = f"this is the launcher of rank {self.first_rank}"
        what = f"rank 0 did not start within {limit:g} s ({rank})"
        why = f"waited for {self.coordinator_path.absolute()}, written by rank 0's launcher;"
        why += " it died, or root is not on a shared file system"
        fix = "root=FOLDER on a shared file system, or a longer distributed.timeout_s"
        refuse("distributed.timeout_s", what, fix, why, error=GenerationError)

    def poll_failure(self) -> int | None:
        """The exit code of rank 0's launcher, if it has failed."""
        code = self._read_answered_message().get("code", 0)
        return None if code in HARMLESS_CODES else code

    def report_exit(self, code: int) -> None:
        """Write this launcher's exit code, unless rank 0's launcher already knows the failure."""
        with contextlib.suppress(OSError):
            needless = code in HARMLESS_CODES or "code" in self._read_answered_message()
            if needless or not self.coordinator_path.parent.is_dir():
                self.worker_path.unlink(missing_ok=True)
            else:
                write_json(self.worker_path, {"nonce": self.nonce, "code": code})

    def _read_answered_message(self) -> NodeMessage:
        word = _read_message(self.coordinator_path)
        return word if self.nonce in word.get("answered", ()) else {}


@contextmanager
def join_coordinator(root: Path, name: str, topology: ProcessTopology) -> Iterator[NodeWorker]:
    """While inside, rank 0's launcher knows us, and learns of a refusal."""
    with _report_exit_code(NodeWorker(root, name, topology)) as worker:
        yield worker


def run_worker_node(run: RunConfig, topology: ProcessTopology) -> int:
    """Run this node's ranks. -> the exit code. Raises RunError if the node cannot take part."""
    root, name = Path(run.root), str(run.name)
    with join_coordinator(root, name, topology) as worker:
        preflight.check_machine(run, local_ranks=topology.local_world_size)
        message = worker.wait_for_message(run.distributed.timeout_s)
        if "code" in message:  # refused, or nothing to do: rank 0's launcher printed the reason
            worker.exit_code = message["code"]
        else:
            limit = run.distributed.timeout_s
            worker.exit_code = _run_ranks(
                root / name, topology, message, worker.poll_failure, limit
            )
    return worker.exit_code


def _run_ranks(
    folder: Path,
    topology: ProcessTopology,
    message: NodeMessage,
    poll_failure: Callable[[], int | None],
    silence_timeout_s: float,
) -> int:
    total, coordinator_host, host = message["total"], message["host"], platform.node()
    if total != topology.world_size:
        what, key = "nodes disagree on the number of processes", "distributed.num_processes"
        why = f"{coordinator_host} expects {total} in all, {host} {topology.world_size}:"
        why += " one per GPU, and the nodes have different numbers of GPUs"
        refuse(key, what, f"{key}=N", why, error=MachineError)
    store_host, port = parse_address(topology.store_address) or message["store"] or ("", 0)
    env = message["env"] if coordinator_host == host else {}
    specs = add_environment(rank_process_specs(topology, store_host, port, None), env)
    callbacks = processes.ProcessCallbacks(
        is_saving=checkpoint_save_probe(folder), poll_remote_failure=poll_failure,
        silence_timeout_s=silence_timeout_s,
    )  # fmt: skip
    return processes.run_processes("train.worker", [message["start"]], callbacks, specs)


def add_environment(
    specs: list[processes.ProcessSpec], env: Mapping[str, str]
) -> list[processes.ProcessSpec]:
    """The same processes with more variables; existing ones are kept."""
    return [replace(spec, env={**env, **spec.env}) for spec in specs]


def checkpoint_save_probe(folder: Path) -> Callable[[], bool]:
    """A function that checks whether a checkpoint is being written in a run's folder."""
    return lambda: any(folder.glob(".tmp-*"))
