"""Rules about the completions of a step: too few of a prompt, turns without rewards, older weights.

Where older weights sampled them (generation.overlap), the importance weight is what makes an update
right, so it cannot be off; and what the policy was when it sampled is known from the sampler alone
(docs/overlap.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from rloo_cli.algorithms.common.config import Switches, correction_mode
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import Problem

ENVIRONMENT = "environment"  # the type of the reward through which turns' rewards are scored


def sibling_problems(config: Switches) -> Iterator[Problem]:
    """Settings that compare a completion with its siblings mean nothing where it has none."""
    if config.num_generations > 1:
        return
    alone = "a prompt's only completion has no sibling whose score could differ"
    refused = {  # key -> whether it is set so, what it would do, the way out
        "zero_std_groups": (
            config.zero_std_groups != "keep",
            "every group would count as one of equal scores, and none would be trained on",
            "keep",
        ),
        "multi_reward": (
            config.multi_reward == "normalize_then_sum",
            "each reward less its group's mean would be 0, and nothing would be learned",
            "sum",
        ),
        "advantage_scale": (
            config.advantage_scale in ("group", "loo_std"),
            "one score has no std, and nothing would be divided",
            "batch",
        ),
    }
    for name, (odd, what, fix) in refused.items():
        if odd:
            yield Problem(
                f"{name}={getattr(config, name)} needs siblings",
                f"algorithm.{name}",
                f"num_generations=1: {alone}; {what}",
                f"algorithm.{name}={fix}",
            )


def sibling_warnings(config: Switches) -> Iterator[str]:
    """Combinations that are allowed but seldom meant, in one sentence each."""
    minus_group_mean = getattr(config, "minus_group_mean", False)
    compared = minus_group_mean or config.baseline in ("loo", "group_mean")
    if config.zero_std_groups != "keep" and not compared:
        yield (
            f"algorithm.zero_std_groups={config.zero_std_groups} leaves out groups of equal scores,"
            f" which have advantages with baseline={config.baseline}: those in which every"
            " completion is right, or wrong, too"
        )
    if config.advantage_scale == "loo_std" and config.num_generations == 2:
        yield (
            "algorithm.advantage_scale=loo_std divides nothing with num_generations=2: the score of"
            " one sibling has no std"
        )


def turn_reward_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """What turns' rewards do not go together with. `config`: the algorithm's switches."""
    how = config.turn_rewards
    if how == "sum":
        return
    if run.agent is None or not any(r.type == ENVIRONMENT for r in run.rewards.values()):
        why = "agent is null" if run.agent is None else "no reward is of the type environment"
        yield Problem(
            f"turn_rewards={how}, and no turn can have a reward",
            "algorithm.turn_rewards",
            f"{why}; an environment's turns are scored by reward=environment",
            "agent=class reward=environment, or algorithm.turn_rewards=sum",
        )
    if how == "credit":
        yield from _credit_problems(config)


def _credit_problems(config: Switches) -> Iterator[Problem]:
    """Settings under which a turn has no advantage of its own, or which look at one score only."""
    fits: dict[str, tuple[bool, str]] = {  # key -> whether it fits, and the value that does
        "dialect": (config.dialect is None, "null"),
        "baseline": (config.baseline in ("loo", "none"), "loo"),
        "advantage_scale": (config.advantage_scale == "none", "none"),
        "normalize_advantages": (not config.normalize_advantages, "false"),
        "normalize_rewards": (not config.normalize_rewards, "false"),
        "multi_reward": (config.multi_reward == "sum", "sum"),
        "reward_clip_range": (config.reward_clip_range is None, "null"),
        "missing_eos_penalty": (config.eos_penalty.mode != "replace", "{mode: none, value: 0.0}"),
        "zero_std_groups": (config.zero_std_groups == "keep", "keep"),
        "ratio_level": (config.has_token_terms, "token"),
    }  # fmt: skip
    if config.name in ("ppo", "reinforce_pp"):
        yield Problem(
            f"{config.name} gives every token a credit of its own",
            "algorithm.turn_rewards",
            f"turn_rewards=credit with algorithm.name={config.name}",
            "algorithm.turn_rewards=sum, or algorithm=rloo",
        )
        return
    for name, (fit, value) in fits.items():
        if not fit:
            yield Problem(
                "turn_rewards=credit gives every turn an advantage of its own",
                f"algorithm.{name}",
                f"found {getattr(config, name)}, which is for one advantage of a whole completion",
                f"algorithm.{name}={value}, or algorithm.turn_rewards=sum",
            )


def lagging_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """What an algorithm's settings cannot do with completions that older weights sampled."""
    generation = run.generation
    if generation.overlap == "none":
        return
    asked = f"generation.overlap={generation.overlap}"
    passes, parts = config.num_iterations, config.num_minibatches
    updates = passes * parts
    if updates > 1:
        yield Problem(
            f"{asked} makes one update of each step's completions",
            f"algorithm.{'num_iterations' if passes > 1 else 'num_minibatches'}",
            f"num_iterations * num_minibatches = {passes} * {parts} = {updates}: the next"
            f" completions would be {updates} updates old, and not one",
            "algorithm.num_iterations=1 algorithm.num_minibatches=1, or generation.overlap=none",
        )
    if config.by_token or config.baseline == "value":
        yield Problem(
            f"{asked} knows no advantages of single tokens",
            "generation.overlap",
            f"algorithm={config.name} computes them from the trainer's own log-probabilities and"
            " values, which older weights did not have",
            "generation.overlap=none",
        )
    if config.needs_greedy and generation.overlap == "carry":
        yield Problem(
            f"{asked} samples no greedy completions",
            "generation.overlap",
            f"algorithm={config.name} compares a prompt's completions with its greedy one, which"
            " would be of other weights than they are",
            "generation.overlap=ahead",
        )
    measured = config.needs_reference or config.teacher_server is not None
    if measured and config.kl_temperature == "one" and generation.temperature != 1:
        yield Problem(
            f"{asked} measures the KL where the completions were sampled",
            "algorithm.kl_temperature",
            f"the sampler's log-probabilities are at temperature {generation.temperature:g}, and"
            " kl_temperature=one asks for those at 1",
            "algorithm.kl_temperature=sampling, or generation.temperature=1",
        )
    mode = correction_mode(config, generation.backend, generation.overlap)
    if mode == "none" and not generation.allow_uncorrected:
        yield Problem(
            f"{asked} without algorithm.correction",
            "algorithm.correction.mode",
            "the completions are of older weights than those that are trained: without a weight"
            " the gradient is of another objective",
            "algorithm.correction.mode=auto, or generation.allow_uncorrected=true for a comparison",
        )
