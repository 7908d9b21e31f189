"""What can be said of configurations: curves over completions, figures at the end, who is ahead.

The held-out score is a metric of the evaluations in metrics.jsonl; where there are none, the
training reward stands in its place and is called so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.cli.compare.runs import RunRecord
from rloo_cli.cli.compare.statistics import (
    Estimate,
    describe_difference,
    mean_with_interval,
    paired_difference,
)
from rloo_cli.reporting import curves

END_FRACTION = 0.1  # share of the steps that the end of a run is the mean of
THRESHOLD_FRACTION = 0.9  # of the way from the start to the best configuration's end
REWARD, KL, GIB = "reward", "objective/kl", 2**30
WIN_RATE_PREFIX = "wins/"  # and against whom: a figure from judges
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
    outcomes = [_configuration_result(one, score) for one in configs]
    limit = _threshold(outcomes)
    for one, outcome in zip(configs, outcomes, strict=True):
        if limit is not None:
            _add_figure(
                outcome,
                "reached",
                one.runs,
                lambda run: _completions_to_threshold(_score_curve(run, score), limit),
            )
    told = Comparison(
        outcomes, score or REWARD, score is not None, limit, {}, outcomes[against].label, [*notes]
    )
    told.differences |= paired_differences(told, "final")
    return told


def paired_differences(comparison: Comparison, figure: str) -> dict[str, Estimate | None]:
    """Label -> a figure minus that of the one that the others are measured by, seed by seed."""
    base = next(o for o in comparison.results if o.label == comparison.against)
    others = [o for o in comparison.results if o is not base]
    theirs = base.figures.get(figure, {})
    return {o.label: paired_difference(o.figures.get(figure, {}), theirs) for o in others}


def conclusion_lines(comparison: Comparison) -> list[str]:
    """A line for each difference: how large, how sure, and what that lets one say.

    Of the final score, then of the win rates where there are some.
    """
    lines = _difference_lines(comparison, comparison.differences, "")
    judged = dict.fromkeys(name for o in comparison.results for name in o.figures)
    for name in [name for name in judged if name.startswith(WIN_RATE_PREFIX)]:
        found = {k: e for k, e in paired_differences(comparison, name).items() if e is not None}
        lines += _difference_lines(
            comparison, found, f", win rate against {name.removeprefix(WIN_RATE_PREFIX)}"
        )
    return lines


def _difference_lines(
    comparison: Comparison, estimates: Mapping[str, Estimate | None], what: str
) -> list[str]:
    lines = []
    for label, told in estimates.items():
        words = describe_difference(told)
        if told is None:
            lines.append(f"{label} against {comparison.against}{what}: {words}")
            continue
        sure = f" ({told.low:+.3f} to {told.high:+.3f}), {told.n} seeds" if told.n > 1 else ""
        who = f"{label} minus {comparison.against}{what}"
        lines.append(f"{who}: {told.mean:+.3f}{sure}: {words}")
    return lines


def _configuration_result(config: Configuration, score: str | None) -> ConfigurationResult:
    outcome = ConfigurationResult(config.label, config.seeds, {}, {}, config.excluded_runs)
    runs = config.runs
    _add_figure(outcome, "start", runs, lambda run: _first_value(_score_curve(run, score)))
    _add_figure(outcome, "final", runs, lambda run: _final_score(run, score))
    _add_figure(
        outcome, "best", runs, lambda run: max(_score_curve(run, score).values(), default=None)
    )
    _add_figure(outcome, "reward", runs, lambda run: _mean_at_end(run, REWARD))
    _add_figure(outcome, "kl", runs, lambda run: _mean_at_end(run, KL))
    _add_figure(outcome, "step_s", runs, lambda run: _median_value(run, "step_time"))
    _add_figure(outcome, "peak_gib", runs, _peak_memory_gib)
    _add_figure(outcome, "updates", runs, lambda run: _last_value(run, "updates"))
    for who in dict.fromkeys(who for run in runs for who in run.judge_tallies):
        _add_figure(outcome, f"{WIN_RATE_PREFIX}{who}", runs, _win_rate(who))
        if len(runs) == 1 and runs[0].judge_tallies[who].get("low") is not None:
            told = runs[0].judge_tallies[who]
            outcome.intervals[f"{WIN_RATE_PREFIX}{who}"] = (told["low"], told["high"])
    outcome.curves = {
        "reward": _mean_curve([_training_curve(run, REWARD) for run in runs]),
        "kl": _mean_curve([_training_curve(run, KL) for run in runs]),
        "held_out": _mean_curve([_score_curve(run, score) for run in runs if score]),
    }
    return outcome


def _add_figure(
    result: ConfigurationResult,
    name: str,
    runs: Sequence[RunRecord],
    measure: Callable[[RunRecord], float | None],
) -> None:
    told = {run.seed: measure(run) for run in runs}
    result.figures[name] = {seed: float(v) for seed, v in told.items() if v is not None}


# Curves.


def _training_curve(run: RunRecord, name: str) -> Curve:
    """A metric of the steps, smoothed as in a run's own curves."""
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
    """The mean at every place that all seeds have."""
    common = sorted(set.intersection(*(set(curve) for curve in seed_curves))) if seed_curves else []
    told = [(x, mean_with_interval([curve[x] for curve in seed_curves])) for x in common]
    return [(x, value) for x, value in told if value is not None]


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
    """GiB at most: as the run measured itself, or what its steps say of a GPU."""
    measured = run.run_metadata.get("memory", {}).get("measured_bytes")
    if measured is not None:
        return float(measured) / GIB
    told = curves.metric_points(run.step_metrics, "memory/peak_gb")[1]
    return max(told) * 1e9 / GIB if told else None


def _threshold(results: Sequence[ConfigurationResult]) -> float | None:
    """REACHED of the way from where they start to the best end; None where nobody got on."""
    ends = [e.mean for o in results if (e := o.mean_over_seeds("final")) is not None]
    starts = [e.mean for o in results if (e := o.mean_over_seeds("start")) is not None]
    if not ends or not starts or max(ends) <= fmean(starts):
        return None
    return fmean(starts) + THRESHOLD_FRACTION * (max(ends) - fmean(starts))


def _completions_to_threshold(curve: Mapping[float, float], limit: float) -> float | None:
    """Completions at the first point that is not below the threshold."""
    return next((x for x in sorted(curve) if curve[x] >= limit), None)
