"""Finds where every value of a composed config came from: a file and line, or the command line.

Hydra does not keep this (ConfigStore never has it), so we map YAML positions ourselves.
"""

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, refuse

COMMAND_LINE = "command line"
MAX_YAML_VALUES = 10_000  # values in one YAML file, aliases written out
MAX_YAML_BYTES = 256_000
MAX_YAML_DEPTH = 30  # levels
# What PyYAML raises, including wrong encodings, invalid dates and nested brackets.
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "merge", "timestamp")


@dataclass(frozen=True)
class SourceLocation:
    """One value in one file."""

    path: Path
    line: int
    value: object
    text: str = ""  # as written; for a list its plain values, separated by blanks

    def __str__(self) -> str:
        return f"{_short(self.path)}:{self.line}"


@dataclass
class ConfigSources:
    """The sources of a composed config, strongest first."""

    overrides: list[str] = field(default_factory=list)  # key=value, as Hydra got them
    files: list[tuple[Path, str]] = field(default_factory=list)  # file, and where it is mounted

    def __post_init__(self) -> None:
        self.locations = [yaml_locations(path, mount) for path, mount in self.files]

    def keys_set_by_user(self, recipe: Path | None) -> list[str]:
        """Keys that the command line or this recipe's file sets to a value that they would not have
        otherwise, in the order written."""
        overrides = [override.lstrip("+~").partition("=") for override in self.overrides]
        keys = [name for name, _, value in overrides if not value.startswith("{")]
        value_of = {name: yaml_value(value) for name, _, value in overrides}
        for (path, _), locations in zip(self.files, self.locations, strict=True):
            if path == recipe:
                keys += [name for name in locations if name not in keys]
                value_of = {name: at.value for name, at in locations.items()} | value_of
        return [key for key in keys if self.value_below(key) != value_of[key]]

    def recipe_sets(self, section: str) -> bool:
        """Whether the chosen recipe's own file, not its base recipes, sets a key with this prefix;
        True if no file is known."""
        own = [
            keys
            for (path, _), keys in zip(self.files, self.locations, strict=True)
            if not path.is_relative_to(paths.CONF)
        ]
        return not self.files or any(key.startswith(section) for keys in own for key in keys)

    def location_of(self, key: str) -> str:
        """`my.yaml:7`, `command line: key=value`, or the nearest thing around the key."""
        return self._find(key)[1]

    def sort_key(self, key: str) -> tuple[int, int]:
        """Sorts keys as they were written: the overrides in order, then each file's lines."""
        return self._find(key)[0]

    def _find(self, key: str) -> tuple[tuple[int, int], str]:
        """The sort key and the location of a key; overrides have rank 0."""
        overrides = [(i, *w.lstrip("+~").partition("=")) for i, w in enumerate(self.overrides)]
        for spelling in _spellings(key):
            for i, name, _, value in reversed(overrides):
                inside = spelling.startswith(f"{name}.") and value.startswith("{")
                if spelling == name or inside:
                    return (0, i), self._override_location(i)
        for name in _spellings(key):
            for i, locations in enumerate(self.locations, 1):
                if name in locations:
                    return (i, locations[name].line), str(locations[name])
        for i, name, _, _ in reversed(overrides):
            # A choice (`model=tiny`, `~model`), or a section that only exists through its keys.
            if key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return (0, i), self._override_location(i)
        parent = key.rpartition(".")[0]
        return self._find(parent) if parent else ((len(self.locations) + 1, 0), "")

    def _override_location(self, i: int) -> str:
        return f"{COMMAND_LINE}: {self.overrides[i].lstrip('+')}"

    def text_of(self, key: str) -> str:
        """The text that sets `key`, as written in an override or in a file."""
        (rank, at), _ = self._find(key)
        if rank == 0:
            return self.overrides[at].partition("=")[2]
        locations = self.locations[rank - 1] if rank <= len(self.locations) else {}
        texts = [locations[name].text for name in _spellings(key) if name in locations]
        parent = key.rpartition(".")[0]
        return texts[0] if texts or not parent else self.text_of(parent)

    def shipped_location(self, key: str) -> SourceLocation | None:
        """Where the chosen files of `conf/` set the default of `key`; None = nowhere."""
        names = [name for name in _spellings(key) if name]
        for (path, _), locations in zip(self.files, self.locations, strict=True):
            found = [locations[name] for name in names if name in locations]
            if found and path.is_relative_to(paths.CONF):
                return found[0]
        return None

    def value_below(self, key: str) -> object:
        """The value that `key` would have without its strongest source.

        Below an override that is the strongest file's value, a recipe's before conf's; below a
        file's the next file's. None if there is none, or it is not a plain value.
        """
        values = [
            locations[name].value
            for name in _spellings(key)
            for locations in self.locations
            if name in locations and locations[name].value not in (None, "???")
        ]
        overridden = self._find(key)[0][0] == 0
        below = values if overridden else values[1:]
        return below[0] if below and "$" not in str(below[0]) else None


def read_user_yaml(path: Path) -> yaml.Node | None:
    """The YAML of a user's file as nodes, before any objects are constructed.

    Raises ConfigError for a file that is not YAML, too large or too deep, an alias bomb, or holds
    anything but plain values (`!!python/object` and other tags).
    """
    try:
        raw = _bytes(path)
        root = yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
        too_many = root is not None and _node_size(root, {}) > MAX_YAML_VALUES
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(broken_yaml_problem(path, error)) from None
    except RecursionError:
        too_deep = RecursionError(f"over {MAX_YAML_DEPTH} levels deep")
        raise ConfigError(broken_yaml_problem(path, too_deep)) from None
    if too_many:
        why = f"over {MAX_YAML_VALUES} values, once its aliases (*name) are written out"
        fix = "remove aliases that repeat others"
        refuse(str(path), f"{path.name} is too large for a config", fix, why)
    if root is not None and (forbidden := _forbidden_node(root)):
        line, why = forbidden
        fix = f"use plain values, at most {MAX_YAML_DEPTH} levels deep"
        refuse(f"{path}:{line}", f"{path.name} is not valid YAML", fix, why)
    return root


def _bytes(path: Path) -> bytes:
    """A regular file's content. Raises ConfigError if it is too large for a config."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "is not a file"
        what = f"{path} {kind if path.exists() else 'does not exist'}"
        fix = "name a file of YAML that exists"
        refuse(str(path), what, fix, "expected a file of YAML")
    with path.open("rb") as file:
        raw = file.read(MAX_YAML_BYTES + 1)
    if len(raw) > MAX_YAML_BYTES:
        why = f"over {MAX_YAML_BYTES // 1000} kB"
        fix = "keep only keys in it, and move data to other files"
        refuse(str(path), f"{path.name} is too large for a config", fix, why)
    return raw


def _forbidden_node(root: yaml.Node) -> tuple[int, str] | None:
    """The line of a value that is not plain (PLAIN_TAGS), too deep or too long, and why."""
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
            return node.start_mark.line + 1, f"the tag {node.tag!r}: only plain values are allowed"
        if node.tag.endswith(":int") and len(node.value) > sys.get_int_max_str_digits():
            return node.start_mark.line + 1, f"a whole number of {len(node.value)} digits"
        if depth > MAX_YAML_DEPTH:
            return node.start_mark.line + 1, f"over {MAX_YAML_DEPTH} levels deep"
        for part in node.value if isinstance(node, yaml.CollectionNode) else []:
            waiting += [(n, depth + 1) for n in (part if isinstance(part, tuple) else (part,))]
    return None


def broken_yaml_problem(path: Path, error: Exception) -> Problem:
    """The problem of a file that is not YAML, at the line that `error` names."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    why = getattr(error, "problem", None) or str(error)
    fix = f"correct line {mark.line + 1}" if mark else f"correct {path}"
    if isinstance(error, OSError):
        fix = f"make {path} readable"
    elif isinstance(error, UnicodeDecodeError):
        fix = f"save {path} as UTF-8"
    elif isinstance(error, RecursionError):
        fix = "nest its values less deeply"
    return Problem(f"{path.name} is not valid YAML", where, why, fix)


def _node_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values in a node, aliases expanded. `sizes`: by id, of counted nodes."""
    if id(node) not in sizes:
        sizes[id(node)] = MAX_YAML_VALUES + 1  # while open: a recursive node is infinite
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        sizes[id(node)] = 1 + sum(_node_size(n, sizes) for n in flat)
    return sizes[id(node)]


def yaml_locations(path: Path, mount: str = "") -> dict[str, SourceLocation]:
    """Dotted key -> its location in a YAML file whose content is mounted at `mount`."""
    try:
        return dict(_yaml_locations(path, path.read_text(), mount))
    except (OSError, yaml.YAMLError):
        return {}  # Hydra reports the error


@functools.lru_cache(256)  # a sweep composes from the same files for each of its jobs
def _yaml_locations(path: Path, text: str, mount: str) -> dict[str, SourceLocation]:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    locations: dict[str, SourceLocation] = {}
    if text.lstrip().startswith("# @package _global_"):
        mount = ""

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            plain = _plain(value) if isinstance(value, yaml.ScalarNode) else None
            locations[name] = SourceLocation(path, key.start_mark.line + 1, plain, _text(value))
            walk(value, name)

    walk(root, mount)
    return locations


def _plain(node: yaml.ScalarNode) -> object:
    """A scalar's value; a text in quotes stays text, whatever else it would be as YAML."""
    return node.value if node.tag.endswith(":str") else yaml.safe_load(node.value)


def _text(node: yaml.Node) -> str:
    """A scalar as written, or the scalars of a list separated by blanks; else ""."""
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return " ".join(part.value for part in parts if isinstance(part, yaml.ScalarNode))


def load_plain_yaml(text: str) -> Any:
    """The values of third-party YAML, by libyaml: Python's own reader takes quadratic time for
    nested brackets. Raises one of YAML_ERRORS."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        root = loader.get_single_node()
        if root is not None and _node_size(root, {}) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"over {MAX_YAML_VALUES} values, once aliases are written out")
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def yaml_value(text: str) -> object:
    """An override's value as YAML reads it; the text itself if it is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _spellings(key: str) -> list[str]:
    """A key, and for a reward's key the same key in the defaults of all rewards."""
    parts = key.split(".")
    common = [".".join(["reward_defaults", *parts[2:]])] if parts[0] == "reward" else []
    return [key, *(common if len(parts) > 2 else [])]


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
