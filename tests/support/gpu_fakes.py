"""Rows that end in every way a row can, for the tests of `bench/gpu.py`. No torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_table import CannotRun, GpuRow

Facts = dict[str, Any]


def measures(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    yield {"verdict": "measured", "device": device, "dtype": dtype, **sizes}


def refutes(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    yield {"verdict": "refuted", "off": 1.0}


def raises(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    yield {"verdict": "measured", "half": 1}
    raise ValueError("of its own")


def crashes(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    yield {"verdict": "measured", "half": 1}
    print("a last word", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """Two rounds, then a process that has left its session, as an engine's does, and no end."""
    yield {"verdict": "measured", "half": 1}
    yield {"verdict": "confirmed", "half": 2}
    code = "import time; time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(os.environ["GPU_FAKES_PID"]).write_text(f"{left.pid} {os.getpid()} ")
    time.sleep(600)


def cannot(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    raise CannotRun("TRL does not fit")
    yield {}


def fake_row(name: str, work: str, sizes: Facts | None = None, **more: Any) -> GpuRow:
    return GpuRow(name, "does it", f"gpu_fakes:{work}", sizes or {}, code=(), **more)


ROWS = [
    fake_row("first", "measures", {"number": 1}, rehearsal="without what a CPU lacks"),
    fake_row("raises", "raises"),
    fake_row("crashes", "crashes"),
    fake_row("hangs", "hangs", seconds=int(os.environ.get("GPU_FAKES_LIMIT", "3"))),
    fake_row("cannot", "cannot"),
    fake_row("two GPUs", "measures", gpus=2),
    fake_row("a later vLLM", "measures", vllm="99.0"),
    fake_row("another package", "measures", packages=("no-such-package",)),
    fake_row("refuted", "refutes"),
    fake_row("untried", "raises", {"other": 1}, refusal="was never tried"),
    fake_row("like first", "measures", {"number": 1}),
    fake_row("last", "measures", {"number": 2}),
]
