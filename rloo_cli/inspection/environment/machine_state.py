"""The machine itself, for `rloo doctor`: devices, memory, network, Slurm, tools of rewards."""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit
from urllib.request import getproxies

import psutil

from rloo_cli.config import hf_cache
from rloo_cli.distributed import device_count
from rloo_cli.inspection.environment.check_lines import CheckLines
from rloo_cli.inspection.environment.gpu_holders import GpuState, read_gpu_states
from rloo_cli.planning import device
from rloo_cli.planning.text import format_gib
from rloo_cli.utils import paths

HUB_TIMEOUT_S = 1.5
MIN_FREE_SHARE = 0.9  # of a GPU's memory: an engine's gpu_memory_utilization refers to all of it
SLURM_COMMANDS = ("sbatch", "srun", "scontrol", "sinfo")
SLURM_JOB_VARIABLES = {
    "SLURM_JOB_PARTITION": "partition", "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_GPUS_ON_NODE": "GPUs on this node", "SLURM_RESTART_COUNT": "restarts",
}  # fmt: skip


def check_devices(lines: CheckLines) -> list[GpuState]:
    """The GPUs and their holders, or the CPU. -> the GPUs"""
    try:
        gpus = read_gpu_states()
    except OSError as error:
        fix = "nvidia-smi; if it fails too, reload the driver"
        lines.add_failure("devices", f"nvidia-smi failed: {error}", fix)
        return []
    if not gpus:
        _check_cpu(lines)
    for gpu in gpus:
        name = f"gpu {gpu.index}"
        found = f"{gpu.name}, {format_gib(gpu.free_bytes)} of {format_gib(gpu.total_bytes)} free"
        if gpu.free_bytes >= MIN_FREE_SHARE * gpu.total_bytes and not gpu.holders:
            lines.add_ok(name, found)
            continue
        who = "; ".join(holder.describe_holder() for holder in gpu.holders)
        fix = "wait, end the process (kill PID), or CUDA_VISIBLE_DEVICES=OTHERS"
        lines.add_warning(name, f"{found}; held by {who or 'invisible processes'}", fix)
    return gpus


def _check_cpu(lines: CheckLines) -> None:
    if evidence := device_count.hidden_gpu_evidence():
        what = f"no GPU found, but {evidence}"
        fix = "nvidia-smi, and python -c 'import torch; print(torch.cuda.is_available())'"
        lines.add_warning("devices", what, fix)
        return
    hidden = os.environ.get(device_count.VISIBLE_DEVICES_VARIABLE)
    why = f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy = os.getloadavg()[0]
    found = f"no GPU{why}: {cores} CPU cores, load {busy:.1f}"
    lines.add_ok("devices", found)


def check_free_memory(lines: CheckLines) -> None:
    """The machine's total and free memory, if no plan shows what is needed."""
    total, free = device.cpu_device().memory_bytes, free_memory_bytes()
    found = f"{format_gib(free)} of {format_gib(total)} free"
    if free < 0.1 * total:
        lines.add_warning("memory", found, "end the processes that use it: ps aux --sort=-rss")
    else:
        lines.add_ok("memory", found)


def free_memory_bytes() -> float:
    """Bytes of available CPU memory."""
    return float(min(psutil.virtual_memory().available, device.cpu_device().memory_bytes))


def check_disks(lines: CheckLines) -> None:
    """The disks of runs and caches, if no plan shows what is needed."""
    folders = {"runs": "runs", "cache": str(hf_cache.hub_cache_folder())}
    for name, folder in folders.items():
        above = nearest_folder(folder)
        free = shutil.disk_usage(above).free
        found = f"{name}: {free / 1e9:.3g} GB free at {above}"
        if free < 1e9:
            lines.add_warning("disk", found, "root=FOLDER, HF_HOME=FOLDER on another disk")
        else:
            lines.add_ok("disk", found)


def nearest_folder(path: str) -> str:
    """The folder itself, or its nearest existing parent."""
    above = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    return above


def check_network(lines: CheckLines) -> None:
    """Whether the hub is reachable, if no run shows what it needs from it."""
    offline = hf_cache.is_hub_offline()
    if offline:
        cache = hf_cache.hub_cache_folder()
        lines.add_ok("network", f"offline by HF_HUB_OFFLINE: only {cache} is available")
        return
    failure, seconds = try_hub()
    if failure:
        fix = "HTTPS_PROXY=..., HF_ENDPOINT=..., or HF_HUB_OFFLINE=1 after fetching everything"
        lines.add_warning("network", f"the hub is not reachable: {failure}", fix)
    else:
        lines.add_ok("network", f"the hub is reachable ({1000 * seconds:.0f} ms)")


def try_hub() -> tuple[str, float]:
    """Connect to the hub, or its proxy. -> why it failed ("" = success), seconds"""
    from huggingface_hub import constants

    endpoint = urlsplit(constants.ENDPOINT)
    proxy = urlsplit(getproxies().get(endpoint.scheme, ""))
    target = proxy if proxy.hostname else endpoint
    host, port = target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
    failures = [f"{host}:{port} did not answer within {HUB_TIMEOUT_S:g} s"]
    began = time.monotonic()

    def connect() -> None:
        try:
            socket.create_connection((host, port), HUB_TIMEOUT_S).close()
            failures[:] = [""]
        except OSError as error:
            failures[:] = [f"{host}:{port}: {error.strerror or error}"]

    # A resolver may take much longer than a connection, and has no timeout.
    thread = threading.Thread(target=connect, daemon=True, name="hub")
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return failures[0], time.monotonic() - began


def check_slurm(lines: CheckLines) -> None:
    """Whether this is a Slurm job, and which of its commands are installed."""
    job = os.environ.get("SLURM_JOB_ID")
    commands = [name for name in SLURM_COMMANDS if shutil.which(name)]
    here = f"{', '.join(commands)} found" if commands else "none of its commands found"
    if not job:
        lines.add_ok("slurm", f"not in a job; {here}")
        return
    facts = [f"{label} {v}" for n, label in SLURM_JOB_VARIABLES.items() if (v := os.environ.get(n))]
    step = os.environ.get("SLURM_STEP_ID")
    facts += [f"step {step}"] if step else []
    found = ", ".join([f"in job {job}", *facts, here])
    if "scontrol" in commands:
        lines.add_ok("slurm", found)
    else:
        lines.add_warning("slurm", found, "add Slurm's bin to PATH: a run cannot requeue itself")


def check_bubblewrap(lines: CheckLines) -> None:
    """bubblewrap, needed by rewards that run a model's code; a run that needs it is tested."""
    found = shutil.which("bwrap")
    if found is None:
        lines.add_ok("bubblewrap", "not installed; the reward code_tests needs it")
        return
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=5)
    lines.add_ok("bubblewrap", f"{said.stdout.strip() or found}")


def check_compilers(lines: CheckLines, wants: Sequence[str]) -> None:
    """A C++ compiler and ninja, for packages that build kernels (`wants`: DeepSpeed, vLLM ...)."""
    if not wants:
        return
    compiler = next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), None)
    ninja = shutil.which("ninja")
    missing = [] if compiler else ["a C++ compiler"]
    missing += ["ninja"] if "DeepSpeed" in wants and ninja is None else []
    who = " and ".join(wants)
    if missing:
        fix = (
            f"apt-get install {'g++ ' if not compiler else ''}{'ninja-build' if not ninja else ''}"
        )
        what = f"{' and '.join(missing)} not found in PATH; {who} may need it to build kernels"
        lines.add_warning("compiler", what, fix.strip())
    else:
        lines.add_ok("compiler", f"{compiler}{', ninja' if ninja else ''}, for {who}")


def check_cache_folder(lines: CheckLines) -> None:
    """The folder for things that rloo builds once, such as make:NAME models."""
    cache = paths.cache_folder()
    above = nearest_folder(str(cache))
    if os.access(above, os.W_OK | os.X_OK):
        lines.add_ok("cache", f"{cache} is writable")
    else:
        why = f"{above} is not writable"
        lines.add_problem("cache", paths.unusable_cache_problem(why), "warn")
