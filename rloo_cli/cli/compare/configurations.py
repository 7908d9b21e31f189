"""Runs -> configurations: those that differ in nothing but the seed, and in what changes no result.

A path with the run's own seed in it (`sft-seed-3/final`) is the same for all seeds: what a driver
makes once per seed is no difference between configurations.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.checkpoint import resume
from rloo_cli.cli.compare.runs import RunRecord
from rloo_cli.config import check, messages
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

NEUTRAL_SECTIONS = (
    "seed", "root", "name", "resume", "resume_allow_changes", "logging", "checkpoint", "slurm",
    "sft", "reward_model", "debug",
)  # fmt: skip
# Runs that differ here have other scores, or scores of something else.
SCORE_KEYS = ("reward", "model.path", "generation.max_completion_length")
HELD_OUT_KEYS = ("data.eval_split", "eval.sets", "eval.max_samples")
BUDGET_KEYS = ("max_steps", "total_episodes", "train.epochs", "train.prompts_per_step",
          "algorithm.num_generations")  # fmt: skip
MAX_LABEL_KEYS = 3  # keys in a label
FlatConfig = JsonObject


@dataclass
class Configuration:
    """Runs of one configuration, a seed each."""

    label: str
    keys: FlatConfig
    runs: list[RunRecord] = field(default_factory=list)  # that count, by seed
    excluded_runs: list[RunRecord] = field(
        default_factory=list
    )  # that do not: failed, stopped, not at the end

    @property
    def seeds(self) -> list[int]:
        """Of the runs that count."""
        return [run.seed for run in self.runs]


def flat_config(run: RunRecord) -> FlatConfig:
    """Dotted key -> value of a run's config, without what is of its place, seed and logs."""
    own = re.compile(rf"(?i)\bseed([-_=]?){run.seed}(?!\d)")
    return {
        key: own.sub(r"seed\1*", value) if isinstance(value, str) else value
        for key, value in messages.walk_values(run.config)
        if not (isinstance(value, dict | list) and value)
        and not _in_sections(key, NEUTRAL_SECTIONS)
    }


def _in_sections(key: str, sections: Collection[str]) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)


def is_neutral_key(key: str) -> bool:
    """Whether two runs that differ there compute the same: what `resume` lets a run change."""
    of_reward = (
        key.startswith("reward.") and key.rpartition(".")[2] in resume.CHANGEABLE_REWARD_KEYS
    )
    return (
        _in_sections(key, resume.CHANGEABLE_KEYS) or of_reward or check.is_engine_placement_key(key)
    )


def group_by_configuration(
    runs: Sequence[RunRecord], unfinished: bool = False
) -> list[Configuration]:
    """Runs -> configurations with labels, RLOO's first, else as they were named.

    `unfinished`: runs that are not at their end count too. Raises ConfigError where one
    configuration has a seed twice.
    """
    keys = [flat_config(run) for run in runs]
    all_keys = list(dict.fromkeys(key for own in keys for key in own))
    telling = {key for key in all_keys if not is_neutral_key(key)}
    groups = _group_run_indices(runs, keys, telling)
    twice = [
        group for group in groups if _repeated_seed(_counted_indices(group, runs, unfinished), runs)
    ]
    for group in twice:  # not only the seed: then it is how they ran that is compared
        telling |= {
            k for k in all_keys if len({_canonical_json(keys[i].get(k)) for i in group}) > 1
        }
    groups = _group_run_indices(runs, keys, telling)
    found = [
        Configuration("", {k: v for k, v in keys[g[0]].items() if k in telling}) for g in groups
    ]
    for one, group in zip(found, groups, strict=True):
        counted = _counted_indices(group, runs, unfinished)
        if pair := _repeated_seed(counted, runs):
            what = f"seed {runs[pair[0]].seed} is there twice in one configuration"
            why = "\n".join(str(runs[i].folder) for i in pair)
            raise ConfigError(Problem(what, "seed", why, "name one of the two"))
        one.runs = sorted((runs[i] for i in counted), key=lambda run: run.seed)
        one.excluded_runs = [runs[i] for i in group if i not in counted]
    _set_labels(found)
    return sorted(found, key=lambda one: one.label.split()[0] != "rloo")


def _group_run_indices(
    runs: Sequence[RunRecord], keys: list[FlatConfig], distinguishing_keys: Collection[str]
) -> list[list[int]]:
    groups = defaultdict(list)
    for i in range(len(runs)):
        groups[
            _canonical_json({k: v for k, v in sorted(keys[i].items()) if k in distinguishing_keys})
        ].append(i)
    return [*groups.values()]


def _counted_indices(group: list[int], runs: Sequence[RunRecord], unfinished: bool) -> list[int]:
    return [i for i in group if runs[i].finished or (unfinished and runs[i].step_metrics)]


def _repeated_seed(counted: list[int], runs: Sequence[RunRecord]) -> list[int]:
    """The runs of the first seed that more than one of these has."""
    often = Counter(runs[i].seed for i in counted)
    seed = next((seed for seed, n in often.items() if n > 1), None)
    return [i for i in counted if runs[i].seed == seed] if seed is not None else []


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# Labels.


def _set_labels(configs: list[Configuration]) -> None:
    """The algorithm's name, and what sets it apart from most of that algorithm, or from most."""
    by_algorithm = defaultdict(list)
    for one in configs:
        by_algorithm[str(one.keys["algorithm.name"])].append(one)
    outside = [key for key in differing_keys(configs) if not key.startswith("algorithm.")]
    for name, group in by_algorithm.items():
        inside = [key for key in differing_keys(group) if key not in outside]
        shortest = Counter(key.rpartition(".")[2] for key in [*inside, *outside])
        for one in group:
            apart = [key for key in inside if not _is_majority_value(key, one, group)]
            apart += [key for key in outside if not _is_majority_value(key, one, configs)]
            apart = [key for key in apart if key in one.keys]
            parts = [
                f"{_short_key(k, shortest)}={format_value(one.keys[k])}"
                for k in apart[:MAX_LABEL_KEYS]
            ]
            more = (
                [f"and {len(apart) - MAX_LABEL_KEYS} more"] if len(apart) > MAX_LABEL_KEYS else []
            )
            one.label = " ".join([name, *parts, *more])
    often = Counter(one.label for one in configs)
    for label, n in often.items():
        for i, one in enumerate([one for one in configs if one.label == label] if n > 1 else [], 1):
            one.label = f"{label} ({i})"


def _is_majority_value(key: str, config: Configuration, among: Sequence[Configuration]) -> bool:
    """Whether more than half of these have its value: it is then not worth a word."""
    own = _canonical_json(config.keys.get(key))
    return 2 * sum(_canonical_json(other.keys.get(key)) == own for other in among) > len(among)


def differing_keys(configs: Sequence[Configuration]) -> list[str]:
    """Keys with several values in these configurations; of the algorithm's, those that all have.

    A section that only some have (`model.lora`) is a difference, an algorithm's own key is none.
    """
    keys = dict.fromkeys(key for one in configs for key in one.keys)
    shared = [
        k for k in keys if not k.startswith("algorithm.") or all(k in one.keys for one in configs)
    ]
    differ = [k for k in shared if len({_canonical_json(one.keys.get(k)) for one in configs}) > 1]
    return [k for k in differ if k != "algorithm.name"]


def _short_key(key: str, shortest: Counter[str]) -> str:
    last = key.rpartition(".")[2]
    return last if shortest[last] == 1 else key


def format_value(value: Any) -> str:
    """A value as it would stand on the command line."""
    if isinstance(value, bool) or value is None:
        return str(json.dumps(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Whether they can be compared.


def comparability_problems(configs: Sequence[Configuration]) -> Iterator[Problem]:
    """Why figures of these configurations do not stand for the same thing."""
    fix = "leave one out, or --anyway"
    prints = {one.label: {r.run_metadata.get("fingerprint") for r in one.runs} for one in configs}
    known = {p for some in prints.values() for p in some if p is not None}
    if len(known) > 1:
        where = next((k for k in differing_keys(configs) if k.startswith("data.")), "data")
        why = "\n".join(f"{label}: {', '.join(map(str, p))}" for label, p in prints.items())
        what = "the runs are not comparable: they were trained on other prompts"
        yield Problem(what, where, f"fingerprints of the data\n{why}", fix)
    every = [(one.label, flat_config(run)) for one in configs for run in one.runs]
    for key in dict.fromkeys(key for _, own in every for key in own):
        same = _in_sections(key, SCORE_KEYS) and not is_neutral_key(key)
        if not (same or _in_sections(key, HELD_OUT_KEYS)):
            continue
        values: dict[str, dict[str, None]] = {}
        for label, own in every:
            values.setdefault(_canonical_json(own.get(key)), {})[label] = None
        if len(values) > 1:
            why = "\n".join(f"{value}: {', '.join(labels)}" for value, labels in values.items())
            yield Problem(f"the runs are not comparable: {key} differs", key, why, fix)


def fairness_warnings(configs: Sequence[Configuration]) -> Iterator[str]:
    """What makes a comparison unfair, or a figure doubtful."""
    keys = [key for key in differing_keys(configs) if key in BUDGET_KEYS]
    if keys:
        yield f"not the same budget: {', '.join(keys)} differ"
    there = [one for one in configs if one.runs]
    elsewhere = {
        one.label: sorted({str(r.run_metadata.get("host")) for r in one.runs}) for one in there
    }
    if len({tuple(hosts) for hosts in elsewhere.values()}) > 1:
        yield "not on the same machine: seconds and memory say little"
    seeds = sorted({seed for one in configs for seed in one.seeds})
    for one in configs:
        known = {*one.seeds, *(run.seed for run in one.excluded_runs)}
        if lost := [str(seed) for seed in seeds if seed not in known]:
            yield f"{one.label}: no run with seed {', '.join(lost)}, which others have"
        for run in [run for run in one.runs if not run.finished]:
            yield f"{one.label}, seed {run.seed} counts as far as it is: {run.status_text}"
    if any(one.excluded_runs for one in configs):
        yield "means are of the runs that count: those that failed might have been the worst"
