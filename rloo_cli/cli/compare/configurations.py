"""Groups runs into configurations: runs that differ only in seed and neutral keys.

A path that contains the run's own seed (`sft-seed-3/final`) counts as equal for all seeds: a file
made once per seed does not make the configurations different.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rloo_cli.checkpoint import resume
from rloo_cli.config import check, messages
from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.utils.errors import Problem, refuse
from rloo_cli.utils.files import JsonObject

NEUTRAL_SECTIONS = (
    "seed", "root", "name", "resume", "resume_allow_changes", "logging", "checkpoint", "slurm",
    "sft", "reward_model", "debug",
)  # fmt: skip
# Scores of runs that differ in these keys are not comparable.
SCORE_KEYS = ("reward", "model.path", "generation.max_completion_length")
HELD_OUT_KEYS = ("data.eval_split", "eval.sets", "eval.max_samples")
BUDGET_KEYS = ("max_steps", "total_episodes", "train.epochs", "train.prompts_per_step",
               "algorithm.num_generations")  # fmt: skip
MAX_LABEL_KEYS = 3  # keys in a label
FlatConfig = JsonObject


@dataclass
class Configuration:
    """Runs of one configuration, one per seed."""

    label: str
    keys: FlatConfig
    runs: list[RunRecord] = field(default_factory=list)  # runs that count, by seed
    excluded_runs: list[RunRecord] = field(default_factory=list)  # failed, stopped or unfinished

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs that count."""
        return [run.seed for run in self.runs]


def flat_config(run: RunRecord) -> FlatConfig:
    """Dotted key -> value of a run's config, without paths, seed and logging."""
    return {
        key: without_seed(run, value) if isinstance(value, str) else value
        for key, value in messages.walk_values(run.config)
        if not (isinstance(value, dict | list) and value)
        and not _in_sections(key, NEUTRAL_SECTIONS)
    }


def without_seed(run: RunRecord, text: str) -> str:
    """A text of a run, such as a path, with `*` in place of the run's own seed."""
    return re.sub(rf"(?i)\bseed([-_=]?){run.seed}(?!\d)", r"seed\1*", text)


def _in_sections(key: str, sections: Collection[str]) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)


def is_neutral_key(key: str) -> bool:
    """Whether this key cannot change results: `resume` lets a run change it."""
    if key.startswith("reward.") and key.rpartition(".")[2] in resume.CHANGEABLE_REWARD_KEYS:
        return True
    return _in_sections(key, resume.CHANGEABLE_KEYS) or check.is_engine_placement_key(key)


def group_by_configuration(
    runs: Sequence[RunRecord], unfinished: bool = False
) -> list[Configuration]:
    """Group runs into configurations with labels: RLOO's first, then in run order.

    `unfinished`: include unfinished runs. Two runs of one configuration and seed each form their
    own configuration. Raises ConfigError if a configuration of more runs has a seed twice.
    """
    keys = [flat_config(run) for run in runs]
    all_keys = list(dict.fromkeys(key for flat in keys for key in flat))
    distinguishing = {key for key in all_keys if not is_neutral_key(key)}
    for group in _group_run_indices(runs, keys, distinguishing):
        if _repeated_seed(_counted_indices(group, runs, unfinished), runs):
            # More than the seed differs: compare neutral keys too, such as the engine.
            distinguishing |= {k for k in all_keys if _differ(keys[i].get(k) for i in group)}
    groups = _group_run_indices(runs, keys, distinguishing)
    twice = len(runs) == 2 and len(groups) == 1 and runs[0].seed == runs[1].seed
    groups = [[0], [1]] if twice else groups
    flat_configs = [{k: v for k, v in keys[g[0]].items() if k in distinguishing} for g in groups]
    configs = [Configuration("", flat) for flat in flat_configs]
    for one, group in zip(configs, groups, strict=True):
        counted = _counted_indices(group, runs, unfinished)
        if pair := _repeated_seed(counted, runs):
            what = f"seed {runs[pair[0]].seed} occurs twice in one configuration"
            why = "\n".join(str(runs[i].folder) for i in pair)
            refuse("seed", what, "pass only one of the two", why)
        one.runs = sorted((runs[i] for i in counted), key=lambda run: run.seed)
        one.excluded_runs = [runs[i] for i in group if i not in counted]
    _set_labels(configs)
    for config, run in zip(configs, runs, strict=False) if twice else ():
        config.label = f"{run.algorithm} {run.name}"
    return sorted(configs, key=lambda one: one.label.split()[0] != "rloo")


def _group_run_indices(
    runs: Sequence[RunRecord], keys: list[FlatConfig], distinguishing_keys: Collection[str]
) -> list[list[int]]:
    groups = defaultdict(list)
    for i in range(len(runs)):
        kept = {k: v for k, v in keys[i].items() if k in distinguishing_keys}
        groups[_canonical_json(kept)].append(i)
    return [*groups.values()]


def _counted_indices(group: list[int], runs: Sequence[RunRecord], unfinished: bool) -> list[int]:
    return [i for i in group if runs[i].finished or (unfinished and runs[i].step_metrics)]


def _repeated_seed(counted: list[int], runs: Sequence[RunRecord]) -> list[int]:
    """The indices of the runs with the first seed that several runs share; [] if there is none."""
    counts = Counter(runs[i].seed for i in counted)
    seed = next((seed for seed, n in counts.items() if n > 1), None)
    return [i for i in counted if runs[i].seed == seed] if seed is not None else []


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _differ(values: Iterable[object]) -> bool:
    return len({_canonical_json(value) for value in values}) > 1


# Labels.


def _set_labels(configs: list[Configuration]) -> None:
    """Label each by its algorithm, and by its differences from the majority."""
    by_algorithm = defaultdict(list)
    for config in configs:
        by_algorithm[str(config.keys["algorithm.name"])].append(config)
    outside = [key for key in differing_keys(configs) if not key.startswith("algorithm.")]
    for name, group in by_algorithm.items():
        inside = [key for key in differing_keys(group) if key not in outside]
        last_parts = Counter(key.rpartition(".")[2] for key in [*inside, *outside])
        for config in group:
            unusual = [key for key in inside if not _is_majority_value(key, config, group)]
            unusual += [key for key in outside if not _is_majority_value(key, config, configs)]
            unusual = [key for key in unusual if key in config.keys]
            parts = [f"{_short_key(k, last_parts)}={format_value(config.keys[k])}" for k in unusual]
            more = len(parts) - MAX_LABEL_KEYS
            parts[MAX_LABEL_KEYS:] = [f"and {more} more"] if more > 0 else []
            config.label = " ".join([name, *parts])
    counts = Counter(config.label for config in configs)
    for label in [label for label, n in counts.items() if n > 1]:
        for i, config in enumerate([c for c in configs if c.label == label], 1):
            config.label = f"{label} ({i})"


def _is_majority_value(key: str, config: Configuration, among: Sequence[Configuration]) -> bool:
    """Whether more than half of these have its value; the label then omits it."""
    value = _canonical_json(config.keys.get(key))
    return 2 * sum(_canonical_json(other.keys.get(key)) == value for other in among) > len(among)


def differing_keys(configs: Sequence[Configuration]) -> list[str]:
    """Keys with several values; of the algorithm's keys, only those that all have.

    A section that only some have (`model.lora`) is a difference, an algorithm's own key is not.
    """
    keys = dict.fromkeys(key for one in configs for key in one.keys if key != "algorithm.name")
    in_all = {k for k in keys if all(k in config.keys for config in configs)}
    shared = [k for k in keys if k in in_all or not k.startswith("algorithm.")]
    return [k for k in shared if _differ(config.keys.get(k) for config in configs)]


def _short_key(key: str, shortest: Counter[str]) -> str:
    last = key.rpartition(".")[2]
    return last if shortest[last] == 1 else key


def format_value(value: object) -> str:
    """A value as on the command line."""
    if isinstance(value, bool) or value is None:
        return str(json.dumps(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# Whether configurations can be compared.


def comparability_problems(configs: Sequence[Configuration]) -> Iterator[Problem]:
    """Why figures of these configurations are not comparable."""
    fix = "exclude one, or --anyway"
    prints = {one.label: {r.run_metadata.get("fingerprint") for r in one.runs} for one in configs}
    known = {p for some in prints.values() for p in some if p is not None}
    if len(known) > 1:
        where = next((k for k in differing_keys(configs) if k.startswith("data.")), "data")
        why = "\n".join(f"{label}: {', '.join(map(str, p))}" for label, p in prints.items())
        what = "the runs are not comparable: they were trained on different prompts"
        yield Problem(what, where, f"fingerprint of the data\n{why}", fix)
    labelled = [(one.label, flat_config(run)) for one in configs for run in one.runs]
    for key in dict.fromkeys(key for _, config in labelled for key in config):
        is_score_key = _in_sections(key, SCORE_KEYS) and not is_neutral_key(key)
        if not (is_score_key or _in_sections(key, HELD_OUT_KEYS)):
            continue
        values: dict[str, dict[str, None]] = {}
        for label, config in labelled:
            values.setdefault(_canonical_json(config.get(key)), {})[label] = None
        if len(values) > 1:
            why = "\n".join(f"{value}: {', '.join(labels)}" for value, labels in values.items())
            yield Problem(f"the runs are not comparable: {key} differs", key, why, fix)


def fairness_warnings(configs: Sequence[Configuration]) -> Iterator[str]:
    """What makes the comparison unfair or a figure doubtful."""
    keys = [key for key in differing_keys(configs) if key in BUDGET_KEYS]
    if keys:
        yield f"different budgets: {', '.join(keys)} differ"
    hosts = [{str(run.run_metadata.get("host")) for run in one.runs} for one in configs if one.runs]
    if any(names != hosts[0] for names in hosts):
        yield "different machines: seconds and memory are not comparable"
    seeds = sorted({seed for one in configs for seed in one.seeds})
    for one in configs:
        own_seeds = {*one.seeds, *(run.seed for run in one.excluded_runs)}
        if missing := [str(seed) for seed in seeds if seed not in own_seeds]:
            yield f"{one.label}: no run with seed {', '.join(missing)}, unlike others"
        for run in [run for run in one.runs if not run.finished]:
            yield f"{one.label}, seed {run.seed} is unfinished: {run.status_text}"
    if any(one.excluded_runs for one in configs):
        yield "means exclude failed runs, which might have been the worst"
