"""The folders of YAML and batch scripts (beside the package in a checkout, in it in a wheel), and
of the cache.
"""

import functools
import os
from pathlib import Path

from rloo_cli.utils.errors import Problem

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGED_YAML = PACKAGE / "_yaml"
ROOT = PACKAGED_YAML if PACKAGED_YAML.is_dir() else PACKAGE.parent

CONF = ROOT / "conf"
RECIPES = ROOT / "recipes"
SLURM = ROOT / "scripts" / "slurm"


def cache_folder() -> Path:
    """The folder for things made once and used again: `$RLOO_CACHE`, else `~/.cache/rloo`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(os.environ.get("RLOO_CACHE") or Path(home, "rloo"))


_paths_as_typed: dict[Path, Path] = {}  # what `absolute_path` made absolute -> as it was typed


def absolute_path(path: Path) -> Path:
    """An absolute path, which stays what it is when code of a user's changes the current folder."""
    absolute = path.absolute()
    if not path.is_absolute():
        _paths_as_typed[absolute] = path
    return absolute


def path_as_typed(path: Path) -> Path:
    """A path as the user typed it, where `absolute_path` got it or a folder above it."""
    for absolute, typed in _paths_as_typed.items():
        if path.is_relative_to(absolute):
            return typed / path.relative_to(absolute)
    return path


def unusable_cache_problem(why: str) -> Problem:
    """The problem of a cache folder that cannot be made or written."""
    where = "RLOO_CACHE" if os.environ.get("RLOO_CACHE") else "XDG_CACHE_HOME, HOME"
    what = f"the cache {cache_folder()} cannot be made or written"
    return Problem(what, f"environment: {where}", why, "export RLOO_CACHE=/a/folder/of/yours")


def recipe_files() -> dict[str, Path]:
    """Name of every shipped recipe -> its file; `a/b` for recipes/a/b.yaml."""
    return {**_shipped_choices(CONF, RECIPES)["recipe"]}


def group_choices(config_dirs: list[Path]) -> dict[str, dict[str, Path]]:
    """Config group -> its choices -> file, for our conf/ and a user's own folders.

    A user's recipes may lie in `recipe/` or `recipes/` of such a folder.
    """
    groups = {group: {**choices} for group, choices in _shipped_choices(CONF, RECIPES).items()}
    for root in config_dirs:
        _add_choices(groups, root)
    return groups


@functools.cache
def _shipped_choices(conf: Path, recipes: Path) -> dict[str, dict[str, Path]]:
    """The choices of these two folders, which stay as they are while a process lives."""
    files = sorted(recipes.rglob("*.yaml"))
    groups = {"recipe": {str(path.relative_to(recipes).with_suffix("")): path for path in files}}
    _add_choices(groups, conf)
    return groups


def _add_choices(groups: dict[str, dict[str, Path]], root: Path) -> None:
    """Add the choices of a folder of groups."""
    for path in sorted(root.glob("*/**/*.yaml")):
        name = str(path.relative_to(root).with_suffix(""))
        is_recipe = name.partition("/")[0] in ("recipe", "recipes")
        group, _, choice = name.partition("/") if is_recipe else name.rpartition("/")
        groups.setdefault("recipe" if is_recipe else group, {})[choice] = path
