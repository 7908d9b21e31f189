"""The functions ("hooks") of a user's own algorithm file: which count, and what they gave back.

An exception or a tensor of another shape in one of them is a mistake in that file, not in rloo: it
is refused with the file's own lines. Imports no torch: a tensor has a shape and a dtype.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rloo_cli.utils.errors import ConfigError, Problem, RunError

KEY = "algorithm.name"
PAGE = "docs/ADD_AN_ALGORITHM.md"


@dataclass(frozen=True)
class Wanted:
    """One part of what a hook returns."""

    name: str  # of the attribute, or of the part of a tuple; "" = all of it
    shape: tuple[int, ...]
    dtype: str  # as torch prints it; "float" = any floating type


def user_hook(module: ModuleType, name: str, base: Callable[..., Any]) -> Callable[..., Any]:
    """What an algorithm's file defines under a hook's name, guarded; else `base`.

    Modules of that name (`import warnings`) are not hooks. Raises ConfigError for anything else
    that the file does not define itself: an import would replace a hook without saying so.
    """
    value = vars(module).get(name, base)
    if value is base or isinstance(value, ModuleType):
        return base
    if not callable(value):
        what = f"{name} in {module.__file__} is not a function"
        why = f"it is {value!r:.80}, and {name} is the name of a hook"
        raise ConfigError(Problem(what, KEY, why, f"call it otherwise, or def {name}(...)", PAGE))
    if inspect.isfunction(value) and value.__module__ != module.__name__:
        what = f"{name} in {module.__file__} is imported, and it is the name of a hook"
        why = f"it comes from {value.__module__}; only functions that the file defines are hooks"
        fix = f"import it under another name, and def {name}(...) where it is to be the hook"
        raise ConfigError(Problem(what, KEY, why, fix, PAGE))
    return _guarded(value, module, name)


def _guarded(code: Callable[..., Any], module: ModuleType, name: str) -> Callable[..., Any]:
    """This hook, with its exceptions and what it returns as the user's own mistakes."""

    @functools.wraps(code)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            returned = code(*arguments, **named)
            if inspect.isgenerator(returned):
                returned = list(returned)
        except Exception as error:
            if isinstance(error, RunError) or type(error).__name__ == "OutOfMemoryError":
                raise
            raise ConfigError(_failure(error, module, name)) from error
        if why := _mismatch(name, returned, arguments):
            where = f"{module.__file__}:{inspect.unwrap(code).__code__.co_firstlineno}"
            what = f"{name} of the algorithm {module.__file__} returned something else"
            raise ConfigError(Problem(what, where, why, f"correct {name}", PAGE))
        return returned

    return call


def _failure(error: Exception, module: ModuleType, name: str) -> Problem:
    """What to say of an exception in a hook: the frames of the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == module.__file__]
    said = "".join(traceback.format_exception_only(error)).strip()
    where = f"{module.__file__}:{own[-1].lineno}" if own else str(module.__file__)
    why = "".join(traceback.format_list(own)) + said
    what = f"{name} of the algorithm {module.__file__} failed: {said.splitlines()[-1]}"
    return Problem(what, where, why, f"correct {name}", PAGE)


def _mismatch(name: str, returned: Any, arguments: tuple[Any, ...]) -> str:
    """What is wrong with what a hook returned, and what would be right; "" = nothing."""
    for wanted in _wanted(name, arguments):
        part = returned
        if wanted.name.isdigit():
            part = returned[int(wanted.name)] if _is_pair(returned) else None
        elif wanted.name:
            part = getattr(returned, wanted.name, None)
        found = _described(part)
        shape, dtype = getattr(part, "shape", None), str(getattr(part, "dtype", ""))
        kind = dtype.removeprefix("torch.")
        right = kind.startswith("float") if wanted.dtype == "float" else kind == wanted.dtype
        if shape is None or tuple(shape) != wanted.shape or not right:
            of = f"{'part ' if wanted.name.isdigit() else ''}{wanted.name}: " if wanted.name else ""
            whole = f" ({name} returned {_described(returned)})" if part is None else ""
            return f"{of}it is {found}{whole}\nexpected: {wanted.dtype}, shape {wanted.shape}"
    return ""


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def _wanted(name: str, arguments: tuple[Any, ...]) -> Iterator[Wanted]:
    """The tensors that a hook returns, from what it was called with (their first is a tensor)."""
    shape = tuple(getattr(arguments[0], "shape", ())) if arguments else ()
    match name:
        case "advantages":
            yield Wanted("reward", shape, "float64")
            yield Wanted("advantage", shape, "float64")
            yield Wanted("usable", shape, "bool")
        case "combine":  # (F, P, K) -> (P, K)
            yield Wanted("0", shape[1:], "float64")
            yield Wanted("1", shape[1:], "bool")
        case "truncation":
            yield Wanted("0", shape, "bool")
            yield Wanted("1", shape, "bool")
        case "shape":
            yield Wanted("", shape, "float64")
        case "usable" | "forwarded":
            yield Wanted("", shape, "bool")
        case "loss" | "value_loss":
            yield Wanted("total", (), "float")
