"""`server.json`: a rollout server's address and token. Only the file's owner can read it.

A server writes the file into the run's folder once it answers; trainers find it there. The pid and
the start time of that process show whether the server that wrote the file is still running. If
several nodes serve one run, RLOO_SERVER_NUMBER is the number of this one: the file of the second
node is `server_2.json`.
"""

import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rloo_cli.utils import child_process
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import write_text

SERVER_FILE = "server.json"
SERVER_NUMBER_VARIABLE = "RLOO_SERVER_NUMBER"


@dataclass(frozen=True)
class ServerRecord:
    """A rollout server that answers, or (`failed`) one that will not be restarted."""

    url: str
    token: str = field(repr=False)
    pid: int  # of its first process
    group: int  # process group of everything it started
    pid_started: str
    host: str
    by: str  # train: the run's launcher started it; vllm-serve: the user did
    model: str
    dtype: str
    vllm: str  # version
    transfer: str  # gloo, nccl
    devices: list[str]  # its GPUs, by UUID; [] if none
    log: str
    failed: str = ""  # why it will not start
    job: str = ""  # id of the Slurm job, and its requeue count

    def is_alive(self) -> bool | None:
        """Whether its process runs; None if unknown because it is on another machine."""
        if self.host != platform.node():
            return None
        return child_process.is_process_alive({"pid": self.pid, "pid_started": self.pid_started})

    def is_stale(self) -> bool:
        """Whether it belongs to an earlier attempt of our Slurm job, or failed in another job."""
        ours = slurm_job_attempt()
        same_job = self.job.partition(".")[0] == ours.partition(".")[0]
        return self.job != ours and (same_job or bool(self.failed))


RECORD = TypeAdapter(ServerRecord)


def serving_node_number() -> int:
    """The number of this serving node in its run; 1 if RLOO_SERVER_NUMBER is not set."""
    return environment_number(SERVER_NUMBER_VARIABLE, 1)


def slurm_job_attempt() -> str:
    """This process's Slurm job and requeue count, as JOB.COUNT; "" without a job."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if job else ""


def server_file_path(folder: Path, node_number: int | None = None) -> Path:
    """The file of a run's serving node number `node_number`; None: of this node."""
    node_number = node_number or serving_node_number()
    return folder / (SERVER_FILE if node_number == 1 else f"server_{node_number}.json")


def server_file_paths(folder: Path) -> list[Path]:
    """The files of all serving nodes in a run's folder."""
    return [*folder.glob(SERVER_FILE), *folder.glob("server_*.json")]


def new_server_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_hex(32)


def write_server_file(folder: Path, record: ServerRecord) -> None:
    """Write this node's `folder/server.json` atomically, with mode 0600."""
    before = os.umask(0o077)
    try:
        write_text(server_file_path(folder), json.dumps(asdict(record), indent=2) + "\n")
    finally:
        os.umask(before)


def write_server_failure(folder: Path, by: str, error: RunError, log: Path) -> None:
    """Report to the trainer, which waits for this node's file, that no server will start."""
    problem = error.problems[0]
    message = [problem.what, problem.why, problem.fix and f"fix: {problem.fix}"]
    record = ServerRecord(
        url="", token="", pid=0, group=0, pid_started="", host="", by=by, model="", dtype="",
        vllm="", transfer="", devices=[], log=str(log),
        failed="\n".join(part for part in message if part), job=slurm_job_attempt(),
    )  # fmt: skip
    write_server_file(folder, record)


def read_server_file(folder: Path, node_number: int | None = None) -> ServerRecord | None:
    """The content of a serving node's file (`server_file_path`); None if it is missing or
    not valid."""
    try:
        return RECORD.validate_json(server_file_path(folder, node_number).read_bytes(), strict=True)
    except (OSError, ValueError):
        return None


def running_server(folder: Path) -> ServerRecord | None:
    """The server of this folder, if it runs; one on another machine is assumed to run."""
    server = read_server_file(folder)
    return server if server and not server.failed and server.is_alive() is not False else None
