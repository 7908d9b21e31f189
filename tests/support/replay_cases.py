"""Runs of the smoke recipe that record their rollouts, and records that are edited."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_cases import attempt

from rloo_cli.data.batch import Batch
from rloo_cli.data.rollout_record import read_rollout_record, write_rollout_record

RECORD = ("logging.rollouts_every=1", "data.eval_split=null", "checkpoint.every=2")
HEAD_FACTS = (  # what a run adds to the head of a record
    "state", "num_steps", "num_prompts", "updates", "seed", "shuffle", "conversational",
    "fingerprint", "tokenizer", "vocab_size", "backend", "attempt", "computed_on", "limits",
)  # fmt: skip


def recorded_run(root: Path, *words: str, **functions: Any) -> Path:
    """A finished run of four steps, of which every one is recorded, with checkpoint-2 and -4."""
    assert attempt(root, *RECORD, *words, **functions)
    return root / "smoke"


def edit_record(folder: Path, step: int, change: Callable[[Batch], None]) -> None:
    """Change what a recorded step says, as a whole and undamaged file."""
    record = read_rollout_record(folder, step)
    change(record.batch)
    write_rollout_record(folder, record.batch, {n: record.head[n] for n in HEAD_FACTS})


def last_line(folder: Path) -> dict[str, Any]:
    """The last line of a run's metrics."""
    line: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return line
