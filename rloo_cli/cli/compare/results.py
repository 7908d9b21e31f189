"""What can be said of configurations: curves over completions, figures at the end, who is ahead.

The held-out score is a metric of the evaluations in metrics.jsonl; where there are none, the
training reward stands in its place and is called so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.cli.compare.runs import Told
from rloo_cli.cli.compare.statistics import Estimate, estimate, paired, verdict
from rloo_cli.reporting import curves

END = 0.1  # share of the steps that the end of a run is the mean of
REACHED = 0.9  # of the way from the start to the best configuration's end
REWARD, KL, GIB = "reward", "objective/kl", 2**30
WINS = "wins/"  # and against whom: a figure from judges
Curve = dict[float, float]  # completions -> value


@dataclass
class Outcome:
    """One configuration's curves and figures."""

    label: str
    seeds: list[int]
    figures: dict[str, dict[int, float]]  # name -> seed -> value; a seed without one is absent
    curves: dict[str, list[tuple[float, Estimate]]]  # name -> completions, mean over all seeds
    left: list[Told] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # of one seed's judge

    def of(self, name: str) -> Estimate | None:
        """A figure's mean over seeds."""
        return estimate([*self.figures.get(name, {}).values()])


@dataclass
class Comparison:
    """Everything that tables and charts are made of."""

    outcomes: list[Outcome]
    score: str  # what is compared: a metric of evaluations, or the training reward
    held_out: bool
    threshold: float | None  # what a configuration has to reach
    differences: dict[str, Estimate | None]  # label -> to the first, or the one named
    against: str
    notes: list[str]


def compare(
    found: Sequence[Configuration], score: str | None, against: int, notes: Sequence[str]
) -> Comparison:
    """Configurations -> their comparison. `score`: a metric of evaluations, None without any."""
    outcomes = [_outcome(one, score) for one in found]
    limit = _threshold(outcomes)
    for one, outcome in zip(found, outcomes, strict=True):
        if limit is not None:
            _put(outcome, "reached", one.runs, lambda run: _reached(_scores(run, score), limit))
    told = Comparison(
        outcomes, score or REWARD, score is not None, limit, {}, outcomes[against].label, [*notes]
    )
    told.differences |= differences(told, "final")
    return told


def differences(comparison: Comparison, figure: str) -> dict[str, Estimate | None]:
    """Label -> a figure minus that of the one that the others are measured by, seed by seed."""
    base = next(o for o in comparison.outcomes if o.label == comparison.against)
    others = [o for o in comparison.outcomes if o is not base]
    theirs = base.figures.get(figure, {})
    return {o.label: paired(o.figures.get(figure, {}), theirs) for o in others}


def verdicts(comparison: Comparison) -> list[str]:
    """A line for each difference: how large, how sure, and what that lets one say.

    Of the final score, then of the win rates where there are some.
    """
    lines = _told(comparison, comparison.differences, "")
    judged = dict.fromkeys(name for o in comparison.outcomes for name in o.figures)
    for name in [name for name in judged if name.startswith(WINS)]:
        found = {k: e for k, e in differences(comparison, name).items() if e is not None}
        lines += _told(comparison, found, f", win rate against {name.removeprefix(WINS)}")
    return lines


def _told(comparison: Comparison, found: Mapping[str, Estimate | None], what: str) -> list[str]:
    lines = []
    for label, told in found.items():
        words = verdict(told)
        if told is None:
            lines.append(f"{label} against {comparison.against}{what}: {words}")
            continue
        sure = f" ({told.low:+.3f} to {told.high:+.3f}), {told.n} seeds" if told.n > 1 else ""
        who = f"{label} minus {comparison.against}{what}"
        lines.append(f"{who}: {told.mean:+.3f}{sure}: {words}")
    return lines


def _outcome(one: Configuration, score: str | None) -> Outcome:
    outcome = Outcome(one.label, one.seeds, {}, {}, one.left)
    runs = one.runs
    _put(outcome, "start", runs, lambda run: _first(_scores(run, score)))
    _put(outcome, "final", runs, lambda run: _final(run, score))
    _put(outcome, "best", runs, lambda run: max(_scores(run, score).values(), default=None))
    _put(outcome, "reward", runs, lambda run: _at_end(run, REWARD))
    _put(outcome, "kl", runs, lambda run: _at_end(run, KL))
    _put(outcome, "step_s", runs, lambda run: _median(run, "step_time"))
    _put(outcome, "peak_gib", runs, _peak)
    _put(outcome, "updates", runs, lambda run: _last(run, "updates"))
    for who in dict.fromkeys(who for run in runs for who in run.verdicts):
        _put(outcome, f"{WINS}{who}", runs, _wins(who))
        if len(runs) == 1 and runs[0].verdicts[who].get("low") is not None:
            told = runs[0].verdicts[who]
            outcome.intervals[f"{WINS}{who}"] = (told["low"], told["high"])
    outcome.curves = {
        "reward": _mean_curve([_training(run, REWARD) for run in runs]),
        "kl": _mean_curve([_training(run, KL) for run in runs]),
        "held_out": _mean_curve([_scores(run, score) for run in runs if score]),
    }
    return outcome


def _put(
    outcome: Outcome, name: str, runs: Sequence[Told], of: Callable[[Told], float | None]
) -> None:
    told = {run.seed: of(run) for run in runs}
    outcome.figures[name] = {seed: float(v) for seed, v in told.items() if v is not None}


# Curves.


def _training(run: Told, name: str) -> Curve:
    """A metric of the steps, smoothed as in a run's own curves."""
    steps, values = curves.points(run.steps, name)
    values = curves.smooth(values) if len(values) > curves.SMOOTH_FROM else values
    return {run.episode(int(s)): v for s, v in zip(steps, values, strict=True)}


def _scores(run: Told, score: str | None) -> Curve:
    """The score of every evaluation; without evaluations the smoothed training reward."""
    if score is None:
        return _training(run, REWARD)
    steps, values = curves.points(run.evaluations, score)
    return {run.episode(int(s)): v for s, v in zip(steps, values, strict=True)}


def _mean_curve(each: Sequence[Curve]) -> list[tuple[float, Estimate]]:
    """The mean at every place that all seeds have."""
    common = sorted(set.intersection(*(set(curve) for curve in each))) if each else []
    told = [(x, estimate([curve[x] for curve in each])) for x in common]
    return [(x, value) for x, value in told if value is not None]


# Figures of one run.


def _first(curve: Curve) -> float | None:
    return curve[min(curve)] if curve else None


def _final(run: Told, score: str | None) -> float | None:
    """The last evaluation's score, or the mean reward of the last steps."""
    if score is None:
        return _at_end(run, REWARD)
    curve = _scores(run, score)
    return curve[max(curve)] if curve else None


def _at_end(run: Told, name: str) -> float | None:
    last = run.steps[-max(1, round(END * len(run.steps))) :]
    values = curves.points(last, name)[1]
    return fmean(values) if values else None


def _median(run: Told, name: str) -> float | None:
    values = curves.points(run.steps, name)[1]
    return median(values) if values else None


def _last(run: Told, name: str) -> float | None:
    values = curves.points(run.steps, name)[1]
    return values[-1] if values else None


def _wins(who: str) -> Callable[[Told], float | None]:
    return lambda run: run.verdicts.get(who, {}).get("rate")


def _peak(run: Told) -> float | None:
    """GiB at most: as the run measured itself, or what its steps say of a GPU."""
    measured = run.facts.get("memory", {}).get("measured_bytes")
    if measured is not None:
        return float(measured) / GIB
    told = curves.points(run.steps, "memory/peak_gb")[1]
    return max(told) * 1e9 / GIB if told else None


def _threshold(outcomes: Sequence[Outcome]) -> float | None:
    """REACHED of the way from where they start to the best end; None where nobody got on."""
    ends = [e.mean for o in outcomes if (e := o.of("final")) is not None]
    starts = [e.mean for o in outcomes if (e := o.of("start")) is not None]
    if not ends or not starts or max(ends) <= fmean(starts):
        return None
    return fmean(starts) + REACHED * (max(ends) - fmean(starts))


def _reached(curve: Mapping[float, float], limit: float) -> float | None:
    """Completions at the first point that is not below the threshold."""
    return next((x for x in sorted(curve) if curve[x] >= limit), None)
