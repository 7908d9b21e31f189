"""Holds the recipe that `rloo migrate` writes: our keys, why each is set, and what was left out.

Every line is checked against the schema as it is added, so that what is printed composes: a key or
a value that this version does not know becomes a comment. All of the output that is not YAML is a
comment too, so `rloo migrate ... > my.yaml` is a recipe.
"""

import textwrap
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rloo_cli.config import registry, schema
from rloo_cli.config.old_names import find_old_name
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

UNKNOWN = "not in this version"
MAX_COMMENT_VALUE = 24  # characters of an old value that a comment repeats
VLLM_BACKEND_SECTIONS = ("server", "colocate")  # sections of the vLLM backends
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
    """Why this version would not take `key: value`; None if it would."""
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
    """The value as the schema takes it: old settings of one or several values are written either
    way. A value becomes a list of one, and a list of one its value, where only that is valid."""
    if isinstance(value, list | tuple):
        value = list(value)
        other = value[0] if len(value) == 1 else value
    else:
        other = [value]
    fits = schema_refusal(key, value, algorithm) is None
    return other if not fits and schema_refusal(key, other, algorithm) is None else value


def schema_field(key: str, algorithm: str = "rloo") -> FieldInfo | None:
    """The schema's field for a dotted key; None if there is none."""
    section, *inner = key.split(".")
    if not inner:
        return schema.RunConfig.model_fields.get(section)
    models = _models(section, inner[0], algorithm)
    for depth, name in enumerate(inner):
        info = next((m.model_fields[name] for m in models if name in m.model_fields), None)
        if info is None or depth == len(inner) - 1:
            return info
        models = _sections_of(info.annotation)
    return None


def _models(section: str, leaf: str, algorithm: str) -> list[type[BaseModel]]:
    """The classes whose fields are the keys of a section."""
    if section == "algorithm":
        name = _algorithm_defaults(algorithm).get("name", algorithm)
        return [registry.config_class("algorithms", name)]
    if section == "generation":
        backend = f"vllm_{leaf}" if leaf in VLLM_BACKEND_SECTIONS else "transformers"
        return [registry.config_class("generation", backend)]
    if section == "agent":  # the keys of every kind
        return [registry.config_class("agents", n) for n in registry.registry_names("agents")]
    info = schema.RunConfig.model_fields.get(section)
    return _sections_of(info.annotation) if info else []


def _sections_of(annotation: object) -> list[type[BaseModel]]:
    """The schemas of sections that an annotation allows, also of one that may be null."""
    parts = [annotation, *get_args(annotation)]
    return [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]


@dataclass
class Recipe:
    """The old flags that are not converted yet, and the lines of the recipe."""

    flags: JsonObject
    setting_format: str = "--{} {}"  # how the input wrote a setting, for the comments
    lines: dict[str, tuple[object, str]] = field(default_factory=dict)  # key -> value, why
    unsupported: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # flags of which no table knows anything
    title: str = ""
    nodes: int = 1  # machines of the old run
    launcher_file: str = ""  # accelerate's config, which names the engine
    algorithm: str = "rloo"  # the choice of that group
    groups: dict[str, tuple[str | list[str], str]] = field(default_factory=dict)  # choice, why

    def __post_init__(self) -> None:
        self.original_flags = dict(self.flags)

    def take(self, name: str, default: object = None) -> Any:
        """The value of an old flag, or the default; the flag counts as converted."""
        value = self.flags.pop(name, None)
        return default if value is None else value

    def original_text(self, name: str) -> str:
        """The text of an old setting as it was written, for a comment."""
        value = self.original_flags.get(name)
        bare = value is True and self.setting_format.startswith("--")  # a flag without a value
        text = "" if bare else _setting_text(value)
        text = text if len(text) <= MAX_COMMENT_VALUE else "..."
        return self.setting_format.format(name, text).strip()

    def put(self, key: str, value: object, why: str, keep_unsupported: bool = True) -> None:
        """Add a line to the recipe, or to the unsupported settings if the schema refuses it."""
        value = fitting_value(key, value, self.algorithm)
        reason = schema_refusal(key, value, self.algorithm)
        if reason is None:
            self.lines[key] = (value, why)
        elif keep_unsupported:
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
        """Write out the old tool's default if ours differs."""
        defaults = our_defaults(self.algorithm)
        if key not in self.lines and (key not in defaults or defaults[key] != value):
            ours = f"; ours is {_flow_yaml(defaults[key])}" if key in defaults else ""
            self.put(key, value, f"{tool}'s default{ours}")

    def written_value(self, key: str, default: object = None) -> object:
        """The value of a key in the recipe so far, or the default."""
        return self.lines[key][0] if key in self.lines else default

    def drop(self, name: str, why: str) -> None:
        """Drop an old flag, with the reason."""
        if name in self.flags:
            self.take(name)
            self.dropped.append(f"{self.original_text(name)}: {why}")

    def put_remaining(self) -> list[str]:
        """Convert what no rule took, by the table of plain renames. Returns unknown flags."""
        unknown = []
        for name, value in list(self.flags.items()):
            del self.flags[name]
            entry, text = find_old_name(name), self.original_text(name)
            key = entry.new_key if entry is not None else None
            refused_false = value is False and key and schema_refusal(key, value, self.algorithm)
            if entry is None:
                unknown.append(text)
            elif value is None or refused_false:
                self.dropped.append(f"{text}: off, as here")
            elif key is None or "<" in key or entry.fix:
                instead = f"write {entry.fix}" if entry.fix else key
                self.dropped.append(f"{text}: {entry.note or instead}")
            elif key in self.lines:
                self.dropped.append(f"{text}: {key} is set by another flag")
            else:
                note = "" if entry.note.startswith("its default") else entry.note
                self.put(key, value, f"{text}; {note}" if note else text)
        return unknown

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


def _setting_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]


def _comment_item(text: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent="# - ", subsequent_indent="#   ")
