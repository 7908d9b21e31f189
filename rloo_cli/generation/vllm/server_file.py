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
from typing import Any

from rloo_cli.utils import pids
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import write_text

NAME = "server.json"
NUMBER = "RLOO_SERVER_NUMBER"


@dataclass(frozen=True)
class Server:
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

    def alive(self) -> bool | None:
        """Whether its process runs; None on another machine, where nobody can tell from here."""
        if self.host != platform.node():
            return None
        return pids.alive({"pid": self.pid, "pid_started": self.pid_started})

    def stale(self) -> bool:
        """Whether it tells of an earlier attempt at our Slurm job, or of a failure in another."""
        ours = job()
        same = self.job.partition(".")[0] == ours.partition(".")[0]
        return self.job != ours and (same or bool(self.failed))


def number() -> int:
    """Which of a run's serving nodes this is; 1 where nobody says so."""
    return environment_number(NUMBER, 1)


def job() -> str:
    """The Slurm job that this process is in, and how often it was requeued; "" outside of one."""
    found = os.environ.get("SLURM_JOB_ID")
    return f"{found}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if found else ""


def place(folder: Path, of: int | None = None) -> Path:
    """The file of a run's n-th serving node; of this one by default."""
    of = of or number()
    return folder / (NAME if of == 1 else f"server_{of}.json")


def places(folder: Path) -> list[Path]:
    """Every such file in a folder."""
    return [*folder.glob(NAME), *folder.glob("server_*.json")]


def token() -> str:
    """A new token, of 256 bits."""
    return secrets.token_hex(32)


def write(folder: Path, server: Server) -> None:
    """Write this node's `folder/server.json` whole, with mode 0600."""
    before = os.umask(0o077)
    try:
        write_text(place(folder), json.dumps(asdict(server), indent=2) + "\n")
    finally:
        os.umask(before)


def write_failure(folder: Path, by: str, error: RunError, log: Path) -> None:
    """Tell the trainer, which waits for this node's file, that no server will come any more."""
    problem = error.problems[0]
    said = [problem.what, problem.why, problem.fix and f"fix: {problem.fix}"]
    nobody = Server(
        url="", token="", pid=0, group=0, pid_started="", host="", by=by, model="", dtype="",
        vllm="", transfer="", devices=[], log=str(log),
        failed="\n".join(part for part in said if part), job=job(),
    )  # fmt: skip
    write(folder, nobody)


def read(folder: Path, of: int | None = None) -> Server | None:
    """What `folder/server.json` says (of the n-th node; else of this one); None where there is
    none, or one of another form."""
    try:
        values: dict[str, Any] = json.loads(place(folder, of).read_text())
        return Server(**values)
    except (OSError, ValueError, TypeError):
        return None


def live(folder: Path) -> Server | None:
    """The server of this folder if it may run: on another machine it gets the benefit of doubt."""
    server = read(folder)
    return server if server and not server.failed and server.alive() is not False else None
