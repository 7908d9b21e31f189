"""`server.json`: where a rollout server is, and the token that opens it. Only its owner reads it.

A server writes the file into the run's folder once it answers; trainers find it there. A file that
a dead server left is told by the server's process number and the time that process began. Where
several nodes serve one run, RLOO_SERVER_NUMBER says which of them a process is: the second one's
file is `server_2.json`.
"""

import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rloo_cli.utils import child_process
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject, write_text

SERVER_FILE = "server.json"
SERVER_NUMBER_VARIABLE = "RLOO_SERVER_NUMBER"


@dataclass(frozen=True)
class ServerRecord:
    """One rollout server that answers, or (`failed`) one that will not any more."""

    url: str
    token: str = field(repr=False)
    pid: int  # of its first process
    group: int  # process group of everything it started
    pid_started: str
    host: str
    by: str  # train: it belongs to that run's launcher; vllm-serve: somebody started it
    model: str
    dtype: str
    vllm: str  # version
    transfer: str  # gloo, nccl
    devices: list[str]  # GPUs it sees; [] without any
    log: str
    failed: str = ""  # why no server will come any more
    job: str = ""  # Slurm's job and how often it was requeued

    def is_alive(self) -> bool | None:
        """Whether its process runs; None on another machine, where nobody can tell from here."""
        if self.host != platform.node():
            return None
        return child_process.is_process_alive({"pid": self.pid, "pid_started": self.pid_started})

    def is_stale(self) -> bool:
        """Whether it tells of an earlier attempt at our Slurm job, or of a failure in another."""
        ours = slurm_job_attempt()
        same = self.job.partition(".")[0] == ours.partition(".")[0]
        return self.job != ours and (same or bool(self.failed))


def serving_node_number() -> int:
    """Which of a run's serving nodes this is; 1 where nobody says so."""
    return environment_number(SERVER_NUMBER_VARIABLE, 1)


def slurm_job_attempt() -> str:
    """The Slurm job that this process is in, and how often it was requeued; "" outside of one."""
    found = os.environ.get("SLURM_JOB_ID")
    return f"{found}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if found else ""


def server_file_path(folder: Path, node_number: int | None = None) -> Path:
    """The file of a run's n-th serving node; of this one by default."""
    node_number = node_number or serving_node_number()
    return folder / (SERVER_FILE if node_number == 1 else f"server_{node_number}.json")


def server_file_paths(folder: Path) -> list[Path]:
    """Every such file in a folder."""
    return [*folder.glob(SERVER_FILE), *folder.glob("server_*.json")]


def new_server_token() -> str:
    """A new token, of 256 bits."""
    return secrets.token_hex(32)


def write_server_file(folder: Path, record: ServerRecord) -> None:
    """Write this node's `folder/server.json` whole, with mode 0600."""
    before = os.umask(0o077)
    try:
        write_text(server_file_path(folder), json.dumps(asdict(record), indent=2) + "\n")
    finally:
        os.umask(before)


def write_server_failure(folder: Path, by: str, error: RunError, log: Path) -> None:
    """Tell the trainer, which waits for this node's file, that no server will come any more."""
    problem = error.problems[0]
    said = [problem.what, problem.why, problem.fix and f"fix: {problem.fix}"]
    nobody = ServerRecord(
        url="", token="", pid=0, group=0, pid_started="", host="", by=by, model="", dtype="",
        vllm="", transfer="", devices=[], log=str(log),
        failed="\n".join(part for part in said if part), job=slurm_job_attempt(),
    )  # fmt: skip
    write_server_file(folder, nobody)


def read_server_file(folder: Path, node_number: int | None = None) -> ServerRecord | None:
    """What `folder/server.json` says (of the n-th node; else of this one); None where there is
    none, or one of another form."""
    try:
        values: JsonObject = json.loads(server_file_path(folder, node_number).read_text())
        return ServerRecord(**values)
    except (OSError, ValueError, TypeError):
        return None


def running_server(folder: Path) -> ServerRecord | None:
    """The server of this folder if it may run: on another machine it gets the benefit of doubt."""
    server = read_server_file(folder)
    return server if server and not server.failed and server.is_alive() is not False else None
