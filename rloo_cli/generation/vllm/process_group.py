"""Processes that end with the one that started them, however that one ends (Linux).

`kill -9` of vLLM's API process alone would leave its engine and worker alive, with their memory
and their GPU. The kernel tells direct children only, so every process asks for itself.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rloo_cli.utils import pids

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Called in a process that multiprocessing started: be killed when its parent dies.

    Does nothing in a first process, such as a server's own: its starter has arranged for that.
    The kernel watches the thread that started us; vLLM starts its processes from main threads.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def parent_death_signal(signal_number: int) -> Callable[[], None] | None:
    """A `preexec_fn`: the child gets this signal when the thread that starts it ends."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def group_processes(process_group: int) -> list[int]:
    """Processes of a group that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == process_group and pids.process_start_time(int(entry.name)):
                    found.append(int(entry.name))
    return found


def kill_process_group_except(process_group: int, spared_pid: int = 0) -> None:
    """Kill a process group but for one process, and Python's tracker of shared memory.

    The tracker takes away the memory that the others leave, hundreds of megabytes, and then ends.
    """
    for pid in group_processes(process_group):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != spared_pid and b"resource_tracker" not in words:
                os.kill(pid, signal.SIGKILL)
