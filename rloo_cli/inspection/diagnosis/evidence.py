"""Reads the evidence of a diagnosis: a run's metrics, its samples by group, and its ledger."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.inspection.sample_files import SampleRecord, list_sample_files, read_sample_records
from rloo_cli.reporting.health.evidence import Evidence, MetricPoints, finite_field
from rloo_cli.reporting.metrics_lines import metric_names
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, read_ledger_entries
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

MAX_SAMPLE_FILES = 40  # read from a long run, evenly spread, with the first and the last


class RunEvidence(Evidence):
    """A run's record with its samples; figures missing in the files are None."""

    def __init__(self, record: RunRecord):
        super().__init__()
        self.record, self.steps = record, len(record.step_metrics)

    # The current value of a metric is its last quarter.
    current_value = recent_mean = Evidence.end_mean

    def metric_points(self, name: str) -> MetricPoints:
        """Values from evaluations for a held-out metric, else from steps."""
        if name not in self._points:
            held_out = name.startswith("eval_")
            lines = self.record.eval_metrics if held_out else self.record.step_metrics
            self._points[name] = [
                (int(line["step"]), value)
                for line in lines
                if (value := finite_field(line, name)) is not None
            ]
        return self._points[name]

    def metric_names(self) -> Collection[str]:
        """The metrics of steps and of evaluations."""
        return metric_names(self.record.metrics_lines)

    def first_value(self, name: str) -> float | None:
        """The first value of a metric; None if it has none."""
        return next(iter(self.metric_values(name)), None)

    def config_value(self, key: str) -> Any:
        """The value of a dotted key of the run's config; None if it has none."""
        value: Any = self.record.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def weights_dtype(self) -> str | None:
        """The trainer's dtype, such as bfloat16; None if neither config nor model define it."""
        named = self.config_value("model.dtype")
        if isinstance(named, str) and named != "auto":
            return named
        folder = self.record.folder
        for path in [folder / "final/config.json", *folder.glob("checkpoint-*/config.json")]:
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(saved, dict) and isinstance(saved.get("dtype"), str):
                return str(saved["dtype"])
        return None


def read_evidence(record: RunRecord) -> RunEvidence:
    """Read the samples and the ledger of a run. Damaged ones are left out."""
    evidence = RunEvidence(record)
    files = list_sample_files(record.folder).get("", {})
    for step in _evenly_spread(sorted(files), MAX_SAMPLE_FILES):
        evidence.samples[step] = _readable_samples(files[step], record.problems)
    held_out = list_sample_files(record.folder, held_out=True)
    for steps in held_out.values():
        evidence.held_out += _readable_samples(steps[max(steps)], record.problems)
    _add_readable_draws(evidence, record.folder / LEDGER_FILE, record.problems)
    return evidence


def _add_readable_draws(evidence: RunEvidence, path: Path, problems: list[str]) -> None:
    """The draws of the ledger; a damaged one has none and is a problem."""
    if not path.is_file():
        return
    try:
        _add_draws(evidence, read_ledger_entries(path))
        return
    except RunError as error:
        problems.append(f"{error.problems[0].where}: {error.problems[0].what}")
    except (OSError, RecursionError) as error:
        problems.append(f"{path}: {error}")
    evidence.draw_examples.clear()
    evidence.draw_epochs.clear()


def _add_draws(evidence: RunEvidence, entries: Iterable[JsonObject]) -> None:
    sampled = {sample.get("draw") for samples in evidence.samples.values() for sample in samples}
    prompts = 0
    for entry in entries:
        if isinstance(entry.get("prompts"), int):
            prompts = entry["prompts"]
        rows = entry.get("rows")
        for draw, row in enumerate(rows if isinstance(rows, list) else [], entry["place"]):
            if draw in sampled:
                evidence.draw_examples[draw] = row
                evidence.draw_epochs[draw] = draw // prompts if prompts > 0 else 0


def _evenly_spread(steps: Sequence[int], count: int) -> list[int]:
    if len(steps) <= count:
        return [*steps]
    return sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})


def _readable_samples(path: Path, problems: list[str]) -> list[SampleRecord]:
    """The samples of a file; a damaged one has none and is a problem."""
    try:
        return read_sample_records(path)
    except RunError as error:
        problems.append(f"{error.problems[0].where}: {error.problems[0].what}")
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    return []
