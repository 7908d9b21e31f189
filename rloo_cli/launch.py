"""From a composed config to a running process: check, make the run's folder, start it, watch it.

Imports no torch. The folder is made only after the check; a run that was refused before its
first step (data, rewards, a model that is not there) leaves none.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from rloo_cli import complaints, config, machine
from rloo_cli.compose import Composed
from rloo_cli.errors import ConfigError, Problem
from rloo_cli.files import read_json, write_json, write_text
from rloo_cli.schema import RunConfig
from rloo_cli.tools import plan

PACKAGES = ("rloo-cli", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "pydantic")
GRACE_S = 10.0  # between a polite and an impolite end
# Until the worker can say how it ended, an interrupt ends it without a traceback.
BOOT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); " \
    "from rloo_cli.worker import main; main()"  # fmt: skip


def train(composed: Composed, multirun: bool = False, dry_run: bool = False) -> int:
    """One experiment, from its composed config to its end; the exit code. Raises RunError."""
    run = config.check(_apart(composed) if multirun else composed)
    machine.check(run)
    if dry_run:
        print(plan.text(run))
        return 0
    folder = Path(run.root, str(run.name))
    done = take_folder(folder, run)
    if done:
        print(done)
        return 0
    new_root = not folder.parent.exists()
    prepare_folder(folder, run, composed)
    code = _start(folder)
    if code in (2, 3, 4, 5) and read_json(folder / "run.json").get("fingerprint") is None:
        shutil.rmtree(folder)
        if new_root:
            with contextlib.suppress(OSError):  # another run came to it meanwhile
                folder.parent.rmdir()
    elif code:
        print(f"the run ended with {code}; its log is {folder}/logs/attempt_1", file=sys.stderr)
    return code


def _apart(composed: Composed) -> Composed:
    """In a sweep, jobs with one name get a name each: the hash of their own overrides."""
    name = composed.values.get("name")
    if name is None:
        return composed
    words = [w for w in composed.sources.overrides if not w.startswith("hydra.")]
    tail = hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:6]
    return Composed(composed.values | {"name": f"{name}-{tail}"}, composed.sources, composed.recipe)


def take_folder(folder: Path, run: RunConfig) -> str:
    """See that the run's folder is free. Returns why there is nothing to do, or "".

    An attempt that ended before it was finished is moved aside, whole. Raises ConfigError when
    the name belongs to another config or to a run that is alive.
    """
    facts = read_json(folder / "run.json")
    if not folder.exists():
        return ""
    old = folder / "config.yaml"
    before = yaml.safe_load(old.read_text()) if old.is_file() else None
    if before is None or facts.get("hash") != config.config_hash(run):
        raise ConfigError(_taken(folder, before, run))
    if facts.get("state") == "finished" and _same_length(before, run):
        return f"{folder} is finished: nothing to do (name=... for another run of it)"
    if facts.get("state") in ("starting", "training") and machine.alive(facts):
        raise ConfigError(
            Problem(f"{folder} is being trained by process {facts['pid']}", "name", fix="name=...")
        )
    if facts.get("state") == "finished":
        raise ConfigError(_taken(folder, before, run))
    aside = next(p for i in range(1, 10**6) if not (p := Path(f"{folder}.attempt{i}")).exists())
    folder.rename(aside)
    print(f"an attempt that did not finish is now in {aside}")
    return ""


def _same_length(before: dict[str, Any], run: RunConfig) -> bool:
    lengths = (before["max_steps"], before["total_episodes"], before["train"]["epochs"])
    return lengths == (run.max_steps, run.total_episodes, run.train.epochs)


def _taken(folder: Path, before: dict[str, Any] | None, run: RunConfig) -> Problem:
    old = dict(complaints.walk(before or {}))
    new = dict(complaints.walk(config.dump(run)))
    leaves = [k for k in {**old, **new} if not isinstance(old.get(k, new.get(k)), dict)]
    changes = [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in leaves if old.get(k) != new.get(k)]
    more = [f"... and {len(changes) - 10} more"] if len(changes) > 10 else []
    shown = "\n".join(["it is another config:", *changes[:10], *more])
    why = shown if before else "it is not a run"
    choices = f"name=OTHER, or root=OTHER, or move it away: mv {folder} {folder}.old"
    return Problem(f"{folder} exists", "name", why, choices)


def prepare_folder(folder: Path, run: RunConfig, composed: Composed) -> None:
    """Make the run's folder: config.yaml (what ranks read), overrides, environment, run.json."""
    folder.mkdir(parents=True)
    write_text(folder / "config.yaml", yaml.safe_dump(config.dump(run), sort_keys=False))
    words = [w for w in composed.sources.overrides if not w.startswith("hydra.")]
    write_text(folder / "overrides.txt", "".join(f"{w}\n" for w in words))
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine_facts = {"python": platform.python_version(), "platform": platform.platform()}
    write_json(folder / "env.json", {**machine_facts, "cpus": os.cpu_count(), "packages": versions})
    write_json(
        folder / "run.json",
        {
            "name": run.name,
            "recipe": composed.recipe,
            "state": "starting",
            "attempt": 1,
            "hash": config.config_hash(run),
            "pid": os.getpid(),
            "pid_started": machine.started(os.getpid()),
            "started": time.time(),
        },
    )


def _start(folder: Path) -> int:
    """Run the worker to its end, passing signals on; its exit code."""
    # Threads that spin long while they wait for each other make a machine that is shared many
    # times slower.
    calm = {"GOMP_SPINCOUNT": "1000", "TOKENIZERS_PARALLELISM": "false"}
    environment = calm | os.environ
    worker = subprocess.Popen(
        # -P: no file in the current folder can pass for a package.
        [sys.executable, "-P", "-c", BOOT, str(folder)],
        env=environment,
        start_new_session=True,  # a Ctrl-C reaches it once, from us
        preexec_fn=_die_with_parent(),
    )
    heard: list[int] = []
    first = [0.0]  # when

    def forward(number: int, frame: Any) -> None:
        heard.append(number)
        first[0] = first[0] or time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if len(heard) > 1 and number == signal.SIGINT:
                os.killpg(worker.pid, signal.SIGKILL)  # the second Ctrl-C means now
            else:
                worker.send_signal(number)

    before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        while worker.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(0.5)
            if heard and time.monotonic() - first[0] > GRACE_S:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # whatever it started and left
    if worker.returncode < 0:
        return 130 if signal.SIGINT in heard else 6 if not heard else 75
    return worker.returncode


def _die_with_parent() -> Callable[[], None] | None:
    """For the child: be killed when the process that started us dies (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
