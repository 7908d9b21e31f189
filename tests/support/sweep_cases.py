"""`rloo sweep` as a user types it, in a folder of the test's own; its processes start fast."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo

SMOKE = (
    "+recipe=smoke", "eval.max_samples=2", "eval.at_start=false", "logging.samples=0",
    "checkpoint.keep_last=2", "generation.max_completion_length=8",
)  # fmt: skip


@pytest.fixture
def quick(fast: dict[str, str], tmp_path: Path) -> Rloo:
    """The command, in an empty folder."""
    return Rloo(tmp_path, fast)


def facts(rloo: Rloo, name: str = "s", root: str = "runs") -> dict[str, Any]:
    """sweep.json; {} while there is none."""
    path = rloo.folder / root / name / "sweep.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def trials(rloo: Rloo, **of: Any) -> list[dict[str, Any]]:
    """The trials of the sweep `s`."""
    return facts(rloo, **of).get("members", [])
