"""Where every value of a composed config came from: a file and line, or the command line.

Hydra forgets this (and ConfigStore never knew), so we keep our own map of YAML positions.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.errors import ConfigError, Problem

COMMAND_LINE = "command line"
LARGEST = 10_000  # values in one YAML file, aliases written out


@dataclass(frozen=True)
class Place:
    """One value in one file."""

    path: Path
    line: int
    value: Any

    def __str__(self) -> str:
        return f"{_short(self.path)}:{self.line}"


@dataclass
class Sources:
    """What a config was composed from, the strongest first."""

    overrides: list[str] = field(default_factory=list)  # key=value words, as Hydra got them
    files: list[tuple[Path, str]] = field(default_factory=list)  # file, and where it is mounted

    def __post_init__(self) -> None:
        self.places = [positions(path, mount) for path, mount in self.files]

    def where(self, key: str) -> str:
        """`my.yaml:7`, `command line: key=value`, or the nearest thing around the key."""
        return self._find(key)[1]

    def order(self, key: str) -> tuple[int, int]:
        """Sorts keys as they were written: the command line's words, then each file's lines."""
        return self._find(key)[0]

    def _find(self, key: str) -> tuple[tuple[int, int], str]:
        for i, word in reversed([*enumerate(self.overrides)]):
            name = word.partition("=")[0].lstrip("+~")
            if key == name or key.startswith(name + "."):
                return (0, i), f"{COMMAND_LINE}: {word.lstrip('+')}"
        for name in _spellings(key):
            for i, places in enumerate(self.places, 1):
                if name in places:
                    return (i, places[name].line), str(places[name])
        parent = key.rpartition(".")[0]
        return self._find(parent) if parent else ((len(self.places) + 1, 0), "")

    def below(self, key: str) -> Any:
        """The value a file gives `key`, without the command line; None when there is none."""
        for name in _spellings(key):
            for places in reversed(self.places):
                if name in places and places[name].value not in (None, "???"):
                    return places[name].value
        return None


def readable(path: Path) -> yaml.Node | None:
    """The YAML of a user's file, unbuilt. Raises ConfigError for none, and for an alias bomb."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(broken(path, error)) from None
    if root is not None and _size(root, {}) > LARGEST:
        why = f"over {LARGEST} values, once its aliases (*name) are written out"
        raise ConfigError(Problem(f"{path.name} is too large for a config", str(path), why))
    return root


def broken(path: Path, error: Exception) -> Problem:
    """What to say of a file that is not YAML."""
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark else str(path)
    return Problem(
        f"{path.name} is not valid YAML", place, getattr(error, "problem", None) or str(error)
    )


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    if id(node) not in sizes:
        sizes[id(node)] = LARGEST + 1  # while it is open: what holds itself has no end
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        sizes[id(node)] = 1 + sum(_size(n, sizes) for n in flat)
    return sizes[id(node)]


def positions(path: Path, mount: str = "") -> dict[str, Place]:
    """Dotted key -> its place in a YAML file whose content is mounted at `mount`."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError):
        return {}  # the error is Hydra's to report, with its own text
    found: dict[str, Place] = {}
    if path.read_text().lstrip().startswith("# @package _global_"):
        mount = ""

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            plain = yaml.safe_load(value.value) if isinstance(value, yaml.ScalarNode) else None
            found[name] = Place(path, key.start_mark.line + 1, plain)
            walk(value, name)

    walk(root, mount)
    return found


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
