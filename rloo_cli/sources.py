"""Where every value of a composed config came from: a file and line, or the command line.

Hydra forgets this (and ConfigStore never knew), so we keep our own map of YAML positions.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

COMMAND_LINE = "command line"


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

    def override(self, key: str) -> str | None:
        """The command-line word that set `key` or a section around it."""
        for word in reversed(self.overrides):
            name = word.partition("=")[0].lstrip("+~")
            if key == name or key.startswith(name + "."):
                return word.lstrip("+")
        return None

    def where(self, key: str) -> str:
        """`my.yaml:7`, `command line: key=value`, or the nearest thing around the key."""
        word = self.override(key)
        if word is not None:
            return f"{COMMAND_LINE}: {word}"
        for name in _spellings(key):
            for places in self.places:
                if name in places:
                    return str(places[name])
        parent = key.rpartition(".")[0]
        return self.where(parent) if parent else ""

    def below(self, key: str) -> Any:
        """The value a file gives `key`, without the command line; None when there is none."""
        for name in _spellings(key):
            for places in reversed(self.places):
                if name in places and places[name].value not in (None, "???"):
                    return places[name].value
        return None


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
