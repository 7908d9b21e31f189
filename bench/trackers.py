"""What trackers cost a run: wall time with none, with tensorboard, and with one that hangs.

    python bench/trackers.py [--rounds 3] [--steps 40]    runs, and rows of bench/trackers.jsonl
    python bench/trackers.py --page                       the table of docs/trackers.md

Each run is a process of its own, of the quickstart's model and data on one thread, and rounds go
A B C A B C, so that a slow minute falls on all alike. `loop` is the training's own seconds,
`process` all from start to end. `inside` is what the loop's thread spent in tracker code, handing a
line over and hearing what the trackers say: by the clock, which on a busy machine counts the time
of others too, and of its own CPU time. The hanging one is a client whose first call never
returns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results

HERE = Path(__file__).resolve().parents[1]
ROWS, PAGE = Path(__file__).with_name("trackers.jsonl"), HERE / "docs" / "trackers.md"
BEGIN, END = "<!-- made: trackers -->", "<!-- end: trackers -->"
KINDS = {
    "none": ("no tracker", "[]"),
    "tensorboard": ("tensorboard", "[tensorboard]"),
    "hanging": ("one that hangs", "[wandb]"),
}
HANGS = "import time\ndef init(**_): time.sleep(3600)\nSettings = dict\n"
CHILD = """
import json, sys, time
from rloo_cli.api import train
from rloo_cli.reporting import trackers
from rloo_cli.train import worker

made = []

class Counted(trackers.TrackerClient):
    def __init__(self, *words):
        super().__init__(*words)
        made.append(self)
        self.cpu = 0.0

    def send(self, metrics):
        start = time.thread_time()
        super().send(metrics)
        self.cpu += time.thread_time() - start

worker.TrackerClient = Counted
summary = train("quickstart", overrides=sys.argv[1:])
told = {"loop_s": summary["seconds"], "lines": sum(c.sent for c in made)}
told |= {"inside_s": sum(c.seconds for c in made), "left_out": sum(c.left_out for c in made)}
told["inside_cpu_s"] = sum(c.cpu for c in made)
print("TOLD " + json.dumps(told))
"""


def measure(kind: str, steps: int) -> results.Row:
    """One run in a folder of its own. -> its row"""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "stand_in").mkdir()
        if kind == "hanging":
            (Path(place) / "stand_in" / "wandb.py").write_text(HANGS)
        path = os.pathsep.join([f"{place}/stand_in", str(HERE)])
        words = [
            f"max_steps={steps}", "name=bench", "resume=never", "logging.console=plain",
            "distributed.threads=1", "train.prompts_per_step=8", "eval.max_samples=20",
            f"logging.trackers={KINDS[kind][1]}",
        ]  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, *words],
            cwd=place, text=True, capture_output=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    told = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("TOLD "))[5:])
    return {"kind": kind, "steps": steps, "process_s": round(seconds, 2)} | told


def table(rows: list[results.Row]) -> str:
    """Medians of each kind, as Markdown."""
    lines = [
        "| tracker | runs | process, s | training loop, s | loop, least to most | inside tracker"
        " code, microseconds a step | of CPU time |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, (name, _) in KINDS.items():
        found = [row for row in rows if row["kind"] == kind]
        if not found:
            continue
        loops = [row["loop_s"] for row in found]
        inside, cpu = (
            statistics.median(1e6 * row[name] / row["steps"] for row in found)
            for name in ("inside_s", "inside_cpu_s")
        )
        process = statistics.median(row["process_s"] for row in found)
        lines.append(
            f"| {name} | {len(found)} | {process:.1f} | {statistics.median(loops):.2f} |"
            f" {min(loops):.2f} to {max(loops):.2f} | {inside:.0f} | {cpu:.0f} |"
        )
    return "\n".join(lines)


def write_page() -> None:
    """Put the table between its marks."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(results.read(ROWS))}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        for number in range(options.rounds):
            for kind in KINDS:
                row = measure(kind, options.steps)
                results.append([row | {"round": number}], ROWS)
                print(row, flush=True)
    print(table(results.read(ROWS)))
    write_page()


if __name__ == "__main__":
    main()
