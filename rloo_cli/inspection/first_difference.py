"""Finds the first difference of two runs: key, version, data, prompt, token, score or number.

Possible causes are compared first (config, versions, data). Then both runs are walked step by step,
in the order of computation: the prompts drawn, the seeds and weights that sampled, completions,
scores, advantages, and the step's metrics. Times and memory depend on the machine and are ignored.
Only reads files.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rloo_cli.inspection.run_record import RunRecord, inspect_run_folder
from rloo_cli.inspection.sample_files import SampleRecord, list_sample_files, read_sample_records
from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES, read_ledger_entries
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject, read_json

# Metrics of the machine, not of the run.
MACHINE_METRICS = re.compile(
    r"step_time|eps|(time|perf|memory|overlap)/.*|reward/.*/time|eval_.*(time|seconds).*"
)
# Sections and keys that affect where and how a run is written, not what it computes.
FREE_KEYS = ("name", "root", "resume", "resume_allow_changes", "logging", "checkpoint", "slurm")
# Fields of a sample in the order of computation: field -> its name.
SAMPLE_FIELDS = {
    "prompt": "prompt", "prompt_length": "tokens of the prompt", "seed": "seed of the completion",
    "weight_version": "version of the weights that sampled", "completion": "completion",
    "completion_length": "tokens of the completion", "finish_reason": "end of the completion",
    "rewards": "reward", "score": "score", "shaped": "score after shaping", "kl": "KL",
    "reward": "reward minus KL", "advantage": "advantage",
}  # fmt: skip
# Metrics in the order of computation; all others follow by name.
METRIC_ORDER = ("reward", "kl", "loss", "grad_norm")
CONTEXT = 24  # characters shown around the first difference of two texts


@dataclass(frozen=True)
class RunDifference:
    """One difference of two runs."""

    what: str  # config key, package, or field
    first: str  # its value in the first run
    second: str
    step: int | None = None
    where: str = ""  # draw and completion, or the file


@dataclass
class FirstDifference:
    """Possible causes of a difference, and the first difference."""

    causes: list[RunDifference] = field(default_factory=list)  # config, versions, data
    parting: RunDifference | None = None  # the first number or text that differs
    steps_compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """Whether the runs computed something different."""
        return self.parting is not None

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return asdict(self) | {"found": self.found}


def find_first_difference(first: Path, second: Path, tolerance: float = 0.0) -> FirstDifference:
    """Compare two runs' folders. `tolerance`: relative, for numbers; 0 = bit for bit.

    Never raises for the files' content; unreadable files become notes.
    """
    runs = inspect_run_folder(first), inspect_run_folder(second)
    result = FirstDifference(notes=[text for run in runs for text in run.problems])
    result.causes = [*_config_differences(*runs), *_environment_differences(first, second)]
    fingerprints = [str(run.run_metadata.get("fingerprint")) for run in runs]
    if fingerprints[0] != fingerprints[1]:
        one, other = fingerprints
        result.causes.append(RunDifference("data (fingerprint)", one, other))
    files = [run.run_metadata.get("code_files") or {} for run in runs]
    for key in {**files[0], **files[1]}:
        if files[0].get(key, "-") != files[1].get(key, "-"):
            one, other = (str(by_key.get(key, "-")) for by_key in files)
            result.causes.append(RunDifference(f"{key} (file)", one, other))
    walk = _StepWalk(runs, tolerance)
    result.parting = next(walk.differences(), None)
    result.steps_compared = walk.steps_compared
    if not walk.steps_compared:
        result.notes.append("the runs share no logged step")
    elif not walk.samples_compared:
        result.notes.append("no step has samples in both runs: only metrics were compared")
    return result


def _flat_values(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _config_differences(first: RunRecord, second: RunRecord) -> list[RunDifference]:
    flat = [
        {k: v for k, v in _flat_values(run.config) if k.partition(".")[0] not in FREE_KEYS}
        for run in (first, second)
    ]
    return [
        RunDifference(key, str(flat[0].get(key, "–")), str(flat[1].get(key, "–")), where="config")
        for key in {**flat[0], **flat[1]}
        if flat[0].get(key) != flat[1].get(key)
    ]


def _environment_differences(first: Path, second: Path) -> list[RunDifference]:
    found = []
    for folder in (first, second):
        try:
            found.append(dict(_flat_values(read_json(folder / "env.json"))))
        except (OSError, ValueError, AttributeError):
            found.append({})
    return [
        RunDifference(key, str(found[0].get(key)), str(found[1].get(key)), where="env.json")
        for key in {**found[0], **found[1]}
        if found[0].get(key) != found[1].get(key)
    ]


class _StepWalk:
    """Walks two runs step by step, and yields differences in the order of their causes."""

    def __init__(self, runs: tuple[RunRecord, RunRecord], tolerance: float):
        self.runs, self.tolerance = runs, tolerance
        self.steps_compared = self.samples_compared = 0

    def differences(self) -> Iterator[RunDifference]:
        metrics = [{int(m["step"]): m for m in run.step_metrics} for run in self.runs]
        evaluations = [{int(m["step"]): m for m in run.eval_metrics} for run in self.runs]
        ledgers = [_LedgerSteps(run.folder) for run in self.runs]
        files = [list_sample_files(run.folder).get("", {}) for run in self.runs]
        for step in sorted({*metrics[0], *metrics[1], *evaluations[0], *evaluations[1]}):
            if all(step in lines for lines in evaluations):
                yield from self._metric_differences(step, evaluations, "evaluation")
            if not all(step in lines for lines in metrics):
                continue  # one of them ended earlier, or logs other steps
            self.steps_compared += 1
            entries = [entry for ledger in ledgers if (entry := ledger.entry_of(step))]
            if len(entries) == len(ledgers):
                yield from _ledger_differences(step, *entries)
            if all(step in found for found in files):
                yield from self._sample_differences(step, *(found[step] for found in files))
            yield from self._metric_differences(step, metrics, "metrics.jsonl")

    def _sample_differences(self, step: int, first: Path, second: Path) -> Iterator[RunDifference]:
        try:
            samples = read_sample_records(first), read_sample_records(second)
        except (RunError, OSError):
            return
        if not all(samples):  # one of them is damaged or truncated
            return
        self.samples_compared += 1
        keyed = [{(s.get("draw"), s.get("k")): s for s in found} for found in samples]
        common = [key for key in keyed[0] if key in keyed[1]]
        for name, called in SAMPLE_FIELDS.items():
            for draw, k in common:
                one, other = (found[draw, k] for found in keyed)
                label = f"draw {draw}, completion {k}"
                yield from self._field_differences(step, label, name, called, one, other)
        if keyed[0].keys() != keyed[1].keys():
            one_count, other_count = (str(len(found)) for found in keyed)
            yield RunDifference("completions", one_count, other_count, step, "samples")

    def _field_differences(
        self, step: int, label: str, name: str, called: str, one: SampleRecord, other: SampleRecord
    ) -> Iterator[RunDifference]:
        values = one.get(name), other.get(name)
        if name == "rewards" and all(isinstance(value, dict) for value in values):
            rewards = [dict(value) for value in values if isinstance(value, dict)]
            for reward in {**rewards[0], **rewards[1]}:
                pair = rewards[0].get(reward), rewards[1].get(reward)
                if not self._is_equal(*pair):
                    what = f"reward {reward}"
                    yield RunDifference(what, str(pair[0]), str(pair[1]), step, label)
        elif name == "completion" and isinstance(values[0], str) and isinstance(values[1], str):
            if values[0] != values[1]:
                at, shown = _parting_texts(values[0], values[1])
                where = f"{label}, character {at}"
                yield RunDifference(called, *shown, step=step, where=where)
        elif not self._is_equal(*values):
            yield RunDifference(called, str(values[0]), str(values[1]), step, label)

    def _metric_differences(
        self, step: int, lines: Sequence[dict[int, MetricsMapping]], where: str
    ) -> Iterator[RunDifference]:
        one, other = (found[step] for found in lines)
        names = [n for n in {**one, **other} if not MACHINE_METRICS.fullmatch(n)]
        known = {name: index for index, name in enumerate(METRIC_ORDER)}
        for name in sorted(names, key=lambda n: (known.get(n, len(known)), n)):
            if name in one and name in other and not self._is_equal(one[name], other[name]):
                yield RunDifference(name, repr(one[name]), repr(other[name]), step, where)

    def _is_equal(self, one: object, other: object) -> bool:
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        if numbers and self.tolerance:
            return math.isclose(one, other, rel_tol=self.tolerance, abs_tol=self.tolerance)  # type: ignore[arg-type]
        return one == other


class _LedgerSteps:
    """The step lines of a ledger, requested in order; none after a damaged line."""

    def __init__(self, folder: Path):
        self.entries = read_ledger_entries(folder / LEDGER_FILE)
        self.entry: JsonObject | None = {"step": -1}

    def entry_of(self, step: int) -> JsonObject | None:
        """The line of a step; None if missing."""
        while self.entry is not None and ("rows" not in self.entry or self.entry["step"] < step):
            try:
                self.entry = next(self.entries, None)
            except (RunError, OSError, ValueError):
                self.entry = None
        return self.entry if self.entry is not None and self.entry["step"] == step else None


def _ledger_differences(step: int, one: JsonObject, other: JsonObject) -> Iterator[RunDifference]:
    """The data row of each draw, then the fates of the draws."""
    for name in ("place", "rows", *PROMPT_FATES):
        pair = one.get(name), other.get(name)
        if pair[0] == pair[1]:
            continue
        if name == "rows" and all(isinstance(rows, list) for rows in pair):
            rows = [list(found) for found in pair if isinstance(found, list)]
            for draw, (a, b) in enumerate(zip(*rows, strict=False), int(one.get("place", 0))):
                if a != b:
                    what = "row of the data"
                    yield RunDifference(what, str(a), str(b), step, f"draw {draw}, ledger.jsonl")
        yield RunDifference(f"{name} of the ledger", str(pair[0]), str(pair[1]), step, LEDGER_FILE)


def _parting_texts(one: str, other: str) -> tuple[int, tuple[str, str]]:
    """The first difference of two texts, and the text there in each."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, at - CONTEXT // 2)
    return at, (repr(one[start : start + CONTEXT]), repr(other[start : start + CONTEXT]))


def difference_lines(result: FirstDifference) -> list[str]:
    """The result in lines: causes first, then the first difference."""
    lines = [f"{d.where or 'data'}: {d.what}  {d.first} → {d.second}" for d in result.causes]
    if result.parting is None:
        equal = f"no difference in {result.steps_compared} steps"
        return [*lines, equal, *(f"note: {text}" for text in result.notes)]
    d = result.parting
    lines.append(f"first difference: step {d.step}, {d.what} ({d.where})")
    lines += [f"  first   {d.first}", f"  second  {d.second}"]
    return [*lines, *(f"note: {text}" for text in result.notes)]
