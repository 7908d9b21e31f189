"""`rloo sweep` as a user types it, in a folder of the test's own; its processes start fast."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo, surroundings

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-P", "-m", "rloo_cli")
SITE = "import fork_python\nfork_python.stand_in()\n"
SMOKE = (
    "+recipe=smoke", "eval.max_samples=2", "eval.at_start=false", "logging.samples=0",
    "checkpoint.keep_last=2", "generation.max_completion_length=8",
)  # fmt: skip


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `rloo` and its workers are forks."""
    base, site = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SITE)
    given = os.environ.get("PYTHONPATH")
    env = surroundings(base)
    env["PYTHONPATH"] = os.pathsep.join([str(site), str(HERE), *([given] if given else [])])
    with tempfile.TemporaryDirectory(prefix="forks-") as place:  # a socket's path is short
        env["FORKS"] = f"{place}/socket"
        process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "fork_python.py"), env["FORKS"]],
            env=env | {"PYTHONPATH": env["PYTHONPATH"]},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield env
        process.kill()
        process.wait()


@pytest.fixture
def quick(fast: dict[str, str], tmp_path: Path) -> Rloo:
    """The command, in an empty folder."""
    return Rloo(tmp_path, fast, PYTHON)


def facts(rloo: Rloo, name: str = "s", root: str = "runs") -> dict[str, Any]:
    """sweep.json; {} while there is none."""
    path = rloo.folder / root / name / "sweep.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def until(done: Callable[[], Any], process: subprocess.Popen[str], limit: float = 120) -> Any:
    """What `done` gives once it is true; the process must live that long."""
    end = time.monotonic() + limit
    while not (found := done()):
        assert process.poll() is None and time.monotonic() < end, "it ended, or took too long"
        time.sleep(0.02)
    return found


def members(rloo: Rloo, **of: Any) -> list[dict[str, Any]]:
    """The members of the sweep `s`."""
    return facts(rloo, **of).get("members", [])
