"""The devices of a run: memory, speed, and the network between them.

Speeds are what programs reach, not data sheet values: 788 TFLOP/s and 4.3 TB/s were measured on one
H200 (docs/results/speed.md); the others are four fifths and nine tenths of their data sheets
(`distributed/device_peaks.py`). CPU speeds are measured with torch's own product: libraries differ
by half on the same CPU.
"""

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rloo_cli.distributed import device_count
from rloo_cli.distributed.device_peaks import DEVICE_PEAKS, DevicePeaks, find_device_kind
from rloo_cli.utils.errors import refuse

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class SpeedShares:
    """The shares of a device's speeds that a run reaches: sampling, passes without, with grad."""

    decode: float = 0.60
    no_grad: float = 0.55
    grad: float = 0.45


@dataclass(frozen=True)
class Device:
    """One GPU, or one process's share of a CPU's time and all of its memory."""

    name: str
    memory_bytes: float
    flops_per_s: float  # of matrix products in the weights' dtype
    bytes_per_s: float  # of its memory
    intra_node_bytes_per_s: float = 450e9  # between GPUs of one machine
    inter_node_bytes_per_s: float = 50e9  # per GPU, between machines: 400 Gb/s
    kind: str = "cuda"
    source: str = ""
    shares: SpeedShares = SpeedShares()

    @property
    def reserved_bytes(self) -> float:
        """Bytes not available for tensors: CUDA, NCCL, fragmentation."""
        is_gpu, memory = self.kind == "cuda", self.memory_bytes
        return 1.5 * GIB + 0.05 * memory if is_gpu else 0.1 * memory

    @property
    def usable_bytes(self) -> float:
        """Bytes for tensors."""
        return self.memory_bytes - self.reserved_bytes


FLOPS_SHARE, BANDWIDTH_SHARE = 0.8, 0.9  # of a data sheet's values, reached by programs
H200_REACHED = DevicePeaks(788e12, 4.3e12)


def _gpu(name: str, kind: str, gib: float, inside: float = 450e9, **peaks: float) -> Device:
    """A GPU of the table of peaks; `peaks`: if this one differs from its kind."""
    sheet = replace(DEVICE_PEAKS[kind], **peaks)
    reached = DevicePeaks(FLOPS_SHARE * sheet.flops_per_s, BANDWIDTH_SHARE * sheet.bytes_per_s)
    reached = H200_REACHED if kind == "H200" else reached
    return Device(name, gib * GIB, reached.flops_per_s, reached.bytes_per_s, inside)


PCIE = 25e9
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", "B200", 178), _gpu("H200", "H200", 139), _gpu("H100-80GB", "H100", 80),
        _gpu("A100-80GB", "A100", 80, 300e9),
        _gpu("A100-40GB", "A100", 40, 300e9, bytes_per_s=1.555e12),
        _gpu("L40S-48GB", "L40S", 48, PCIE), _gpu("RTX4090-24GB", "RTX 4090", 24, PCIE),
        _gpu("A10-24GB", "A10", 24, PCIE), _gpu("L4-24GB", "L4", 24, PCIE),
    )
}  # fmt: skip
ASSUMED_GPU = GPUS["H100-80GB"]
CPU_CORE_FLOPS, CPU_BYTES = 40e9, 2e10  # per second, in float32, without measurements
# Between what runs of smollm2_arithmetic, smollm2_reasoning and PPO reached on two machines of two
# cores (docs/results/real_model.md): no launch overhead, and thin products per token.
CPU_SHARES = SpeedShares(decode=0.48, no_grad=0.74, grad=0.66)


def cpu_device(measured: bool = False) -> Device:
    """The CPU of this machine; its speeds `measured`, in a second, or assumed."""
    cores, total = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    memory = min(total, int(limit) if limit.isdigit() else total)
    name, source = f"CPU with {cores} cores", "this machine, without a GPU"
    flops, num_bytes = cores * CPU_CORE_FLOPS, CPU_BYTES
    if measured:
        flops, num_bytes = measured_cpu_speeds()
        source += f"; measured: {flops / 1e9:.0f} GFLOP/s, {num_bytes / 1e9:.0f} GB/s"
        source += f" under a load of {os.getloadavg()[0]:.1f}"
    return Device(name, float(memory), flops, num_bytes, 1e10, 1e9, "cpu", source, CPU_SHARES)


@functools.cache
def measured_cpu_speeds() -> tuple[float, float]:
    """Float32 operations per second of a matrix product, and bytes per second of one with a vector,
    which has to read the whole matrix: on all cores, the best of several."""
    import torch

    square = torch.ones((1024, 1024), dtype=torch.float32)
    tall = torch.ones((16384, 2048), dtype=torch.float32)  # 128 MiB: no cache holds it
    vector = torch.ones(2048, dtype=torch.float32)
    product_s = min(_seconds_of(lambda: square @ square) for _ in range(20))
    reading_s = min(_seconds_of(lambda: tall @ vector) for _ in range(10))
    return 2 * 1024**3 / product_s, tall.nbytes / reading_s


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def find_device(name: str | None, small: bool = False, measured: bool = True) -> Device:
    """The device to plan for: `name` (a GPU's name, 80GiB, cpu), else this machine's GPU.

    Without either: this machine's CPU if `small`, else ASSUMED_GPU. `measured`: the CPU's speeds
    are measured, which imports torch. Raises ConfigError.
    """
    if name is None:
        gpu = _local_gpu()
        if gpu is not None:
            return gpu
        assumed = "assumed: no GPU found; set --gpu NAME, --gpu 80GiB or --gpu cpu"
        return cpu_device(measured) if small else replace(ASSUMED_GPU, source=assumed)
    if name.lower() == "cpu":
        return cpu_device(measured=True)
    if gpu := _gpu_by_name(name):
        return replace(gpu, source="--gpu")
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", name, re.IGNORECASE)
    if size is None or float(size[1]) <= 0:
        fix = f"--gpu 80GiB, --gpu cpu, or one of: {', '.join(GPUS)}"
        why = "expected a known GPU, a memory size in GiB or GB, or cpu"
        refuse("command line", f"--gpu {name}: not a valid device", fix, why)
    memory = float(size[1]) * (GIB if size[2].lower() == "gib" else 1e9)
    source = f"--gpu; speed of {ASSUMED_GPU.name} assumed"
    return replace(ASSUMED_GPU, name=f"GPU of {name}", memory_bytes=memory, source=source)


def rank_device(kind: str, memory: float, name: str = "") -> Device:
    """The device of a running run, of torch's `kind`. `memory`: bytes of a GPU; `name`: its own."""
    if kind != "cuda":
        return cpu_device()
    speed = _gpu_of_its_kind(name) or ASSUMED_GPU
    shown = name or "this GPU"
    return replace(speed, name=shown, memory_bytes=memory, source="this machine")


def _gpu_by_name(name: str) -> Device | None:
    plain = re.sub(r"[\s_-]", "", name).lower()
    fits = [g for n, g in GPUS.items() if re.sub("-", "", n).lower() == plain]
    fits = fits or [g for n, g in GPUS.items() if n.partition("-")[0].lower() == plain]
    return fits[0] if fits else None


def _gpu_of_its_kind(name: str) -> Device | None:
    """The GPU of the list whose kind is part of the vendor's device name."""
    kind = (find_device_kind(name) or "").replace(" ", "")
    return next((g for n, g in GPUS.items() if kind and kind.startswith(n.partition("-")[0])), None)


def _local_gpu() -> Device | None:
    """The first GPU of this machine, by nvidia-smi."""
    if not device_count.visible_gpus() or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        name, _, megabytes = output.splitlines()[0].rpartition(",")
        memory = float(megabytes) * 2**20
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None
    like = _gpu_of_its_kind(name)
    speed = like or ASSUMED_GPU
    source = "this machine" if like else f"this machine; speed of {speed.name} assumed"
    return replace(speed, name=name.strip(), memory_bytes=memory, source=source)
