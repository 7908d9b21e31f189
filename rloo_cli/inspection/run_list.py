"""Lists runs with state, age, steps, held-out score and size; reads little from each folder."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_cli.inspection.run_folders import RUN_FILES
from rloo_cli.inspection.run_record import run_state
from rloo_cli.reporting import eval_lines
from rloo_cli.utils.files import JsonObject, read_json


@dataclass(frozen=True)
class RunSummary:
    """One run of the list. Unknown fields are None."""

    run: str
    state: str  # of run.json; `killed` if its process is gone, `damaged` if unreadable
    code: int | None
    age_s: float | None  # seconds since its first attempt started
    idle_s: float | None  # seconds since it wrote metrics or run.json
    step: int
    of_steps: int | None
    attempt: int | None
    metric: str | None  # the held-out score's name
    score: float | None  # of the last evaluation
    size_bytes: int

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return asdict(self)


def list_runs(root: Path) -> list[RunSummary]:
    """The runs in a folder and up to two folders below it, the last written first."""
    now = time.time()
    runs = [summarize_run(folder, now) for folder in _run_folders_in(root)]
    return sorted(runs, key=lambda run: float("inf") if run.idle_s is None else run.idle_s)


def _run_folders_in(root: Path) -> Iterator[Path]:
    patterns = ("", "*/", "*/*/", "*/*/*/")
    folders = {path.parent for deep in patterns for path in root.glob(f"{deep}{RUN_FILES[0]}")}
    yield from sorted(folders)


def summarize_run(folder: Path, now: float) -> RunSummary:
    """One run at the time `now` (seconds since 1970). Never raises for its content."""
    metadata = _read_metadata(folder / "run.json")
    written = [p.stat().st_mtime for name in RUN_FILES[:2] if (p := folder / name).is_file()]
    step = _nested_number(metadata, "progress", "step")
    last_step, evaluation = _last_lines(folder / "metrics.jsonl")
    started = metadata.get("started")
    of_steps = _nested_number(metadata, "plan", "max_steps")
    headline = next((name for _, name in eval_lines.headline_metrics(evaluation)), None)
    score = evaluation.get(headline) if headline else None
    return RunSummary(
        str(folder),
        run_state(metadata) if metadata else "damaged",
        metadata.get("code"),
        now - started if isinstance(started, int | float) else None,
        now - max(written) if written else None,
        int(max(step or 0, last_step)),
        None if of_steps is None else int(of_steps),
        metadata.get("attempt"),
        headline,
        score if isinstance(score, int | float) else None,
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )


def _read_metadata(path: Path) -> JsonObject:
    try:
        values = read_json(path)
    except (ValueError, OSError):
        return {}
    return values if isinstance(values, dict) else {}


def _nested_number(metadata: JsonObject, section: str, key: str) -> float | None:
    values = metadata.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, int | float) else None


def _last_lines(path: Path) -> tuple[int, JsonObject]:
    """The last logged step, and the last evaluation with a headline; read from the file's end."""
    step = 0
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        if step and b'"eval_' not in line:
            continue
        try:
            entry = json.loads(line)
            step = step or int(entry["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        if eval_lines.is_evaluation(entry) and eval_lines.headline_metrics(entry):
            return step, entry
    return step, {}
