"""`server.json`: where a rollout server is, and the token that opens it. Only its owner reads it.

A server writes the file into the run's folder once it answers; trainers find it there. A file that
a dead server left is told by the server's process number and the time that process began.
"""

import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli import pids
from rloo_cli.files import write_text

NAME = "server.json"


@dataclass(frozen=True)
class Server:
    """One rollout server that answers, or (`failed`) one that will not any more."""

    url: str
    token: str = field(repr=False)
    pid: int  # of its API process
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

    def alive(self) -> bool | None:
        """Whether its process runs; None on another machine, where nobody can tell from here."""
        if self.host != platform.node():
            return None
        return pids.alive({"pid": self.pid, "pid_started": self.pid_started})


def token() -> str:
    """A new token, of 256 bits."""
    return secrets.token_hex(32)


def write(folder: Path, server: Server) -> None:
    """Write `folder/server.json` whole, with mode 0600."""
    before = os.umask(0o077)
    try:
        write_text(folder / NAME, json.dumps(asdict(server), indent=2) + "\n")
    finally:
        os.umask(before)


def read(folder: Path) -> Server | None:
    """What `folder/server.json` says; None where there is none, or one of another form."""
    try:
        values: dict[str, Any] = json.loads((folder / NAME).read_text())
        return Server(**values)
    except (OSError, ValueError, TypeError):
        return None


def live(folder: Path) -> Server | None:
    """The server of this folder if it may run: on another machine it gets the benefit of doubt."""
    server = read(folder)
    return server if server and not server.failed and server.alive() is not False else None
