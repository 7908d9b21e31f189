"""Guards the methods ("hooks") of a user's own algorithm, and checks what they return.

An exception in a hook, or a tensor of the wrong shape, is an error in that file, not in rloo. The
refusal shows the file's own lines. Imports no torch: a tensor has a shape and a dtype.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec

from rloo_cli.utils.errors import ConfigError, Problem, RunError, refuse

ALGORITHM_KEY = "algorithm.name"
ALGORITHM_DOCS = "rloo docs algorithms"
P = ParamSpec("P")


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a hook returns, alone or as part of its result."""

    name: str  # of the attribute, or the index in a tuple; "" = the tensor is the whole result
    shape: tuple[int, ...]
    dtype: str  # as torch prints it; "float" = any floating type


HOOKS = (
    "advantages", "token_advantages", "loss", "value_loss", "next_state", "rules", "warnings",
    "forward_plan", "combine_rewards", "shape_scores", "sequence_kl",
)  # fmt: skip


def guard_hooks(algorithm: type, module: ModuleType) -> None:
    """Guard the hooks that an algorithm class in a user's file defines, once.

    Raises ConfigError for a hook's name that is not a function.
    """
    own = [c for c in algorithm.__mro__ if c.__module__ == module.__name__]
    for owner, name in [(c, n) for c in own for n in HOOKS if n in vars(c)]:
        value = vars(owner)[name]
        if not inspect.isfunction(value):
            what = f"{owner.__name__}.{name} in {module.__file__} is not a function"
            why = f"it is {value!r:.80}, but {name} is the name of a hook"
            fix = f"rename it, or def {name}(self, ...)"
            refuse(ALGORITHM_KEY, what, fix, why, more=ALGORITHM_DOCS)
        if not hasattr(value, "__wrapped__"):
            setattr(owner, name, _guarded(value, module, name))


def _guarded(code: Callable[P, object], module: ModuleType, name: str) -> Callable[P, object]:
    """A hook that raises ConfigError for its exceptions, and for invalid results."""

    @functools.wraps(code)
    def call(*arguments: P.args, **named: P.kwargs) -> object:
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
            what = f"{name} of the algorithm {module.__file__} returned an invalid result"
            refuse(where, what, f"correct {name}", why, more=ALGORITHM_DOCS)
        return returned

    return call


def _failure(error: Exception, module: ModuleType, name: str) -> Problem:
    """The problem of an exception in a hook, with the frames of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == module.__file__]
    message = "".join(traceback.format_exception_only(error)).strip()
    where = f"{module.__file__}:{own[-1].lineno}" if own else str(module.__file__)
    why = "".join(traceback.format_list(own)) + message
    what = f"{name} of the algorithm {module.__file__} failed: {message.splitlines()[-1]}"
    return Problem(what, where, why, f"correct {name}", ALGORITHM_DOCS)


def _mismatch(name: str, returned: object, arguments: tuple[Any, ...]) -> str:
    """What is wrong with a hook's result, and what is expected; "" = nothing."""
    for expected in _expected_tensors(name, arguments):
        part: Any = returned
        if expected.name.isdigit():
            is_pair = isinstance(returned, tuple) and len(returned) == 2
            part = part[int(expected.name)] if is_pair else None
        elif expected.name:
            part = getattr(returned, expected.name, None)
        shape, dtype = getattr(part, "shape", None), str(getattr(part, "dtype", ""))
        kind = dtype.removeprefix("torch.")
        right = kind.startswith("float") if expected.dtype == "float" else kind == expected.dtype
        if shape is None or tuple(shape) != expected.shape or not right:
            index = "part " if expected.name.isdigit() else ""
            of = f"{index}{expected.name}: " if expected.name else ""
            whole = f" ({name} returned {_described(returned)})" if part is None else ""
            it_is = f"{of}it is {_described(part)}{whole}"
            return f"{it_is}\nexpected: {expected.dtype}, shape {expected.shape}"
    return _metrics_mismatch(returned, arguments[1]) if name == "loss" else ""


def _metrics_mismatch(loss: Any, inputs: Any) -> str:
    """Problems of the `metrics` of a Loss, which are numbers per token or completion."""
    tokens, completions = tuple(inputs.logp.shape), (inputs.micro_batch.num_sequences,)
    for name, values in loss.metrics.items():
        if tuple(getattr(values, "shape", ())) not in (tokens, completions):
            expected = f"a number for each token, {tokens}, or for each completion, {completions}"
            return f"metrics[{name!r}]: it is {_described(values)}\nexpected: {expected}"
    return ""


def _described(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def _expected_tensors(name: str, arguments: tuple[Any, ...]) -> Iterator[ExpectedTensor]:
    """The tensors that a hook must return, from its arguments (the first is `self`)."""
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
        case "sequence_kl":  # (N,), (N,), a micro-batch of S completions -> (S,)
            yield ExpectedTensor("", (arguments[3].num_sequences,), "float64")
        case "loss" | "value_loss":
            yield ExpectedTensor("total", (), "float")
