"""A reward, ready to be called: its code, its config, and what it wants to be given."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig
from rloo_cli.config.user_code import location
from rloo_cli.rewards.engine.arguments import KWARGS
from rloo_cli.utils.errors import ConfigError, Problem

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Reward:
    """One entry of the config's `reward` mapping."""

    name: str
    config: RewardConfig
    code: Callable[..., Any]
    wants: frozenset[str] | None  # names in its signature; None = everything (**kwargs)
    needs: tuple[str, ...]  # data columns it cannot do without
    fixed: dict[str, Any]  # arguments that are the same in every call
    is_async: bool
    location: str  # file:line
    memory: dict[Any, float | None] = field(default_factory=dict, repr=False, compare=False)
    idle: list[Any] = field(default_factory=list, repr=False, compare=False)  # workers that wait


def build(name: str, config: RewardConfig) -> Reward:
    """The reward that `config.type` names.

    Raises ConfigError (at `reward.<name>.path`) when the user's code cannot be loaded or called,
    MachineError when a package is missing.
    """
    module = registry.module("rewards", config.type)
    if hasattr(module, "preflight"):
        module.preflight(config)
    if hasattr(module, "load"):
        code, fixed = module.load(name, config)
        loaded = _reward(name, config, code, fixed, where=f"reward.{name}.path")
        _check_it_reads(loaded)
        return loaded
    needs = module.needs(config) if hasattr(module, "needs") else []
    fixed = {"config": config} if "config" in inspect.signature(module.score).parameters else {}
    shipped = _reward(name, config, module.score, fixed, f"reward.{name}")
    return replace(shipped, needs=(*shipped.needs, *needs))


def from_callable(name: str, fn: Callable[..., Any], config: RewardConfig) -> Reward:
    """A plain Python callable as a reward; `config` has the common keys."""
    return _reward(name, config, fn, {}, where=f"reward.{name}")


def _reward(
    name: str, config: RewardConfig, code: Callable[..., Any], fixed: dict[str, Any], where: str
) -> Reward:
    try:
        parameters = list(inspect.signature(code).parameters.values())
    except (TypeError, ValueError):  # some builtins have none: give everything
        parameters = [inspect.Parameter("kwargs", STARS[1])]
    takes_all = any(p.kind == STARS[1] for p in parameters)
    named = {p.name: p for p in parameters if p.kind not in STARS}
    _check_signature(code, named, takes_all, fixed, where)
    required = [p.name for p in named.values() if p.default is p.empty]
    call = getattr(code, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
    is_async = inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(call)
    if is_async and config.workers:
        why = f"{location(code)} is async: its calls run side by side already, on one event loop"
        key = f"reward.{name}.workers"
        raise ConfigError(Problem(f"{key} would do nothing", key, why, f"{key}=0"))
    return Reward(
        name=name,
        config=config,
        code=code,
        wants=None if takes_all else frozenset(named),
        needs=(*(n for n in required if n not in KWARGS and n not in fixed), *config.only),
        fixed=fixed,
        is_async=is_async,
        location=location(code),
    )


def _check_it_reads(reward: Reward) -> None:
    """Whether a function that a config names takes anything of the completions.

    What does not (os.system, a loader of pickles) is no reward, and is not called to find out.
    """
    if reward.wants is not None and not reward.wants & KWARGS:
        key, takes = f"reward.{reward.name}.path", ", ".join(sorted(reward.wants)) or "nothing"
        why = f"{reward.location} takes: {takes}; it could score no completion"
        fix = "def score(completions, **kwargs): return one number per completion"
        raise ConfigError(Problem("this is not a reward", key, why, fix))


def _check_signature(
    code: Callable[..., Any],
    named: dict[str, inspect.Parameter],
    takes_all: bool,
    fixed: dict[str, Any],
    where: str,
) -> None:
    for parameter in named.values():
        if parameter.kind == POSITIONAL and parameter.default is parameter.empty:
            what = f"parameter {parameter.name!r} cannot be given by name"
            why = f"{location(code)} has it before a /, and rewards get keyword arguments only"
            raise ConfigError(Problem(what, where, why, "take the / out of its signature"))
    for given in fixed:
        key = where.removesuffix(".path") + f".kwargs.{given}"
        if given in KWARGS:
            why = f"every reward is called with {given} of the completions"
            raise ConfigError(Problem(f"{given} cannot be given", key, why, f"rename {given}"))
        if not takes_all and given not in named:
            why = f"{location(code)} takes: {', '.join(named) or 'nothing'}"
            raise ConfigError(Problem(f"the reward takes no {given!r}", key, why, f"~{key}"))
