"""A composed config -> a checked, frozen `RunConfig`; all its errors at once.

`check` is strict: an unknown key is an error wherever it was written, and every error names the
key, the file and line or the command line, what was found, and what would be right.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError, create_model

from rloo_cli.config import debug as config_debug
from rloo_cli.config import judge as config_judge
from rloo_cli.config import messages, registry, rules
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.provenance import ConfigSources
from rloo_cli.config.schema import (
    DataConfig,
    EvalConfig,
    Frozen,
    Mixture,
    RunConfig,
    SetConfig,
    Sets,
    SourceConfig,
)
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

# What a run may change and still be the same experiment (docs/reference.md).
KEYS_NOT_HASHED = (
    "root", "name", "resume", "resume_allow_changes", "logging", "checkpoint", "eval", "max_steps",
    "total_episodes", "train.epochs", "sft", "reward_model", "distributed",
    "slurm",
)  # fmt: skip
# Where and how an engine runs, not what it computes: such a key makes no other run of it.
ENGINE_SECTIONS = ("generation.server", "generation.colocate")
ENGINE_PLACEMENT_KEYS = (
    "base_url", "num_nodes", "api_key_env", "host", "port", "allow_remote", "data_parallel_size",
    "api_processes", "max_in_flight", "ready_timeout_s", "init_timeout_s", "sync_timeout_s",
    "request_timeout_s", "reconnect_timeout_s", "retries", "max_restarts", "tensor_parallel_size",
    "gpu_memory_utilization", "kv_cache_gb", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching", "transfer", "sleep",
)  # fmt: skip


def is_engine_placement_key(key: str) -> bool:
    """Whether a key says only where and how a sampler's engine runs."""
    section, _, leaf = key.rpartition(".")
    return section in ENGINE_SECTIONS and leaf in ENGINE_PLACEMENT_KEYS


def check_config(composed: ComposedConfig) -> RunConfig:
    """Check a composed config and freeze it. Raises ConfigError with every problem found."""
    sources = composed.sources
    values = merge_defaults(composed.values, sources)
    problems = list(messages.pre_schema_problems(values))
    if not problems:
        try:
            run = build_run_config(values)
        except ValidationError as error:
            problems = messages.validation_problems(error, values, run_config_class(values))
        else:
            if run.name is None:
                named = values | {"name": default_run_name(run, composed.recipe)}
                run = build_run_config(named)
            problems = list(rules.run_problems(run))
    problems += messages.underflow_problems(values, sources)
    if problems:
        problems.sort(key=lambda p: sources.sort_key(p.where))  # as they were written
        raise ConfigError(*[messages.locate_problem(p, sources) for p in problems])
    return run


def merge_defaults(values: JsonObject, sources: ConfigSources | None = None) -> JsonObject:
    """Put the defaults common to all rewards, and those of its type, under every entry of `reward`,
    and debug's reward model in.

    `reward=...` on the command line replaces a recipe's rewards: what the recipe says about those
    that are gone goes with them. Raises ConfigError for a section that is none (`train: 5`).
    """
    problems = [*messages.section_problems(values)]
    if problems:
        raise ConfigError(
            *[messages.locate_problem(p, sources or ConfigSources()) for p in problems]
        )
    values = dict(values)
    common, debug = values.pop("reward_defaults", {}), values.get("debug") or {}
    rewards = values.get("reward") or {}
    words = [w.lstrip("+") for w in sources.overrides] if sources is not None else []
    if isinstance(rewards, dict):
        if any(w.startswith("reward=") for w in words):
            rewards = {
                n: e
                for n, e in rewards.items()
                if not isinstance(e, dict)
                or "type" in e
                or any(w.startswith(f"reward.{n}.") for w in words)
            }
        entries = {
            n: common | config_judge.reward_type_defaults(e) | e if isinstance(e, dict) else e
            for n, e in rewards.items()
        }
        values["reward"] = config_debug.apply_debug_rewards(entries, debug)
    if "generation" in values:
        values["generation"] = config_debug.apply_debug_generation(
            values["generation"], debug, words
        )
    values["data"] = config_debug.apply_debug_data(values.get("data"), debug)
    if "model" in values:
        values["model"] = config_debug.apply_debug_model(values["model"], debug)
    return _with_sets(config_judge.merge_judge_defaults(_with_mixture(values), common))


def _with_mixture(values: JsonObject) -> JsonObject:
    """What a source of data.mixture leaves out is as in `data`, but for where data.path is."""
    data = values.get("data")
    mixture = data.get("mixture") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(mixture, dict) or not mixture:
        return values
    common = {k: v for k, v in data.items() if k in SetConfig.model_fields and k != "path"}
    common |= {"name": None, "revision": None}
    whole = {n: common | e if isinstance(e, dict) else e for n, e in mixture.items()}
    path = None if data.get("path") == "???" else data.get("path")
    return values | {"data": data | {"path": path, "mixture": whole}}


def _with_sets(values: JsonObject) -> JsonObject:
    """What a held-out set leaves out is as in `data`; where it has a path of its own, not what
    only says where data.path is. Its split, left out, is data.eval_split or test; of data of its
    own, test, and a single file's only one, train.
    """
    evaluation, data = values.get("eval"), values.get("data")
    if not isinstance(evaluation, dict) or not isinstance(data, dict):
        return values
    sets = evaluation.get("sets")
    if not isinstance(sets, dict):
        return values
    common = {k: v for k, v in data.items() if k in SetConfig.model_fields and k != "split"}
    stand_in = (values.get("debug") or {}).get("sets_from_data")
    whole = {}
    for name, entry in sets.items():
        if not isinstance(entry, dict):
            whole[name] = entry
        elif stand_in and data.get("eval_split"):
            whole[name] = common | {"split": data["eval_split"]}
        else:
            other: JsonObject = {"split": data.get("eval_split") or "test"}
            if "path" in entry:
                is_file = str(entry["path"]).endswith((".jsonl", ".json", ".csv", ".parquet"))
                other = {"split": "train" if is_file else "test", "name": None, "revision": None}
            whole[name] = common | other | entry
    return values | {"eval": evaluation | {"sets": whole}}


def build_run_config(values: JsonObject) -> RunConfig:
    """Plain values -> RunConfig. Raises pydantic's ValidationError."""
    checked: RunConfig = run_config_class(values).model_validate(values)
    return checked


def run_config_class(values: JsonObject) -> type[RunConfig]:
    """RunConfig with the sections that the chosen algorithm, backend, rewards and sets bring."""
    algorithm = registry.config_class("algorithms", values["algorithm"]["name"])
    generation = registry.config_class("generation", values["generation"]["backend"])
    entries = values["reward"].items()
    kinds: Any = {n: (registry.config_class("rewards", e["type"]), ...) for n, e in entries}
    rewards: Any = create_model("Rewards", __base__=Frozen, **kinds)

    class Run(RunConfig):
        """One experiment, wholly in config."""

    given = values["eval"].get("sets") if isinstance(values["eval"], dict) else None
    named: Any = dict.fromkeys(given if isinstance(given, dict) else (), (SetConfig, ...))
    sets: Any = create_model("Sets", __base__=Sets, **named)
    judge = values["eval"].get("judge") if isinstance(values["eval"], dict) else None
    parts: Any = {"sets": sets, "judge": config_judge.judge_config_class(judge) | None}
    parts = {name: (of, EvalConfig.model_fields[name]) for name, of in parts.items()}
    evaluation: Any = create_model("Eval", __base__=EvalConfig, **parts)
    fields: Any = {"algorithm": (algorithm, ...), "generation": (generation, ...)}
    fields |= {"eval": (evaluation, ...), "data": (_data_class(values), ...)}
    model: type[RunConfig] = create_model("Run", __base__=Run, reward=(rewards, ...), **fields)
    return model


def _data_class(values: JsonObject) -> Any:
    """DataConfig with a field for each source of the mixture."""
    data = values.get("data")
    given = data.get("mixture") if isinstance(data, dict) else None
    named: Any = dict.fromkeys(given if isinstance(given, dict) else (), (SourceConfig, ...))
    mixture: Any = create_model("Mixture", __base__=Mixture, **named)
    field = DataConfig.model_fields["mixture"]
    return create_model("Data", __base__=DataConfig, mixture=(mixture | None, field))


def dump_config(run: RunConfig) -> JsonObject:
    """The plain values of a run, as written to config.yaml."""
    return run.model_dump(mode="json")


def fill_newer_keys(values: JsonObject) -> JsonObject:
    """The config of a run, with the keys that its version did not have yet: as before.

    Raises KeyError where a section is missing that every version has written.
    """
    filled: JsonObject = _filled(run_config_class(values), values)
    return filled


def _filled(model: type[BaseModel], values: JsonObject) -> JsonObject:
    values = dict(values)
    for name, info in model.model_fields.items():
        extra = info.json_schema_extra
        if name not in values and isinstance(extra, dict) and "since" in extra:
            values[name] = copy.deepcopy(extra["before"])
        inside = values.get(name)
        section = _section_model(info.annotation)
        if section is not None and isinstance(inside, dict):
            values[name] = _filled(section, inside)
    return values


def _section_model(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also one that may be null."""
    parts = [annotation, *get_args(annotation)]
    return next((p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)), None)


def first_version_values(values: JsonObject) -> JsonObject:
    """A run's plain values as the first version would have written them, for hash and comparison:
    without the keys that came later and say "as before", and with the defaults that were changed.
    As they are where a section is missing that every version has written: somebody changed them.
    """
    try:
        values = fill_newer_keys(values)
    except (KeyError, TypeError):
        return values
    return _first_version_values(run_config_class(values), values)


def _first_version_values(model: type[BaseModel], values: JsonObject) -> JsonObject:
    kept = {}
    for name, value in values.items():
        info = model.model_fields.get(name)
        extra = info.json_schema_extra if info is not None else None
        extra = extra if isinstance(extra, dict) else {}
        if "since" in extra and value == extra["before"]:
            continue
        if "default_was" in extra:
            now, earlier = cast(list[Any], extra["default_was"])
            value = earlier if value == now else value
        section = _section_model(info.annotation) if info is not None else None
        if section is not None and isinstance(value, dict):
            value = _first_version_values(section, value)
        kept[name] = value
    return kept


def read_config(path: Path) -> RunConfig:
    """Load a config.yaml written by a run, also by an earlier version: safe YAML, no interpolation,
    the same check.
    """
    values = yaml.safe_load(path.read_text())
    return _read(path, lambda: build_run_config(fill_newer_keys(values)))


def _read(path: Path, make: Callable[[], RunConfig]) -> RunConfig:
    try:
        return make()
    except (ValidationError, KeyError) as error:
        raise ConfigError(
            Problem(f"{path} is not a config of this version", why=str(error))
        ) from None


def read_resolved_config(path: Path) -> RunConfig:
    """The same for a run that trains: keys that stand for something else are written out."""
    values = yaml.safe_load(path.read_text())
    return _read(path, lambda: build_run_config(_with_resolved_algorithm(fill_newer_keys(values))))


def resolve_config(run: RunConfig) -> RunConfig:
    """The config to train with: keys that stand for something else are written out."""
    values = dump_config(run)
    return (
        build_run_config(_with_resolved_algorithm(values))
        if resolved_algorithm_keys(values)
        else run
    )


def resolved_algorithm_keys(values: JsonObject) -> JsonObject:
    """What keys of the algorithm's section that stand for something else come to."""
    algorithm = registry.algorithm_class(values["algorithm"]["name"])
    found: JsonObject = algorithm.resolved_values(
        values["algorithm"], values["generation"]["backend"]
    )
    return found


def _with_resolved_algorithm(values: JsonObject) -> JsonObject:
    return values | {"algorithm": values["algorithm"] | resolved_algorithm_keys(values)}


def config_text(run: RunConfig) -> str:
    """What config.yaml of a run says: its values, and in a comment what some of them come to."""
    values = dump_config(run)
    text = yaml.safe_dump(values, sort_keys=False)
    lines = []
    for key, value in resolved_algorithm_keys(values).items():
        inside = value if isinstance(value, dict) else {"": value}
        before = values["algorithm"].get(key)
        for leaf, now in inside.items():
            if not leaf or now != before[leaf]:
                lines.append(f"#   algorithm.{key}{leaf and '.' + leaf}: {now}\n")
    head = "# Trained with, where the values above stand for something else:\n"
    return text + (head if lines else "") + "".join(lines)


def config_hash(run: RunConfig) -> str:
    """6 hex digits of what makes the experiment what it is; where it is kept is left out."""
    values = first_version_values(dump_config(run))
    for key in KEYS_NOT_HASHED:
        section, _, leaf = key.partition(".")
        (values[section] if leaf else values).pop(leaf or section, None)
    for section in ENGINE_SECTIONS:
        engine = values["generation"].get(section.rpartition(".")[2], {})
        for leaf in [leaf for leaf in engine if is_engine_placement_key(f"{section}.{leaf}")]:
            engine.pop(leaf)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def default_run_name(run: RunConfig, recipe: str | None) -> str:
    """`<recipe>-<model>-<hash>`: the same config finds its run again."""
    model = Path(run.model.path.rpartition(":")[2]).name
    parts = [(recipe or "train").replace("/", "-")[:60], model[:60], config_hash(run)]
    return re.sub(r"[^A-Za-z0-9._+-]", "-", "-".join(parts)).lstrip("-._+")
