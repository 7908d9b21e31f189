"""What the machine must have before a run may start, found without importing torch."""

import contextlib
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_cli import registry
from rloo_cli.errors import MachineError, Problem
from rloo_cli.schema import RunConfig


def check(run: RunConfig) -> None:
    """Raises MachineError (exit 3) with everything the machine lacks for this run."""
    problems: list[Problem] = []
    for name, entry in run.rewards.items():
        module = registry.module("rewards", entry.type)
        try:
            if hasattr(module, "preflight"):
                module.preflight(entry)
        except MachineError as error:
            problems += [replace(p, where=f"reward.{name}") for p in error.problems]
    above = next(
        p for p in [Path(run.root).absolute(), *Path(run.root).absolute().parents] if p.exists()
    )
    if not os.access(above, os.W_OK):
        problems.append(
            Problem(f"root = {run.root} cannot be written", "root", f"looked at {above}")
        )
    elif shutil.disk_usage(above).free < 100e6:
        problems.append(Problem(f"{above} has under 100 MB free", "root", fix="root=..."))
    if problems:
        raise MachineError(*problems)


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
