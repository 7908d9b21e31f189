"""A composed config -> a checked, frozen `RunConfig`; all its errors at once.

`check` is strict: an unknown key is an error wherever it was written, and every error names the
key, the file and line or the command line, what was found, and what would be right.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, create_model

from rloo_cli import registry, rules
from rloo_cli.compose import Composed
from rloo_cli.errors import ConfigError, Problem
from rloo_cli.names import nearest, old_name
from rloo_cli.schema import Frozen, RunConfig
from rloo_cli.sources import Sources

# What a run may change and still be the same experiment (PROMISES 14).
FREE = ("root", "name", "logging", "eval", "max_steps", "total_episodes", "train.epochs")
PICKS = {"algorithm": ("algorithms", "name"), "generation": ("generation", "backend")}


def check(composed: Composed) -> RunConfig:
    """Check a composed config and freeze it. Raises ConfigError with every problem found."""
    values, sources = merged(composed.values), composed.sources
    problems = [*_targets(values), *_missing(values), *_unregistered(values)]
    if not problems:
        try:
            run = build(values)
        except ValidationError as error:
            problems = _translate(error, values)
        else:
            if run.name is None:
                named = values | {"name": default_name(run, composed.recipe)}
                run = build(named)
            problems = list(rules.problems(run))
    if problems:
        raise ConfigError(*[_place(p, sources) for p in problems])
    return run


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Put the defaults common to all rewards under every entry, and debug's reward model in."""
    values = dict(values)
    common = values.pop("reward_defaults", {})
    rewards = values.get("reward") or {}
    if isinstance(rewards, dict):
        entries = {n: common | e if isinstance(e, dict) else e for n, e in rewards.items()}
        stand_in = (values.get("debug") or {}).get("reward_model_path")
        for entry in entries.values():
            if stand_in and isinstance(entry, dict) and entry.get("type") == "model":
                entry |= {"path": stand_in, "tokenizer": None, "revision": None}
        values["reward"] = entries
    return values


def build(values: dict[str, Any]) -> RunConfig:
    """Plain values -> RunConfig. Raises pydantic's ValidationError."""
    checked: RunConfig = model_class(values).model_validate(values)
    return checked


def model_class(values: dict[str, Any]) -> type[RunConfig]:
    """RunConfig with the sections that the chosen algorithm, backend and rewards bring."""
    algorithm = registry.config_class("algorithms", values["algorithm"]["name"])
    generation = registry.config_class("generation", values["generation"]["backend"])
    kinds = {n: registry.config_class("rewards", e["type"]) for n, e in values["reward"].items()}
    rewards: Any = create_model(
        "Rewards", __base__=Frozen, **{n: (k, ...) for n, k in kinds.items()}
    )

    class Run(RunConfig):
        """One experiment, wholly in config."""

    fields: Any = {"algorithm": (algorithm, ...), "generation": (generation, ...)}
    model: type[RunConfig] = create_model("Run", __base__=Run, reward=(rewards, ...), **fields)
    return model


def dump(run: RunConfig) -> dict[str, Any]:
    """The plain values of a run, as written to config.yaml."""
    return run.model_dump(mode="json")


def read(path: Path) -> RunConfig:
    """Load a config.yaml written by a run: safe YAML, no interpolation, the same check."""
    values = yaml.safe_load(path.read_text())
    try:
        return build(values)
    except (ValidationError, KeyError) as error:
        raise ConfigError(
            Problem(f"{path} is not a config of this version", why=str(error))
        ) from None


def config_hash(run: RunConfig) -> str:
    """6 hex digits of what makes the experiment what it is; where it is kept is left out."""
    values = dump(run)
    for key in FREE:
        section, _, leaf = key.partition(".")
        (values[section] if leaf else values).pop(leaf or section, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def default_name(run: RunConfig, recipe: str | None) -> str:
    """`<recipe>-<model>-<hash>`: the same config finds its run again."""
    model = Path(run.model.path.rpartition(":")[2]).name
    parts = [recipe.replace("/", "-") if recipe else "train", model, config_hash(run)]
    return re.sub(r"[^A-Za-z0-9._+-]", "-", "-".join(parts)).lstrip("-._+")


def walk(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested dictionaries and lists, sections included."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key, value
        if isinstance(value, dict | list):
            yield from walk(value, key)


def _targets(values: dict[str, Any]) -> Iterator[Problem]:
    for key, _ in walk(values):
        if key.rpartition(".")[2] in ("_target_", "_convert_", "_partial_", "_recursive_"):
            yield Problem(
                f"{key}: a config names no Python objects",
                key,
                "parts are chosen by their registry name; nothing was run",
                "reward=function reward.function.path=file.py:name",
            )


def _missing(values: dict[str, Any]) -> Iterator[Problem]:
    for key, value in walk(values):
        if value == "???":
            yield Problem(f"{key} has no value", key, "it has no default", f"{key}=VALUE")


def _unregistered(values: dict[str, Any]) -> Iterator[Problem]:
    picks = [(f"{s}.{k}", room, (values.get(s) or {}).get(k)) for s, (room, k) in PICKS.items()]
    rewards = values.get("reward") or {}
    if not isinstance(rewards, dict) or any(not isinstance(e, dict) for e in rewards.values()):
        yield Problem("reward is not a mapping of entries", "reward", fix="reward=accuracy")
        return
    old = [k for k in rewards if "type" not in rewards[k] or not str(k).isidentifier()]
    for name in old:
        yield Problem(
            f"reward.{name} is not a reward",
            f"reward.{name}",
            "an entry of `reward` has a name of letters and a `type`",
            f"reward={(nearest(str(name), registry.names('rewards')) or ['NAME'])[0]}",
        )
    picks += [
        (f"reward.{n}.type", "rewards", e["type"]) for n, e in rewards.items() if n not in old
    ]
    for key, room, name in picks:
        known = registry.names(room)
        if name not in known:
            close = nearest(str(name), known)
            yield Problem(
                f"{key} = {name!r}: there is no such {registry.ROOMS[room]}",
                key,
                f"one of: {', '.join(sorted(known))}",
                f"{key}={close[0]}" if close else "",
            )


def _translate(error: ValidationError, values: dict[str, Any]) -> list[Problem]:
    """pydantic's errors as ours: one per key, although a union reports each of its members."""
    known = known_keys(model_class(values))
    found: dict[str, Problem] = {}
    for item in error.errors():
        key = _key(item["loc"], values, item["type"])
        if item["type"] == "extra_forbidden":
            problem = unknown_key(key, known)
        elif item["type"] == "missing":
            problem = Problem(f"{key} has no value", key, "it has no default", f"{key}=VALUE")
        else:
            why = item["msg"].replace("Input should be", "should be").replace("Value error, ", "")
            problem = Problem(
                f"{key} = {item['input']!r} is not valid", key, f"{why}, got {item['input']!r}"
            )
            if key in found:
                why = f"{found[key].why.rpartition(', got')[0]}; or {problem.why}"
                problem = Problem(problem.what, key, why)
        found[key] = problem
    return list(found.values())


def unknown_key(key: str, known: list[str]) -> Problem:
    """What to say of a key that the schema has not: today's name of an old one, or near ones."""
    section = key.rpartition(".")[0]
    why = f'the schema has no such key under "{section}"' if section else "there is no such key"
    old = old_name(key)
    if old is not None:
        today = old.new or "nothing in rloo"
        fix = f"write {old.new} instead" if old.new else f"leave {key} out"
        return Problem(
            f"{key} is not a key",
            key,
            f"{old.source} calls it so; here it is {today}. {old.note}",
            fix,
        )
    close = nearest(key, known)
    fix = f"did you mean {' or '.join(close)}?" if close else ""
    if not close:
        near = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
        why += f"; it has: {', '.join(near)}" if near else ""
    return Problem(
        f"{key} is not a key", key, why, fix, f"rloo config explain {(close or [key])[0]}"
    )


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a schema, sections included."""
    keys = []
    for name, info in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        for part in [info.annotation, *getattr(info.annotation, "__args__", ())]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys += known_keys(part, f"{prefix}{name}.")
    return keys


def _key(loc: tuple[int | str, ...], values: Any, kind: str) -> str:
    """A pydantic location without the tags it adds for the members of a union."""
    key: list[str] = []
    for part in loc:
        inside = isinstance(values, dict) and part in values
        if isinstance(values, list) and isinstance(part, int) and part < len(values):
            inside = True
        if not inside and not (kind == "missing" and isinstance(values, dict)):
            break
        key.append(str(part))
        values = values[part] if inside else None
    return ".".join(key)


def _place(problem: Problem, sources: Sources) -> Problem:
    """Put the file and line, or the command line, where a problem names a key."""
    key = problem.where
    if not key or not re.fullmatch(r"[\w.]+", key):
        return problem
    fix = problem.fix
    good = sources.below(key)
    if not fix and good is not None:
        fix = f"{key}={good}" if not isinstance(good, str) or good else ""
    more = problem.more or f"rloo config explain {key}"
    return Problem(problem.what, sources.where(key) or key, problem.why, fix, more)
