"""The methods ("hooks") of a user's own algorithm, and what they gave back.

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

ALGORITHM_KEY = "algorithm.name"
ALGORITHM_DOCS = "docs/ADD_AN_ALGORITHM.md"


@dataclass(frozen=True)
class ExpectedTensor:
    """One part of what a hook returns."""

    name: str  # of the attribute, or of the part of a tuple; "" = all of it
    shape: tuple[int, ...]
    dtype: str  # as torch prints it; "float" = any floating type


HOOKS = (
    "advantages", "token_advantages", "loss", "value_loss", "next_state", "rules", "warnings",
    "forward_plan", "combine_rewards", "shape_scores",
)  # fmt: skip


def guard_hooks(algorithm: type, module: ModuleType) -> None:
    """Guard the hooks that the class of a user's own file defines, once.

    Raises ConfigError for a hook's name that is not a function.
    """
    own = [c for c in algorithm.__mro__ if c.__module__ == module.__name__]
    for owner, name in [(c, n) for c in own for n in HOOKS if n in vars(c)]:
        value = vars(owner)[name]
        if not inspect.isfunction(value):
            what = f"{owner.__name__}.{name} in {module.__file__} is not a function"
            why = f"it is {value!r:.80}, and {name} is the name of a hook"
            fix = f"give it another name, or def {name}(self, ...)"
            raise ConfigError(Problem(what, ALGORITHM_KEY, why, fix, ALGORITHM_DOCS))
        if not hasattr(value, "__wrapped__"):
            setattr(owner, name, _guarded(value, module, name))


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
            raise ConfigError(Problem(what, where, why, f"correct {name}", ALGORITHM_DOCS))
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
    return Problem(what, where, why, f"correct {name}", ALGORITHM_DOCS)


def _mismatch(name: str, returned: Any, arguments: tuple[Any, ...]) -> str:
    """What is wrong with what a hook returned, and what would be right; "" = nothing."""
    for wanted in _expected_tensors(name, arguments):
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


def _expected_tensors(name: str, arguments: tuple[Any, ...]) -> Iterator[ExpectedTensor]:
    """The tensors that a hook returns, from what it was called with (after `self`)."""
    first = arguments[1] if len(arguments) > 1 else None
    shape = tuple(getattr(first, "shape", ()))
    match name:
        case "advantages":
            shape = tuple(first.score.shape) if first is not None else ()
            yield ExpectedTensor("reward", shape, "float64")
            yield ExpectedTensor("advantage", shape, "float64")
            yield ExpectedTensor("usable", shape, "bool")
        case "token_advantages" if first is not None:
            yield ExpectedTensor("advantage", tuple(first.mask.shape), "float64")
        case "combine_rewards":  # (F, P, K) -> (P, K)
            yield ExpectedTensor("0", shape[1:], "float64")
            yield ExpectedTensor("1", shape[1:], "bool")
        case "shape_scores":
            yield ExpectedTensor("", shape, "float64")
        case "loss" | "value_loss":
            yield ExpectedTensor("total", (), "float")
