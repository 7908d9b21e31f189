"""Whose RLOO: seven frameworks compute seven different things under that name (docs/OBJECTIVES.md).

A dialect is a YAML file of switches, conf/algorithm/dialect/. What no switch says hangs on its name
here, so that a reader finds it in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from rloo_cli.config.schema import Frozen, key
from rloo_cli.utils import paths
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.config.schema import RunConfig

Name = Literal["paper", "trl", "trl_0_21", "verl", "openrlhf", "ms_swift", "nemo_rl"]
NAMES = get_args(Name)
NORM_EPS = {"trl_0_21": 1e-8}  # of normalize_advantages; everybody else adds 1e-4
UNGUARDED = ("trl", "trl_0_21")  # normalise also a step in which only KL differs
NONE_IS_ZERO = ("ms_swift",)  # a reward that says None counts as 0
CLIPS_ADVANTAGES = ("openrlhf",)  # reward_clip_range is that of advantages, before their KL
TOKEN_KL_LIMIT = {"openrlhf": 10.0, "nemo_rl": 10.0}  # each token's estimate is clamped to +- this
SCORE_FUNCTION_KL = ("nemo_rl",)  # KL in the loss has the gradient of its sampling too


class Config(Frozen):
    dialect: Name | None = key(
        "Compute RLOO as another framework does: algorithm.dialect=NAME takes up its file of keys"
    )


def dialect_values(name: str) -> JsonObject:
    """Dotted key -> value of a dialect's file."""
    given = yaml.safe_load((paths.CONF / "algorithm" / "dialect" / f"{name}.yaml").read_text())
    return {f"{section}.{k}": v for section, keys in given.items() for k, v in keys.items()}


def dialect_problems(run: RunConfig, config: Config) -> Iterator[Problem]:
    """A dialect of something else, or one whose name was set without its keys."""
    if config.dialect is None or run.algorithm.name == "rloo":
        return
    yield Problem(
        f"{config.dialect} is a dialect of rloo",
        "algorithm.dialect",
        f"algorithm.name is {run.algorithm.name}",
        "algorithm=rloo, or algorithm.dialect=null",
    )


def dialect_differences(run: RunConfig, config: Config) -> Iterator[str]:
    """Keys that the run sets otherwise than its dialect's file: they win, and are told."""
    if config.dialect is None:
        return
    for name, theirs in dialect_values(config.dialect).items():
        section, _, leaf = name.partition(".")
        mine: Any = getattr(getattr(run, section), leaf, None)
        mine = mine.model_dump() if isinstance(mine, Frozen) else mine
        if mine != theirs and not (isinstance(theirs, dict) and _is_part_of(theirs, mine)):
            yield (
                f"{name}={_yaml_text(mine)}, where dialect {config.dialect} has "
                f"{_yaml_text(theirs)}"
            )


def _is_part_of(theirs: JsonObject, mine: Any) -> bool:
    return isinstance(mine, dict) and all(mine.get(k) == v for k, v in theirs.items())


def _yaml_text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
