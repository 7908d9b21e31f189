"""Keys whose value takes up a file of other keys (a dialect), and files that begin with others."""

from pathlib import Path
from typing import Any

import yaml

from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.config.provenance import Sources

GROUPS = {"algorithm.dialect": "algorithm/dialect"}


def same_choices(values: dict[Any, Any], choices: dict[str, Any], sources: Sources) -> None:
    """Raises ConfigError for a recipe that sets the name of a file of keys without taking it up."""
    for key, group in GROUPS.items():
        section, _, leaf = key.partition(".")
        inside = values.get(section)
        value = inside.get(leaf) if isinstance(inside, dict) else None
        if value is not None and value != choices.get(group):
            why = f"{key} is only the name of a file of keys, which would not be read"
            fix = f"defaults: [override /{group}: {value}] at the recipe's head"
            raise ConfigError(Problem(f"{key} is set as a plain key", sources.where(key), why, fix))


def bases(choices: dict[str, Path], chosen: str) -> list[Path]:
    """The files that a choice of a group begins with, nearest first."""
    found: list[Path] = []
    while chosen in choices and choices[chosen] not in found:
        found.append(choices[chosen])
        given = yaml.safe_load(choices[chosen].read_text())
        named = [d for d in (given or {}).get("defaults", []) if isinstance(d, str)]
        chosen = next((d for d in named if d != "_self_"), "")
    return found[1:]
