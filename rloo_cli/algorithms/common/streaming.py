"""Training on groups while others of the step are being sampled (overlap=stream): its rules.

What is refused needs the whole step before its first backward pass, in more than one factor of the
gradient: then nothing could be trained before the last completion, or with another result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common import forward_plan
from rloo_cli.config import registry
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from rloo_cli.algorithms.common.config import Switches
    from rloo_cli.config.schema import RunConfig

OVERLAP, STREAM = "generation.overlap", "generation.overlap=stream"
# Hooks whose defaults are known to treat every group by itself.
HOOKS = ("loss", "combine_rewards", "shape_scores")
WHOLE_STEP = "it is known once the step's last completion is: nothing could be trained before"


def streaming_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """What an algorithm's settings cannot do before the whole step is sampled."""
    if run.generation.overlap != "stream":
        return
    whole_step = [*_whole_step_keys(config)]
    if not whole_step:  # else that is the reason of a separate pass, too
        plan = forward_plan.forward_plan(run, config)
        yield from _pass_problems(config, plan.separate)
    for key, asked, fix in whole_step:
        what = f"{STREAM} and algorithm.{key}={asked} do not go together"
        yield Problem(what, f"algorithm.{key}", WHOLE_STEP, f"algorithm.{key}={fix}")
    if config.entropy_coef > 0:
        why = "the bonus is divided by the step's tokens, and the loss by another number: two"
        why += " factors, which one gradient does not have"
        what, key = f"{STREAM} knows no entropy bonus", "algorithm.entropy_coef"
        yield Problem(what, key, why, f"{key}=0, or generation.overlap=none")
    if config.normalize_advantages and not forward_plan.has_one_factor(config):
        why = "normalising is not one factor of the gradient here: a KL outside the advantage, a"
        why += " baseline from outside the group, or a clip would not be multiplied by it"
        what, key = f"{STREAM} cannot normalise these advantages", "algorithm.normalize_advantages"
        yield Problem(what, key, why, f"{key}=false, or generation.overlap=none")
    if config.needs_greedy:
        what = f"{STREAM} and a greedy completion per prompt do not go together"
        why = f"algorithm={config.name} scores them after all others, and its baseline needs them"
        yield Problem(what, "generation.overlap", why, "generation.overlap=none")
    yield from _hook_problems(config)


def _pass_problems(config: Switches, separate: str | None) -> Iterator[Problem]:
    """Settings with which the training forward is not the first pass, or not the only one."""
    fix = "generation.overlap=none"
    if config.by_token or config.baseline == "value":
        why = f"algorithm={config.name} computes an advantage for each token, which needs the"
        why += " whole step first"
        yield Problem(f"{STREAM} knows no advantages of single tokens", OVERLAP, why, fix)
    elif separate is not None:
        why = f"log-probabilities are computed in a pass of their own: {separate}"
        yield Problem(f"{STREAM} trains in the first pass", OVERLAP, why, fix)
    elif config.num_iterations > 1:
        what = f"{STREAM} makes one update of each step's completions"
        why = f"num_iterations = {config.num_iterations}: the others would begin when all is there"
        fix = f"algorithm.num_iterations=1, or {fix}"
        yield Problem(what, "algorithm.num_iterations", why, fix)


def _whole_step_keys(config: Switches) -> Iterator[tuple[str, str, str]]:
    """Keys that need the whole step: (key, its value, a value that does not)."""
    if config.normalize_rewards:
        yield "normalize_rewards", "true", "false"
    if config.multi_reward == "normalize_then_sum":
        yield "multi_reward", config.multi_reward, "sum"
    if config.zero_std_groups == "resample":
        yield "zero_std_groups", "resample", "drop"
    if config.baseline == "batch_mean":
        yield "baseline", config.baseline, "loo"
    if config.advantage_scale == "batch":
        yield "advantage_scale", "batch", "group"


def _hook_problems(config: Switches) -> Iterator[Problem]:
    """Hooks of the user's own: whether they look at other groups is not known."""
    algorithm = registry.algorithm_class(config.name)
    own = [h for h in HOOKS if getattr(algorithm, h).__qualname__ != f"Algorithm.{h}"]
    if own:
        what = f"{STREAM} and an algorithm with its own {', '.join(own)} do not go together"
        why = "it may need the whole step, or divide by something else than `denominator`"
        fix = f"{algorithm.__name__} without {', '.join(own)}, or generation.overlap=none"
        yield Problem(what, "generation.overlap", why, fix)
