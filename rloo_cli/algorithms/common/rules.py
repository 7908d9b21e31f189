"""Conflicts between keys that stop a run before it starts, and combinations worth a warning.

Limits of a single key are at the key. A problem names the key, the arithmetic and the fixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, log, sqrt
from statistics import NormalDist

from rloo_cli.algorithms.common import completion_rules, dialect
from rloo_cli.algorithms.common import config as common_config
from rloo_cli.algorithms.common.config import (
    Switches,
    in_reward,
    num_updates_per_step,
    shared_switches,
)
from rloo_cli.config.rules_sampling import MASK_KEY, inexact_settings
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.utils.errors import Problem, value_problem

OWN_BASELINES = {"greedy": "remax", "value": "ppo"}  # baseline -> its only algorithm
TOKEN_NOISE = 0.01  # log-ratio per token from kernels and one small update
CLIPPED_SHARE = 0.1  # warn if that noise alone clips more completions


def choice_problems(config: Switches) -> Iterator[Problem]:
    """Conflicts among the choices of the algorithm alone; `where` is the dotted key."""
    yield from _loss_problems(config)
    yield from _baseline_problems(config)
    yield from _group_advantage_problems(config)


def whitening_problems(config: Switches) -> Iterator[Problem]:
    """Settings that centre or divide advantages, which the algorithm's whitening replaces."""
    plain = {"advantage_scale": "none", "normalize_advantages": False, "kl_in_baseline": False}
    why = "the step's token advantages are whitened instead, so it would have no effect"
    setting = f"algorithm={config.name}"
    yield from completion_rules.needed_value_problems(config, setting, plain, why)


def _loss_problems(config: Switches) -> Iterator[Problem]:
    for part in common_config.PARTS:
        if getattr(config, part) is None:
            why = "it is null, and algorithm.loss_type, which would set it, is null too"
            fix = "algorithm.loss_type=dapo"
            yield Problem(f"{part} is not set", f"algorithm.{part}", why, fix)
    if config.policy_loss == "cispo" and (config.epsilon_high or 0) < 1:
        key, what = "algorithm.epsilon_high", "is not a valid cap of CISPO's weights"
        why = "it is the cap itself, not a distance from 1: every weight of 1 or more would be cut"
        yield value_problem(key, config.epsilon_high, what, "5.0", why)
    if config.policy_loss == "luspo" and config.ratio_level == "token":
        what, why = "gives no ratio per completion", "policy_loss=luspo weighs that ratio by length"
        yield value_problem("algorithm.ratio_level", "token", what, "geometric", why)


def _baseline_problems(config: Switches) -> Iterator[Problem]:
    for baseline, name in OWN_BASELINES.items():
        if (config.baseline == baseline) != (config.name == name):
            baseline_of = {algorithm: b for b, algorithm in OWN_BASELINES.items()}
            instead, why = (
                baseline_of.get(config.name, "loo"),
                f"only {name} has baseline={baseline}",
            )
            what = f"is not available with algorithm={config.name}"
            yield value_problem("algorithm.baseline", config.baseline, what, instead, why)


def _group_advantage_problems(config: Switches) -> Iterator[Problem]:
    """What the advantages of MaxRL and of pass@k are not defined with."""
    grouped = config.baseline in ("loo", "group_mean")
    why = "it is an advantage over the scores of a group"
    if config.advantage_scale == "mean":
        refused = {"baseline": (not grouped, why, "group_mean")}
        setting = "algorithm.advantage_scale=mean"
        yield from completion_rules.switch_problems(config, setting, refused)
    if (k := config.pass_at_k) is None:
        return
    scale, few = "the gradient would not be that of pass@k", f"a completion needs {k} siblings"
    kl = "the KL of the other completions would be in the largest reward"
    refused = {
        "baseline": (not grouped, why, "loo"),
        "advantage_scale": (config.advantage_scale != "none", scale, "none"),
        "kl_in_baseline": (in_reward(config) and config.kl_in_baseline, kl, "false"),
        "num_generations": (config.num_generations <= k, few, str(k + 1)),
    }
    yield from completion_rules.switch_problems(config, f"algorithm.pass_at_k={k}", refused)


def algorithm_problems(run: RunConfig) -> Iterator[Problem]:
    """Conflicts between keys; `where` is the dotted key."""
    config = shared_switches(run)
    yield from dialect.dialect_problems(run, config.dialect)
    yield from choice_problems(config)
    yield from completion_rules.sibling_problems(config)
    yield from completion_rules.turn_reward_problems(run, config)
    yield from _kl_problems(config)
    yield from _ratio_problems(config)
    yield from _shaping_problems(config)
    yield from _correction_problems(config, run.generation)
    yield from completion_rules.lagging_problems(run, config)
    yield from _minibatch_problems(config, run.train.prompts_per_step)


def algorithm_warnings(run: RunConfig) -> Iterator[str]:
    """Combinations that are allowed but rarely intended, in one sentence each."""
    config, generation = shared_switches(run), run.generation
    max_length, num_updates = generation.max_completion_length, num_updates_per_step(config)
    yield from dialect.dialect_differences(run, config.dialect)
    yield from _kl_warnings(config)
    yield from completion_rules.sibling_warnings(config)
    filters = inexact_settings(generation)
    mode = common_config.correction_mode(config, generation.backend, generation.overlap)
    if filters and mode == "none":
        yield f"generation.{', '.join(filters)}: logp then differs from the sampling distribution"
    share = clipped_by_noise(config, max_length)
    if num_updates > 1 and share > CLIPPED_SHARE:
        yield (
            f"algorithm.ratio_level=sequence, {num_updates} updates per step: noise of"
            f" {TOKEN_NOISE} per token over {max_length} tokens alone clips"
            f" {share:.0%} of the completions; widen epsilon, algorithm.epsilon_tokens=N for long"
            " ones, or ratio_level=token or geometric"
        )
    rule = config.overlong_penalty
    if rule is not None and rule.max_length - rule.cache >= max_length:
        yield (
            f"algorithm.overlong_penalty starts above {rule.max_length - rule.cache} tokens, and"
            f" generation.max_completion_length={max_length}: never charged"
        )
    if run.rewards and all(reward.weight == 0 for reward in run.rewards.values()):
        yield (
            f"every reward has the weight 0 ({', '.join(run.rewards)}): each is only a metric, no"
            " completion has a score, and nothing is learned"
        )
    if config.loss_agg == "token_mean_local":
        yield "algorithm.loss_agg=token_mean_local: the loss depends on the micro-batch size"


def clipped_by_noise(config: Switches, num_tokens: int) -> float:
    """Predicted share of completions that TOKEN_NOISE alone moves out of the clip range."""
    if config.ratio_level != "sequence" or config.policy_loss != "clip":
        return 0.0
    noise = NormalDist(sigma=TOKEN_NOISE * sqrt(num_tokens))
    power = sqrt(max(1.0, num_tokens / config.epsilon_tokens)) if config.epsilon_tokens else 1.0
    low = power * log(1 - config.epsilon) if config.epsilon < 1 else -inf
    return noise.cdf(low) + 1 - noise.cdf(power * log(config.upper))


def _kl_problems(config: Switches) -> Iterator[Problem]:
    if config.kl_ratio_weighted and config.kl_estimator == "k2":
        what, why = (
            "does not give the gradient of a KL with kl_estimator=k2",
            "it is exact for k1 and k3 only",
        )
        fix = "false, or algorithm.kl_estimator=k3"
        yield value_problem("algorithm.kl_ratio_weighted", "true", what, fix, why)
    alone = config.kl_estimator == "k1" and not config.kl_ratio_weighted
    if config.kl_in == "loss" and alone and config.beta > 0:
        what = "does not pull the policy towards the reference with kl_in=loss"
        why, fix = "its expected gradient is zero", "k3 (or k2), or algorithm.kl_in=reward"
        yield value_problem("algorithm.kl_estimator", "k1", what, fix, why)
    if config.kl_credit != "to_go":
        return
    needs = {
        "algorithm.kl_in=reward": config.kl_in == "reward",
        "algorithm.kl_in_baseline=false": not config.kl_in_baseline,
        "algorithm.ratio_level=token (or policy_loss=reinforce)": (
            config.ratio_level == "token" or config.policy_loss == "reinforce"
        ),
        "algorithm.normalize_advantages=false": not config.normalize_advantages,
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        yield Problem(
            "kl_credit=to_go gives every token its own advantage",
            "algorithm.kl_credit",
            f"to_go needs {' and '.join(missing)}",
            " ".join(m.split()[0] for m in missing)
            + ("" if config.by_token else ", or algorithm.kl_credit=sequence"),
        )


def _ratio_problems(config: Switches) -> Iterator[Problem]:
    n = num_updates_per_step(config)
    if config.policy_loss == "reinforce" and n > 1 and not config.allow_stale:
        what = "has no ratio, so later updates of a step are off-policy"
        why = (
            f"num_iterations * num_minibatches = {config.num_iterations} *"
            f" {config.num_minibatches} = {n} updates per step; reinforce is exact for 1"
        )
        fix = "clip, or algorithm.allow_stale=true"
        yield value_problem("algorithm.policy_loss", "reinforce", what, fix, why)
    rule = config.adaptive_entropy
    if rule is not None and not rule.min <= config.entropy_coef <= rule.max:
        key, what = "algorithm.entropy_coef", "is not within adaptive_entropy's range"
        why = f"the weight would begin outside {rule.min:g} to {rule.max:g}"
        yield value_problem(key, f"{config.entropy_coef:g}", what, f"{rule.min:g}", why)
    if config.delta is not None and config.delta <= config.upper:
        what, found = "cuts into the clip range", f"{config.delta:g}"
        why = f"found {found}; must be above 1 + epsilon_high = {config.upper:g}"
        yield value_problem("algorithm.delta", found, what, "null, or a larger one", why)
    by_sequence = config.ratio_level == "sequence" and config.policy_loss == "clip"
    if config.epsilon_tokens is not None and (not by_sequence or config.delta is not None):
        what = "epsilon_tokens only widens the clip range of per-completion ratios"
        why = f"policy_loss is {config.policy_loss}, ratio_level {config.ratio_level}"
        why += f", delta {config.delta}"
        fix = "algorithm.ratio_level=sequence algorithm.policy_loss=clip algorithm.delta=null, or"
        fix += " algorithm.epsilon_tokens=null"
        yield Problem(what, "algorithm.epsilon_tokens", why, fix)


def _shaping_problems(config: Switches) -> Iterator[Problem]:
    limits, overlong, eos = config.reward_clip_range, config.overlong_penalty, config.eos_penalty
    if limits is not None and limits[0] >= limits[1]:
        key, found = "algorithm.reward_clip_range", f"[{limits[0]:g}, {limits[1]:g}]"
        fix, why = f"[{limits[1]:g},{limits[0]:g}], or null", "the first must be below the second"
        yield value_problem(key, found, "is empty", fix, why)
    if eos.mode == "subtract" and eos.value < 0:
        key, what = "algorithm.missing_eos_penalty", "rewards truncation"
        why = "it is subtracted from the score; must be 0 or more"
        fix = f"{-eos.value:g}, or {{mode: replace, value: {eos.value:g}}}"
        yield value_problem(key, f"{eos.value:g}", what, fix, why)
    if overlong is not None and overlong.cache > overlong.max_length:
        key, what = "algorithm.overlong_penalty.cache", "is more than the penalty's max_length"
        why = f"max_length is {overlong.max_length}: the penalty would start below 0 tokens"
        yield value_problem(key, overlong.cache, what, overlong.max_length // 5 or 1, why)


def _correction_problems(config: Switches, generation: GenerationConfig) -> Iterator[Problem]:
    rule = config.correction
    if rule.floor > rule.cap:
        what, why = "keeps no weight", f"floor {rule.floor:g} is above cap {rule.cap:g}"
        yield value_problem("algorithm.correction.floor", f"{rule.floor:g}", what, 0, why)
    region = rule.geometric_range
    if region is not None and not region[0] <= 1 <= region[1]:
        key, what = "algorithm.correction.geometric_range", "excludes an unchanged policy"
        why = f"1, the weight of an unchanged policy, is not in {region[0]:g} to {region[1]:g}"
        shown = f"[{region[0]:g}, {region[1]:g}]"
        yield value_problem(key, shown, what, "[0.8,1.25], or null", why)
    mode = common_config.correction_mode(config, generation.backend, generation.overlap)
    filters = inexact_settings(generation)
    if config.trust_region is not None and filters:
        what = "the sampler's probabilities cannot be compared with the policy's"
        why = f"generation.{', generation.'.join(filters)} cut or bend what is sampled"
        fix = f"{MASK_KEY}=true, or algorithm.trust_region=null"
        yield Problem(what, "algorithm.trust_region", why, fix)
    if mode == "none" or not filters:
        return
    off = {"top_p": "1.0", "top_k": "0", "min_p": "null", "repetition_penalty": "1.0"}
    off |= {"min_tokens": "0", "kwargs": "{}"}
    shown = rule.mode if rule.mode == mode else f"{rule.mode} ({mode} with {generation.backend})"
    yield Problem(
        "the sampler's log-probabilities cannot be corrected",
        "algorithm.correction.mode",
        f"correction.mode is {shown}, and generation.{', generation.'.join(filters)} change the"
        " sampling distribution, so its log-probabilities belong to another one",
        (f"{MASK_KEY}=true, or " if not inexact_settings(generation, with_masks=True) else "")
        + " ".join(f"generation.{f.split('=')[0]}={off[f.split('=')[0]]}" for f in filters)
        + ", or algorithm.correction.mode=none",
    )


def _minibatch_problems(config: Switches, num_prompts: int) -> Iterator[Problem]:
    n = config.num_minibatches
    if num_prompts % n == 0:
        return
    divisors = [d for d in range(1, num_prompts + 1) if num_prompts % d == 0]
    near = [max(d for d in divisors if d < n), min((d for d in divisors if d > n), default=0)]
    valid = " or ".join(str(d) for d in near if d)
    key, what = "algorithm.num_minibatches", "does not divide the step's prompts"
    why = f"train.prompts_per_step = {num_prompts} = {num_prompts // n} * {n} + {num_prompts % n}"
    sizes = dict.fromkeys((n * (num_prompts // n) or n, n * (num_prompts // n + 1)))
    multiples = " or ".join(map(str, sizes))
    yield value_problem(key, n, what, f"{valid}, or train.prompts_per_step={multiples}", why)


def _kl_warnings(config: Switches) -> Iterator[str]:
    if config.beta == 0:
        return
    if config.kl_in == "reward" and config.kl_estimator != "k1":
        yield (
            f"algorithm.kl_estimator={config.kl_estimator} in the reward does not have the"
            " gradient of KL(policy || reference); only k1 does"
        )
    if config.kl_in == "none":
        yield f"algorithm.kl_in=none: beta={config.beta:g} is ignored, KL is only logged"
    if config.kl_in != "loss" and config.kl_ratio_weighted:
        yield "algorithm.kl_ratio_weighted does nothing unless kl_in=loss"
    if config.kl_in == "reward" and config.mask_truncated_completions is True:
        yield (
            "algorithm.mask_truncated_completions=true leaves masked completions in the baseline"
            " without a KL, which favours them over their siblings; use drop"
        )
    if config.zero_std_groups == "drop":
        yield "algorithm.zero_std_groups=drop also drops those groups' KL gradient"
