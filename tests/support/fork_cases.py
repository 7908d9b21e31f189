"""`rloo` with its worker forked from a process that is ready: for tests that need many."""

import contextlib
import fcntl
import io
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_cases import surroundings
from fork_python import ask

from rloo_cli.cli import main
from rloo_cli.launch import processes
from rloo_cli.utils import fault_injection

HERE = Path(__file__).parent
SITE = "import fork_python\nfork_python.stand_in()\n"


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `rloo` and its workers are forks of one process.

    All processes of a session of tests share it; it ends with the last of them.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SITE)
    given = os.environ.get("PYTHONPATH")
    env = surroundings(base)
    env["PYTHONPATH"] = os.pathsep.join([str(site), str(HERE), *([given] if given else [])])
    got = shared / "forks"
    with (shared / "forks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not got.exists():
            process = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "fork_python.py")],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert process.stdout
            got.write_text(process.stdout.readline().strip())
        env["FORKS"] = got.read_text()
        lease = ask({"what": "lease", "env": env}, [0, 1, 2])
        assert lease.recv(1) == b"0"
    with lease:
        yield env


@dataclass
class Forked:
    """`forked(*words, faults=..., ranks=...)` is `rloo(*words)` in `folder`; the exit code."""

    env: dict[str, str]
    folder: Path

    def __call__(
        self, *words: str, faults: str = "", ranks: int = 0, env: dict[str, str] | None = None
    ) -> int:
        armed = {"RLOO_FAULTS": faults, "RLOO_ALLOW_FAULTS": "1"} | (env or {})

        def run(module: str, words: list[str], *looked_after: object) -> int:
            code = ended(self.env | armed, self.folder, f"rloo_cli.{module}", words, ranks)
            return code if code >= 0 else 6

        try:
            with (
                contextlib.chdir(self.folder),
                mock.patch.object(processes, "run_processes", run),
                mock.patch.dict(os.environ, armed),
                contextlib.redirect_stdout(io.StringIO()) as said,
                contextlib.redirect_stderr(said),
            ):
                code = main.find_verb([*words])()
        finally:
            fault_injection.arm_faults()  # the launcher has armed them in this process, too
        with (self.folder / "out").open("a") as out:
            out.write(said.getvalue())
        return code

    def said(self) -> str:
        """Everything that was said since the last time this was asked."""
        path = self.folder / "out"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text


def ended(env: dict[str, str], folder: Path, module: str, words: list[str], ranks: int) -> int:
    """The exit code (-N: killed by signal N) of the fork that ended first of those that did not end
    with 0; what they say goes to `folder`/out."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(folder / "out", flags)
    said: dict[socket.socket, bytes] = {}
    for rank in of_ranks(ranks):
        job = {"what": module, "words": words, "cwd": str(folder), "env": env | rank}
        said[ask(job, [nothing, out, out])] = b""
    os.close(nothing)
    os.close(out)
    codes = []
    with selectors.DefaultSelector() as ready:
        for end in said:
            ready.register(end, selectors.EVENT_READ)
        while said:
            for key, _ in ready.select():
                end: Any = key.fileobj
                said[end] += (part := end.recv(100))
                if not part or said[end].count(b"\n") == 2:  # its pid, and its code
                    ready.unregister(end)
                    codes.append(int(said.pop(end).split()[1]))
                    end.close()
    return next((code for code in codes if code), 0)


def of_ranks(count: int) -> list[dict[str, str]]:
    """What the environment of each rank says; of none where there is one process."""
    if not count:
        return [{}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    all_of = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # ranks that meet in another order are an error
    }  # fmt: skip
    return [{"RANK": str(n), "LOCAL_RANK": str(n), **all_of} for n in range(count)]


def on_ranks(env: dict[str, str], folder: Path, spec: str, ranks: int = 2) -> list[Any]:
    """What a test module's function ("file.py:function", of a World) returns on each rank."""
    code = ended(env, folder, "rank_job", [str(folder), spec], ranks)
    assert code == 0, (folder / "out").read_text()
    return [json.loads((folder / f"rank_{n}.json").read_text()) for n in range(ranks)]


@pytest.fixture
def forked(fast: dict[str, str], tmp_path: Path) -> Forked:
    """The command, in an empty folder."""
    return Forked(fast, tmp_path)
