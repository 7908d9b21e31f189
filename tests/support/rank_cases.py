"""Launchers of ranks that are not real (`fake_rank`): started, watched, asked how they ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_cases import surroundings

from rloo_cli.utils.child_process import process_start_time

HERE = Path(__file__).parent
# Every process that imports the worker gets the fake one.
INSTEAD = """
import sys
import fake_rank
sys.modules["rloo_cli.train.worker"] = fake_rank
"""
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[str]
    folder: Path
    out: Path
    began: float  # time.monotonic

    def rank(self, number: int, limit: float = 150) -> dict[str, Any]:
        """What a rank has written about itself, once it has."""
        path, end = self.folder / f"rank_{number}.json", time.monotonic() + limit
        while not path.exists():
            assert time.monotonic() < end and self.process.poll() is None, self.said()
            time.sleep(0.02)
        return self.facts(number)

    def facts(self, number: int) -> dict[str, Any]:
        """The same, from one that may have ended."""
        found: dict[str, Any] = json.loads((self.folder / f"rank_{number}.json").read_text())
        return found

    def code(self, limit: float = 150) -> int:
        """Its exit code."""
        return self.process.wait(limit)

    def said(self) -> str:
        """What it has printed."""
        return self.out.read_text()


@dataclass
class Launchers:
    """`launchers(plans)` starts one; whatever is left of them is ended with the test."""

    folder: Path
    env: dict[str, str]
    running: list[Launched]

    def __call__(self, plans: Mapping[int, str], limits: Mapping[str, Any] | None = None) -> Any:
        """A launcher of so many fake ranks, without any config."""
        words = [str(HERE / "fake_rank.py"), str(len(plans)), json.dumps(limits or {})]
        return self.start(words, plans)

    def train(self, *words: str, plans: Mapping[int, str], **variables: str) -> Launched:
        """`rloo train +recipe=smoke WORDS`, with fake workers."""
        command = ["-m", "rloo_cli", "train", "+recipe=smoke", *words]
        return self.start(command, plans, **variables)

    def start(self, words: list[str], plans: Mapping[int, str], **variables: str) -> Launched:
        """Python with these words."""
        got = {"FAKE_RANKS": json.dumps(plans), "FAKE_FOLDER": str(self.folder / "ranks")}
        out = self.folder / f"out_{len(self.running)}"
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", *words],
                cwd=self.folder / "work",
                env=self.env | got | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        began = time.monotonic()
        self.running.append(Launched(process, self.folder / "ranks", out, began))
        return self.running[-1]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Launchers in an empty folder."""
    for name in ("ranks", "work", "instead"):
        (tmp_path / name).mkdir()
    (tmp_path / "instead" / "sitecustomize.py").write_text(INSTEAD)
    env = {k: v for k, v in surroundings(tmp_path).items() if not k.startswith("SLURM_")}
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(tmp_path / "instead"), str(HERE), *([given] if given else [])])
    kept = {k: v for k, v in env.items() if k not in OURS} | {"PYTHONPATH": path}
    made = Launchers(tmp_path, kept, [])
    yield made
    for launched in made.running:
        launched.process.kill()
        launched.process.wait()


def gone(*pids: int, limit: float = 5) -> bool:
    """Whether these processes are gone within some seconds."""
    end = time.monotonic() + limit
    while any(process_start_time(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
