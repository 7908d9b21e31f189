"""What a diagnosis rests on: a run's metrics, its samples by group, and the figures of both."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.inspection.sample_files import SampleRecord, list_sample_files, read_sample_records
from rloo_cli.reporting.advice import HELD_OUT_METRICS, MetricHistory
from rloo_cli.reporting.panel import last_message, metric_history
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, read_ledger_entries
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

MAX_SAMPLE_FILES = 40  # read of a long run, evenly spread, with the first and the last
QUARTER = 4  # the start and the end of a run are its first and last quarter


@dataclass
class RunEvidence:
    """A run's record with its samples; every figure is None where the files do not say it."""

    record: RunRecord
    samples: dict[int, list[SampleRecord]] = field(default_factory=dict)  # step -> completions
    held_out: list[SampleRecord] = field(default_factory=list)  # of the last evaluation
    # Of the draws that have samples: draw -> row of the data, draw -> its epoch.
    draw_examples: dict[int, int] = field(default_factory=dict)
    draw_epochs: dict[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Logged steps."""
        return len(self.record.step_metrics)

    def config_value(self, key: str) -> Any:
        """The value of a dotted key of the run's config; None where it has none."""
        value: Any = self.record.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def weights_dtype(self) -> str | None:
        """What the trainer computes in, as bfloat16; None where neither config nor model say it."""
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

    def metric_values(self, name: str) -> list[float]:
        """The finite values of a metric, in order."""
        return metric_history(self.record.step_metrics, name)

    def start_and_end(self, name: str) -> tuple[float, float] | None:
        """The mean of a metric over the first and over the last quarter of the run."""
        values = self.metric_values(name)
        count = len(values) // QUARTER
        return (fmean(values[:count]), fmean(values[-count:])) if count else None

    def end_mean(self, name: str) -> float | None:
        """The mean of a metric over the last quarter."""
        both = self.start_and_end(name)
        return None if both is None else both[1]

    @cached_property
    def held_out_history(self) -> MetricHistory:
        """The held-out scores as the advice of a run sees them at its last evaluation."""
        history = MetricHistory()
        for metrics in self.record.eval_metrics:
            history.add(metrics, HELD_OUT_METRICS)
        return history

    def groups(self, last: bool = False) -> Iterator[list[SampleRecord]]:
        """The completions of each prompt; `last`: of the second half of the samples alone."""
        steps = sorted(self.samples)
        for step in steps[len(steps) // 2 :] if last else steps:
            groups: dict[object, list[SampleRecord]] = defaultdict(list)
            for sample in self.samples[step]:
                groups[sample.get("draw")].append(sample)
            yield from groups.values()


def read_evidence(record: RunRecord) -> RunEvidence:
    """Read the samples and the ledger of a run. What is damaged is left out."""
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
    """The draws of the ledger; of one that is damaged none, which is a problem."""
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
    """The samples of a file; of one that is damaged none, which is a problem."""
    try:
        return read_sample_records(path)
    except RunError as error:
        problems.append(f"{error.problems[0].where}: {error.problems[0].what}")
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    return []


def prompt_text(sample: SampleRecord) -> str:
    """The prompt's own words: of a conversation, the user's last message."""
    return last_message(sample.get("prompt", ""))


def shown_prompt(sample: SampleRecord) -> str:
    """The prompt's words with its images: two prompts are equal if both are."""
    return "".join([prompt_text(sample), *(str(image) for image in sample.get("images") or [])])


def episode_turns(sample: SampleRecord) -> list[JsonObject]:
    """The turns of an episode; [] for one answer to a prompt."""
    turns = sample.get("turns")
    return [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []


def whole_text(sample: SampleRecord) -> str:
    """What was said and told in a completion: two that have it in common are equal."""
    turns = episode_turns(sample)
    parts = [[turn.get("told"), turn.get("said")] for turn in turns]
    return json.dumps(parts) if turns else str(sample.get("completion"))


def finite_field(sample: Mapping[str, Any], name: str) -> float | None:
    """A number of a sample or of a line of metrics; None where there is none."""
    value = sample.get(name)
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable and value is not None else None


def group_pairs(
    groups: Iterable[list[SampleRecord]], first: str, second: str
) -> list[tuple[float, float]]:
    """Two fields of every completion, each minus its mean over the completion's group."""
    pairs = []
    for group in groups:
        found = [(finite_field(s, first), finite_field(s, second)) for s in group]
        both = [(a, b) for a, b in found if a is not None and b is not None]
        if len(both) > 1:
            means = [fmean(column) for column in zip(*both, strict=True)]
            pairs += [(a - means[0], b - means[1]) for a, b in both]
    return pairs


def pair_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The correlation of two centred columns; None where one of them does not vary."""
    sums = [
        sum(a * b for a, b in pairs),
        sum(a * a for a, _ in pairs),
        sum(b * b for _, b in pairs),
    ]
    return sums[0] / math.sqrt(sums[1] * sums[2]) if sums[1] > 0 and sums[2] > 0 else None
