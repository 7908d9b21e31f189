"""The GPUs of this machine, and the processes that hold their memory, by nvidia-smi."""

import csv
import os
import shutil
import subprocess
from dataclasses import dataclass, field

import psutil

from rloo_cli.distributed.device_count import VISIBLE_DEVICES_VARIABLE

MIB = 2**20
SMI_TIMEOUT_S = 4.0
GPU_FIELDS = "index,uuid,name,memory.total,memory.used"
HOLDER_FIELDS = "gpu_uuid,pid,used_memory"


@dataclass(frozen=True)
class MemoryHolder:
    """A process that holds memory of a GPU."""

    pid: int
    used_bytes: float

    def describe_holder(self) -> str:
        """Its pid, owner and command, as far as visible."""
        used = f"{self.used_bytes / 2**30:.3g} GiB"
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                owner, command = process.username(), " ".join(process.cmdline())[:80]
        except psutil.Error:
            return f"process {self.pid}, not visible from here, {used}"
        return f"process {self.pid} of {owner} ({command}), {used}"


@dataclass(frozen=True)
class GpuState:
    """One GPU, and the holders of its memory."""

    index: str
    uuid: str
    name: str
    total_bytes: float
    used_bytes: float
    holders: list[MemoryHolder] = field(default_factory=list)

    @property
    def free_bytes(self) -> float:
        return self.total_bytes - self.used_bytes


def read_gpu_states() -> list[GpuState]:
    """The GPUs that this process can use; [] without nvidia-smi. Raises OSError if it fails."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return []
    holders: dict[str, list[MemoryHolder]] = {}
    for uuid, pid, used in _query(found, "compute-apps", HOLDER_FIELDS):
        if pid.isdigit():
            holders.setdefault(uuid, []).append(MemoryHolder(int(pid), _mebibytes(used)))
    states = [
        GpuState(index, uuid, name, _mebibytes(total), _mebibytes(used), holders.get(uuid, []))
        for index, uuid, name, total, used in _query(found, "gpu", GPU_FIELDS)
    ]
    return [state for state in states if _is_visible(state)]


def _query(program: str, what: str, fields: str) -> list[list[str]]:
    """The rows of one nvidia-smi query. Raises OSError."""
    command = [program, f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {SMI_TIMEOUT_S:g} s") from None
    if said.returncode:
        lines = (said.stdout + said.stderr).strip().splitlines() or ["no output"]
        raise OSError(f"exit code {said.returncode}: {lines[0][:200]}")
    rows = csv.reader(said.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _mebibytes(text: str) -> float:
    """MiB as bytes; 0 for unknown values ([N/A])."""
    return float(text) * MIB if text.replace(".", "").isdigit() else 0.0


def _is_visible(state: GpuState) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, which names GPUs by number or UUID, includes it."""
    chosen = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    if chosen is None:
        return True
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return any(n == state.index or (len(n) > 4 and state.uuid.startswith(n)) for n in names)
