"""What is wrong with a composed config, in words: one problem per key, where it was written.

`before_types` finds what must be right before the schema can be put together, `of_types` turns
pydantic's errors into ours, `placed` turns a key into a file and line.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from rloo_cli.config import judge, registry
from rloo_cli.config.old_names import OldName, find_old_name, nearest_names
from rloo_cli.config.provenance import ConfigSources
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

MAX_INT64 = 2**63 - 1
MIN_FLOAT64 = math.ulp(0.0)
# Sections that are null until a choice of their group is made.
OPTIONAL_SECTIONS = {"model.lora": "lora=default", "model.quantization": "quantization=4bit"}
# A number with an exponent, as it is written: its digits before the exponent in a group.
EXPONENT = re.compile(r"(?<![\w.])[+-]?([\d_]*\.?[\d_]*)[eE][+-]?\d+(?![\w.])")
REGISTRY_KEYS = {"algorithm": ("algorithms", "name"), "generation": ("generation", "backend")}


def pre_schema_problems(values: JsonObject) -> Iterator[Problem]:
    """Python objects, secrets, keys without a value, and names that no registry has."""
    yield from _targets(values)
    yield from _secrets(values)
    yield from _overflow_problems(values)
    yield from _missing(values)
    yield from _unregistered(values)
    yield from _badly_named(values)
    yield from judge.unknown_judge_problems(values)


def section_problems(values: JsonObject) -> Iterator[Problem]:
    """Sections that are something else: what is to be looked through further has to be one."""
    for name, info in {**RunConfig.model_fields, "reward_defaults": None}.items():
        of = info.annotation if info is not None else None
        inside = list(of.model_fields) if isinstance(of, type) and issubclass(of, BaseModel) else []
        if name in values and (inside or info is None) and not isinstance(values[name], dict):
            if name == "reward":
                continue
            what = f"{name} = {_clipped(values[name])} is not a section"
            why = f"it holds keys: {', '.join(inside) or 'those that all rewards have'}"
            yield Problem(what, name, why, f"{name}.KEY=VALUE for one of them")


def walk_values(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested dictionaries and lists, sections included."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key, value
        if isinstance(value, dict | list):
            yield from walk_values(value, key)


def schema_keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every dotted key of a schema -> its meaning ("" for a section without one)."""
    keys = {}
    for name, info in model.model_fields.items():
        keys[f"{prefix}{name}"] = info.description or ""
        for part in [info.annotation, *getattr(info.annotation, "__args__", ())]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys |= schema_keys(part, f"{prefix}{name}.")
    return keys


def _targets(values: JsonObject) -> Iterator[Problem]:
    for key, _ in walk_values(values):
        if key.rpartition(".")[2] in ("_target_", "_convert_", "_partial_", "_recursive_"):
            yield Problem(
                f"{key}: a config names no Python objects",
                key,
                "parts are chosen by their registry name; nothing was run",
                "reward=function reward.function.path=file.py:name",
            )


def _secrets(values: JsonObject) -> Iterator[Problem]:
    """Keys that would hold a secret, and values that are one (`${oc.env:HF_TOKEN}`)."""
    for key, value in walk_values(values):
        of = redact.find_secret(value) if isinstance(value, str) else ""
        if of or (redact.SECRET_KEY.search(key) and not isinstance(value, dict)):
            why = "no key takes one: config.yaml, which a run writes, would hold it"
            variable = of if of.isidentifier() else "NAME"
            fix = f"export {variable}=... where the run is started, and leave {key} out"
            yield Problem(f"{key}: this looks like a secret", key, why, fix)


def _overflow_problems(values: JsonObject) -> Iterator[Problem]:
    for key, value in walk_values(values):
        if isinstance(value, int) and abs(value) > MAX_INT64:
            why = f"{str(value)[:20]}... is beyond {MAX_INT64}, what 64 bits hold"
            yield Problem(f"{key} is too large a number", key, why)


def underflow_problems(values: JsonObject, sources: ConfigSources) -> Iterator[Problem]:
    """Numbers that are written as something other than 0, and are 0 for a computer."""
    for key, value in walk_values(values):
        if not isinstance(value, float) or value != 0:
            continue
        for written in EXPONENT.finditer(sources.text_of(key)):
            if re.search("[1-9]", written[1]) and float(written[0]) == 0:
                why = f"it is nearer to 0 than the least number that 64 bits hold, {MIN_FLOAT64:g}"
                yield Problem(f"{key} = {written[0]} would be 0", key, why)
                break


def _missing(values: JsonObject) -> Iterator[Problem]:
    for key, value in walk_values(values):
        if value == "???" and (meant := _misspelt(key, values)):
            said = _clipped(meant[1]) if isinstance(meant[1], dict | list) else meant[1]
            why = f"{key}, which it is near, has no value and no default"
            yield Problem(f"{meant[0]} is not a key", meant[0], why, f"{key}={said}")
        elif value == "???":
            yield Problem(
                f"{key} has no value",
                key,
                "it has no default",
                f"{key}=VALUE, or a recipe that has it: +recipe=quickstart",
            )


def _misspelt(missing: str, values: JsonObject) -> tuple[str, Any] | None:
    """The unknown key, and its value, that was meant to be this one, which has none."""
    section, _, leaf = missing.rpartition(".")
    inside: Any = values
    for part in section.split("."):
        inside = inside[part] if isinstance(inside, dict) else {}
    known = set(_fields_of(section, inside)) | {leaf}
    near = {f"{section}.{k}": v for k, v in inside.items() if k not in known}
    for name, value in values.items():
        if name not in (*RunConfig.model_fields, "reward_defaults"):
            near |= {k: v for k, v in walk_values({name: value}) if not isinstance(v, dict)}
    return next(((k, v) for k, v in near.items() if nearest_names(k, [missing])), None)


def _fields_of(section: str, inside: JsonObject) -> Iterable[str]:
    """The keys that this section has, where that is known by its name or its type."""
    top, _, rest = section.partition(".")
    kind = inside.get("type")
    if top == "reward" and kind in registry.registry_names("rewards"):
        found: Iterable[str] = registry.config_class("rewards", kind).model_fields
        return found
    info = RunConfig.model_fields.get(top)
    of = info.annotation if info is not None and not rest else None
    known = isinstance(of, type) and issubclass(of, BaseModel)
    return of.model_fields if known else inside  # type: ignore[union-attr]


def _unregistered(values: JsonObject) -> Iterator[Problem]:
    picks: list[tuple[str, str, Any]] = [
        (f"{s}.{k}", room, (values.get(s) or {}).get(k)) for s, (room, k) in REGISTRY_KEYS.items()
    ]
    rewards = values.get("reward") or {}
    if not isinstance(rewards, dict) or any(not isinstance(e, dict) for e in rewards.values()):
        yield Problem("reward is not a mapping of entries", "reward", fix="reward=accuracy")
        return
    badly = [k for k in rewards if not str(k).isidentifier() or hasattr(BaseModel, str(k))]
    old = [k for k in rewards if "type" not in rewards[k] or k in badly or str(k).startswith("_")]
    for name in old:
        if "_target_" in rewards[name]:  # that was said
            continue
        yield Problem(
            f"reward.{name} is not a reward",
            f"reward.{name}",
            "an entry of `reward` has a `type`, and a name of letters that pydantic has no use for",
            "reward="
            + (nearest_names(str(name), registry.registry_names("rewards")) or ["NAME"])[0],
        )
    picks += [
        (f"reward.{n}.type", "rewards", e["type"]) for n, e in rewards.items() if n not in old
    ]
    for key, room, name in picks:
        known = registry.registry_names(room)
        if not isinstance(name, str) or not (name in known or registry.is_user_file(room, name)):
            close = nearest_names(str(name), known)
            yield Problem(
                f"{key} = {name!r}: there is no such {registry.REGISTRIES[room]}",
                key,
                f"one of: {', '.join(sorted(known))}",
                f"{key}={close[0]}" if close else "",
            )


def _badly_named(values: JsonObject) -> Iterator[Problem]:
    """Held-out sets and sources whose name would not do in the name of a metric, file or field."""
    kinds = {"eval.sets": "a held-out set", "data.mixture": "a source"}
    fixes = {"eval.sets": "hard={split: test}", "data.mixture": "maths={path: PATH, weight: 1}"}
    for key, kind in kinds.items():
        section, _, leaf = key.partition(".")
        inside = values.get(section)
        names = inside.get(leaf) if isinstance(inside, dict) else None
        for name in names if isinstance(names, dict) else ():
            good = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", str(name))
            if not good or hasattr(BaseModel, name):
                yield Problem(
                    f"{key}.{name}: {kind} cannot have this name",
                    f"{key}.{name}",
                    "letters, digits and _, at most 40, and no word that pydantic keeps for itself",
                    f"{key}.{fixes[key]}",
                )


def validation_problems(
    error: ValidationError, values: JsonObject, model: type[BaseModel]
) -> list[Problem]:
    """pydantic's errors as ours: one per key, although a union reports each of its members."""
    known = schema_keys(model)
    found: dict[str, Problem] = {}
    for item in error.errors():
        key = _key(item["loc"], values, item["type"])
        if item["type"] == "extra_forbidden":
            found[key] = unknown_key_problem(key, known)
        elif item["type"] == "missing":
            found[key] = Problem(f"{key} has no value", key, "it has no default", f"{key}=VALUE")
            section = next((s for s in OPTIONAL_SECTIONS if key.startswith(f"{s}.")), None)
            if section is not None:  # `model.lora.r=8` alone: all the others have no value
                found.pop(key)
                why = (
                    f"some of {section} is set, and {OPTIONAL_SECTIONS[section]} gives the "
                    "rest its values"
                )
                what = f"{section} is not whole"
                where = next(k for k, _ in walk_values(values) if k.startswith(f"{section}."))
                found[section] = Problem(what, where, why, OPTIONAL_SECTIONS[section])
        else:
            before = found[key].why.partition(", got")[0] + "; or " if key in found else ""
            said = item["msg"].replace("Input should be", "should be").replace("Value error, ", "")
            value = _clipped(item["input"])
            why = f"{before}{said}, got {value}"
            why, fix = _with_quotes(item, key, why) if key not in found else (why, "")
            found[key] = Problem(f"{key} = {value} is not valid", key, why, fix)
    # A union complains about itself beside the one key inside it that is wrong.
    deepest = [k for k in found if not any(other.startswith(f"{k}.") for other in found)]
    return [_with_meaning(found[key], known) for key in deepest]


def _with_quotes(item: Any, key: str, why: str) -> tuple[str, str]:
    """Why, and what to write, where a list of texts has one that YAML reads as something else."""
    whole, _, last = key.rpartition(".")
    value = item["input"]
    if item["type"] != "string_type" or not last.isdigit() or not isinstance(value, int | float):
        return why, ""
    in_file = in_word = str(value).lower()
    if isinstance(value, bool):
        in_file = "yes" if value else "no"
        bare = "yes, on and true" if value else "no, off and false"
        why += f"\nwithout quotes, {bare} are read as {value} in a file; it is a text in quotes"
    leaf = whole.rpartition(".")[2]
    return why, f'{leaf}: ["{in_file}"] in a file, \'{whole}=["{in_word}"]\' on the command line'


def _clipped(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _with_meaning(problem: Problem, meanings: dict[str, str]) -> Problem:
    meaning = meanings.get(problem.where, "")
    why = f"{problem.why}\nit is: {meaning}" if meaning else problem.why
    return Problem(problem.what, problem.where, why, problem.fix, problem.more)


def unknown_key_problem(key: str, meanings: dict[str, str]) -> Problem:
    """What to say of a key that the schema has not: today's name of an old one, or near ones."""
    section = key.rpartition(".")[0]
    if key in meanings:  # `algorithm.beta: 0.3` in a file
        whole = key.replace(".", ": {") + ": VALUE" + "}" * key.count(".")
        return Problem(f"{key} is not a key of a file", key, "a file nests its sections", whole)
    why = f'the schema has no such key under "{section}"' if section else "there is no such key"
    if choice := choice_with_key(key):
        fix = f"{choice}, or leave {key} out"
        return Problem(f"{key} is not a key", key, f"only {choice} has it", fix, "rloo config")
    old = find_old_name(key)
    if old is not None and old.new_key != key:
        return _of_another_trainer(key, old, meanings)
    leaves = [k for k in meanings if not any(other.startswith(f"{k}.") for other in meanings)]
    close = nearest_names(key, leaves)
    fix = f"did you mean {' or '.join(close)}?" if close else ""
    if not close:
        near = [k.rpartition(".")[2] for k in meanings if k.rpartition(".")[0] == section]
        why += f"; it has: {', '.join(near)}" if near else ""
    return Problem(
        f"{key} is not a key", key, why, fix, f"rloo config explain {(close or [key])[0]}"
    )


def choice_with_key(key: str) -> str:
    """`algorithm=ppo` for a key that only this choice of its group has; "" where every choice has
    the key, or none.
    """
    section, _, rest = key.partition(".")
    if section not in REGISTRY_KEYS:
        return ""
    room, _ = REGISTRY_KEYS[section]
    names = registry.registry_names(room)
    having = [n for n in names if rest in schema_keys(registry.config_class(room, n))]
    return " or ".join(f"{section}={n}" for n in having) if len(having) < len(names) else ""


def _of_another_trainer(key: str, old: OldName, meanings: dict[str, str]) -> Problem:
    """What to say of a key as another trainer spelt it: today's name, or that there is none."""
    what, note = f"{key} is not a key", f": {old.note}" if old.note else ""
    if old.new_key is None:
        why = f"{old.source} calls it so; there is nothing for it in rloo yet{note}"
        return Problem(what, key, why, f"leave {key} out", "rloo config")
    optional = next(
        (c for s, c in OPTIONAL_SECTIONS.items() if old.new_key.startswith(f"{s}.")), ""
    )
    choice = optional or ("" if old.new_key in meanings else choice_with_key(old.new_key))
    fix = old.fix or f"write {old.new_key} instead" + (f", with {choice}" if choice else "")
    more = f"rloo config explain {old.new_key}" if old.new_key in meanings else "rloo config"
    why = f"{old.source} calls it so; here it is {old.new_key}{note}"
    return Problem(what, key, why, fix.replace("<name>", "NAME"), more)


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


def locate_problem(problem: Problem, sources: ConfigSources) -> Problem:
    """Put the file and line, or the command line, where a problem names a key."""
    key = problem.where
    if not key or not re.fullmatch(r"[\w.+-]+", key):
        return problem
    fix = problem.fix
    good = sources.value_below(key)
    if not fix and good is not None and len(str(good)) < 100:
        fix = f"{key}={str(good).lower() if isinstance(good, bool) else good}"
    more = problem.more or f"rloo config explain {key}"
    return Problem(problem.what, sources.location_of(key) or key, problem.why, fix, more)
