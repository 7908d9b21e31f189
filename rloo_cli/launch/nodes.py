"""How launchers of one run that were started side by side come to an agreement: through files.

Rank 0's launcher makes the run's folder; the others wait for its word, `.go-KEY.json` beside the
run's folder. Each of them first writes a word of its own with a number drawn for the occasion, and
believes only what answers that number: files of a start that was killed say nothing. Whoever ends
wrongly writes its code, so that nobody waits for one who has gone.
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
from typing import Any, TypeVar

from rloo_cli.config.rules import parse_address
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import preflight, processes
from rloo_cli.launch.topology import ProcessTopology, rank_process_specs
from rloo_cli.utils.errors import GenerationError, MachineError, Problem, RunError
from rloo_cli.utils.files import JsonObject, read_json, write_json

POLL_S = 0.2
EXIT_REPORT_TIMEOUT_S = (
    15.0  # the first one waits so long for the others to have heard how it ended
)
HARMLESS_CODES = (0, 75)  # all of them end so together
NodeMessage = JsonObject
P = TypeVar("P", "NodeCoordinator", "NodeWorker")


def coordinator_file(root: Path, name: str, key: str) -> Path:
    """Where rank 0's launcher says what it does, for one start of one run."""
    digest = hashlib.sha256(f"{name}\n{key}".encode()).hexdigest()[:12]
    return root / f".go-{digest}.json"


def _read_message(path: Path) -> NodeMessage:
    try:
        return read_json(path)
    except (OSError, ValueError):  # taken away, or a network's file system that is behind
        return {}


class NodeCoordinator:
    """Rank 0's launcher: says what to do, hears how the others fare. Alone, it does nothing."""

    def __init__(self, root: Path, name: str, topology: ProcessTopology):
        self.path, self.num_others = (
            coordinator_file(root, name, topology.launch_id),
            topology.num_launchers - 1,
        )
        self.message: NodeMessage = {
            "key": topology.launch_id,
            "host": platform.node(),
            "total": topology.world_size,
        }
        self.answered_nonces: dict[str, str] = {}  # file -> the number in it
        self.running_nodes: set[str] = set()
        self.new_root = False
        self.exit_code = 0  # how it ended
        if self.num_others:
            with contextlib.suppress(OSError):  # it cannot be written: that is said elsewhere
                self.new_root = not root.exists()
                root.mkdir(parents=True, exist_ok=True)
                self._remove_messages()

    def send_message(self, **fields: Any) -> None:
        """Tell the others."""
        self.message |= fields
        self._write_message()

    def poll_failure(self) -> int | None:
        """Answer those who came; the code of one that ended wrongly."""
        if not self.num_others:
            return None
        words = {
            p.name: _read_message(p) for p in self.path.parent.glob(f"{self.path.stem}-*.json")
        }
        self.running_nodes = {name for name, word in words.items() if "code" not in word}
        new = {name: word["nonce"] for name, word in words.items() if "nonce" in word}
        if new.items() - self.answered_nonces.items():
            self.answered_nonces |= new
            self._write_message()
        codes = (word["code"] for word in words.values() if "code" in word)
        return next((code for code in codes if code not in HARMLESS_CODES), None)

    def report_exit(self, code: int) -> None:
        """Say how it ended, let the others hear it, and take the files away."""
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
            write_json(
                self.path, self.message | {"answered": sorted(self.answered_nonces.values())}
            )

    def _remove_messages(self) -> None:
        for path in self.path.parent.glob(f"{self.path.stem}*.json"):
            path.unlink(missing_ok=True)


@contextmanager
def _report_exit_code(node: P) -> Iterator[P]:
    """The others hear with which code this one parts, or that an error of ours ended it."""
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
    """While inside, the others can hear us; they are told if it ends in a refusal."""
    with _report_exit_code(NodeCoordinator(root, name, topology)) as leader:
        yield leader


class NodeWorker:
    """Another launcher: waits for the word of rank 0's. It never touches the run's folder."""

    def __init__(self, root: Path, name: str, topology: ProcessTopology):
        self.coordinator_path = coordinator_file(root, name, topology.launch_id)
        self.worker_path = self.coordinator_path.with_name(
            f"{self.coordinator_path.stem}-{topology.first_rank}.json"
        )
        self.first_rank, self.nonce = topology.first_rank, secrets.token_hex(8)
        self.exit_code = 0  # how it ended

    def wait_for_message(self, limit: float) -> NodeMessage:
        """The word that says what to do, or a code. Raises GenerationError after `limit` s."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.coordinator_path.parent.is_dir() and not self.worker_path.exists():
                with contextlib.suppress(OSError):  # rank 0's launcher makes the folder, not we
                    write_json(self.worker_path, {"nonce": self.nonce})
            word = self._read_answered_message()
            if "start" in word or "code" in word:
                return word
            time.sleep(min(POLL_S, limit))
        raise GenerationError(
            Problem(
                f"rank 0 did not begin in {limit:g} s (this is the launcher of rank "
                f"{self.first_rank})",
                "distributed.timeout_s",
                f"waited for {self.coordinator_path.absolute()}, which rank 0's launcher "
                "writes; it died, or"
                " root is not on a disk that all nodes share",
                "root=FOLDER that every node sees, or a longer distributed.timeout_s",
            )
        )

    def poll_failure(self) -> int | None:
        """The code of rank 0's launcher, if it has ended wrongly."""
        code = self._read_answered_message().get("code", 0)
        return None if code in HARMLESS_CODES else code

    def report_exit(self, code: int) -> None:
        """Say how it ended."""
        with contextlib.suppress(OSError):
            if (
                code in HARMLESS_CODES
                or "code" in self._read_answered_message()
                or not self.coordinator_path.parent.is_dir()
            ):
                self.worker_path.unlink(missing_ok=True)
            else:
                write_json(self.worker_path, {"nonce": self.nonce, "code": code})

    def _read_answered_message(self) -> NodeMessage:
        word = _read_message(self.coordinator_path)
        return word if self.nonce in word.get("answered", ()) else {}


@contextmanager
def join_coordinator(root: Path, name: str, topology: ProcessTopology) -> Iterator[NodeWorker]:
    """While inside, rank 0's launcher knows of us; it is told if we are refused."""
    with _report_exit_code(NodeWorker(root, name, topology)) as follower:
        yield follower


def run_worker_node(run: RunConfig, topology: ProcessTopology) -> int:
    """Do our part of a run; its exit code. Raises RunError where we cannot take part."""
    root, name = Path(run.root), str(run.name)
    with join_coordinator(root, name, topology) as follower:
        preflight.check_machine(run, local_ranks=topology.local_world_size)
        word = follower.wait_for_message(run.distributed.timeout_s)
        if "code" in word:  # refused, or there was nothing to do: rank 0's launcher has said why
            follower.exit_code = word["code"]
        else:
            follower.exit_code = _run_ranks(root / name, topology, word, follower.poll_failure)
    return follower.exit_code


def _run_ranks(
    folder: Path,
    topology: ProcessTopology,
    message: JsonObject,
    poll_failure: Callable[[], int | None],
) -> int:
    if message["total"] != topology.world_size:
        why = (
            f"on {message['host']} there are to be {message['total']} in all, on {platform.node()}"
        )
        raise MachineError(
            Problem(
                "nodes do not agree how many processes train",
                "distributed.num_processes",
                f"{why} {topology.world_size}: one per GPU, and the nodes have not as many",
                "distributed.num_processes=N",
            )
        )
    host, port = parse_address(topology.store_address) or message["store"] or ("", 0)
    env = message["env"] if message["host"] == platform.node() else {}
    starts = add_environment(rank_process_specs(topology, host, port, None), env)
    watch = processes.ProcessCallbacks(
        is_saving=checkpoint_save_probe(folder), poll_remote_failure=poll_failure
    )
    return processes.run_processes("train.worker", [message["start"]], watch, starts)


def add_environment(
    specs: list[processes.ProcessSpec], env: Mapping[str, str]
) -> list[processes.ProcessSpec]:
    """The same processes, with more in their environment."""
    return [replace(start, env={**env, **start.env}) for start in specs]


def checkpoint_save_probe(folder: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written there."""
    return lambda: any(folder.glob(".tmp-*"))
