"""The recipe `rloo migrate` writes: our keys with the reason for each, and what was left out.

Every line is checked against the schema as it goes in, so that what is printed composes: a key or
a value that this version does not know becomes a comment. All of the output that is not YAML is a
comment too, so `rloo migrate ... > my.yaml` is a recipe.
"""

import textwrap
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from rloo_cli.config import registry, schema
from rloo_cli.config.old_names import find_old_name
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

UNKNOWN = "not in this version"
MAX_COMMENT_VALUE = 24  # characters of an old value that a comment repeats


VLLM_BACKEND_SECTIONS = ("server", "colocate")  # sections of the vLLM backends


@cache
def our_defaults(algorithm: str = "rloo") -> JsonObject:
    """Dotted key -> our default, as far as conf/ gives one. An algorithm's mappings stay whole."""
    files = {"": paths.CONF / "config.yaml"}
    for group in ("model", "data"):
        files[group] = paths.CONF / group / "default.yaml"
    files["generation"] = paths.CONF / "generation/transformers.yaml"
    files["distributed"] = paths.CONF / "distributed/single.yaml"
    found = {f"algorithm.{k}": v for k, v in _algorithm_defaults(algorithm).items()}
    for section, path in files.items():
        values = yaml.safe_load(path.read_text()) if path.is_file() else None
        for name, value in (values or {}).items():
            if section:
                found[f"{section}.{name}"] = value
            elif isinstance(value, dict):
                found |= {f"{name}.{k}": v for k, v in value.items()}
            else:
                found[name] = value
    return found


@cache
def _algorithm_defaults(choice: str) -> JsonObject:
    """The keys of a choice of the group `algorithm`, with those of the one it begins with."""
    values = yaml.safe_load((paths.CONF / "algorithm" / f"{choice}.yaml").read_text()) or {}
    found: JsonObject = {}
    for base in values.pop("defaults", ()):
        found |= _algorithm_defaults(base)
    return found | values


TABLE_SCHEMAS = {  # keys whose value is a table of named entries, each of this form
    "data.mixture": schema.SourceConfig,
    "eval.sets": schema.SetConfig,
}


def schema_refusal(key: str, value: Any, algorithm: str = "rloo") -> str | None:
    """Why this version would not take `key: value`; None when it would."""
    section, _, name = key.partition(".")
    if section == "reward":
        kind = name.rpartition(".")[2]
        if kind == "type" and value not in registry.registry_names("rewards"):
            return UNKNOWN
        return None
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


def schema_field(key: str, algorithm: str = "rloo") -> Any:
    """The schema's field of a dotted key; None where there is none."""
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


def _models(section: str, leaf: str, algorithm: str) -> list[Any]:
    """The classes whose fields are the keys of a section."""
    if section == "algorithm":
        name = _algorithm_defaults(algorithm).get("name", algorithm)
        return [registry.config_class("algorithms", name)]
    if section == "generation":
        backend = f"vllm_{leaf}" if leaf in VLLM_BACKEND_SECTIONS else "transformers"
        return [registry.config_class("generation", backend)]
    info = schema.RunConfig.model_fields.get(section)
    return _sections_of(info.annotation) if info else []


def _sections_of(annotation: Any) -> list[Any]:
    """The sections that an annotation allows, also one that may be null."""
    parts = [annotation, *get_args(annotation)]
    return [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]


@dataclass
class Recipe:
    """Old flags not yet dealt with, and what has become of the others."""

    flags: JsonObject
    setting_format: str = "--{} {}"  # how the input wrote a setting, for the comments
    lines: dict[str, tuple[Any, str]] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    launcher_file: str = ""  # accelerate's config, which names the engine
    algorithm: str = "rloo"  # the choice of that group
    groups: dict[str, tuple[Any, str]] = field(default_factory=dict)  # choices of config groups

    def __post_init__(self) -> None:
        self.original_flags = dict(self.flags)

    def take(self, name: str, default: Any = None) -> Any:
        """An old flag's value; it counts as dealt with."""
        value = self.flags.pop(name, None)
        return default if value is None else value

    def original_text(self, name: str) -> str:
        """An old setting as it was written."""
        value = self.original_flags.get(name)
        bare = value is True and self.setting_format.startswith("--")  # a flag without a value
        text = "" if bare else _setting_text(value)
        return self.setting_format.format(
            name, text if len(text) <= MAX_COMMENT_VALUE else "..."
        ).strip()

    def put(self, key: str, value: Any, why: str, keep_unsupported: bool = True) -> None:
        """A line of the recipe, or of what this version lacks when the schema refuses it."""
        reason = schema_refusal(key, value, self.algorithm)
        if reason is None:
            self.lines[key] = (value, why)
        elif keep_unsupported:
            because = "" if reason == UNKNOWN else f"; this version refuses it: {reason}"
            self.unsupported.append(f"{key}: {_flow_yaml(value)}  ({why}{because})")

    def put_reward(self, name: str, entry: JsonObject, why: str) -> None:
        """A reward: a shipped one by its group, another with every key that its kind has."""
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

    def put_default(self, key: str, value: Any, tool: str) -> None:
        """The old tool's own default, written out only where ours differs."""
        known = our_defaults(self.algorithm)
        if key not in self.lines and (key not in known or known[key] != value):
            mine = f"; ours is {_flow_yaml(known[key])}" if key in known else ""
            self.put(key, value, f"{tool}'s default{mine}")

    def written_value(self, key: str, default: Any = None) -> Any:
        """What the recipe says of a key so far."""
        return self.lines[key][0] if key in self.lines else default

    def drop(self, name: str, why: str) -> None:
        """An old flag without a line here."""
        if name in self.flags:
            said = self.original_text(name)
            self.take(name)
            self.dropped.append(f"{said}: {why}")

    def _is_refused(self, key: str, value: Any) -> bool:
        return schema_refusal(key, value, self.algorithm) is not None

    def put_remaining(self) -> list[str]:
        """Deal with what no rule took: plain renames by the table. Returns unknown flags."""
        unknown = []
        for name in list(self.flags):
            row, said = find_old_name(name), self.original_text(name)
            value = self.flags.pop(name)
            if row is None:
                unknown.append(said)
            elif value is None or (
                value is False
                and row.new_key
                and schema_refusal(row.new_key, value, self.algorithm)
            ):
                self.dropped.append(f"{said}: off, as here")
            elif row.new_key is None or "<" in row.new_key:
                self.dropped.append(f"{said}: {row.note or row.new_key}")
            elif row.new_key in self.lines:
                self.dropped.append(f"{said}: {row.new_key} is set by another flag")
            else:
                note = "" if row.note.startswith("its default") else row.note
                self.put(row.new_key, value, f"{said}; {note}" if note else said)
        return unknown

    def render(self, title: str, unknown: list[str], name: str = "my") -> str:
        """The whole output: YAML, with everything else in comments."""
        lines = _comment(title)
        if self.groups:
            lines.append("defaults:")
        for group, (choice, why) in self.groups.items():
            lines.append(f"  - override /{group}: {_flow_yaml(choice)} # {why}")
        lines += [*_yaml_lines(self.lines), "", f"# run it: rloo train +recipe={name}.yaml"]
        parts = {
            "mind": self.notes,
            UNKNOWN: self.unsupported,
            "dropped": self.dropped,
            "unknown flags, ignored": unknown,
        }
        for head, items in parts.items():
            if items:
                lines += ["#", f"# {head}:", *(c for item in items for c in _comment_item(item))]
        return "\n".join(lines) + "\n"


def _yaml_lines(leaves: dict[str, tuple[Any, str]]) -> list[str]:
    """Dotted keys -> indented YAML, sections in the schema's order."""
    order = {
        n: i for i, n in enumerate(dict.fromkeys([*schema.RunConfig.model_fields, *our_defaults()]))
    }
    lines: list[str] = []
    open_path: list[str] = []
    last_place = len(order)
    for key in sorted(
        leaves,
        key=lambda k: (order.get(k.split(".")[0], last_place), order.get(k, last_place)),
    ):
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


def _flow_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _setting_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]


def _comment_item(text: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent="# - ", subsequent_indent="#   ")
