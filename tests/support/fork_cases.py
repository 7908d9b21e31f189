"""`rloo` with its worker forked from a process that is ready: for tests that need many."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_cases import surroundings

from rloo_cli.cli import main
from rloo_cli.launch import processes

SERVER = Path(__file__).with_name("fork_server.py")


@dataclass
class Forked:
    """`forked(*words, faults=..., ranks=...)` is `rloo(*words)` in `folder`; the exit code."""

    server: subprocess.Popen[str]
    folder: Path

    def __call__(
        self, *words: str, faults: str = "", ranks: int = 0, env: dict[str, str] | None = None
    ) -> int:
        armed = {"RLOO_FAULTS": faults, "RLOO_ALLOW_FAULTS": "1"} | (env or {})

        def run(module: str, words: list[str], *looked_after: object) -> int:
            out = str(self.folder / "out")
            job = {
                "module": module,
                "words": words,
                "cwd": str(self.folder),
                "env": armed,
                "out": out,
                "ranks": ranks,
            }
            assert self.server.stdin and self.server.stdout
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            code = int(self.server.stdout.readline())
            return code if code >= 0 else 6

        with (
            contextlib.chdir(self.folder),
            mock.patch.object(processes, "run", run),
            mock.patch.dict(os.environ, armed),
            contextlib.redirect_stdout(io.StringIO()) as said,
            contextlib.redirect_stderr(said),
        ):
            code = main.dispatch([*words])
        with (self.folder / "out").open("a") as out:
            out.write(said.getvalue())
        return code

    def said(self) -> str:
        """Everything that was said since the last time this was asked."""
        path = self.folder / "out"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text


def on_ranks(server: "subprocess.Popen[str]", folder: Path, spec: str, ranks: int = 2) -> list[Any]:
    """What a test module's function ("file.py:function", of a World) returns on each rank."""
    out = folder / "out"
    job = {
        "module": "rank_job", "words": [str(folder), spec], "cwd": str(folder), "env": {},
        "out": str(out), "ranks": ranks,
    }  # fmt: skip
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    assert code == 0, out.read_text()
    return [json.loads((folder / f"rank_{n}.json").read_text()) for n in range(ranks)]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process that is ready."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER)],
        env=surroundings(tmp_path_factory.getbasetemp()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def forked(fork_server: subprocess.Popen[str], tmp_path: Path) -> Forked:
    """The command, in an empty folder."""
    return Forked(fork_server, tmp_path)
