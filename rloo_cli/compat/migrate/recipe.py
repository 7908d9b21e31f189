"""Holds the recipe that `rloo migrate` writes: our keys, why each is set, and what was left out.

Every line is checked against the schema when it is added, so that the output composes: a key or
a value that this version does not know becomes a comment. All output that is not YAML is a
comment too, so `rloo migrate ... > my.yaml` is a recipe.
"""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rloo_cli.compat.migrate.table import RULES, Rule
from rloo_cli.compat.migrate.versions import DIALECTS, Dialect
from rloo_cli.config import registry, schema
from rloo_cli.config.old_names import OldName, find_old_name
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

UNKNOWN = "not in this version"
MAX_COMMENT_VALUE = 24  # characters of an old value that a comment repeats
SAMPLERS = ("transformers", "vllm_server", "vllm_colocate")
TABLE_SCHEMAS = {  # keys whose value is a table of named entries, each with this schema
    "data.mixture": schema.SourceConfig,
    "eval.sets": schema.SetConfig,
}


@cache
def our_defaults(algorithm: str = "rloo") -> JsonObject:
    """Dotted key -> our default, if conf/ has one. An algorithm's mappings stay whole."""
    files = {
        "": "config.yaml",
        "model": "model/default.yaml",
        "data": "data/default.yaml",
        "generation": "generation/transformers.yaml",
        "distributed": "distributed/single.yaml",
    }
    defaults = {f"algorithm.{k}": v for k, v in _algorithm_defaults(algorithm).items()}
    for section, file in files.items():
        path = paths.CONF / file
        values = yaml.safe_load(path.read_text()) if path.is_file() else None
        for name, value in (values or {}).items():
            if section:
                defaults[f"{section}.{name}"] = value
            elif isinstance(value, dict):
                defaults |= {f"{name}.{k}": v for k, v in value.items()}
            else:
                defaults[name] = value
    return defaults


@cache
def _algorithm_defaults(choice: str) -> JsonObject:
    """The keys of a choice of the group `algorithm`, with those of its base."""
    values = yaml.safe_load((paths.CONF / "algorithm" / f"{choice}.yaml").read_text()) or {}
    inherited: JsonObject = {}
    for base in values.pop("defaults", ()):
        inherited |= _algorithm_defaults(base)
    return inherited | values


def schema_refusal(key: str, value: object, algorithm: str = "rloo") -> str | None:
    """Why this version rejects `key: value`; None if it accepts it."""
    if key.partition(".")[0] == "reward":
        is_unknown = key.endswith(".type") and value not in registry.registry_names("rewards")
        return UNKNOWN if is_unknown else None
    if key in TABLE_SCHEMAS and isinstance(value, dict):
        entries = [f"{key}.{n}.{k}" for n, entry in value.items() for k in entry
                   if k not in TABLE_SCHEMAS[key].model_fields]  # fmt: skip
        return f"{entries[0]} is not a key" if entries else None
    info = schema_field(key, algorithm)
    if info is None:
        return UNKNOWN
    try:
        TypeAdapter(info.rebuild_annotation()).validate_python(value, strict=True)
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    return None


def fitting_value(key: str, value: object, algorithm: str = "rloo") -> object:
    """The value in the schema's form: old settings of one or several values are written either
    way. A value becomes a list of one, and a list of one its value, if only that is valid."""
    if isinstance(value, list | tuple):
        value = list(value)
        other = value[0] if len(value) == 1 else value
    else:
        other = [value]
    fits = schema_refusal(key, value, algorithm) is None
    return other if not fits and schema_refusal(key, other, algorithm) is None else value


def schema_field(key: str, algorithm: str = "rloo") -> FieldInfo | None:
    """The schema's field for a dotted key; None if there is none."""
    return _schema_fields(algorithm).get(key)


@cache
def _schema_fields(algorithm: str) -> dict[str, FieldInfo]:
    """Every dotted key except rewards -> its field, including those of every sampler and agent."""
    chosen = _algorithm_defaults(algorithm).get("name", algorithm)
    classes = [("algorithm", registry.config_class("algorithms", chosen))]
    classes += [("generation", registry.config_class("generation", name)) for name in SAMPLERS]
    kinds = registry.registry_names("agents")
    classes += [("agent", registry.config_class("agents", name)) for name in kinds]
    found: dict[str, FieldInfo] = {}
    for section, model in classes:
        found = _fields_of(model, f"{section}.") | found
    return _fields_of(schema.RunConfig, "") | found


def _fields_of(model: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    """The fields of a schema and of its sections, also of those that may be null."""
    found = {f"{prefix}{name}": info for name, info in model.model_fields.items()}
    for name, info in model.model_fields.items():
        for part in [info.annotation, *get_args(info.annotation)]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= _fields_of(part, f"{prefix}{name}.")
    return found


def old_run_error(what: str, why: str, fix: str) -> ConfigError:
    """An error about an old run's settings."""
    return ConfigError(Problem(what, "the old run", why, fix))


@dataclass
class Recipe:
    """The old settings that are not converted yet, and the lines of the recipe."""

    flags: JsonObject
    setting_format: str = "--{} {}"  # how the input wrote a setting, for the comments
    dialect: Dialect = DIALECTS["trl"]
    notes: list[str] = field(default_factory=list)
    lines: dict[str, tuple[object, str]] = field(default_factory=dict)  # key -> value, why
    unsupported: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # settings that no table knows
    title: str = ""
    algorithm: str = "rloo"  # the choice of that group
    groups: dict[str, tuple[str | list[str], str]] = field(default_factory=dict)  # choice, why

    def __post_init__(self) -> None:
        self.original_flags = dict(self.flags)

    def take(self, name: str, default: object = None) -> Any:
        """The value of an old setting, or the default; the setting counts as converted."""
        value = self.flags.pop(name, None)
        return default if value is None else value

    def take_list(self, name: str) -> list[Any]:
        """The values of an old setting that takes one or several; [] without it."""
        value = self.take(name, [])
        return list(value) if isinstance(value, list | tuple) else [value]

    def take_number(self, name: str, default: float | None = None) -> Any:
        """Take a number, or the default. Raises ConfigError for another value."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.not_a_number_error(name)
        return value

    def take_whole_number(self, name: str, default: int | None = None) -> Any:
        """Take a number as `take_number`. Raises ConfigError unless it is whole, and 1 or more."""
        value = self.take_number(name, default)
        if value is not None and (value != int(value) or value < 1):
            what = f"{name}: {value} is not a whole number >= 1"
            fix = f"give {name} a whole number in the old settings, such as {max(1, round(value))}"
            raise old_run_error(what, self.original_text(name), fix)
        return None if value is None else int(value)

    def not_a_number_error(self, name: str) -> ConfigError:
        """The error for an old setting that should be a number."""
        what = f"{name}: a number is expected, not {self.original_flags.get(name)!r}"
        fix = f"give {name} its number in the old settings"
        return old_run_error(what, self.original_text(name), fix)

    def original_text(self, name: str) -> str:
        """An old setting as it was written, for a comment."""
        value = self.original_flags.get(name)
        bare = value is True and self.setting_format.startswith("--")  # a flag without a value
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        text = "" if bare else text if len(text) <= MAX_COMMENT_VALUE else "..."
        return self.setting_format.format(name, text).strip()

    def add_flags(self, flags: JsonObject) -> None:
        """Take these as old settings, too, unless the run has the name already."""
        for name, value in flags.items():
            self.flags.setdefault(name, value)
            self.original_flags.setdefault(name, value)

    def put(self, key: str, value: object, why: str) -> None:
        """Add a line to the recipe, or to the unsupported settings if the schema rejects it."""
        value = fitting_value(key, value, self.algorithm)
        reason = schema_refusal(key, value, self.algorithm)
        if reason is None:
            self.lines[key] = (value, why)
        else:
            because = "" if reason == UNKNOWN else f"; this version refuses it: {reason}"
            self.unsupported.append(f"{key}: {_flow_yaml(value)}  ({why}{because})")

    def put_reward(self, name: str, entry: JsonObject, why: str) -> None:
        """Add a reward: by its config group if there is one, else with every key of its type."""
        kind = entry["type"]
        if schema_refusal(f"reward.{name}.type", kind):
            self.unsupported.append(f"reward.{name}: {_flow_yaml(entry)}  ({why})")
        elif kind == name and len(entry) == 1:
            chosen = [*self.groups.get("reward", ([], ""))[0], name]
            self.groups["reward"] = (chosen, why)
        else:
            path = paths.CONF / "reward" / f"{kind}.yaml"
            whole = yaml.safe_load(path.read_text())[kind] if path.is_file() else {}
            for key, value in (whole | entry).items():
                self.put(f"reward.{name}.{key}", value, why if key in entry else f"as {kind}.yaml")

    def put_default(self, key: str, value: object, tool: str) -> None:
        """Write the old tool's default if ours differs."""
        defaults = our_defaults(self.algorithm)
        if key not in self.lines and (key not in defaults or defaults[key] != value):
            ours = f"; ours is {_flow_yaml(defaults[key])}" if key in defaults else ""
            self.put(key, value, f"{tool}'s default{ours}")

    def written_value(self, key: str, default: object = None) -> object:
        """The value of a key in the recipe so far, or the default."""
        return self.lines[key][0] if key in self.lines else default

    def drop(self, names: Iterable[str], why: str) -> None:
        """Drop those of these old settings that exist, with the reason."""
        for name in [n for n in names if n in self.flags]:
            del self.flags[name]
            self.dropped.append(f"{self.original_text(name)}: {why}")

    def names_of(self, section: str) -> list[str]:
        """The remaining old settings for keys that begin with `section`."""
        rows = {name: find_old_name(name) for name in self.flags}
        return [n for n, row in rows.items() if row and (row.new_key or "").startswith(section)]

    def apply_table(self) -> None:
        """Convert the rest: by the table of changed values, then by that of names."""
        for name in [n for n in RULES if n in self.flags] + [
            n for n in self.flags if n not in RULES
        ]:
            self._convert(name, RULES.get(name, Rule()), find_old_name(name))

    def _convert(self, name: str, rule: Rule, row: OldName | None) -> None:
        """Convert one old setting by its rule and its row in the table of names."""
        value, text = self.flags.pop(name), self.original_text(name)
        key = rule.key or (row.new_key if row is not None else None)
        note = rule.note or (row.note if row is not None else "")
        is_choice = row is not None and row.fix and rule.convert is None
        value, is_off = self._value_here(name, value, rule, key)
        if row is None and not rule.key:
            self.unknown.append(text)
        elif rule.drop:
            self.dropped.append(f"{text}: {rule.drop}")
        elif is_off:
            self.dropped.append(f"{text}: off, as here")
        elif row is not None and (key is None or "<" in key or is_choice):
            self.dropped.append(f"{text}: {note or (f'write {row.fix}' if row.fix else key)}")
        elif key in self.lines:
            self.dropped.append(f"{text}: {key} is set by another setting")
        else:
            says = note and not note.startswith("its default")
            self.put(str(key), value, f"{text}; {note}" if says else text)

    def _value_here(self, name: str, value: Any, rule: Rule, key: str | None) -> tuple[Any, bool]:
        """The value of an old setting under its key here, and whether it was off, as here."""
        given = value if not isinstance(value, list | dict) else str(value)
        if isinstance(rule.convert, Mapping) and given in rule.convert:
            return rule.convert[given], False
        if value is None or (value is False and isinstance(rule.convert, Mapping)):
            return value, True
        if callable(rule.convert):
            try:
                return rule.convert(value), False
            except (TypeError, ValueError):
                raise self.not_a_number_error(name) from None
        is_off = value is False and key and schema_refusal(key, value, self.algorithm) is not None
        return value, bool(is_off)

    def render(self, name: str = "my") -> str:
        """The whole text: YAML, with everything else in comments."""
        lines = _comment(self.title)
        if self.groups:
            lines.append("defaults:")
        for group, (choice, why) in self.groups.items():
            lines.append(f"  - override /{group}: {_flow_yaml(choice)} # {why}")
        lines += [*_yaml_lines(self.lines), "", f"# run it: rloo train +recipe={name}.yaml"]
        parts = {
            "mind": self.notes,
            UNKNOWN: self.unsupported,
            "dropped": self.dropped,
            "unknown flags, ignored": self.unknown,
        }
        for head, items in parts.items():
            if items:
                lines += ["#", f"# {head}:", *(c for item in items for c in _comment_item(item))]
        return "\n".join(lines) + "\n"


def _yaml_lines(leaves: dict[str, tuple[object, str]]) -> list[str]:
    """Dotted keys -> lines of indented YAML, sections in the schema's order."""
    names = dict.fromkeys([*schema.RunConfig.model_fields, *our_defaults()])
    order = {name: i for i, name in enumerate(names)}
    lines: list[str] = []
    open_path: list[str] = []

    def position(key: str) -> tuple[int, int]:
        return order.get(key.split(".")[0], len(order)), order.get(key, len(order))

    for key in sorted(leaves, key=position):
        *path, last = key.split(".")
        shared = 0
        while path[: shared + 1] == open_path[: shared + 1] and shared < len(path):
            shared += 1
        for depth in range(shared, len(path)):
            lines.append("  " * depth + f"{path[depth]}:")
        open_path = path
        value, why = leaves[key]
        lines.append("  " * len(path) + f"{last}: {_flow_yaml(value)} # {why}")
    return lines


def _flow_yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]


def _comment_item(text: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent="# - ", subsequent_indent="#   ")
