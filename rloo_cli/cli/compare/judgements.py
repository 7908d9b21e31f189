"""Chooses comparable win rates: of final models, by one judge, over the same pairs.

A run may have been judged several times: at checkpoints, by other judges, in one order or both. For
each opponent the judgement that most configurations have is used; the others are reported.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rloo_cli.cli.compare.configurations import Configuration, format_value, without_seed
from rloo_cli.inspection.run_record import JudgeTally
from rloo_cli.utils.files import JsonObject

Tallies = Mapping[Path, JsonObject]  # the run's folder -> wins, rate and limits


def comparable_tallies(configs: Sequence[Configuration]) -> dict[str, Tallies]:
    """Opponent -> the tallies of all runs that were judged in the same way."""
    return {
        opponent: {folder: tally.counts for folder, tally in chosen.items()}
        for opponent, chosen in _chosen_tallies(configs).items()
    }


def left_out_lines(configs: Sequence[Configuration]) -> Iterator[str]:
    """A line per judged run whose win rate is not compared, with the reason."""
    chosen = _chosen_tallies(configs)
    for config in configs:
        for run in config.runs:
            for opponent in dict.fromkeys(tally.opponent for tally in run.judge_tallies):
                others = chosen.get(opponent, {})
                if run.folder not in others:
                    own = [t for t in run.judge_tallies if t.opponent == opponent][-1]
                    reason = _reason(own, next(iter(others.values()), None))
                    yield (
                        f"{config.label}, seed {run.seed}: its win rate against {opponent} is not"
                        f" compared: {own.folder} {reason}"
                    )


def _chosen_tallies(configs: Sequence[Configuration]) -> dict[str, dict[Path, JudgeTally]]:
    """Opponent -> the run's folder -> the tally of the most common judgement."""
    by_key: dict[tuple[str, str], dict[Path, JudgeTally]] = defaultdict(dict)
    labels: dict[tuple[str, str], set[str]] = defaultdict(set)
    for config in configs:
        for run in config.runs:
            for tally in run.judge_tallies:
                if tally.of_final_model:
                    key = tally.opponent, without_seed(run, tally.judgement_key)
                    by_key[key][run.folder] = tally
                    labels[key].add(config.label)
    chosen: dict[str, dict[Path, JudgeTally]] = {}
    for key in sorted(by_key, key=lambda key: (-len(labels[key]), -len(by_key[key]))):
        chosen.setdefault(key[0], by_key[key])
    return chosen


def _reason(own: JudgeTally, other: JudgeTally | None) -> str:
    """Why a tally is not compared; `other`: one that is compared."""
    if not own.of_final_model:
        return "is not about the run's final model"
    if other is None:
        return "has no counterpart"
    keys = dict.fromkeys([*own.judgement, *other.judgement])
    differ = [k for k in keys if own.judgement.get(k) != other.judgement.get(k)]
    values = (
        f"{key} {format_value(own.judgement.get(key))}, not"
        f" {format_value(other.judgement.get(key))}"
        for key in differ
    )
    return f"was judged differently: {'; '.join(values)}"
