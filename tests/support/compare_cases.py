"""Runs as they would lie in a folder, written by hand: for the tests of `rloo compare`."""

import json
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.reporting.statistics import share_limits

KEYS: dict[str, Any] = {
    "max_steps": 4,
    "model": {"path": "make:tiny", "lora": None},
    "data": {"path": "make:tiny", "eval_split": "test"},
    "reward": {"exact_match": {"type": "exact_match", "weight": 1.0, "timeout_s": 9.0}},
    "generation": {"backend": "transformers", "max_completion_length": 8},
    "algorithm": {"name": "rloo", "num_generations": 4, "beta": 0.05},
    "train": {"prompts_per_step": 2, "learning_rate": 1e-4, "layout": "auto"},
    "eval": {"every": 2, "sets": {}, "max_samples": None},
    "logging": {"every": 1},
}
SCORES = (0.0, 0.5, 1.0)  # of the evaluations at steps 0, 2, 4


def write(
    root: Path,
    name: str,
    seed: int = 1,
    scores: tuple[float, ...] = SCORES,
    state: str = "finished",
    steps: int = 4,
    fingerprint: str = "f1",
    second: float = 1.0,
    samples: int | None = None,
    **keys: Any,
) -> Path:
    """A run's folder. `keys`: dotted key (with __ for the dot) -> value.

    `samples`: held-out prompts, over which a score has its interval; None: it has none.
    """
    config = json.loads(json.dumps(KEYS)) | {"name": name, "root": str(root), "seed": seed}
    for key, value in keys.items():
        *sections, last = key.split("__")
        values = config
        for section in sections:
            values = values[section]
        values[last] = value
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    facts: dict[str, Any] = {
        "name": name, "state": state, "fingerprint": fingerprint, "host": "here",
        "recipe": "compare", "progress": {"step": steps}, "memory": {"measured_bytes": 2**30},
    }  # fmt: skip
    if state != "finished":
        facts |= {"code": 7, "ended": {"why": "ended with 7"}}
    (folder / "run.json").write_text(json.dumps(facts))
    size = config["train"]["prompts_per_step"] * config["algorithm"]["num_generations"]
    rows: list[dict[str, Any]] = [
        {"step": 2 * i, "eval_reward": score, "eval_reward/exact_match/mean": score}
        | ({} if samples is None else _interval(samples, score))
        for i, score in enumerate(scores)
        if 2 * i <= steps
    ]
    for step in range(1, steps + 1):
        got = {"reward": 0.1 * step + 0.01 * seed, "objective/kl": 0.2 * step, "updates": step}
        rows.append({"step": step, "step_time": second, "sampled_completions": step * size, **got})
    rows.sort(key=lambda row: (row["step"], "step_time" not in row))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _interval(samples: int, score: float) -> dict[str, float]:
    low, high = share_limits(samples, score, score * (1 - score))
    return {"eval_reward/low": low, "eval_reward/high": high}


def judged(folder: Path, rate: float, of: str = "final", step: int = 4, **keys: Any) -> None:
    """A judge's result beside the run, of one of its models; `keys` are the judge's."""
    got = {"rate": rate, "low": rate - 0.1, "high": rate + 0.1, "wins": 50, "losses": 50}
    home = folder / "eval" / of
    home.mkdir(parents=True)
    said = {"keys": {"against": "reference", "model": "a", "both_orders": True, **keys}}
    (home / "judge.json").write_text(json.dumps(said | {"sets": {"held out": got}}))
    (home / "about.json").write_text(json.dumps({"state": {"step": step}}))
    (folder / "summary.json").write_text(json.dumps({"steps": 4}))
