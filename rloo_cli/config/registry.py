"""Finds things by name: `accuracy` -> rloo_cli/rewards/accuracy.py, `file.py:name` -> code.

To add a reward, an algorithm or a generation backend, add its file (and its YAML). The file's name
is its registry name. Each has a class `Config`, read here without importing torch.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_cli.config.hooks import guard_hooks
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.paths import ROOT

REGISTRIES = {
    "rewards": "reward", "algorithms": "algorithm", "generation": "generation", "agents": "agent",
}  # fmt: skip


@cache
def registry_names(registry: str) -> dict[str, str]:
    """Registry names of a package, one of REGISTRIES -> module names.

    Every module in the package's folder counts; shared code lies in sub-folders.
    """
    package = importlib.import_module(f"rloo_cli.{registry}")
    modules = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]
    return {name.removesuffix("_"): f"rloo_cli.{registry}.{name}" for name in modules}


def registered_module(registry: str, name: str) -> ModuleType:
    """The module behind a registry name; for an algorithm also a user's file.

    Raises KeyError for an unknown one, ConfigError for a file that does not exist.
    """
    if is_user_file(registry, name):
        return _algorithm_file(name)
    return importlib.import_module(registry_names(registry)[name])


def is_user_file(registry: str, name: str) -> bool:
    """Whether this names a Python file rather than a registry name."""
    return registry == "algorithms" and name.endswith(".py")


def _algorithm_file(name: str) -> ModuleType:
    try:
        loaded = _import_file(Path(name))
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a file can raise anything
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        why = f"{type(error).__name__}: {error}, at line {line}"
        what, fix = f"{name} cannot be read", f"correct {name}"
        raise ConfigError(Problem(what, "algorithm.name", why, fix)) from error
    config = getattr(loaded, "Config", None)
    if not isinstance(config, type) or not hasattr(config, "model_fields"):
        why, fix = "the file has no class Config(Switches)", "add class Config(Switches) to it"
        raise ConfigError(_not_an_algorithm(name, why, fix))
    return loaded


def _not_an_algorithm(name: str, why: str, fix: str) -> Problem:
    what = f"{name} is not an algorithm"
    return Problem(what, "algorithm.name", why, fix, more="rloo docs algorithms")


def config_class(registry: str, name: str) -> Any:
    """The class `Config` of a registry name's module, a pydantic model."""
    return registered_module(registry, name).Config


def algorithm_class(name: str) -> Any:
    """The class of an algorithm (`algorithms.common.base`), shipped or from a user's file.

    Raises ConfigError for a file with none or several, or whose class lacks a hook.
    """
    loaded = registered_module("algorithms", name)
    found = [
        value
        for value in vars(loaded).values()
        if getattr(value, "is_algorithm", False) and value.__module__ == loaded.__name__
    ]
    if not is_user_file("algorithms", name):
        return found[0]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        why = f"the file must define exactly one Algorithm subclass; it has {names}"
        fix = "add class Mine(Algorithm[Config])" if not found else "move all but one elsewhere"
        raise ConfigError(_not_an_algorithm(name, why, fix))
    if inspect.isabstract(found[0]):
        left = ", ".join(sorted(found[0].__abstractmethods__))
        why = f"{found[0].__name__} does not define {left}"
        raise ConfigError(_not_an_algorithm(name, why, f"define {left} in {found[0].__name__}"))
    guard_hooks(found[0], loaded)
    return found[0]


def split_code_spec(spec: str) -> tuple[str, str]:
    """`file.py:name` -> its two halves. Raises ConfigError without a colon.

    A `scripts/` file missing in the current folder is taken from rloo.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name.isidentifier():
        why = "expected path/to/file.py:name or package.module:name"
        what, given = f"{spec!r} is not a valid code reference", "config or command line"
        fix = f"{where or ('' if colon else name) or 'file.py'}:NAME, of a function or class in it"
        refuse(given, what, fix, why)
    shipped = ROOT / where
    if Path(where).parts[:1] == ("scripts",) and not Path(where).is_file() and shipped.is_file():
        return str(shipped), name
    return where, name


def load_code(spec: str) -> Any:
    """Import a user's own code: `path/to/file.py:name` or `package.module:name`.

    Raises ConfigError if the file, name or module does not exist. What the file itself
    raises is reported by the caller, with the user's frames.
    """
    where, name = split_code_spec(spec)
    with contextlib.chdir(os.getcwd()):  # an import may change the current folder
        loaded = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    if not hasattr(loaded, name):
        public = [n for n, v in vars(loaded).items() if callable(v) and not n.startswith("_")]
        why = f"it has: {', '.join(public) or 'nothing'}"
        close = nearest_names(name, public)
        fix = f"{where}:{close[0]}" if close else f"define {name} in {where}"
        refuse(where, f"{where} has no {name!r}", fix, why)
    return getattr(loaded, name)


def code_fingerprint(spec: str) -> str:
    """First 12 hex digits of a user file's SHA-256, printed where its code is used."""
    where = code_file(spec)
    return "-" if where is None else file_fingerprint(where)


def file_fingerprint(path: Path | str) -> str:
    """First 12 hex digits of a file's SHA-256."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def code_file(spec: str) -> Path | None:
    """The file of a user's own code, found without importing anything; None = not found.

    Files that come with rloo do not count.
    """
    where = split_code_spec(spec)[0]
    if where.endswith(".py"):
        return Path(where) if Path(where).is_file() else None
    if where.partition(".")[0] == __name__.partition(".")[0]:
        return None
    folders: list[str] | None = [*sys.path, str(Path.cwd())]
    found = None
    for depth, _ in enumerate(where.split("."), 1):
        found = PathFinder.find_spec(".".join(where.split(".")[:depth]), folders)
        if found is None:
            return None
        folders = list(found.submodule_search_locations or [])
    is_file = found is not None and found.origin is not None and Path(found.origin).is_file()
    return Path(str(found.origin)) if found is not None and is_file else None


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a user's folder must not shadow a library
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        what, why = f"no module named {error.name!r}", f"from {name}"
        fix = f"install {error.name}, or run rloo in the folder that contains it"
        refuse(name, what, fix, why)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        why, fix = f"looked at {path.absolute()}", "give the path of a file that exists"
        refuse(str(path), f"{path} is not a file", fix, why)
    name = f"rloo_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    here = path.resolve().parent
    others = _namesakes(here)
    sys.path.insert(0, str(here))  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(here))
        sys.modules.update(others)
    _FOLDERS.add(here)
    return loaded


_FOLDERS: set[Path] = set()  # of the user's files that were loaded


def _namesakes(here: Path) -> dict[str, ModuleType]:
    """Remove modules that lie beside another user file and share a name with a module in this
    folder from sys.modules."""
    removed = {}
    for name, module in sys.modules.copy().items():  # other threads may import
        file = getattr(module, "__file__", None)
        beside = file is not None and Path(file).parent in _FOLDERS - {here}
        if beside and "." not in name and (here / f"{name}.py").is_file():
            removed[name] = sys.modules.pop(name)
    return removed
