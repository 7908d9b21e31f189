"""The charts of a run's report, as Vega-Lite: drawn by altair, for a self-contained page.

Long runs are thinned: a point is the mean of nearby steps, so a page about a thousand steps stays
small. Charts have no fixed colour for text and axes; the page sets it, light or dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.inspection.diagnosis.evidence import RunEvidence
from rloo_cli.reporting.health.evidence import finite_field
from rloo_cli.reporting.metrics_lines import MetricsMapping, metric_names
from rloo_cli.reporting.panel import metric_history
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.metrics import find_metric

MAX_POINTS = 300  # per line
MAX_BINS = 30  # bins of steps in the histogram of scores
SCORE_BINS = 24
MAX_DOTS = 600  # completions in the plot of score and length
PALETTE = ("#3b82f6", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#dc2626", "#64748b")
HEIGHT = 170
MAX_OWN_CHARTS = 12
OWN_NOTE = "logged by a reward (log_metric) or by the algorithm's loss"

# Title -> metric -> its name in the legend. A chart is omitted if the run lacks its metrics.
CURVES: dict[str, dict[str, str]] = {
    "KL to the reference, nats per token": {"kl": "kl"},
    "entropy, nats": {"entropy": "entropy"},
    "length of completions, tokens": {
        "completions/mean_length": "mean",
        "completions/mean_terminated_length": "finished ones",
        "completions/max_length": "longest",
    },
    "shares": {
        "completions/clipped_ratio": "truncated",
        "frac_reward_zero_std": "groups without spread",
        "clip_ratio/region_mean": "ratios clipped",
    },
    "turns and calls of an episode": {
        "agent/turns": "turns",
        "agent/calls": "calls",
        "agent/bad_calls": "bad calls",
        "agent/errors": "tool errors",
    },
    "episodes that failed or were cut off, shares": {
        "agent/failures": "no score",
        "agent/truncated_by/turns": "at max_turns",
        "agent/truncated_by/tokens": "at max_episode_tokens",
        "agent/truncated_by/context": "at the context",
        "agent/truncated_by/completion": "in a turn",
    },
    "seconds of a call": {"agent/tool_s": "seconds"},
    "gradient norm before clipping": {"grad_norm": "grad_norm"},
    "sampler against trainer, nats per token": {
        "sampling/logp_diff_rms": "root mean square",
        "sampling/logp_diff_mean": "mean",
    },
    "sampler against trainer by position in the completion, nats per token": {
        "sampling/logp_diff_from0": "tokens 0-63",
        "sampling/logp_diff_from64": "64-511",
        "sampling/logp_diff_from512": "512-4095",
        "sampling/logp_diff_from4096": "4096 on",
    },
    "value loss": {"loss/value_avg": "value loss"},
    "tokens per second": {"perf/tokens_per_s": "tokens/s"},
}


@dataclass(frozen=True)
class ReportChart:
    """A chart: its title, what to see in it, and its Vega-Lite."""

    title: str
    spec: JsonObject
    note: str = ""


def thin_points(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[JsonObject]:
    """At most this many points; each is the mean of its neighbours."""
    if not points:
        return []
    size = max(1, math.ceil(len(points) / most))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        {
            "step": round(sum(x for x, _ in group) / len(group), 1),
            "value": float(f"{sum(y for _, y in group) / len(group):.5g}"),
        }
        for group in groups
    ]


def metric_line(lines: Sequence[MetricsMapping], name: str) -> list[JsonObject]:
    """The finite values of a metric by step, thinned."""
    points = []
    for line in lines:
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            points.append((float(line["step"]), float(value)))
    return thin_points(points)


def curve_charts(run: RunEvidence, advice: Sequence[tuple[int, str]]) -> list[ReportChart]:
    """The curves of a run; a dashed line marks the run's advice."""
    charts = []
    if reward := _reward_chart(run, advice):
        charts.append(reward)
    for title, metrics in CURVES.items():
        values = [
            point | {"line": label}
            for name, label in metrics.items()
            for point in metric_line(run.record.step_metrics, name)
        ]
        if values:
            charts.append(ReportChart(title, _lines_spec(values, title, advice)))
    for name in own_metrics(run.record.step_metrics)[:MAX_OWN_CHARTS]:
        values = [p | {"line": name} for p in metric_line(run.record.step_metrics, name)]
        charts.append(ReportChart(name, _lines_spec(values, name, advice), OWN_NOTE))
    return charts


def own_metrics(lines: Sequence[MetricsMapping]) -> list[str]:
    """Names of numbers logged by rewards, or by the loss of a user's algorithm."""
    return [
        name
        for name in metric_names(lines)
        if name.startswith("algorithm/") or find_metric(name) is None
        if metric_line(lines, name)
    ]


def _reward_chart(run: RunEvidence, advice: Sequence[tuple[int, str]]) -> ReportChart | None:
    values = [p | {"line": "reward"} for p in metric_line(run.record.step_metrics, "reward")]
    held_out = dict.fromkeys(
        name for line in run.record.eval_metrics for name in line if name.endswith("_reward")
    )
    for name in held_out:
        label = name.removeprefix("eval_").removesuffix("_reward").removesuffix("reward")
        label = f"held out {label}".strip()
        values += [p | {"line": label} for p in metric_line(run.record.eval_metrics, name)]
    title = "reward, and held-out score"
    return ReportChart(title, _lines_spec(values, title, advice, dots=True)) if values else None


def _lines_spec(
    values: list[JsonObject], title: str, advice: Sequence[tuple[int, str]], dots: bool = False
) -> JsonObject:
    import altair as alt  # lazy: a third of a second, only for this verb

    names = list(dict.fromkeys(value["line"] for value in values))
    colour = alt.Color(
        "line:N",
        scale=alt.Scale(domain=names, range=list(PALETTE[: len(names)])),
        legend=alt.Legend(orient="top", title=None) if len(names) > 1 else None,
    )
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(format=".6~g")),
        color=colour,
        tooltip=[alt.Tooltip("line:N"), alt.Tooltip("step:Q"), alt.Tooltip("value:Q")],
    )
    layers: list[Any] = [base.mark_line(strokeWidth=1.6, point={"size": 18} if dots else False)]
    if advice:
        marks = [{"step": step, "advice": text} for step, text in advice]
        rule = alt.Chart(alt.InlineData(values=marks)).mark_rule(
            color="#d97706", strokeDash=[4, 3], strokeWidth=1.4
        )
        layers.append(rule.encode(x="step:Q", tooltip=["step:Q", "advice:N"]))
    return _sized(alt.layer(*layers))


def _sized(chart: Any, height: int = HEIGHT) -> JsonObject:
    spec: JsonObject = chart.properties(width="container", height=height).to_dict(validate=False)
    spec.pop("config", None)
    return spec


def score_charts(run: RunEvidence) -> list[ReportChart]:
    """Scores of completions: their histogram over time, spread, and relation to length."""
    found = [_score_histogram(run), _spread_chart(run), _length_chart(run)]
    return [chart for chart in found if chart is not None]


def _score_histogram(run: RunEvidence) -> ReportChart | None:
    import altair as alt  # lazy: a third of a second, only for this verb

    scores = [
        (step, score)
        for step, samples in run.samples.items()
        for sample in samples
        if (score := finite_field(sample, "score")) is not None
    ]
    if not scores:
        return None
    steps = sorted(run.samples)
    size = max(1, math.ceil(len(steps) / MAX_BINS))
    column_of = {step: steps[i // size * size] for i, step in enumerate(steps)}
    row_of = _score_rows([score for _, score in scores])
    counts: dict[tuple[int, float], int] = {}
    for step, score in scores:
        cell = column_of[step], row_of[score]
        counts[cell] = counts.get(cell, 0) + 1
    values = [
        {"step": step, "score": score, "completions": count}
        for (step, score), count in sorted(counts.items())
    ]
    # One colour in several strengths: readable on light and dark.
    chart = alt.Chart(alt.InlineData(values=values)).mark_rect(color=PALETTE[0])
    spec = _sized(
        chart.encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True)),
            y=alt.Y("score:O", title="score", sort="descending", axis=alt.Axis(labelOverlap=True)),
            opacity=alt.Opacity("completions:Q", scale=alt.Scale(range=[0.06, 1]), legend=None),
            tooltip=["step:O", "score:O", "completions:Q"],
        )
    )
    return ReportChart("scores over time", spec, "stronger: more completions with that score")


def _score_rows(scores: Sequence[float]) -> dict[float, float]:
    """Score -> its row of the histogram: itself if there are few, else a bin."""
    distinct = sorted({*scores})
    if len(distinct) <= SCORE_BINS:
        return {score: float(f"{score:.4g}") for score in distinct}
    width = (distinct[-1] - distinct[0]) / SCORE_BINS
    bins = [min(SCORE_BINS - 1, int((score - distinct[0]) / width)) for score in distinct]
    return {
        score: float(f"{distinct[0] + (bin_ + 0.5) * width:.4g}")
        for score, bin_ in zip(distinct, bins, strict=True)
    }


def _spread_chart(run: RunEvidence) -> ReportChart | None:
    values = []
    best = max(
        (s for g in run.groups() for x in g if (s := finite_field(x, "score")) is not None),
        default=0.0,
    )
    for step, samples in sorted(run.samples.items()):
        groups: dict[object, list[float]] = {}
        for sample in samples:
            if (score := finite_field(sample, "score")) is not None:
                groups.setdefault(sample.get("draw"), []).append(score)
        if groups:
            best_of_all = sum(min(g) == best for g in groups.values()) / len(groups)
            none_best = sum(max(g) < best for g in groups.values()) / len(groups)
            values += [
                {"step": step, "value": round(best_of_all, 4), "line": "all completions best"},
                {"step": step, "value": round(none_best, 4), "line": "none is best"},
            ]
    values += [
        point | {"line": "std within groups"}
        for point in metric_line(run.record.step_metrics, "reward_std")
    ]
    if not values:
        return None
    title = "groups: all right, all wrong, spread"
    return ReportChart(title, _lines_spec(values, title, []), "best = the highest score of the run")


def _length_chart(run: RunEvidence) -> ReportChart | None:
    import altair as alt  # lazy: a third of a second, only for this verb

    dots = [
        {"length": length, "score": score, "step": step}
        for step, samples in sorted(run.samples.items())
        for sample in samples
        if (length := finite_field(sample, "completion_length")) is not None
        and (score := finite_field(sample, "score")) is not None
    ]
    if not dots:
        return None
    dots = dots[:: max(1, math.ceil(len(dots) / MAX_DOTS))]
    chart = alt.Chart(alt.InlineData(values=dots)).mark_circle(size=26, opacity=0.45)
    spec = _sized(
        chart.encode(
            x=alt.X("length:Q", title="tokens"),
            y=alt.Y("score:Q", title="score"),
            color=alt.Color("step:Q", scale=alt.Scale(scheme="viridis")),
            tooltip=["step:Q", "length:Q", "score:Q"],
        )
    )
    return ReportChart("score and length", spec)


def _main_phases(steps: Sequence[MetricsMapping]) -> dict[str, list[str]]:
    """Phase -> its metrics, the longest first; the shortest of many phases are merged."""
    names = [name for name in metric_names(steps) if name.startswith("time/")]
    totals = {name: sum(metric_history(steps, name)) for name in names}
    ranked = sorted(totals, key=lambda name: -totals[name])
    shown, rest = ranked[: len(PALETTE) - 1], ranked[len(PALETTE) - 1 :]
    return {name.removeprefix("time/"): [name] for name in shown} | (
        {"other": rest} if rest else {}
    )


def phase_chart(run: RunEvidence) -> ReportChart | None:
    """The seconds of each step by phase, stacked."""
    import altair as alt  # lazy: a third of a second, only for this verb

    steps = run.record.step_metrics
    phases = _main_phases(steps)
    values = []
    for label, names in phases.items():
        seconds = [(float(m["step"]), sum(m.get(name, 0.0) for name in names)) for m in steps]
        values += [point | {"phase": label} for point in thin_points(seconds)]
    if not values:
        return None
    chart = alt.Chart(alt.InlineData(values=values)).mark_area(opacity=0.85)
    spec = _sized(
        chart.encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("value:Q", title="seconds", stack="zero"),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=list(phases), range=list(PALETTE[: len(phases)])),
                legend=alt.Legend(orient="top", title=None, columns=4),
            ),
            tooltip=["phase:N", "step:Q", "value:Q"],
        )
    )
    return ReportChart("seconds of a step, by phase", spec)
