"""How many processes train, and which of them this one is. Imports no torch."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rloo_cli.config.schema import DistributedConfig, GenerationConfig

VISIBLE_DEVICES_VARIABLE, DEVICE_ORDER_VARIABLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def local_process_count(spread: DistributedConfig, generation: GenerationConfig) -> int:
    """Processes that train on each machine: set by the config, else one per GPU that the run's own
    rollout server leaves, 1 without GPUs."""
    if spread.engine == "single":
        return 1
    return spread.num_processes or max(1, len(visible_gpus()) - local_server_gpus(generation))


def local_server_gpus(generation: GenerationConfig) -> int:
    """GPUs of a rollout server that this run starts besides its trainer; 0 if it starts none:
    another backend, a server elsewhere, separate serving nodes."""
    keys: Any = generation.own_keys
    if not generation.is_server or keys.base_url is not None or keys.num_nodes:
        return 0
    return gpus_per_server(generation)


def gpus_per_server(generation: GenerationConfig) -> int:
    """GPUs that one rollout server of this run uses, wherever it is."""
    keys: Any = generation.own_keys
    size: int = keys.tensor_parallel_size * keys.data_parallel_size
    return size


def hidden_gpu_evidence() -> str:
    """Evidence that this machine has GPUs, for an error if torch sees none; "" = none, or
    they are hidden on purpose (CUDA_VISIBLE_DEVICES is empty or -1)."""
    if os.environ.get(VISIBLE_DEVICES_VARIABLE) in ("", "-1"):
        return ""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if given.isdigit() and int(given):
        return f"SLURM_GPUS_ON_NODE={given}"
    return "/dev/nvidiactl exists" if Path("/dev/nvidiactl").exists() else ""


@cache
def _nvidia_smi_gpus(path: str) -> tuple[str, ...]:
    """The GPUs that nvidia-smi lists. It takes up to a second, and a run asks several times."""
    query = [path, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(said.stdout.split()) if said.returncode == 0 else ()


def visible_gpus() -> list[str]:
    """GPUs visible to this process, as CUDA_VISIBLE_DEVICES or nvidia-smi names them."""
    chosen = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    if chosen == "NoDevFiles":  # an older Slurm's value for none
        return []
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        valid = names[: names.index("-1")] if "-1" in names else names
        return [name for name in valid if name] if Path("/dev/nvidiactl").exists() else []
    if (found := shutil.which("nvidia-smi")) is None:
        return sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    return list(_nvidia_smi_gpus(found))


def gpu_uuids(gpus: Sequence[str]) -> list[str]:
    """The UUIDs, by nvidia-smi, of the GPUs in `visible_gpus`.

    A name that it does not list is unchanged. UUIDs of different machines differ.
    """
    listed = _listed_gpus()
    numbered = {str(number): uuid for number, uuid in enumerate(listed)}
    return [
        numbered.get(gpu) or next((u for u in listed if gpu and u.startswith(gpu)), gpu)
        for gpu in gpus
    ]


def _listed_gpus() -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    return _nvidia_smi_gpus(tool) if tool is not None else ()


def numbered_gpu_environment(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that show a process these GPUs by number, for a program without UUID support.

    nvidia-smi numbers GPUs by PCI bus order, CUDA only on request. A name
    that nvidia-smi does not list is unchanged.
    """
    listed = _listed_gpus()
    numbers = {g: i for g in gpus for i, uuid in enumerate(listed) if g and uuid.startswith(g)}
    shown = {VISIBLE_DEVICES_VARIABLE: ",".join(str(numbers.get(gpu, gpu)) for gpu in gpus)}
    return shown | ({DEVICE_ORDER_VARIABLE: "PCI_BUS_ID"} if numbers else {})
