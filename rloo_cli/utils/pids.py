"""Processes of ours, told by number and the time they began, never by their name.

A number alone is soon another process; a zombie counts as gone.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any


def started(pid: int) -> str:
    """When a process began, as the kernel counts; "" when it is gone (a zombie counts as gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def alive(facts: dict[str, Any]) -> bool:
    """Whether the process that run.json names still runs, and is the same one."""
    now = started(int(facts.get("pid", -1)))
    return bool(now) and now == facts.get("pid_started")


def end(facts: dict[str, Any], patience: float = 10.0) -> None:
    """See that a process of ours is gone: wait for it, then kill it and its group.

    It is told by its number and the time it began, never by its name.
    """
    limit = time.monotonic() + patience
    while alive(facts):
        if time.monotonic() > limit:
            print(f"process {facts['pid']} was left by an earlier attempt: it is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(facts["group"]), signal.SIGKILL)
            limit = time.monotonic() + patience
        time.sleep(0.05)
