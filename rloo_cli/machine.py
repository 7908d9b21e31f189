"""What the machine must have before a run may start, found without importing torch."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloo_cli import hub, made, places, registry
from rloo_cli.errors import MachineError, Problem
from rloo_cli.schema import RunConfig


def check(run: RunConfig, downloads: bool = True) -> None:
    """Raises MachineError (exit 3) with everything the machine lacks for this run.

    `downloads`: what has to be downloaded counts too (a plan needs nothing of it).
    """
    problems: list[Problem] = []
    for name, entry in run.rewards.items():
        module = registry.module("rewards", entry.type)
        try:
            if hasattr(module, "preflight"):
                module.preflight(entry)
        except MachineError as error:
            problems += [replace(p, where=f"reward.{name}") for p in error.problems]
    problems += [*(_downloads(run) if downloads else ()), *_packages(run)]
    above = next(
        p for p in [Path(run.root).absolute(), *Path(run.root).absolute().parents] if p.exists()
    )
    if not os.access(above, os.W_OK):
        problems.append(
            Problem(f"root = {run.root} cannot be written", "root", f"looked at {above}")
        )
    elif (disk := shutil.disk_usage(above)).free < 100e6:
        what = "has under 100 MB free" if disk.total else "is no place for files"
        problems.append(Problem(f"{above} {what}", "root", fix="root=FOLDER on another disk"))
    if problems:
        raise MachineError(*problems)


def _downloads(run: RunConfig) -> Iterator[Problem]:
    """What a run without network would have to download."""
    for key, path, makes in places.named(run) if hub.offline() else ():
        if path.startswith(made.MADE) or Path(path).expanduser().exists():
            continue
        kind = "dataset" if makes is made.DATA else "model"
        if not hub.cached(path, hub.revision_of(run, key), kind):
            why = f"HF_HUB_OFFLINE is set, and it is not in the cache: {hub.cache()}"
            fix = f"on a machine with network: {hub.fetch_command()}"
            yield Problem(f"{key} = {path!r} is not to be had", key, why, fix)


def _packages(run: RunConfig) -> Iterator[Problem]:
    """Packages that a key needs and `pip install rloo-cli` does not bring."""
    attention = run.model.attn_implementation or ""
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_3"}
    if attention in package and find_spec(package[attention]) is None:
        install = package[attention].replace("_", "-")
        why = f"it needs the package {install}, which is not installed"
        fix = f"pip install {install}, or model.attn_implementation=sdpa"
        what = f"model.attn_implementation = {attention!r} cannot be had"
        yield Problem(what, "model.attn_implementation", why, fix)


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
