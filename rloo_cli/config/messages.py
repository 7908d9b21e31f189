"""Says what is wrong with a composed config: one problem per key, where it was written.

`pre_schema_problems` finds what must be right before the schema can be put together,
`validation_problems` turns pydantic's errors into ours, `locate_problem` adds file and line.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rloo_cli.config import agent, judge, registry
from rloo_cli.config.old_names import OldName, find_old_name, nearest_names
from rloo_cli.config.pasted import guess_name, paste_setting, unknown_name_problem
from rloo_cli.config.provenance import ConfigSources
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import paths, redact
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

MAX_INT64 = 2**63 - 1
MIN_FLOAT64 = math.ulp(0.0)
# Sections that are null unless a choice of their group is selected.
OPTIONAL_SECTIONS = {
    "model.lora": "lora=default", "model.quantization": "quantization=4bit", "agent": "agent=tools",
}  # fmt: skip
# A number with an exponent, as written: its digits before the exponent in a group.
EXPONENT = re.compile(r"(?<![\w.])[+-]?([\d_]*\.?[\d_]*)[eE][+-]?\d+(?![\w.])")
SECTIONS_WITH_DEFAULTS = ("model", "data")  # groups whose files start from their `default`
REGISTRY_KEYS = {"algorithm": ("algorithms", "name"), "generation": ("generation", "backend")}
CHOSEN_SECTIONS = REGISTRY_KEYS | {"agent": ("agents", "kind")}  # an agent may be null


def pre_schema_problems(values: JsonObject) -> Iterator[Problem]:
    """Python objects, secrets, keys without a value, and names unknown to the registries."""
    yield from _targets(values)
    yield from _secrets(values)
    yield from _overflow_problems(values)
    yield from missing_value_problems(values)
    yield from _unregistered(values)
    yield from _badly_named(values)
    yield from judge.unknown_judge_problems(values)
    yield from agent.unknown_agent_problems(values)


def section_problems(values: JsonObject) -> Iterator[Problem]:
    """Sections that do not hold keys, such as `train: 5`."""
    for name, info in {**RunConfig.model_fields, "reward_defaults": None}.items():
        model = info.annotation if info is not None else None
        is_model = isinstance(model, type) and issubclass(model, BaseModel)
        keys = list(model.model_fields) if is_model else []  # type: ignore[union-attr]
        if name in values and (keys or info is None) and not isinstance(values[name], dict):
            if name == "reward":
                continue
            what = f"{name} = {_clipped(values[name])} is not a section"
            why = f"its keys: {', '.join(keys) or 'those of all rewards'}"
            yield Problem(what, name, why, f"{name}.KEY=VALUE for one of them")


def walk_values(
    values: Mapping[str, object] | Sequence[object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Every (dotted key, value) of nested dictionaries and lists, sections included."""
    items: Iterable[tuple[object, object]]
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
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
                f"{key}: a config cannot name Python objects",
                key,
                "choose parts by registry name; no code was run",
                "reward=function reward.function.path=file.py:name",
            )


def _secrets(values: JsonObject) -> Iterator[Problem]:
    """Keys that would hold a secret, and values that are secrets (`${oc.env:HF_TOKEN}`)."""
    for key, value in walk_values(values):
        secret = redact.find_secret(value) if isinstance(value, str) else ""
        if secret or (redact.SECRET_KEY.search(key) and not isinstance(value, dict)):
            why = "keys cannot hold secrets: the run writes them to config.yaml"
            variable = secret if secret.isidentifier() else "NAME"
            fix = f"export {variable}=... in the run's environment, and remove {key}"
            yield Problem(f"{key}: this looks like a secret", key, why, fix)


def _overflow_problems(values: JsonObject) -> Iterator[Problem]:
    for key, value in walk_values(values):
        if isinstance(value, int) and abs(value) > MAX_INT64:
            why = f"{str(value)[:20]}... exceeds {MAX_INT64}, the 64-bit limit"
            fix = f"set {key} to a number nearer to 0"
            yield Problem(f"{key} is too large a number", key, why, fix)


def underflow_problems(values: JsonObject, sources: ConfigSources) -> Iterator[Problem]:
    """Non-zero numbers that become 0 as 64-bit floats."""
    for key, value in walk_values(values):
        if not isinstance(value, float) or value != 0:
            continue
        for written in EXPONENT.finditer(sources.text_of(key)):
            if re.search("[1-9]", written[1]) and float(written[0]) == 0:
                why = f"it is below the smallest 64-bit float, {MIN_FLOAT64:g}"
                fix = f"{key}=0 if that is intended, else a larger number"
                yield Problem(f"{key} = {written[0]} would be 0", key, why, fix)
                break


def missing_value_problems(values: JsonObject) -> Iterator[Problem]:
    """Required keys without a value, each with a likely misspelling."""
    for key, value in walk_values(values):
        if value == "???" and (misspelt := _misspelt(key, values)):
            name, meant = misspelt
            why = f"the similar key {key} has no value and no default"
            yield Problem(f"{name} is not a key", name, why, paste_setting(key, meant))
        elif value == "???":
            fix = f"{key}=VALUE, or a recipe that has it: +recipe=quickstart"
            yield Problem(f"{key} has no value", key, "it has no default", fix)


def _misspelt(missing: str, values: JsonObject) -> tuple[str, object] | None:
    """The unknown key, and its value, that is a likely misspelling of `missing`."""
    section, _, leaf = missing.rpartition(".")
    inside = values
    for part in section.split("."):
        inside = inside[part] if isinstance(inside, dict) else {}
    fields = set(_fields_of(section, inside)) | {leaf}
    unknown: dict[str, object] = {f"{section}.{k}": v for k, v in inside.items() if k not in fields}
    for name, value in values.items():
        if name not in (*RunConfig.model_fields, "reward_defaults"):
            unknown |= {k: v for k, v in walk_values({name: value}) if not isinstance(v, dict)}
    return next(((k, v) for k, v in unknown.items() if nearest_names(k, [missing])), None)


def _fields_of(section: str, inside: JsonObject) -> Iterable[str]:
    """The possible keys of a section, or its actual ones (`inside`) if its class is unknown."""
    top, _, rest = section.partition(".")
    kind = inside.get("type")
    if top == "reward" and kind in registry.registry_names("rewards"):
        return list(registry.config_class("rewards", kind).model_fields)
    info = RunConfig.model_fields.get(top)
    model = info.annotation if info is not None and not rest else None
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    return model.model_fields if is_model else inside  # type: ignore[union-attr]


def _unregistered(values: JsonObject) -> Iterator[Problem]:
    """Keys with a name that their registry (algorithm, backend, reward types) lacks."""
    choices: list[tuple[str, str, object]] = [
        (f"{section}.{key}", kind, (values.get(section) or {}).get(key))
        for section, (kind, key) in REGISTRY_KEYS.items()
    ]
    rewards = values.get("reward") or {}
    if not isinstance(rewards, dict) or any(not isinstance(e, dict) for e in rewards.values()):
        why = f"found {_clipped(rewards)}, expected a name for each reward, with its keys"
        fix = "defaults: [override /reward: NAME] in the file, or remove reward from it"
        yield Problem("reward is not a mapping of entries", "reward", why, fix)
        return
    for name, entry in rewards.items():
        reserved = not str(name).isidentifier() or hasattr(BaseModel, str(name))
        if "type" in entry and not reserved and not str(name).startswith("_"):
            choices.append((f"reward.{name}.type", "rewards", entry["type"]))
        elif "_target_" not in entry:  # else reported by `_targets`
            close = nearest_names(str(name), registry.registry_names("rewards")) or ["NAME"]
            where = f"reward.{name}"
            why = "an entry of `reward` needs a `type`, and a name that pydantic does not reserve"
            yield Problem(f"{where} is not a reward", where, why, f"reward={close[0]}")
    for key, kind, name in choices:
        names = registry.registry_names(kind)
        if not isinstance(name, str) or not (name in names or registry.is_user_file(kind, name)):
            yield unknown_name_problem(key, name, registry.REGISTRIES[kind], names)


def _badly_named(values: JsonObject) -> Iterator[Problem]:
    """Held-out sets and sources whose name is not valid in a metric, file or field."""
    kinds = {"eval.sets": "a held-out set", "data.mixture": "a source"}
    fixes = {"eval.sets": "hard={split: test}", "data.mixture": "maths={path: PATH, weight: 1}"}
    why = "use at most 40 letters, digits and _, and no name that pydantic reserves"
    for key, kind in kinds.items():
        section, _, leaf = key.partition(".")
        inside = values.get(section)
        names = inside.get(leaf) if isinstance(inside, dict) else None
        for name in names if isinstance(names, dict) else ():
            good = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", str(name))
            if not good or hasattr(BaseModel, name):
                where = f"{key}.{name}"
                what = f"{where}: {kind} cannot have this name"
                yield Problem(what, where, why, f"{key}.{fixes[key]}")


def validation_problems(
    error: ValidationError, values: JsonObject, model: type[BaseModel], sources: ConfigSources
) -> list[Problem]:
    """pydantic's errors as ours: one per key, although a union reports each of its types.

    The fix is left to `locate_problem` if the key would have another value without this one.
    """
    meanings = schema_keys(model)
    problems: dict[str, Problem] = {}
    without_value: list[str] = []
    for item in error.errors():
        key = _key(item["loc"], values, item["type"])
        section = next((s for s in OPTIONAL_SECTIONS if key.startswith(f"{s}.")), None)
        if item["type"] == "extra_forbidden":
            problems[key] = unknown_key_problem(key, meanings)
        elif item["type"] == "missing" and section is None:
            without_value.append(key)
            problems[key] = Problem(f"{key} has no value", key, "it has no default", f"{key}=VALUE")
        elif item["type"] == "missing" and section is not None:
            # `model.lora.r=8` alone: the others have no value
            choice = OPTIONAL_SECTIONS[section]
            why = f"only some keys of {section} are set; {choice} sets the others"
            keys = (k for k, _ in walk_values(values) if k.startswith(f"{section}."))
            where = next(keys, section)  # the section itself if it is `{}`
            problems.pop(key, None)
            problems[section] = Problem(f"{section} is incomplete", where, why, choice)
        else:
            before = problems[key].why.partition(", got")[0] + "; or " if key in problems else ""
            text = item["msg"].replace("Input should be", "should be").replace("Value error, ", "")
            value = _clipped(item["input"])
            why = f"{before}{text}, got {value}"
            fix = problems[key].fix if key in problems else ""
            if key not in problems and _good_value(key, sources) is None:
                fix = _value_fix(item, key)
            if key not in problems:
                why, fix = _with_quotes(item, key, why, fix)
            problems[key] = Problem(f"{key} = {value} is not valid", key, why, fix)
    # A union reports itself in addition to the wrong key inside it.
    deepest = [k for k in problems if not any(other.startswith(f"{k}.") for other in problems)]
    incomplete = _sections_without_defaults(without_value, values)
    shown = [k for k in deepest if k.rpartition(".")[0] not in incomplete or k not in without_value]
    return [*incomplete.values(), *(_with_meaning(problems[key], meanings) for key in shown)]


def _sections_without_defaults(
    without_value: Sequence[str], values: JsonObject
) -> dict[str, Problem]:
    """Section -> one problem for a file of one's own, model/mine.yaml, without a defaults list."""
    found: dict[str, Problem] = {}
    for section in SECTIONS_WITH_DEFAULTS:
        lacking = [key for key in without_value if key.rpartition(".")[0] == section]
        if len(lacking) > 1:
            given = [key for key, _ in walk_values(values) if key.startswith(f"{section}.")]
            why = f"{len(lacking)} of its keys have no value: {', '.join(lacking)}"
            fix = "defaults: [default, _self_] as the first line of its file"
            what, where = f"{section} is incomplete", (given or [section])[0]
            found[section] = Problem(what, where, why, fix)
    return found


def _value_fix(item: ErrorDetails, key: str) -> str:
    """A valid value for the key, as far as pydantic's error shows."""
    kind, limits = item["type"], item.get("ctx") or {}
    forms = {"int": "N, a whole number", "float": "NUMBER", "str": "TEXT", "list": "[...]"}
    form = next((text for start, text in forms.items() if kind.startswith(start)), "")
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(limits.get("expected")))
        form = guess_name(str(item["input"]), allowed, "ONE, of these")
    elif kind.startswith("bool"):
        form = "true, or false"
    elif kind in ("greater_than_equal", "less_than_equal"):
        form = f"{limits[kind[0] + 'e']:g}"
    elif kind in ("greater_than", "less_than"):
        form = f"NUMBER, {kind.replace('_', ' ')} {limits[kind[0] + 't']:g}"
    elif kind in ("dict_type", "model_type"):
        form = "{KEY: VALUE}"
    whole, _, last = key.rpartition(".")
    if last.isdigit() and form:  # an entry of a list, which is set as a whole
        return f"{whole}=[{form}]"
    return f"{key}={form}" if form else f"omit {key}, or correct it"


def _with_quotes(item: ErrorDetails, key: str, why: str, fix: str) -> tuple[str, str]:
    """`why` and `fix`, improved for a text that YAML reads as a number or a bool."""
    whole, _, last = key.rpartition(".")
    value = item["input"]
    if item["type"] != "string_type" or not isinstance(value, int | float):
        return why, fix
    in_file = on_line = str(value).lower()
    if not last.isdigit():
        return why, paste_setting(key, on_line)
    if isinstance(value, bool):
        in_file = "yes" if value else "no"
        bare = "yes, on and true" if value else "no, off and false"
        why += f"\nwithout quotes, {bare} are read as {value} in a file; quote it to keep a text"
    leaf = whole.rpartition(".")[2]
    return why, f'{leaf}: ["{in_file}"] in a file, \'{whole}=["{on_line}"]\' on the command line'


def _clipped(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _with_meaning(problem: Problem, meanings: dict[str, str]) -> Problem:
    meaning = meanings.get(problem.where, "")
    why = f"{problem.why}\nmeaning: {meaning}" if meaning else problem.why
    return Problem(problem.what, problem.where, why, problem.fix, problem.more)


def unknown_key_problem(key: str, meanings: dict[str, str]) -> Problem:
    """The problem of an unknown key, with the current name of an old key, or similar keys.

    `meanings`: every key of the schema, and what it means.
    """
    section = key.rpartition(".")[0]
    if key in meanings:  # `algorithm.beta: 0.3` in a file
        whole = key.replace(".", ": {") + ": VALUE" + "}" * key.count(".")
        return Problem(f"{key} is not a key of a file", key, "a file nests its sections", whole)
    why = f'the schema has no such key under "{section}"' if section else "unknown key"
    if choice := choice_with_key(key):
        fix = f"{choice}, or omit {key}"
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
    more = f"rloo config explain {(close or [key])[0]}"
    return Problem(f"{key} is not a key", key, why, fix, more)


def choice_with_key(key: str) -> str:
    """`algorithm=ppo` for a key that only this choice has; else ""."""
    section, _, rest = key.partition(".")
    if section not in CHOSEN_SECTIONS:
        return ""
    kind, _ = CHOSEN_SECTIONS[section]
    names = registry.registry_names(kind)
    having = [n for n in names if rest in schema_keys(registry.config_class(kind, n))]
    return " or ".join(f"{section}={n}" for n in having) if len(having) < len(names) else ""


def _of_another_trainer(key: str, old: OldName, meanings: dict[str, str]) -> Problem:
    """The problem of a key named as in another trainer, with rloo's name for it, if any."""
    what, note = f"{key} is not a key", f": {old.note}" if old.note else ""
    if old.new_key is None:
        why = f"this is a setting of {old.source}; rloo has no equivalent{note}"
        return Problem(what, key, why, f"omit {key}", "rloo config")
    new = old.new_key
    optional = next((c for s, c in OPTIONAL_SECTIONS.items() if new.startswith(f"{s}.")), "")
    choice = optional or ("" if new in meanings else choice_with_key(new))
    fix = old.fix or f"write {new} instead" + (f", with {choice}" if choice else "")
    more = f"rloo config explain {new}" if new in meanings else "rloo config"
    why = f"this is the name in {old.source}; in rloo it is {new}{note}"
    return Problem(what, key, why, fix.replace("<name>", "NAME"), more)


def _key(loc: tuple[int | str, ...], values: object, kind: str) -> str:
    """A pydantic location without the tags that it adds for the types of a union."""
    key: list[str] = []
    for part in loc:
        match values, part:
            case (dict(), _) if part in values:
                values = values[part]
            case (list(), int()) if part < len(values):
                values = values[part]
            case _ if not (kind == "missing" and part == loc[-1]):
                continue
        key.append(str(part))
    return ".".join(key)


def _good_value(key: str, sources: ConfigSources) -> object:
    """The value that a key would have without the wrong one; None for none, or a long one."""
    good = sources.value_below(key)
    return good if len(str(good)) < 100 else None


def locate_problem(problem: Problem, sources: ConfigSources) -> Problem:
    """Replace the key that a problem names by its file and line, or the command line."""
    key = problem.where
    if not key or not re.fullmatch(r"[\w.+-]+", key):
        return problem
    fix = problem.fix
    good = _good_value(key, sources)
    if not fix and good is not None:
        fix = paste_setting(key, good)
    more = problem.more or f"rloo config explain {key}"
    return Problem(problem.what, sources.location_of(key) or key, problem.why, fix, more)


def locate_in_run(problems: Iterable[Problem], folder: Path) -> list[Problem]:
    """`locate_problem` for a run that has begun, whose folder names its overrides and its recipe:
    for keys that one of them sets."""
    try:
        overrides = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return list(problems)
    recipe = next((w.partition("=")[2] for w in overrides if w.startswith("+recipe=")), "")
    files = [(paths.recipe_files().get(recipe) or Path(recipe), "")] if recipe else []
    sources = ConfigSources(overrides, files)
    names = [override.lstrip("+~").partition("=")[0] for override in overrides]

    def is_written(key: str) -> bool:
        chosen = any(key == name or key.startswith(f"{name}.") for name in names)
        return chosen or any(key in locations for locations in sources.locations)

    return [locate_problem(p, sources) if is_written(p.where) else p for p in problems]
