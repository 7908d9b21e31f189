"""Rows that end in every way a row can, for the tests of `bench/gpu_proof.py`. No torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from proof_child import CannotRun
from proof_rows import ProofRow

Facts = dict[str, Any]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def good(device: str, dtype: str, sizes: Facts) -> Facts:
    return {"verdict": "measured", "device": device, "dtype": dtype, **sizes}


def refuted(device: str, dtype: str, sizes: Facts) -> Facts:
    return {"verdict": "refuted", "off": 1.0}


def raises(device: str, dtype: str, sizes: Facts) -> Facts:
    raise ValueError("of its own")


def crashes(device: str, dtype: str, sizes: Facts) -> Facts:
    print("a last word", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs(device: str, dtype: str, sizes: Facts) -> Facts:
    """With a process that has left its session, as an engine's does."""
    code = "import time; time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(sizes["pid"]).write_text(str(left.pid))
    time.sleep(600)
    return {}


def full(device: str, dtype: str, sizes: Facts) -> Facts:
    try:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    except OutOfMemoryError as error:
        raise RuntimeError("what it was wrapped in") from error


def cannot(device: str, dtype: str, sizes: Facts) -> Facts:
    raise CannotRun("not with vLLM 0.22.1: it has no labels")


def row(name: str, work: str, sizes: Facts | None = None, **more: Any) -> ProofRow:
    return ProofRow(name, "", f"proof_fakes:{work}", sizes or {}, sizes or {}, **more)


PID = os.environ.get("PROOF_FAKES_PID", "pid")
ROWS = [
    row("first", "good", {"number": 1}, rehearsal="without what a CPU lacks"),
    row("raises", "raises"),
    row("crashes", "crashes"),
    row("hangs", "hangs", {"pid": PID}, seconds=int(os.environ.get("PROOF_FAKES_LIMIT", 4))),
    row("full", "full"),
    row("cannot", "cannot"),
    row("two GPUs", "good", gpus=2),
    row("a later vLLM", "good", vllm="99.0", lacks="it has no labels"),
    row("another package", "good", packages=("no-such-package",)),
    row("refuted", "refuted"),
    row("untried", "raises", refusal="was never tried"),
    row("last", "good", {"number": 2}),
]
