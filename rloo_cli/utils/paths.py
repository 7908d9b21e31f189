"""The folders of YAML, scripts and pages (beside the package in a checkout, in it in a wheel), and
of the cache.
"""

import functools
import os
import pwd
from pathlib import Path

from rloo_cli.utils.errors import Problem

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGED_YAML = PACKAGE / "_yaml"
ROOT = PACKAGED_YAML if PACKAGED_YAML.is_dir() else PACKAGE.parent

CONF = ROOT / "conf"
RECIPES = ROOT / "recipes"
SLURM = ROOT / "scripts" / "slurm"
DOCS = ROOT / "docs"


def cache_folder() -> Path:
    """The folder for things made once and used again.

    `$RLOO_CACHE`, else `$XDG_CACHE_HOME/rloo`, else `~/.cache/rloo`.
    """
    if folder := os.environ.get("RLOO_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rloo")


def stand_in_for_home() -> str:
    """Set a cache folder and a user name if this process lacks them. -> a warning, or ""

    A container may run with a user id without a passwd entry, and without HOME. Hugging Face's
    libraries would then create a folder named ~, and torch would fail to find the user's name. The
    variables set here also apply to our child processes.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("LOGNAME", f"uid-{os.getuid()}")
    if os.path.expanduser("~") != "~" or os.environ.get("XDG_CACHE_HOME"):
        return ""
    import tempfile  # lazy: rarely needed

    folder = Path(tempfile.gettempdir(), f"rloo-cache-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="rloo-cache-"))  # the name is taken by another user
    os.environ["XDG_CACHE_HOME"] = str(folder)
    if os.environ.get("RLOO_CACHE") and os.environ.get("HF_HOME"):
        return ""
    return (
        f"HOME is not set and user {os.getuid()} has no home folder: the cache is in {folder};"
        " set RLOO_CACHE and HF_HOME to use another folder"
    )


_paths_as_typed: dict[Path, Path] = {}  # absolute path from `absolute_path` -> as typed


def absolute_path(path: Path) -> Path:
    """An absolute path, which user code that changes the current folder does not affect."""
    absolute = path.absolute()
    if not path.is_absolute():
        _paths_as_typed[absolute] = path
    return absolute


def path_as_typed(path: Path) -> Path:
    """A path as the user typed it, if `absolute_path` got it or a parent folder."""
    for absolute, typed in _paths_as_typed.items():
        if path.is_relative_to(absolute):
            return typed / path.relative_to(absolute)
    return path


def unusable_cache_problem(why: str) -> Problem:
    """The problem of a cache folder that cannot be created or written."""
    where = "RLOO_CACHE" if os.environ.get("RLOO_CACHE") else "XDG_CACHE_HOME, HOME"
    what = f"the cache {cache_folder()} cannot be created or written"
    return Problem(what, f"environment: {where}", why, "export RLOO_CACHE=/a/folder/of/yours")


def recipe_files() -> dict[str, Path]:
    """Name of every shipped recipe -> its file; `a/b` for recipes/a/b.yaml."""
    return {**_shipped_choices(CONF, RECIPES)["recipe"]}


def doc_pages() -> dict[str, Path]:
    """Name of every page of docs/ -> its file; `results/speed` for docs/results/speed.md."""
    pages = sorted(DOCS.rglob("*.md"), key=lambda path: (path.parent, path.name))
    return {str(path.relative_to(DOCS).with_suffix("")): path for path in pages}


def group_choices(config_dirs: list[Path]) -> dict[str, dict[str, Path]]:
    """Config group -> its choices -> file, in conf/ and in a user's folders.

    A user's recipes may lie in `recipe/` or `recipes/` of such a folder.
    """
    groups = {group: {**choices} for group, choices in _shipped_choices(CONF, RECIPES).items()}
    for root in config_dirs:
        _add_choices(groups, root)
    return groups


@functools.cache
def _shipped_choices(conf: Path, recipes: Path) -> dict[str, dict[str, Path]]:
    """The choices of these two folders, constant during a process."""
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
