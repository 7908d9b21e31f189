"""Builds a reward: its code, its config, and the arguments in its signature."""

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig
from rloo_cli.config.user_code import code_location
from rloo_cli.rewards.engine.arguments import REWARD_KWARGS
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.worker_pool import WorkerPool

POSITIONAL_ONLY_KIND = inspect.Parameter.POSITIONAL_ONLY
VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Reward:
    """One entry of the config's `reward` mapping."""

    name: str
    config: RewardConfig
    code: RewardFunction
    parameter_names: frozenset[str] | None  # of its signature; None = everything (**kwargs)
    required_columns: tuple[str, ...]  # data columns that it needs
    fixed_arguments: dict[str, object]  # arguments that are the same in every call
    is_async: bool
    location: str  # file:line
    score_cache: dict[Hashable, float | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    pools: list[WorkerPool] = field(default_factory=list, repr=False, compare=False)  # of workers

    def reads_any(self, arguments: Collection[str]) -> bool:
        """Whether it takes one of these arguments; with **kwargs, whether its code names one."""
        if self.parameter_names is not None:
            return not self.parameter_names.isdisjoint(arguments)
        code: Any = getattr(self.code, "__code__", None)
        named = () if code is None else (*code.co_varnames, *map(str, code.co_consts))
        return not {*named}.isdisjoint(arguments)


def build_reward(name: str, config: RewardConfig) -> Reward:
    """Build the reward that `config.type` names.

    Raises ConfigError (at `reward.<name>.path`) when the user's code cannot be loaded or called,
    MachineError when a package is missing.
    """
    module = registry.registered_module("rewards", config.type)
    if hasattr(module, "preflight"):
        module.preflight(config)
    if hasattr(module, "load"):
        code, fixed = module.load(name, config)
        loaded = _reward_from_code(name, config, code, fixed, where=f"reward.{name}.path")
        _check_reads_completions(loaded)
        return loaded
    needs = module.needs(config) if hasattr(module, "needs") else []
    fixed = {"config": config} if "config" in inspect.signature(module.score).parameters else {}
    shipped = _reward_from_code(name, config, module.score, fixed, f"reward.{name}")
    return replace(shipped, required_columns=(*shipped.required_columns, *needs))


def reward_from_callable(name: str, function: RewardFunction, config: RewardConfig) -> Reward:
    """Build a reward from a Python callable; `config` has the keys that all rewards share."""
    return _reward_from_code(name, config, function, {}, where=f"reward.{name}")


def _reward_from_code(
    name: str, config: RewardConfig, code: RewardFunction, fixed_arguments: dict[str, object],
    where: str,
) -> Reward:  # fmt: skip
    try:
        parameters = list(inspect.signature(code).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature: pass every argument
        parameters = [inspect.Parameter("kwargs", VARIADIC_KINDS[1])]
    takes_all = any(p.kind == VARIADIC_KINDS[1] for p in parameters)
    named = {p.name: p for p in parameters if p.kind not in VARIADIC_KINDS}
    _check_signature(code, named, takes_all, fixed_arguments, where)
    required = [p.name for p in named.values() if p.default is p.empty]
    call = getattr(code, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
    is_async = inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(call)
    if is_async and config.workers:
        location, key = code_location(code), f"reward.{name}.workers"
        why = f"{location} is async: its calls already run concurrently, on one event loop"
        refuse(key, f"{key} has no effect", f"{key}=0", why)
    provided = REWARD_KWARGS | fixed_arguments.keys()
    return Reward(
        name=name,
        config=config,
        code=code,
        parameter_names=None if takes_all else frozenset(named),
        required_columns=(
            *(n for n in required if n not in provided),
            *config.only,
        ),
        fixed_arguments=fixed_arguments,
        is_async=is_async,
        location=code_location(code),
    )


def _check_reads_completions(reward: Reward) -> None:
    """Raises ConfigError for a function that reads nothing of the completions.

    Such a function (os.system, a loader of pickles) is not a reward and must not be called.
    """
    if reward.parameter_names is not None and not reward.parameter_names & REWARD_KWARGS:
        takes = ", ".join(sorted(reward.parameter_names)) or "nothing"
        why = f"{reward.location} takes: {takes}; it does not get the completions"
        fix = "def score(completions, **kwargs), which returns one number per completion"
        refuse(f"reward.{reward.name}.path", "this is not a reward", fix, why)


def _check_signature(
    code: RewardFunction, parameters: Mapping[str, inspect.Parameter], takes_all: bool,
    fixed_arguments: Mapping[str, object], where: str,
) -> None:  # fmt: skip
    """Raises ConfigError if a signature does not fit calls by name with these arguments."""
    for parameter in parameters.values():
        if parameter.kind == POSITIONAL_ONLY_KIND and parameter.default is parameter.empty:
            what = f"parameter {parameter.name!r} cannot be passed by name"
            why = f"{code_location(code)} has it before a /, but rewards get only keyword arguments"
            refuse(where, what, "remove the / from its signature", why)
    for name in fixed_arguments:
        key = where.removesuffix(".path") + f".kwargs.{name}"
        if name in REWARD_KWARGS:
            why = f"every reward gets {name} of the completions"
            refuse(key, f"{name} cannot be set", f"rename {name}", why)
        if not takes_all and name not in parameters:
            why = f"{code_location(code)} takes: {', '.join(parameters) or 'nothing'}"
            refuse(key, f"the reward has no parameter {name!r}", f"~{key}", why)
