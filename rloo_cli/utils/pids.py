"""Processes of ours, told by number and the time they began, never by their name.

A number alone is soon another process; a zombie counts as gone.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any


def process_start_time(pid: int) -> str:
    """When a process began, as the kernel counts; "" when it is gone (a zombie counts as gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def is_process_alive(process: dict[str, Any]) -> bool:
    """Whether the process that run.json names still runs, and is the same one."""
    now = process_start_time(int(process.get("pid", -1)))
    return bool(now) and now == process.get("pid_started")


def kill_leftover_process(process: dict[str, Any], timeout_s: float = 10.0) -> None:
    """See that a process of ours is gone: wait for it, then kill it and its group.

    It is told by its number and the time it began, never by its name.
    """
    limit = time.monotonic() + timeout_s
    while is_process_alive(process):
        if time.monotonic() > limit:
            print(f"process {process['pid']} was left by an earlier attempt: it is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(process["group"]), signal.SIGKILL)
            limit = time.monotonic() + timeout_s
        time.sleep(0.05)
