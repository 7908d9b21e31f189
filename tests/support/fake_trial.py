"""Stands in for `rloo train` as a trial of a sweep: takes its turns, logs steps, ends as told.

FAKE_TRIALS is JSON, number -> {"fail": [step, code], "hold": step (there it waits for the file
"go"), "deaf": true}. Its reward is its number; metrics.jsonl is all that it remembers.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from rloo_cli.utils import signals, sweep_time_slices
from rloo_cli.utils.errors import Stopped
from rloo_cli.utils.files import read_json, write_json


def main(words: list[str]) -> None:
    """Be that run."""
    given = dict(word.partition("=")[::2] for word in words)
    folder = Path(given.get("root", "runs"), given["name"])
    number = int(os.environ[sweep_time_slices.SOCKET_VARIABLE].rpartition(":")[2])
    plan = json.loads(os.environ["FAKE_TRIALS"]).get(str(number), {})
    signals.install_signal_handlers()
    if plan.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    steps, metrics = int(given["max_steps"]), folder / "metrics.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    attempt = read_json(folder / "run.json").get("attempt", 0) + 1
    facts: dict[str, Any] = {"attempt": attempt, "pid": os.getpid(), "plan": {"max_steps": steps}}
    facts |= {"state": "training", "hash": "none"}
    (folder / "config.yaml").write_text("{}\n")
    write_json(folder / "run.json", facts | {"words": words})
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    code = 0
    try:
        for step in range(done, steps):
            sweep_time_slices.wait_in_sweep(
                step,
                sweep_time_slices.TimeSliceHooks(
                    lambda: None, nothing, nothing, signals.raise_if_stopped
                ),
            )
            while plan.get("hold") == step and not Path("go").exists():
                time.sleep(0.01)
                signals.raise_if_stopped()
            if plan.get("fail", [None])[0] == step:
                print("error: it fails\n  why      it was told to", flush=True)
                os._exit(plan["fail"][1])
            row = {"step": step + 1, "reward": number, "loss": -number, "step_time": 0.01}
            with metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")
    except Stopped as error:
        print(error, flush=True)
        code = 75
    os._exit(code)


def nothing() -> None:
    """A fake trial is on no device."""
