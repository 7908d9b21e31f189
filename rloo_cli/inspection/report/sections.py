"""A run's report, section by section, as plain values for its page.

Nothing here depends on the clock or the folder's location: equal files give equal reports.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev

from rloo_cli.data.images import THUMBNAIL_PREFIX
from rloo_cli.inspection.diagnosis import Diagnosis
from rloo_cli.inspection.diagnosis.evidence import RunEvidence
from rloo_cli.inspection.ledger_sums import read_ledger_sums
from rloo_cli.inspection.report.token_strips import TokenStrip, token_strips
from rloo_cli.inspection.sample_files import SampleRecord
from rloo_cli.reporting.conversation import conversation_parts, episode_end
from rloo_cli.reporting.eval_lines import headline_metrics, interval_text
from rloo_cli.reporting.health.evidence import (
    finite_field,
    group_pairs,
    pair_correlation,
    prompt_text,
)
from rloo_cli.reporting.metrics_lines import metric_names
from rloo_cli.reporting.panel import format_duration, format_number, metric_history
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject, read_json

SHOWN_SAMPLES = 5  # best, worst and most disputed ones each
MAX_TEXT = 1200  # characters of a prompt or a completion
MAX_PARTS = 24  # messages of an episode
STATE_WORDS = {
    "finished": "finished",
    "stopped": "was stopped, and can be resumed",
    "failed": "failed",
    "training": "is training, or was interrupted",
    "starting": "has not started its first step",
    "killed": "was killed: its process is gone",
    "unknown": "has no readable run.json",
}


@dataclass(frozen=True)
class ReportTable:
    """A table of the page; the first column names its rows."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


@dataclass(frozen=True)
class ShownSample:
    """A completion as shown on the page."""

    title: str
    prompt: str
    completion: str
    figures: str
    # Parts of an episode: (told, said or called; who; the text); shown instead of the completion.
    parts: Sequence[tuple[str, str, str]] = ()
    images: Sequence[str] = ()  # of the prompt, as `data:` URLs


@dataclass
class ReportSections:
    """The page's content besides charts."""

    name: str
    verdict: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    held_out: ReportTable | None = None
    samples: dict[str, list[ShownSample]] = field(default_factory=dict)  # heading -> samples
    reward_figures: list[tuple[str, str]] = field(default_factory=list)
    strips: list[TokenStrip] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # of keys on resume
    phases: ReportTable | None = None
    duration: ReportTable | None = None
    memory: ReportTable | None = None
    ledger: ReportTable | None = None
    ledger_problem: str = ""
    environment: list[tuple[str, str]] = field(default_factory=list)
    config_text: str = ""


def build_sections(run: RunEvidence, diagnosis: Diagnosis) -> ReportSections:
    """Every section with data in the run's files."""
    folder = run.record.folder
    sections = ReportSections(_run_name(run), verdict_text(run, diagnosis), _run_facts(run))
    overrides = folder / "overrides.txt"
    if overrides.is_file():
        lines = overrides.read_text(encoding="utf-8", errors="replace").splitlines()
        sections.overrides = [_visible(line) for line in lines if line.strip()]
    sections.held_out = _held_out_table(run)
    sections.samples = _shown_samples(run)
    sections.reward_figures = _reward_figures(run)
    sections.strips = token_strips(run)
    sections.changes = _resume_changes(run)
    sections.phases = _phase_table(run)
    sections.duration = _duration_table(run)
    sections.memory = _memory_table(run)
    sections.ledger, sections.ledger_problem = _ledger_table(folder)
    sections.environment = _environment_facts(run)
    config = folder / "config.yaml"
    if config.is_file():
        sections.config_text = _visible(config.read_text(encoding="utf-8", errors="replace"))
    return sections


def verdict_text(run: RunEvidence, diagnosis: Diagnosis) -> str:
    """The run in one line: how it ended, what it learnt, and the gravest finding."""
    record = run.record
    of = record.run_metadata.get("plan", {}).get("max_steps")
    parts = [f"The run {STATE_WORDS.get(record.state, record.state)}"]
    parts[0] += f" after {record.last_step} of {of} steps" if of else f" at step {record.last_step}"
    evaluated = [line for line in record.eval_metrics if headline_metrics(line)]
    if evaluated:
        label, name = headline_metrics(evaluated[0])[0]
        first, last = evaluated[0].get(name), evaluated[-1].get(name)
        if isinstance(first, int | float) and isinstance(last, int | float):
            texts = [format_number(first) + interval_text(evaluated[0], name)]
            if len(evaluated) > 1:
                texts.append(format_number(last) + interval_text(evaluated[-1], name))
            parts.append(f"{label} {' → '.join(texts)}")
    elif reward := run.start_and_end("reward"):
        parts.append(f"reward {format_number(reward[0])} → {format_number(reward[1])}")
    if diagnosis.findings:
        parts.append(f"found: {', '.join(finding.name for finding in diagnosis.findings)}")
    else:
        parts.append("no known problem found")
    if diagnosis.problems:
        parts.append(f"damaged files: {len(diagnosis.problems)}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _run_name(run: RunEvidence) -> str:
    return str(run.config_value("name") or run.record.run_metadata.get("name") or "run")


def _run_facts(run: RunEvidence) -> list[tuple[str, str]]:
    plan, times = run.record.run_metadata.get("plan", {}), run.metric_values("step_time")
    facts = [(name, str(plan[name])) for name in ("recipe", "model", "algorithm") if plan.get(name)]
    if times:
        facts.append(("training", f"{format_duration(sum(times))}, {median(times):.3g} s a step"))
    tokens = metric_history(run.record.step_metrics, "num_tokens")
    if tokens:
        facts.append(("tokens", f"{tokens[-1]:,.0f}"))
    attempt = run.record.run_metadata.get("attempt")
    if isinstance(attempt, int) and attempt > 1:
        facts.append(("attempts", str(attempt)))
    why = run.record.run_metadata.get("ended", {}).get("why")
    if why and why != "finished":
        facts.append(("why it ended", _visible(str(why))))
    return facts


def _resume_changes(run: RunEvidence) -> list[str]:
    """Keys that a resumed attempt changed, as `attempt 2: train.learning_rate 1e-4 → 1e-5`."""
    changes = run.record.run_metadata.get("changes")
    lines = []
    for entry in changes if isinstance(changes, list) else []:
        for key, pair in entry.items() if isinstance(entry, dict) else ():
            if isinstance(pair, list) and len(pair) == 2:
                at = f"attempt {entry.get('attempt', '?')}"
                lines.append(_visible(f"{at}: {key} {pair[0]} → {pair[1]}"))
    return lines


def _held_out_table(run: RunEvidence) -> ReportTable | None:
    lines = [line for line in run.record.eval_metrics if headline_metrics(line)]
    if not lines:
        return None
    names = dict.fromkeys(pair for line in lines for pair in headline_metrics(line))
    rows = [
        (
            str(line["step"]),
            *(
                f"{format_number(v)}{interval_text(line, name)}"
                if isinstance(v := line.get(name), int | float) else "–"
                for _, name in names
            ),
        )
        for line in lines
    ]  # fmt: skip
    shown = rows if len(rows) <= 12 else [*rows[:6], ("…",) * len(rows[0]), *rows[-5:]]
    return ReportTable(("step", *(label for label, _ in names)), shown)


def _shown_samples(run: RunEvidence) -> dict[str, list[ShownSample]]:
    """From the run's second half: best and worst samples, and most disputed groups."""
    groups = [group for group in run.groups(last=True) if group]
    scored = [
        (score, sample)
        for group in groups
        for sample in group
        if (score := finite_field(sample, "score")) is not None
    ]
    if not scored:
        return {}
    order = sorted(scored, key=lambda pair: pair[0])
    best = [_shown_sample(sample) for _, sample in _one_of_each_group(order[::-1])]
    worst = [_shown_sample(sample) for _, sample in _one_of_each_group(order)]
    disputed = []
    for group in sorted(groups, key=_group_spread, reverse=True)[:SHOWN_SAMPLES]:
        ranked = sorted(
            (s for s in group if finite_field(s, "score") is not None),
            key=lambda sample: finite_field(sample, "score") or 0.0,
        )
        if _group_spread(group) > 0:
            disputed += [_shown_sample(ranked[-1]), _shown_sample(ranked[0])]
    found = {
        "best": best,
        "worst": worst,
        "most disputed: best and worst of a group": disputed,
    }
    return {heading: samples for heading, samples in found.items() if samples}


def _one_of_each_group(
    order: Sequence[tuple[float, SampleRecord]],
) -> list[tuple[float, SampleRecord]]:
    """The first of each group, SHOWN_SAMPLES of them: equal answers to a prompt add nothing."""
    first: dict[object, tuple[float, SampleRecord]] = {}
    for score, sample in order:
        first.setdefault(sample.get("draw"), (score, sample))
    return [*first.values()][:SHOWN_SAMPLES]


def _group_spread(group: Sequence[SampleRecord]) -> float:
    scores = group_scores(group)
    return pstdev(scores) if len(scores) > 1 else 0.0


def _shown_sample(sample: SampleRecord) -> ShownSample:
    parts = [("score", sample.get("score")), *(sample.get("rewards") or {}).items()]
    parts += [(name, sample.get(name)) for name in ("advantage", "kl") if name in sample]
    figures = [f"{k} {format_number(v)}" for k, v in parts if isinstance(v, int | float)]
    end = episode_end(sample) or str(sample.get("finish_reason") or "")
    figures += [_visible(end)] if end else []
    return ShownSample(
        f"draw {sample.get('draw', '?')}, completion {sample.get('k', '?')}",
        _shortened(prompt_text(sample)),
        _shortened(str(sample.get("completion", ""))),
        " · ".join(figures),
        _shown_parts(sample),
        [x for x in sample.get("images") or [] if str(x).startswith(THUMBNAIL_PREFIX)],
    )


def _shown_parts(sample: SampleRecord) -> list[tuple[str, str, str]]:
    """An episode's messages, each shortened; if there are many, the first and last ones."""
    parts = conversation_parts(sample)
    shown = [(str(part.kind), _visible(part.head), _shortened(part.text)) for part in parts]
    if len(shown) <= MAX_PARTS:
        return shown
    half = MAX_PARTS // 2
    left_out = ("told", "…", f"{len(shown) - 2 * half} more")
    return [*shown[:half], left_out, *shown[-half:]]


def _shortened(text: str) -> str:
    return _visible(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …")


def _visible(text: str) -> str:
    return show_control_characters(text)


def _reward_figures(run: RunEvidence) -> list[tuple[str, str]]:
    pairs = group_pairs(run.groups(), "score", "completion_length")
    facts = []
    if (correlation := pair_correlation(pairs)) is not None:
        facts.append(("correlation of score and length within groups", f"{correlation:+.2f}"))
    for name, (first, last) in _group_shares(run).items():
        facts.append((name, f"{format_number(first, '%')} → {format_number(last, '%')}"))
    if (spread := run.start_and_end("reward_std")) is not None:
        spread_text = f"{format_number(spread[0])} → {format_number(spread[1])}"
        facts.append(("std of the scores within groups", spread_text))
    for name, values in _reward_columns(run.groups()).items():
        summary = f"mean {format_number(fmean(values))}, {format_number(min(values))} to"
        facts.append((f"reward {name}", f"{summary} {format_number(max(values))}"))
    return facts


def _group_shares(run: RunEvidence) -> dict[str, tuple[float, float]]:
    """Share of groups that are all right or all wrong, in the first and second half."""
    found = [scores for group in run.groups() if (scores := group_scores(group))]
    if len(found) < 2:
        return {}
    best = max(max(scores) for scores in found)
    halves = found[: len(found) // 2], found[len(found) // 2 :]
    return {
        "groups with only the best score": _shares(halves, lambda s: min(s) == best),
        "groups without the best score": _shares(halves, lambda s: max(s) < best),
    }


def group_scores(group: Sequence[SampleRecord]) -> list[float]:
    """The scores in a group, without missing ones."""
    return [s for sample in group if (s := finite_field(sample, "score")) is not None]


def _shares(
    halves: tuple[list[list[float]], list[list[float]]], true: Callable[[list[float]], bool]
) -> tuple[float, float]:
    first, second = (fmean(true(scores) for scores in half) for half in halves)
    return first, second


def _reward_columns(groups: Iterable[Sequence[SampleRecord]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for sample in group:
            for name, value in (sample.get("rewards") or {}).items():
                if isinstance(value, int | float):
                    columns[str(name)].append(float(value))
    return columns


def _phase_table(run: RunEvidence) -> ReportTable | None:
    names = [n for n in metric_names(run.record.step_metrics) if n.startswith("time/")]
    whole = sum(run.metric_values("step_time"))
    if not whole:
        return None
    rows = []
    for name in names:
        values = run.metric_values(name)
        rows.append(
            (name[5:], f"{median(values):.3g}" if values else "–", f"{sum(values) / whole:.1%}")
        )
    rows.append(("a whole step", f"{median(run.metric_values('step_time')):.3g}", ""))
    return ReportTable(("phase", "median seconds", "share of all"), rows)


def _memory_table(run: RunEvidence) -> ReportTable | None:
    memory = run.record.run_metadata.get("memory") or {}
    measured, predicted = memory.get("measured_bytes"), memory.get("predicted_bytes")
    if not isinstance(measured, int | float):
        return None
    rows = [("measured peak", _gib(measured))]
    note = ""
    if isinstance(predicted, int | float) and predicted:
        rows.append((f"predicted, in {memory.get('predicted_phase', 'all')}", _gib(predicted)))
        rows += [(f"– {name}", _gib(size)) for name, size in _numbers_of(memory, "predicted_parts")]
        note = f"The prediction is off by {predicted / measured - 1:+.0%}." if measured else ""
    return ReportTable(("memory", "GiB"), rows, note)


def _numbers_of(section: JsonObject, name: str) -> list[tuple[str, float]]:
    """The numbers of an object inside a section of run.json."""
    values = section.get(name)
    found = values.items() if isinstance(values, dict) else ()
    return [(str(key), value) for key, value in found if isinstance(value, int | float)]


def _duration_table(run: RunEvidence) -> ReportTable | None:
    """Seconds of a step, predicted and measured."""
    seconds = run.record.run_metadata.get("seconds") or {}
    measured, predicted = seconds.get("measured_step_s"), seconds.get("predicted_step_s")
    if not isinstance(measured, int | float) or not isinstance(predicted, int | float):
        return None
    rows = [("measured, median", f"{measured:.3g}"), ("predicted", f"{predicted:.3g}")]
    rows += [(f"– {k}", f"{s:.3g}") for k, s in _numbers_of(seconds, "predicted_parts_s")]
    device = _visible(str(seconds.get("assumed_device", "?")))
    note = (
        f"Predicted for {device}, by its assumed speed and the run's own lengths, without Python's"
    )
    note += " own time, which is most of a tiny model's."
    if isinstance(load := seconds.get("load_average"), int | float):
        note += f" The machine's load was {load:.1f} when the run ended."
    return ReportTable(("a step", "seconds"), rows, note)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _ledger_table(folder: Path) -> tuple[ReportTable | None, str]:
    if not (folder / "ledger.jsonl").is_file():
        return None, ""
    try:
        sums = read_ledger_sums(folder)
    except RunError as error:
        problem = error.problems[0]
        where = problem.where.replace(f"{folder}/", "")
        return None, _visible(f"{problem.what} ({where}): {problem.why}")
    except OSError as error:
        return None, f"the ledger is unreadable: {type(error).__name__}"
    rows = [(name, f"{count:,}") for name, count in sums["fates"].items() if count]
    rows.append(("together", f"{sums['draws']:,}"))
    about = f"{sums['prompts']:,} prompts, {sums['filtered']} filtered, {sums['updates']} updates."
    return ReportTable(("fate of a draw", "draws"), rows, about), ""


def _environment_facts(run: RunEvidence) -> list[tuple[str, str]]:
    metadata, facts = run.record.run_metadata, []
    for name in ("hash", "fingerprint", "checkpoint", "came_from"):
        if metadata.get(name):
            facts.append((name, str(metadata[name])))
    try:
        environment = read_json(run.record.folder / "env.json")
    except (OSError, ValueError):
        environment = {}
    facts += [(str(k), _plain_value(v)) for k, v in environment.items()]
    forward = metadata.get("forward")
    if isinstance(forward, dict):
        facts.append(("forward", _plain_value(forward)))
    return facts


def _plain_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain_value(v)}" for k, v in value.items() if v not in ("", None))
    return _visible(str(value))


def sections_json(sections: ReportSections) -> JsonObject:
    """The verdict and the figures as plain values, for --json."""
    return {
        "name": sections.name,
        "verdict": sections.verdict,
        "facts": dict(sections.facts),
        "reward": dict(sections.reward_figures),
        "environment": dict(sections.environment),
        "ledger_problem": sections.ledger_problem,
    }
