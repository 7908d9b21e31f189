"""Running `rloo` as a user does, in a folder of the test's own: for the command-line tests."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PYTHON = (sys.executable, "-P", "-m", "rloo_cli")
# Reached through a path, so that every process the command starts has it too.
NO_TORCH = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "datasets"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Forbidden())
"""


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Both streams."""
        return self.out + self.err

    @property
    def own_err(self) -> list[str]:
        """Lines of `err`, without that of bitsandbytes: on import it says that it lacks kernels."""
        return [line for line in self.err.splitlines() if "kernels-community" not in line]


@dataclass(frozen=True)
class Rloo:
    """`rloo(*words)` in `folder`, offline, with the session's cache.

    With `forks`, a command whose end is waited for is a fork of a process that has imported
    everything (fork_python); `real` and `start` are processes as a user has them.
    """

    folder: Path
    environment: dict[str, str]
    program: tuple[str, ...] = PYTHON
    forks: dict[str, str] = field(default_factory=dict)

    def __call__(self, *words: str, timeout: float = 300, **variables: str) -> Ended:
        return self.real(*words, timeout=timeout, **(self.forks | variables))

    def real(self, *words: str, timeout: float = 300, **variables: str) -> Ended:
        """The command, where the process itself is what is tested, or what it imports."""
        ended = subprocess.run(
            [*self.program, *words],
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            errors="replace",
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command, still running; its output goes to `folder`/out."""
        with (self.folder / "out").open("w") as out:
            return subprocess.Popen(
                [*self.program, *words],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def left(self) -> list[str]:
        """Everything in the folder but Python's own copies of what it has imported."""
        found = (str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))
        return sorted(path for path in found if "__pycache__" not in path)


def surroundings(base: Path) -> dict[str, str]:
    """The environment of every command: no network, nobody's cache, no colours.

    One thread: two that wait for each other on a busy machine are slower than one.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RLOO_", "HYDRA_"))}
    ours = {"RLOO_CACHE": str(base / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    return kept | ours | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def rloo(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, fast: dict[str, str]) -> Rloo:
    """The command, in an empty folder."""
    forks = {name: fast[name] for name in ("PYTHONPATH", "FORKS")}
    return Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()), forks=forks)


@pytest.fixture
def rloo_without_torch(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rloo]:
    """The command, in an empty folder, where importing torch is an error."""
    environment = surroundings(tmp_path_factory.getbasetemp())
    forbidden = tmp_path_factory.mktemp("no_torch")
    (forbidden / "sitecustomize.py").write_text(NO_TORCH)
    path = os.pathsep.join([str(forbidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    yield Rloo(tmp_path, environment | {"PYTHONPATH": path})


def strict(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of strict JSON: NaN and Infinity are errors."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(p) for p in found.read_text().split()] if found.exists() else []
    return [*direct, *(inner for child in direct for inner in children(child))]
