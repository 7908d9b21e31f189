"""How many processes train, and which of them this one is. Imports no torch."""

import os
import shutil
import subprocess
from pathlib import Path

from rloo_cli.schema import RunConfig


def here(run: RunConfig) -> int:
    """Processes that train on each machine: as the config says, else one per GPU, 1 without."""
    spread = run.distributed
    if spread.engine == "single":
        return 1
    return spread.num_processes or len(gpus()) or 1


def total(run: RunConfig) -> int:
    """Processes that train, over all machines."""
    return here(run) * run.distributed.num_nodes


def gpus() -> list[str]:
    """GPUs visible to this process, as CUDA_VISIBLE_DEVICES or nvidia-smi names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        valid = names[: names.index("-1")] if "-1" in names else names
        return [name for name in valid if name] if Path("/dev/nvidiactl").exists() else []
    if shutil.which("nvidia-smi") is None:
        return sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.split() if said.returncode == 0 else []
