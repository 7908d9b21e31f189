"""Compares configurations: curves over completions, figures at the end, differences.

The held-out score is a metric of the evaluations in metrics.jsonl; without any, the training reward
takes its place and is named so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.cli.compare.statistics import (
    Estimate,
    describe_difference,
    mean_with_interval,
    paired_difference,
)
from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.reporting import curves

END_FRACTION = 0.1  # share of the steps that the end of a run is the mean of
THRESHOLD_FRACTION = 0.9  # of the way from the start to the best configuration's end
REWARD, KL, GIB = "reward", "objective/kl", 2**30
WIN_RATE_PREFIX = "wins/"  # of the names of figures from judges; the opponent follows
Curve = dict[float, float]  # completions -> value


@dataclass
class ConfigurationResult:
    """One configuration's curves and figures."""

    label: str
    seeds: list[int]
    figures: dict[str, dict[int, float]]  # name -> seed -> value; a seed without one is absent
    curves: dict[str, list[tuple[float, Estimate]]]  # name -> completions, mean over all seeds
    excluded_runs: list[RunRecord] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # of one seed's judge

    def mean_over_seeds(self, name: str) -> Estimate | None:
        """A figure's mean over seeds."""
        return mean_with_interval([*self.figures.get(name, {}).values()])


@dataclass
class Comparison:
    """Everything that tables and charts are made of."""

    results: list[ConfigurationResult]
    score: str  # what is compared: a metric of evaluations, or the training reward
    held_out: bool
    threshold: float | None  # what a configuration has to reach
    differences: dict[str, Estimate | None]  # label -> to the first, or the one named
    against: str
    notes: list[str]


def compare_configurations(
    configs: Sequence[Configuration], score: str | None, against: int, notes: Sequence[str]
) -> Comparison:
    """Configurations -> their comparison. `score`: a metric of evaluations, None without any."""
    results = [_configuration_result(config, score) for config in configs]
    limit = _threshold(results)

    def reached(run: RunRecord) -> float | None:
        return None if limit is None else _completions_to_threshold(_score_curve(run, score), limit)

    for config, result in zip(configs, results, strict=True):
        if limit is not None:
            _add_figure(result, "reached", config.runs, reached)
    has_score, baseline = score is not None, results[against].label
    comparison = Comparison(results, score or REWARD, has_score, limit, {}, baseline, [*notes])
    comparison.differences |= paired_differences(comparison, "final")
    return comparison


def paired_differences(comparison: Comparison, figure: str) -> dict[str, Estimate | None]:
    """Label -> a figure minus that of `comparison.against`, seed by seed."""
    base = next(o for o in comparison.results if o.label == comparison.against)
    others = [o for o in comparison.results if o is not base]
    theirs = base.figures.get(figure, {})
    return {o.label: paired_difference(o.figures.get(figure, {}), theirs) for o in others}


def conclusion_lines(comparison: Comparison) -> list[str]:
    """A line for each difference: how large, how sure, and what follows from it.

    The final score comes first, then win rates if there are any.
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
        interval = f" ({e.low:+.3f} to {e.high:+.3f}), {e.n} seeds" if e.n > 1 else ""
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
    for opponent in dict.fromkeys(opponent for run in runs for opponent in run.judge_tallies):
        name = f"{WIN_RATE_PREFIX}{opponent}"
        _add_figure(result, name, runs, _win_rate(opponent))
        tally = runs[0].judge_tallies[opponent] if len(runs) == 1 else {}
        if tally.get("low") is not None:
            result.intervals[name] = (tally["low"], tally["high"])
    result.curves = {
        "reward": _mean_curve([_training_curve(run, REWARD) for run in runs]),
        "kl": _mean_curve([_training_curve(run, KL) for run in runs]),
        "held_out": _mean_curve([_score_curve(run, score) for run in runs if score]),
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


# Curves.


def _training_curve(run: RunRecord, name: str) -> Curve:
    """Completions -> a metric of the training steps, smoothed as in a run's own curves."""
    steps, values = curves.metric_points(run.step_metrics, name)
    values = curves.smooth_values(values) if len(values) > curves.SMOOTH_FROM else values
    return {run.completions_sampled(int(s)): v for s, v in zip(steps, values, strict=True)}


def _score_curve(run: RunRecord, score: str | None) -> Curve:
    """The score of every evaluation; without evaluations the smoothed training reward."""
    if score is None:
        return _training_curve(run, REWARD)
    steps, values = curves.metric_points(run.eval_metrics, score)
    return {run.completions_sampled(int(s)): v for s, v in zip(steps, values, strict=True)}


def _mean_curve(seed_curves: Sequence[Curve]) -> list[tuple[float, Estimate]]:
    """The mean at every point that all seeds have."""
    common = sorted(set.intersection(*(set(curve) for curve in seed_curves))) if seed_curves else []
    means = [(x, mean_with_interval([curve[x] for curve in seed_curves])) for x in common]
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


def _mean_at_end(run: RunRecord, name: str) -> float | None:
    last = run.step_metrics[-max(1, round(END_FRACTION * len(run.step_metrics))) :]
    values = curves.metric_points(last, name)[1]
    return fmean(values) if values else None


def _median_value(run: RunRecord, name: str) -> float | None:
    values = curves.metric_points(run.step_metrics, name)[1]
    return median(values) if values else None


def _last_value(run: RunRecord, name: str) -> float | None:
    values = curves.metric_points(run.step_metrics, name)[1]
    return values[-1] if values else None


def _win_rate(opponent: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.judge_tallies.get(opponent, {}).get("rate")


def _peak_memory_gib(run: RunRecord) -> float | None:
    """Peak memory in GiB, as the run measured it, or as its steps report it of a GPU."""
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
    """Completions at the first point that is not below the threshold."""
    return next((x for x in sorted(curve) if curve[x] >= limit), None)
