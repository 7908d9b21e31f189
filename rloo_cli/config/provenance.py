"""Where every value of a composed config came from: a file and line, or the command line.

Hydra forgets this (and ConfigStore never knew), so we keep our own map of YAML positions.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.utils.errors import ConfigError, Problem

COMMAND_LINE = "command line"
MAX_YAML_VALUES = 10_000  # values in one YAML file, aliases written out
MAX_YAML_BYTES = 256_000  # bytes
MAX_YAML_DEPTH = 30  # levels
PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "merge", "timestamp")  # tags


@dataclass(frozen=True)
class SourceLocation:
    """One value in one file."""

    path: Path
    line: int
    value: Any
    text: str = ""  # as it is written; of a list: its plain values, blanks between them

    def __str__(self) -> str:
        return f"{_short(self.path)}:{self.line}"


@dataclass
class ConfigSources:
    """What a config was composed from, the strongest first."""

    overrides: list[str] = field(default_factory=list)  # key=value words, as Hydra got them
    files: list[tuple[Path, str]] = field(default_factory=list)  # file, and where it is mounted

    def __post_init__(self) -> None:
        self.locations = [yaml_locations(path, mount) for path, mount in self.files]

    def keys_set_by_user(self, recipe: Path | None) -> list[str]:
        """Keys that the command line or this recipe's file sets to another value than they would
        have without it; in the order in which they were written.
        """
        words = [word.lstrip("+~").partition("=") for word in self.overrides]
        keys = [name for name, _, value in words if not value.startswith("{")]
        value_of = {name: yaml_value(value) for name, _, value in words}
        for path, places in zip((p for p, _ in self.files), self.locations, strict=True):
            if path == recipe:
                keys += [name for name in places if name not in keys]
                value_of = {name: place.value for name, place in places.items()} | value_of
        return [key for key in keys if self.value_below(key) != value_of[key]]

    def location_of(self, key: str) -> str:
        """`my.yaml:7`, `command line: key=value`, or the nearest thing around the key."""
        return self._find(key)[1]

    def sort_key(self, key: str) -> tuple[int, int]:
        """Sorts keys as they were written: the command line's words, then each file's lines."""
        return self._find(key)[0]

    def _find(self, key: str) -> tuple[tuple[int, int], str]:
        words = [(i, *w.lstrip("+~").partition("=")) for i, w in enumerate(self.overrides)]
        for asked in _spellings(key):
            for i, name, _, value in reversed(words):
                inside = asked.startswith(f"{name}.") and value.startswith("{")
                if asked == name or inside:
                    return (0, i), self._override_location(i)
        for name in _spellings(key):
            for i, places in enumerate(self.locations, 1):
                if name in places:
                    return (i, places[name].line), str(places[name])
        for i, name, _, _ in reversed(words):
            # A choice (`model=tiny`, `~model`), or a section that only its own keys made.
            if key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return (0, i), self._override_location(i)
        parent = key.rpartition(".")[0]
        return self._find(parent) if parent else ((len(self.locations) + 1, 0), "")

    def _override_location(self, i: int) -> str:
        return f"{COMMAND_LINE}: {self.overrides[i].lstrip('+')}"

    def text_of(self, key: str) -> str:
        """The text that gives `key` its value, as it was written: a word's value, or a file's."""
        (rank, at), _ = self._find(key)
        if rank == 0:
            return self.overrides[at].partition("=")[2]
        places = self.locations[rank - 1] if rank <= len(self.locations) else {}
        found = [places[name].text for name in _spellings(key) if name in places]
        parent = key.rpartition(".")[0]
        return found[0] if found or not parent else self.text_of(parent)

    def value_below(self, key: str) -> Any:
        """The value `key` would have without the one that is wrong: what stands below it.

        Under the command line's that is the strongest file's, a recipe's before conf's; under a
        file's the next one's. None when there is none, or it is no plain value.
        """
        found = [
            places[name].value
            for name in _spellings(key)
            for places in self.locations
            if name in places and places[name].value not in (None, "???")
        ]
        overridden = self._find(key)[0][0] == 0
        rest = found if overridden else found[1:]
        return rest[0] if rest and "$" not in str(rest[0]) else None


def read_user_yaml(path: Path) -> yaml.Node | None:
    """The YAML of a user's file, unbuilt.

    Raises ConfigError for what is no file of YAML, too large, too deep, an alias bomb, or made of
    anything but plain values (`!!python/object` and other tags).
    """
    try:
        raw = _bytes(path)
        root = yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
        too_many = root is not None and _node_size(root, {}) > MAX_YAML_VALUES
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(broken_yaml_problem(path, error)) from None
    except RecursionError:
        raise ConfigError(
            broken_yaml_problem(path, RecursionError(f"over {MAX_YAML_DEPTH} levels deep"))
        ) from None
    if too_many:
        why = f"over {MAX_YAML_VALUES} values, once its aliases (*name) are written out"
        raise ConfigError(Problem(f"{path.name} is too large for a config", str(path), why))
    strange = root and _forbidden_node(root)
    if strange:
        what, where = f"{path.name} is not valid YAML", f"{path}:{strange[0]}"
        raise ConfigError(Problem(what, where, strange[1]))
    return root


def _bytes(path: Path) -> bytes:
    """A regular file's content, not more of it than a config may have."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not there" if not path.exists() else "no file"
        raise ConfigError(Problem(f"{path} is {kind}", str(path), "expected a file of YAML"))
    with path.open("rb") as file:
        raw = file.read(MAX_YAML_BYTES + 1)
    if len(raw) > MAX_YAML_BYTES:
        why = f"over {MAX_YAML_BYTES // 1000} kB"
        raise ConfigError(Problem(f"{path.name} is too large for a config", str(path), why))
    return raw


def _forbidden_node(root: yaml.Node) -> tuple[int, str] | None:
    """The line of a value that is none of PLAIN, or that lies too deep, and why."""
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
            return node.start_mark.line + 1, f"the tag {node.tag!r}: a config holds plain values"
        if depth > MAX_YAML_DEPTH:
            return node.start_mark.line + 1, f"over {MAX_YAML_DEPTH} levels deep"
        for part in node.value if isinstance(node, yaml.CollectionNode) else []:
            waiting += [(n, depth + 1) for n in (part if isinstance(part, tuple) else (part,))]
    return None


def broken_yaml_problem(path: Path, error: Exception) -> Problem:
    """What to say of a file that is not YAML."""
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark else str(path)
    return Problem(
        f"{path.name} is not valid YAML", place, getattr(error, "problem", None) or str(error)
    )


def _node_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    if id(node) not in sizes:
        sizes[id(node)] = MAX_YAML_VALUES + 1  # while it is open: what holds itself has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        sizes[id(node)] = 1 + sum(_node_size(n, sizes) for n in flat)
    return sizes[id(node)]


def yaml_locations(path: Path, mount: str = "") -> dict[str, SourceLocation]:
    """Dotted key -> its place in a YAML file whose content is mounted at `mount`."""
    try:
        return dict(_yaml_locations(path, path.read_text(), mount))
    except (OSError, yaml.YAMLError):
        return {}  # the error is Hydra's to report, with its own text


@functools.lru_cache(256)  # a sweep composes from the same files for each of its jobs
def _yaml_locations(path: Path, text: str, mount: str) -> dict[str, SourceLocation]:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    found: dict[str, SourceLocation] = {}
    if text.lstrip().startswith("# @package _global_"):
        mount = ""

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            plain = _plain(value) if isinstance(value, yaml.ScalarNode) else None
            found[name] = SourceLocation(path, key.start_mark.line + 1, plain, _text(value))
            walk(value, name)

    walk(root, mount)
    return found


def _plain(node: yaml.ScalarNode) -> Any:
    """A scalar's value; text is itself, whatever else it would be as YAML."""
    return node.value if node.tag.endswith(":str") else yaml.safe_load(node.value)


def _text(node: yaml.Node) -> str:
    """A scalar as it is written, or the scalars of a list with blanks between them; else ""."""
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return " ".join(part.value for part in parts if isinstance(part, yaml.ScalarNode))


def yaml_value(text: str) -> Any:
    """A word's value as YAML reads it; the text itself where that is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _spellings(key: str) -> list[str]:
    """A key of one reward may have come from the defaults of all rewards."""
    parts = key.split(".")
    common = [".".join(["reward_defaults", *parts[2:]])] if parts[0] == "reward" else []
    return [key, *(common if len(parts) > 2 else [])]


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
