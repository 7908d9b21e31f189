"""Compares configurations: curves over completions, figures at the end, differences.

The held-out score is a metric of the evaluations in metrics.jsonl; without evaluations the training
reward is used instead, under its own name. Win rates come from one judge, on the final models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from rloo_cli.cli.compare import judgements
from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.reporting import curves
from rloo_cli.reporting.statistics import (
    Z_95,
    Estimate,
    describe_difference,
    half_width_error,
    mean_with_interval,
    paired_difference,
)
from rloo_cli.utils.files import JsonObject

END_FRACTION = 0.1  # last share of the steps, averaged for the end of a run
THRESHOLD_FRACTION = 0.9  # of the way from the start to the best configuration's end
REWARD, KL, GIB = "reward", "objective/kl", 2**30
WIN_RATE_PREFIX = "wins/"  # of the names of figures from judges; the opponent follows
Curve = dict[float, float]  # completions -> value
Limits = tuple[float, float]  # of the 95 % interval of one run's score, over its prompts


@dataclass
class ConfigurationResult:
    """One configuration's curves and figures."""

    label: str
    seeds: list[int]
    figures: dict[str, dict[int, float]]  # name -> seed -> value; missing for seeds without one
    curves: dict[str, list[tuple[float, Estimate]]]  # name -> completions, mean over all seeds
    excluded_runs: list[RunRecord] = field(default_factory=list)
    errors: dict[str, dict[int, float]] = field(default_factory=dict)  # of a figure, by seed
    limits: dict[str, Limits] = field(default_factory=dict)  # of a single seed's figure

    def mean_over_seeds(self, name: str) -> Estimate | None:
        """A figure's mean over seeds."""
        figures, errors = self.figures.get(name, {}), self.errors.get(name, {})
        return mean_with_interval([*figures.values()], [errors.get(seed) for seed in figures])


@dataclass
class Comparison:
    """The data of all tables and charts."""

    results: list[ConfigurationResult]
    score: str  # the compared score: an evaluation metric, or the training reward
    held_out: bool
    threshold: float | None  # the score to reach
    differences: dict[str, Estimate | None]  # label -> minus the baseline
    against: str
    notes: list[str]


def compare_configurations(
    configs: Sequence[Configuration], score: str | None, against: int, notes: Sequence[str]
) -> Comparison:
    """Configurations -> their comparison. `score`: an evaluation metric; None without any."""
    results = [_configuration_result(config, score) for config in configs]
    for opponent, tallies in judgements.comparable_tallies(configs).items():
        for config, result in zip(configs, results, strict=True):
            _add_win_rate(result, opponent, config.runs, tallies)
    limit = _threshold(results)

    def reached(run: RunRecord) -> float | None:
        return None if limit is None else _completions_to_threshold(_score_curve(run, score), limit)

    for config, result in zip(configs, results, strict=True):
        if limit is not None:
            _add_figure(result, "reached", config.runs, reached)
    has_score, baseline = score is not None, results[against].label
    notes = [*notes, *judgements.left_out_lines(configs)]
    comparison = Comparison(results, score or REWARD, has_score, limit, {}, baseline, notes)
    comparison.differences |= paired_differences(comparison, "final")
    return comparison


def paired_differences(comparison: Comparison, figure: str) -> dict[str, Estimate | None]:
    """Label -> a figure minus that of `comparison.against`, seed by seed."""
    base = next(o for o in comparison.results if o.label == comparison.against)
    others = [o for o in comparison.results if o is not base]
    theirs = base.figures.get(figure, {}), base.errors.get(figure)
    return {
        o.label: paired_difference(
            o.figures.get(figure, {}), theirs[0], o.errors.get(figure), theirs[1]
        )
        for o in others
    }


def conclusion_lines(comparison: Comparison) -> list[str]:
    """A line per difference: size, interval and verdict.

    The final score comes first, then win rates.
    """
    lines = _difference_lines(comparison, comparison.differences, "")
    judged = dict.fromkeys(name for o in comparison.results for name in o.figures)
    for name in [name for name in judged if name.startswith(WIN_RATE_PREFIX)]:
        paired = {k: e for k, e in paired_differences(comparison, name).items() if e is not None}
        what = f", win rate against {name.removeprefix(WIN_RATE_PREFIX)}"
        lines += _difference_lines(comparison, paired, what)
    return lines


def _difference_lines(
    comparison: Comparison, estimates: Mapping[str, Estimate | None], what: str
) -> list[str]:
    lines = []
    for label, e in estimates.items():
        verdict = describe_difference(e)
        if e is None:
            lines.append(f"{label} against {comparison.against}{what}: {verdict}")
            continue
        interval = f" ({e.low:+.3f} to {e.high:+.3f})" if e.half_width is not None else ""
        interval += f", {e.n} seeds" if e.n > 1 else ""
        difference = f"{label} minus {comparison.against}{what}"
        lines.append(f"{difference}: {e.mean:+.3f}{interval}: {verdict}")
    return lines


def _configuration_result(config: Configuration, score: str | None) -> ConfigurationResult:
    result = ConfigurationResult(config.label, config.seeds, {}, {}, config.excluded_runs)
    runs = config.runs
    measures: dict[str, Callable[[RunRecord], float | None]] = {
        "start": lambda run: _first_value(_score_curve(run, score)),
        "final": lambda run: _final_score(run, score),
        "best": lambda run: max(_score_curve(run, score).values(), default=None),
        "reward": lambda run: _mean_at_end(run, REWARD),
        "kl": lambda run: _mean_at_end(run, KL),
        "step_s": lambda run: _median_value(run, "step_time"),
        "peak_gib": _peak_memory_gib,
        "updates": lambda run: _last_value(run, "updates"),
    }
    for name, measure in measures.items():
        _add_figure(result, name, runs, measure)
    _add_errors(result, "final", runs, lambda run: _final_limits(run, score))
    result.curves = {
        "reward": _mean_curve([_training_curve(run, REWARD) for run in runs]),
        "kl": _mean_curve([_training_curve(run, KL) for run in runs]),
        "held_out": _mean_curve(
            [_score_curve(run, score) for run in runs if score],
            [_score_errors(run, score) for run in runs if score],
        ),
    }
    return result


def _add_figure(
    result: ConfigurationResult,
    name: str,
    runs: Sequence[RunRecord],
    measure: Callable[[RunRecord], float | None],
) -> None:
    values = {run.seed: measure(run) for run in runs}
    result.figures[name] = {seed: float(v) for seed, v in values.items() if v is not None}


def _add_errors(
    result: ConfigurationResult,
    name: str,
    runs: Sequence[RunRecord],
    limits_of: Callable[[RunRecord], Limits | None],
) -> None:
    """Add the standard error of each run's figures."""
    limits = {run.seed: found for run in runs if (found := limits_of(run)) is not None}
    result.errors[name] = {seed: half_width_error(*found) for seed, found in limits.items()}
    if len(runs) == 1 and limits:
        result.limits[name] = limits[runs[0].seed]


def _add_win_rate(
    result: ConfigurationResult,
    opponent: str,
    runs: Sequence[RunRecord],
    tallies: Mapping[Path, JsonObject],
) -> None:
    """Add the win rates of these runs; `tallies`: by the run's folder."""
    name = f"{WIN_RATE_PREFIX}{opponent}"
    _add_figure(result, name, runs, lambda run: tallies.get(run.folder, {}).get("rate"))
    _add_errors(result, name, runs, lambda run: _limits(tallies.get(run.folder, {})))


# Curves.


def _training_curve(run: RunRecord, name: str) -> Curve:
    """Completions -> a metric of the training steps, smoothed as in the run's curves."""
    steps, values = curves.metric_points(run.step_metrics, name)
    values = curves.smooth_values(values) if len(values) > curves.SMOOTH_FROM else values
    return {run.completions_sampled(int(s)): v for s, v in zip(steps, values, strict=True)}


def _score_curve(run: RunRecord, score: str | None) -> Curve:
    """The score of every evaluation; without evaluations the smoothed training reward."""
    if score is None:
        return _training_curve(run, REWARD)
    steps, values = curves.metric_points(run.eval_metrics, score)
    return {run.completions_sampled(int(s)): v for s, v in zip(steps, values, strict=True)}


def _score_errors(run: RunRecord, score: str) -> Curve:
    """Completions -> the standard error of the held-out score there, if known."""
    known = [(line, limits) for line in run.eval_metrics if (limits := _limits(line, score))]
    return {run.completions_sampled(int(m["step"])): half_width_error(*at) for m, at in known}


def _mean_curve(
    seed_curves: Sequence[Curve], seed_errors: Sequence[Curve] = ()
) -> list[tuple[float, Estimate]]:
    """The mean at every point that all seeds share."""
    common = sorted(set.intersection(*(set(curve) for curve in seed_curves))) if seed_curves else []
    means = [
        (x, mean_with_interval([c[x] for c in seed_curves], [e.get(x) for e in seed_errors]))
        for x in common
    ]
    return [(x, mean) for x, mean in means if mean is not None]


# Figures of one run.


def _first_value(curve: Curve) -> float | None:
    return curve[min(curve)] if curve else None


def _final_score(run: RunRecord, score: str | None) -> float | None:
    """The last evaluation's score, or the mean reward of the last steps."""
    if score is None:
        return _mean_at_end(run, REWARD)
    curve = _score_curve(run, score)
    return curve[max(curve)] if curve else None


def _final_limits(run: RunRecord, score: str | None) -> Limits | None:
    """The 95 % interval of the final score, over prompts; None if unknown."""
    if score is not None:
        lines = [line for line in run.eval_metrics if score in line]
        return _limits(lines[-1], score) if lines else None
    values = _values_at_end(run, REWARD)
    if len(values) < 2:
        return None
    half = Z_95 * stdev(values) / math.sqrt(len(values))  # each step has different prompts
    return fmean(values) - half, fmean(values) + half


def _limits(metrics: Mapping[str, object], name: str = "") -> Limits | None:
    """The limits of a score; None if it has none."""
    prefix = f"{name}/" if name else ""
    low, high = metrics.get(f"{prefix}low"), metrics.get(f"{prefix}high")
    if isinstance(low, int | float) and isinstance(high, int | float):
        return low, high
    return None


def _mean_at_end(run: RunRecord, name: str) -> float | None:
    values = _values_at_end(run, name)
    return fmean(values) if values else None


def _values_at_end(run: RunRecord, name: str) -> Sequence[float]:
    last = run.step_metrics[-max(1, round(END_FRACTION * len(run.step_metrics))) :]
    return curves.metric_points(last, name)[1]


def _median_value(run: RunRecord, name: str) -> float | None:
    values = curves.metric_points(run.step_metrics, name)[1]
    return median(values) if values else None


def _last_value(run: RunRecord, name: str) -> float | None:
    values = curves.metric_points(run.step_metrics, name)[1]
    return values[-1] if values else None


def _peak_memory_gib(run: RunRecord) -> float | None:
    """Peak memory in GiB, as the run measured it, or as its steps report it for a GPU."""
    measured = run.run_metadata.get("memory", {}).get("measured_bytes")
    if measured is not None:
        return float(measured) / GIB
    peaks_gb = curves.metric_points(run.step_metrics, "memory/peak_gb")[1]
    return max(peaks_gb) * 1e9 / GIB if peaks_gb else None


def _threshold(results: Sequence[ConfigurationResult]) -> float | None:
    """The score at THRESHOLD_FRACTION of the way to the best end; None if no run improved."""
    ends = [e.mean for o in results if (e := o.mean_over_seeds("final")) is not None]
    starts = [e.mean for o in results if (e := o.mean_over_seeds("start")) is not None]
    if not ends or not starts or max(ends) <= fmean(starts):
        return None
    return fmean(starts) + THRESHOLD_FRACTION * (max(ends) - fmean(starts))


def _completions_to_threshold(curve: Mapping[float, float], limit: float) -> float | None:
    """Completions at the first point at or above the threshold."""
    return next((x for x in sorted(curve) if curve[x] >= limit), None)
