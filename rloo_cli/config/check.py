"""Turns a composed config into a checked, frozen `RunConfig`, or reports all its errors at once.

`check_config` is strict: an unknown key is an error wherever it was written, and every error names
the key, the file and line or the command line, what was found, and what would be right.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError, create_model

from rloo_cli import __version__
from rloo_cli.config import agent as config_agent
from rloo_cli.config import debug as config_debug
from rloo_cli.config import judge as config_judge
from rloo_cli.config import messages, registry, rules
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.provenance import YAML_ERRORS, ConfigSources
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
from rloo_cli.utils.errors import ConfigError, refuse
from rloo_cli.utils.files import JsonObject

ModelT = TypeVar("ModelT", bound=BaseModel)
# Keys that a run can change and remain the same experiment (docs/reference.md).
KEYS_NOT_HASHED = (
    "root", "name", "resume", "resume_allow_changes", "logging", "checkpoint", "eval", "target",
    "max_steps", "total_episodes", "train.epochs", "sft", "reward_model", "distributed", "slurm",
    "guards", "generation.max_sampling_mask_ids",
)  # fmt: skip
# Where and how an inference engine runs, not what it computes: not part of the experiment either.
ENGINE_SECTIONS = ("generation.server", "generation.colocate", "algorithm.teacher")
ENGINE_PLACEMENT_KEYS = (
    "base_url", "num_nodes", "api_key_env", "host", "port", "allow_remote", "data_parallel_size",
    "api_server_count", "max_in_flight", "ready_timeout_s", "init_timeout_s", "sync_timeout_s",
    "request_timeout_s", "reconnect_timeout_s", "retries", "max_restarts", "tensor_parallel_size",
    "gpu_memory_utilization", "kv_cache_gb", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching", "transfer", "sleep",
)  # fmt: skip


def is_engine_placement_key(key: str) -> bool:
    """Whether a key says only where and how an inference engine runs."""
    section, _, leaf = key.rpartition(".")
    return section in ENGINE_SECTIONS and leaf in ENGINE_PLACEMENT_KEYS


def check_config(composed: ComposedConfig, needs_reward: bool = True) -> RunConfig:
    """Check a composed config and freeze it. Raises ConfigError with every problem found.

    `needs_reward`: false for `rloo sft` and `rloo reward-model`, which learn from examples.
    """
    sources = composed.sources
    values = merge_defaults(composed.values, sources)
    problems = list(messages.pre_schema_problems(values))
    if problems == list(messages.missing_value_problems(values)):  # also without any
        try:
            run = build_run_config(values)
        except ValidationError as error:
            reported = {p.where for p in problems} | {
                k for k, value in messages.walk_values(values) if value == "???"
            }
            found = messages.validation_problems(error, values, run_config_class(values), sources)
            # The section of a misspelt key is not a second mistake.
            problems += [
                p for p in found if not any(f"{k}.".startswith(f"{p.where}.") for k in reported)
            ]
        else:
            if problems:
                raise ConfigError(*[messages.locate_problem(p, sources) for p in problems])
            if run.name is None:
                name = default_run_name(run.model.path, composed.recipe, config_hash(run))
                run = build_run_config(values | {"name": name})
            problems = list(rules.run_problems(run, needs_reward))
    problems += messages.underflow_problems(values, sources)
    if problems:
        problems.sort(key=lambda p: sources.sort_key(p.where))  # in the order they were written
        raise ConfigError(*[messages.locate_problem(p, sources) for p in problems])
    return run


def merge_defaults(values: JsonObject, sources: ConfigSources | None = None) -> JsonObject:
    """Fill in what sections leave out: rewards, mixture sources, held-out sets, the judge, debug.

    An entry of `reward` gets the defaults common to all rewards and those of its type. `reward=...`
    on the command line replaces a recipe's rewards, and `override /reward: ...` those of its base
    recipe; keys of replaced rewards are dropped. Raises ConfigError for a section that is not a
    section (`train: 5`).
    """
    sources = sources or ConfigSources()
    if problems := [*messages.section_problems(values)]:
        raise ConfigError(*[messages.locate_problem(p, sources) for p in problems])
    values = dict(values)
    common, debug = values.pop("reward_defaults", {}), values.get("debug") or {}
    rewards = values.get("reward") or {}
    overrides = [w.lstrip("+") for w in sources.overrides]
    if isinstance(rewards, dict):
        replaced = any(w.startswith("reward=") for w in overrides)
        entries = {}
        for name, entry in rewards.items():
            if not isinstance(entry, dict):
                entries[name] = entry
            elif (
                "type" in entry
                or any(w.startswith(f"reward.{name}.") for w in overrides)
                or (not replaced and sources.recipe_sets(f"reward.{name}."))
            ):
                entries[name] = common | config_judge.reward_type_defaults(entry) | entry
        values["reward"] = config_debug.apply_debug_rewards(entries, debug)
    if "generation" in values:
        generation = values["generation"]
        values["generation"] = config_debug.apply_debug_generation(generation, debug, overrides)
    values["data"] = config_debug.apply_debug_data(values.get("data"), debug)
    algorithm = config_debug.apply_debug_teacher(values.get("algorithm"), debug, overrides)
    if "algorithm" in values:
        values["algorithm"] = algorithm
    if "model" in values:
        values["model"] = config_debug.apply_debug_model(values["model"], debug, algorithm)
    return _with_sets(config_judge.merge_judge_defaults(_with_mixture(values), common))


def _with_mixture(values: JsonObject) -> JsonObject:
    """Fill in what a source of data.mixture leaves out: it is as in `data`, but for the keys that
    say where data.path is."""
    data = values.get("data")
    mixture = data.get("mixture") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(mixture, dict) or not mixture:
        return values
    common = {k: v for k, v in data.items() if k in SetConfig.model_fields and k != "path"}
    common |= {"name": None, "revision": None}
    filled = {n: _over(common, e) if isinstance(e, dict) else e for n, e in mixture.items()}
    path = None if data.get("path") == "???" else data.get("path")
    return values | {"data": data | {"path": path, "mixture": filled}}


def _over(common: JsonObject, entry: JsonObject) -> JsonObject:
    """A source's or set's own keys over those of `data`; of `task` key by key."""
    task, own = common.get("task"), entry.get("task")
    both = {"task": task | own} if isinstance(task, dict) and isinstance(own, dict) else {}
    return common | entry | both


def _with_sets(values: JsonObject) -> JsonObject:
    """Fill in what a held-out set leaves out: it is as in `data`.

    A set with its own path inherits nothing about the location of data.path. Its split defaults to
    data.eval_split or test; with its own path to test, and for a single file to train.
    """
    evaluation, data = values.get("eval"), values.get("data")
    if not isinstance(evaluation, dict) or not isinstance(data, dict):
        return values
    sets = evaluation.get("sets")
    if not isinstance(sets, dict):
        return values
    common = {k: v for k, v in data.items() if k in SetConfig.model_fields and k != "split"}
    stand_in = (values.get("debug") or {}).get("sets_from_data")
    filled = {}
    for name, entry in sets.items():
        if not isinstance(entry, dict):
            filled[name] = entry
        elif stand_in and data.get("eval_split"):
            filled[name] = common | {"split": data["eval_split"]}
        else:
            other: JsonObject = {"split": data.get("eval_split") or "test"}
            if "path" in entry:
                is_file = str(entry["path"]).endswith((".jsonl", ".json", ".csv", ".parquet"))
                other = {"split": "train" if is_file else "test", "name": None, "revision": None}
            filled[name] = _over(common | other, entry)
    return values | {"eval": evaluation | {"sets": filled}}


def build_run_config(values: JsonObject) -> RunConfig:
    """Plain values -> RunConfig. Raises pydantic's ValidationError."""
    return run_config_class(values).model_validate(values)


def run_config_class(values: JsonObject) -> type[RunConfig]:
    """RunConfig with the sections that the chosen algorithm, backend, rewards and sets bring."""

    class Run(RunConfig):
        """One experiment, wholly in config."""

    algorithm = registry.config_class("algorithms", values["algorithm"]["name"])
    generation = registry.config_class("generation", values["generation"]["backend"])
    entries = values["reward"].items()
    rewards = {n: (registry.config_class("rewards", e["type"]), ...) for n, e in entries}
    sets = _subclass("Sets", Sets, _named_entries(values["eval"], "sets", SetConfig))
    judge = values["eval"].get("judge") if isinstance(values["eval"], dict) else None
    judge_class = config_judge.judge_config_class(judge) | None
    in_eval, in_data = EvalConfig.model_fields, DataConfig.model_fields
    mixture = _subclass(
        "Mixture", Mixture, _named_entries(values.get("data"), "mixture", SourceConfig)
    )
    eval_fields = {"sets": (sets, in_eval["sets"]), "judge": (judge_class, in_eval["judge"])}
    agent_class = config_agent.agent_section(values) | None
    sections = {
        "reward": _subclass("Rewards", Frozen, rewards),
        "algorithm": algorithm,
        "generation": generation,
        "eval": _subclass("Eval", EvalConfig, eval_fields),
        "data": _subclass("Data", DataConfig, {"mixture": (mixture | None, in_data["mixture"])}),
    }
    fields = {name: (kind, ...) for name, kind in sections.items()}
    return _subclass("Run", Run, fields | {"agent": (agent_class, RunConfig.model_fields["agent"])})


def _subclass(name: str, base: type[ModelT], fields: Mapping[str, Any]) -> type[ModelT]:
    """A subclass of a pydantic model with more fields: name -> (type, default or ...)."""
    return create_model(name, __base__=base, **fields)


def _named_entries(section: object, key: str, kind: type[BaseModel]) -> dict[str, object]:
    """A required field of this type for each name under a key of a section, such as eval.sets."""
    entries = section.get(key) if isinstance(section, dict) else None
    return dict.fromkeys(entries if isinstance(entries, dict) else (), (kind, ...))


def dump_config(run: RunConfig) -> JsonObject:
    """The plain values of a run, as written to config.yaml."""
    return run.model_dump(mode="json")


def read_config(path: Path) -> RunConfig:
    """Read and check a config.yaml that a run wrote."""
    return _read(path, lambda values: values)


# What a damaged file, or one of another version, makes PyYAML, pydantic and `prepare` raise.
UNREADABLE_CONFIG = (*YAML_ERRORS, KeyError, TypeError, AttributeError)
WRITTEN_BY = re.compile(r"# Written by rloo (\S+)\n")  # first line of a run's config.yaml


def written_version(path: Path) -> str | None:
    """The version of rloo that wrote this config.yaml; None if it is missing."""
    try:
        with path.open(encoding="utf-8") as file:
            found = WRITTEN_BY.match(file.readline())
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None


def check_other_version(path: Path, values: JsonObject) -> None:
    """Raises ConfigError if another minor version wrote a config that this version does not accept.

    `path`: of the run's config.yaml, which says the version. `values`: its values, or those that a
    checkpoint of the run has. A config of this minor version is compared key by key elsewhere.
    """
    version = written_version(path)
    if version is None or version.split(".")[:2] == __version__.split(".")[:2]:
        return
    try:
        build_run_config(values)
    except UNREADABLE_CONFIG as error:
        what = f"{path} was written by rloo {version} and is not valid in this version"
        fix = f"resume with rloo {version}, or start over with this version: name=OTHER"
        refuse(str(path), what, fix, _invalid_keys(error))


def _invalid_keys(error: Exception) -> str:
    """Missing, unknown and mistyped keys, a line each."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    more = [f"... and {len(lines) - 10} more"] if len(lines) > 10 else []
    return "\n".join([*lines[:10], *more])


def _read(path: Path, prepare: Callable[[JsonObject], JsonObject]) -> RunConfig:
    try:
        return build_run_config(prepare(yaml.safe_load(path.read_text())))
    except UNREADABLE_CONFIG as error:
        what = f"{path} is not a config of this version"
        fix = "use the rloo version that wrote it"
        refuse(str(path), what, fix, str(error))


def read_resolved_config(path: Path) -> RunConfig:
    """`read_config` for a run that trains: keys that stand for others are written out."""
    return _read(path, _with_resolved_algorithm)


def resolve_config(run: RunConfig) -> RunConfig:
    """The config to train with: keys that stand for others (`loss_type`) are written out."""
    values = dump_config(run)
    resolved = resolved_algorithm_keys(values)
    return build_run_config(_with_resolved_algorithm(values)) if resolved else run


def resolved_algorithm_keys(values: JsonObject) -> JsonObject:
    """The values of the algorithm's keys that others stand for, such as `loss_type`."""
    config = values["algorithm"]
    algorithm = registry.algorithm_class(config["name"])
    resolved: JsonObject = algorithm.resolved_values(
        config, values["generation"]["backend"], values["generation"]["overlap"]
    )
    return resolved


def _with_resolved_algorithm(values: JsonObject) -> JsonObject:
    return values | {"algorithm": values["algorithm"] | resolved_algorithm_keys(values)}


def config_text(run: RunConfig) -> str:
    """The text of a run's config.yaml: its values, and in comments the version of rloo that wrote
    it and the keys written out."""
    values = dump_config(run)
    text = f"# Written by rloo {__version__}\n{yaml.safe_dump(values, sort_keys=False)}"
    lines = []
    for key, value in resolved_algorithm_keys(values).items():
        leaves = value if isinstance(value, dict) else {"": value}
        before = values["algorithm"].get(key)
        for leaf, now in leaves.items():
            if not leaf or now != before[leaf]:
                lines.append(f"#   algorithm.{key}{leaf and '.' + leaf}: {now}\n")
    head = "# Trained with these values, which the keys above stand for:\n"
    return text + (head if lines else "") + "".join(lines)


def config_hash(run: RunConfig) -> str:
    """6 hex digits of everything the experiment depends on, without KEYS_NOT_HASHED."""
    values = dump_config(run)
    for key in KEYS_NOT_HASHED:
        section, _, leaf = key.partition(".")
        (values[section] if leaf else values).pop(leaf or section, None)
    for section in ENGINE_SECTIONS:
        room, _, name = section.partition(".")
        engine = values[room].get(name, {})
        for leaf in [leaf for leaf in engine if is_engine_placement_key(f"{section}.{leaf}")]:
            engine.pop(leaf)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def default_run_name(model_path: str, recipe: str | None, digest: str) -> str:
    """`<recipe>-<model>-<hash>`: the same config always names the same run."""
    model = Path(model_path.rpartition(":")[2]).name
    parts = [(recipe or "train").replace("/", "-")[:60], model[:60], digest]
    return re.sub(r"[^A-Za-z0-9._+-]", "-", "-".join(parts)).lstrip("-._+")
