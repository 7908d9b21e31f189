"""The RLOO variants of seven other frameworks that compute something else (docs/algorithms.md).

A dialect is a YAML file of switches in conf/algorithm/dialect/. The constants here are
differences that no switch expresses, by the dialect's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

import yaml

from rloo_cli.config.schema import Frozen
from rloo_cli.utils import paths
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.config.schema import RunConfig

DialectName = Literal["paper", "trl", "trl_0_21", "verl", "openrlhf", "ms_swift", "nemo_rl"]
NAMES = get_args(DialectName)
NORM_EPS = {"trl_0_21": 1e-8}  # of normalize_advantages; all others add 1e-4
UNGUARDED = ("trl", "trl_0_21")  # also normalize a step in which only the KL differs
NONE_IS_ZERO = ("ms_swift",)  # a reward that returns None counts as 0
CLIPS_ADVANTAGES = ("openrlhf",)  # reward_clip_range clips advantages, before their KL
TOKEN_KL_LIMIT = {"openrlhf": 10.0, "nemo_rl": 10.0}  # each token's estimate is clamped to +- this
SCORE_FUNCTION_KL = ("nemo_rl",)  # KL in the loss also has the score-function gradient


def dialect_values(name: str) -> JsonObject:
    """Dotted key -> value of a dialect's file."""
    sections = yaml.safe_load((paths.CONF / "algorithm" / "dialect" / f"{name}.yaml").read_text())
    return {f"{section}.{k}": v for section, keys in sections.items() for k, v in keys.items()}


def dialect_problems(run: RunConfig, name: DialectName | None) -> Iterator[Problem]:
    """The problem of a dialect with an algorithm other than rloo."""
    if name is None or run.algorithm.name == "rloo":
        return
    why, fix = (
        f"algorithm.name is {run.algorithm.name}",
        "algorithm=rloo, or algorithm.dialect=null",
    )
    yield Problem(f"{name} is a dialect of rloo", "algorithm.dialect", why, fix)


def dialect_differences(run: RunConfig, name: DialectName | None) -> Iterator[str]:
    """A sentence for each key that the run sets to another value than its dialect's file."""
    for dotted, theirs in dialect_values(name).items() if name else ():
        section, _, leaf = dotted.partition(".")
        mine: object = getattr(getattr(run, section), leaf, None)
        mine = mine.model_dump() if isinstance(mine, Frozen) else mine
        if mine != theirs and not (isinstance(theirs, dict) and _is_part_of(theirs, mine)):
            their_text = f"dialect {name} has {_yaml_text(theirs)}"
            yield f"{dotted}={_yaml_text(mine)}, where {their_text}"


def _is_part_of(theirs: JsonObject, mine: object) -> bool:
    return isinstance(mine, dict) and all(mine.get(k) == v for k, v in theirs.items())


def _yaml_text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
