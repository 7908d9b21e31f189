"""Runs for the verbs that look at one: real, of a thousand made steps, and damaged."""

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fork_cases import Forked

from rloo_cli.data import order
from rloo_cli.reporting.prompt_ledger import LEDGER_FORMAT, entry_check

SHORT = (
    "train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "eval.every=2",
    "eval.max_samples=4", "logging.console=plain", "distributed.threads=1",
)  # fmt: skip


def make_real_runs(forked: Forked) -> Path:
    """The folder of real runs: finished, again (its twin), interrupted, and one of three attempts.

    -> their root
    """
    for name in ("finished", "again"):
        assert forked(*SHORT, f"name={name}") == 0, forked.said()
    assert forked(*SHORT, "name=interrupted", faults="step@3=kill9") == 6
    thrice = (*SHORT, "name=thrice", "max_steps=6")
    assert forked(*thrice, faults="step@2=term") == 75, forked.said()
    assert forked(*thrice, "resume=auto", faults="step@2=term") == 75, forked.said()
    assert forked(*thrice, "resume=auto") == 0, forked.said()
    return forked.folder / "runs"


def write_long_run(like: Path, folder: Path, steps: int = 1000) -> Path:
    """A run of so many steps, made from a real one's files: metrics, samples, ledger, evaluations.

    Its numbers wander as those of a run do; the ledger adds up.
    """
    folder.mkdir(parents=True)
    for name in ("config.yaml", "env.json", "overrides.txt"):
        shutil.copyfile(like / name, folder / name)
    shutil.copytree(like / "final", folder / "final")
    draw = random.Random(7)
    lines = [json.loads(text) for text in (like / "metrics.jsonl").read_text().splitlines()]
    step_line = next(line for line in reversed(lines) if "step_time" in line)
    eval_line = next(line for line in lines if "step_time" not in line)
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps(eval_line | {"step": 0}) + "\n")
        for step in range(1, steps + 1):
            scale = 1 + 0.3 * math.sin(step / 90) + 0.1 * draw.random()
            line = {k: v * scale if isinstance(v, float) else v for k, v in step_line.items()}
            line |= {"step": step, "reward": 0.2 + 0.6 * step / steps + 0.1 * scale}
            file.write(json.dumps(line) + "\n")
            if step % 50 == 0:
                line = eval_line | {"step": step, "eval_reward": 0.1 + 0.8 * step / steps}
                file.write(json.dumps(line) + "\n")
    samples = sorted((like / "samples").glob("step_*.jsonl"))[-1]
    (folder / "samples").mkdir()
    shutil.copyfile(like / "samples" / "eval_000000.jsonl", folder / "samples/eval_000000.jsonl")
    for step in range(10, steps + 1, 10):
        shutil.copyfile(samples, folder / "samples" / f"step_{step:06d}.jsonl")
    updates = _write_long_ledger(folder, steps)
    about = json.loads((like / "run.json").read_text())
    about["plan"]["max_steps"], about["name"] = steps, folder.name
    progress = {"step": steps, "place": 4 * steps, "updates": updates}
    about |= {"progress": progress, "fingerprint": "made"}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def _write_long_ledger(folder: Path, steps: int) -> int:
    """A ledger of so many steps of four prompts over sixty-four; -> its updates."""
    check = ""
    with (folder / "ledger.jsonl").open("w") as file:
        for entry in _long_ledger_entries(steps):
            check = entry_check(entry, check)
            file.write(json.dumps(entry | {"check": check}) + "\n")
    return steps


def _long_ledger_entries(steps: int) -> Iterator[dict[str, Any]]:
    prompts = 64
    yield {"ledger": LEDGER_FORMAT, "step": 0, "place": 0, "prompts": prompts,
           "data_rows": prompts, "filtered": [], "cut": 0, "seed": 1, "shuffle": True,
           "fingerprint": "made"}  # fmt: skip
    for step in range(1, steps + 1):
        draws = range(4 * (step - 1), 4 * step)
        rows = [order.prompt_index_at(p, prompts, 1, "made", True, ()) for p in draws]
        yield {"step": step, "place": draws[0], "draws": 4, "updates": 1, "rows": rows,
               "epochs": sorted({p // prompts for p in draws}),
               "trained": list(draws)}  # fmt: skip


def _append(name: str, data: bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(data)

    return change


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(data) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) * 2 // 3])

    return change


def _last_samples(data: bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        sorted((run / "samples").glob("step_*.jsonl"))[-1].write_bytes(data)

    return change


def _empty_everything(run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


# What is done to a copy of a finished run.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "a metrics line cut off": _append("metrics.jsonl", b'{"step": 5, "rew'),
    "metrics cut in a line": _cut("metrics.jsonl"),
    "junk among the metrics": _append("metrics.jsonl", b'\x00\xff\n[1, 2]\n{"step": "x"}\n'),
    "binary metrics": _write("metrics.jsonl", bytes(range(256)) * 8),
    "broken run.json": _write("run.json", b'{"state": "finis'),
    "run.json is a list": _write("run.json", b"[1, 2, 3]"),
    "run.json of other kinds": _write(
        "run.json", b'{"plan": 3, "progress": [], "ended": "x", "memory": 1, "pid": "me"}'
    ),
    "no run.json": _remove("run.json"),
    "no config": _remove("config.yaml"),
    "config is not YAML": _write("config.yaml", b"name: [\n\x00"),
    "config of other kinds": _write("config.yaml", b"train: 3\nseed: x\nreward: [1]\nmodel: 1\n"),
    "junk in the samples": _last_samples(b"\x89PNG\r\n\x00\xff\xfe\n{\"draw\": [1]}\n"),
    "samples of other kinds": _last_samples(b'{"draw": 1, "rewards": [3], "score": "high"}\n'),
    "ledger cut": _cut("ledger.jsonl"),
    "junk in the ledger": _append("ledger.jsonl", b"\xff\x00\n"),
    "every file is empty": _empty_everything,
}  # fmt: skip


def damaged_copy(run: Path, damage: str, folder: Path) -> Path:
    """A copy of a run with this damage."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "logs"))
    DAMAGES[damage](folder)
    return folder
