"""What is wrong with a composed config, in words: one problem per key, where it was written.

`before_types` finds what must be right before the schema can be put together, `of_types` turns
pydantic's errors into ours, `placed` turns a key into a file and line.
"""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from rloo_cli import registry
from rloo_cli.errors import Problem
from rloo_cli.names import nearest, old_name
from rloo_cli.sources import Sources

PICKS = {"algorithm": ("algorithms", "name"), "generation": ("generation", "backend")}


def before_types(values: dict[str, Any]) -> Iterator[Problem]:
    """Python objects, keys without a value, and names that no registry has."""
    yield from _targets(values)
    yield from _missing(values)
    yield from _unregistered(values)
    yield from _badly_named(values)


def walk(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested dictionaries and lists, sections included."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key, value
        if isinstance(value, dict | list):
            yield from walk(value, key)


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every dotted key of a schema -> its meaning ("" for a section without one)."""
    keys = {}
    for name, info in model.model_fields.items():
        keys[f"{prefix}{name}"] = info.description or ""
        for part in [info.annotation, *getattr(info.annotation, "__args__", ())]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys |= known_keys(part, f"{prefix}{name}.")
    return keys


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
            yield Problem(
                f"{key} has no value",
                key,
                "it has no default",
                f"{key}=VALUE, or a recipe that has it: +recipe=quickstart",
            )


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


def _badly_named(values: dict[str, Any]) -> Iterator[Problem]:
    """Held-out sets whose name would not do in the name of a metric or a file, or of a field."""
    evaluation = values.get("eval")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    for name in sets if isinstance(sets, dict) else ():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", str(name)) or hasattr(BaseModel, name):
            yield Problem(
                f"eval.sets.{name}: a held-out set cannot have this name",
                f"eval.sets.{name}",
                "letters, digits and _, at most 40, and no word that pydantic keeps for itself",
                "eval.sets.hard={split: test}",
            )


def of_types(
    error: ValidationError, values: dict[str, Any], model: type[BaseModel]
) -> list[Problem]:
    """pydantic's errors as ours: one per key, although a union reports each of its members."""
    known = known_keys(model)
    found: dict[str, Problem] = {}
    for item in error.errors():
        key = _key(item["loc"], values, item["type"])
        if item["type"] == "extra_forbidden":
            found[key] = unknown_key(key, known)
        elif item["type"] == "missing":
            found[key] = Problem(f"{key} has no value", key, "it has no default", f"{key}=VALUE")
        else:
            before = found[key].why.partition(", got")[0] + "; or " if key in found else ""
            said = item["msg"].replace("Input should be", "should be").replace("Value error, ", "")
            why = f"{before}{said}, got {item['input']!r}"
            found[key] = Problem(f"{key} = {item['input']!r} is not valid", key, why)
    # A union complains about itself beside the one key inside it that is wrong.
    deepest = [k for k in found if not any(other.startswith(f"{k}.") for other in found)]
    return [_with_meaning(found[key], known) for key in deepest]


def _with_meaning(problem: Problem, known: dict[str, str]) -> Problem:
    meaning = known.get(problem.where, "")
    why = f"{problem.why}\nit is: {meaning}" if meaning else problem.why
    return Problem(problem.what, problem.where, why, problem.fix, problem.more)


def unknown_key(key: str, known: dict[str, str]) -> Problem:
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
    leaves = [k for k in known if not any(other.startswith(f"{k}.") for other in known)]
    close = nearest(key, leaves)
    fix = f"did you mean {' or '.join(close)}?" if close else ""
    if not close:
        near = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
        why += f"; it has: {', '.join(near)}" if near else ""
    return Problem(
        f"{key} is not a key", key, why, fix, f"rloo config explain {(close or [key])[0]}"
    )


def _key(loc: tuple[int | str, ...], values: Any, kind: str) -> str:
    """A pydantic location without the tags it adds for the members of a union."""
    key: list[str] = []
    for part in loc:
        inside = isinstance(values, dict) and part in values
        inside |= isinstance(values, list) and isinstance(part, int) and part < len(values)
        if inside:
            values = values[part]
        elif not (kind == "missing" and part == loc[-1]):
            continue
        key.append(str(part))
    return ".".join(key)


def placed(problem: Problem, sources: Sources) -> Problem:
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
