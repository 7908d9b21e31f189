"""Conflicts between keys that stop a run before it starts, and combinations worth a warning.

Limits of a single key stand at the key. A problem names the key, the arithmetic and the ways out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, log, sqrt
from statistics import NormalDist

from rloo_cli.algorithms.common import completion_rules, dialect
from rloo_cli.algorithms.common import config as common_config
from rloo_cli.algorithms.common.config import Switches, num_updates_per_step, shared_switches
from rloo_cli.config.rules_sampling import MASK_KEY, inexact_settings
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.utils.errors import Problem

OWN_BASELINES = {"greedy": "remax", "value": "ppo"}  # baseline -> the only algorithm that has it
TOKEN_NOISE = 0.01  # log-ratio per token that kernels and one small update make
CLIPPED_SHARE = 0.1  # predicted share of completions clipped by that noise alone: warn above


def choice_problems(config: Switches) -> Iterator[Problem]:
    """Conflicts among the choices of the algorithm alone; `where` is the dotted key."""
    yield from _loss_problems(config)
    yield from _baseline_problems(config)


def whitening_problems(config: Switches) -> Iterator[Problem]:
    """Settings that centre or divide advantages which the algorithm's whitening replaces."""
    plain = {"advantage_scale": "none", "normalize_advantages": False, "kl_in_baseline": False}
    for name, value in plain.items():
        found = getattr(config, name)
        if found != value:
            yield Problem(
                f"{config.name} whitens the advantages of the step's tokens, and nothing else does",
                f"algorithm.{name}",
                f"found {str(found).lower()}; it would do nothing",
                f"algorithm.{name}={str(value).lower()}",
            )


def _loss_problems(config: Switches) -> Iterator[Problem]:
    for part in common_config.PARTS:
        if getattr(config, part) is None:
            yield Problem(
                f"{part} is not set",
                f"algorithm.{part}",
                "it is null, and so is algorithm.loss_type, which would set it",
                "algorithm.loss_type=dapo",
            )
    if config.policy_loss == "cispo" and (config.epsilon_high or 0) < 1:
        yield Problem(
            "CISPO's epsilon_high is the cap of its weights, not what 1 is exceeded by",
            "algorithm.epsilon_high",
            f"found {config.epsilon_high}: every weight of 1 and more would be cut",
            "algorithm.epsilon_high=5.0",
        )
    if config.policy_loss == "luspo" and config.ratio_level == "token":
        yield Problem(
            "LUSPO weighs a completion's one ratio by its length",
            "algorithm.ratio_level",
            "ratio_level=token with policy_loss=luspo",
            "algorithm.ratio_level=geometric",
        )


def _baseline_problems(config: Switches) -> Iterator[Problem]:
    for baseline, name in OWN_BASELINES.items():
        if (config.baseline == baseline) != (config.name == name):
            baseline_of = {algorithm: b for b, algorithm in OWN_BASELINES.items()}
            yield Problem(
                f"baseline={config.baseline} is not one of algorithm={config.name}",
                "algorithm.baseline",
                f"baseline={baseline} is what {name} is",
                f"algorithm.baseline={baseline_of.get(config.name, 'loo')}",
            )


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
    """Combinations that are allowed but seldom meant, in one sentence each."""
    config, generation = shared_switches(run), run.generation
    max_length, num_updates = generation.max_completion_length, num_updates_per_step(config)
    yield from dialect.dialect_differences(run, config.dialect)
    yield from _kl_warnings(config)
    yield from completion_rules.sibling_warnings(config)
    filters = inexact_settings(generation)
    mode = common_config.correction_mode(config, generation.backend, generation.overlap)
    if filters and mode == "none":
        yield f"generation.{', '.join(filters)}: logp does not describe what is sampled then"
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
    """Predicted share of completions that TOKEN_NOISE alone takes out of the clip range."""
    if config.ratio_level != "sequence" or config.policy_loss != "clip":
        return 0.0
    noise = NormalDist(sigma=TOKEN_NOISE * sqrt(num_tokens))
    power = sqrt(max(1.0, num_tokens / config.epsilon_tokens)) if config.epsilon_tokens else 1.0
    low = power * log(1 - config.epsilon) if config.epsilon < 1 else -inf
    return noise.cdf(low) + 1 - noise.cdf(power * log(config.upper))


def _kl_problems(config: Switches) -> Iterator[Problem]:
    if config.kl_ratio_weighted and config.kl_estimator == "k2":
        yield Problem(
            "a ratio-weighted k2 has the gradient of no KL",
            "algorithm.kl_ratio_weighted",
            "kl_ratio_weighted=true is exact for k1 and k3 only; kl_estimator is k2",
            "algorithm.kl_ratio_weighted=false, or algorithm.kl_estimator=k3",
        )
    alone = config.kl_estimator == "k1" and not config.kl_ratio_weighted
    if config.kl_in == "loss" and alone and config.beta > 0:
        yield Problem(
            "k1 in the loss does not pull towards the reference",
            "algorithm.kl_estimator",
            "kl_in=loss with kl_estimator=k1: its expected gradient is zero",
            "algorithm.kl_estimator=k3 (or k2), or algorithm.kl_in=reward",
        )
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
            "kl_credit=to_go gives every token an advantage of its own",
            "algorithm.kl_credit",
            f"to_go needs {' and '.join(missing)}",
            " ".join(m.split()[0] for m in missing)
            + ("" if config.by_token else ", or algorithm.kl_credit=sequence"),
        )


def _ratio_problems(config: Switches) -> Iterator[Problem]:
    n = num_updates_per_step(config)
    if config.policy_loss == "reinforce" and n > 1 and not config.allow_stale:
        yield Problem(
            "reinforce has no ratio, so later updates of a step are off-policy",
            "algorithm.policy_loss",
            f"num_iterations * num_minibatches = {config.num_iterations} *"
            f" {config.num_minibatches} = {n} updates per step; reinforce is exact for 1",
            "algorithm.policy_loss=clip, or algorithm.allow_stale=true",
        )
    if config.delta is not None and config.delta <= config.upper:
        yield Problem(
            "delta would cut into the clip range",
            "algorithm.delta",
            f"found {config.delta:g}; must be above 1 + epsilon_high = {config.upper:g}",
            "algorithm.delta=null, or a larger one",
        )
    by_sequence = config.ratio_level == "sequence" and config.policy_loss == "clip"
    if config.epsilon_tokens is not None and (not by_sequence or config.delta is not None):
        yield Problem(
            "epsilon_tokens widens the clip range of a completion's own ratio alone",
            "algorithm.epsilon_tokens",
            f"policy_loss is {config.policy_loss}, ratio_level {config.ratio_level}, delta"
            f" {config.delta}",
            "algorithm.ratio_level=sequence algorithm.policy_loss=clip algorithm.delta=null, or"
            " algorithm.epsilon_tokens=null",
        )


def _shaping_problems(config: Switches) -> Iterator[Problem]:
    limits, overlong, eos = config.reward_clip_range, config.overlong_penalty, config.eos_penalty
    if limits is not None and limits[0] >= limits[1]:
        yield Problem(
            "reward_clip_range is empty",
            "algorithm.reward_clip_range",
            f"found [{limits[0]:g}, {limits[1]:g}]; the first must be below the second",
            f"algorithm.reward_clip_range=[{limits[1]:g},{limits[0]:g}], or null",
        )
    if eos.mode == "subtract" and eos.value < 0:
        yield Problem(
            "missing_eos_penalty would reward truncation",
            "algorithm.missing_eos_penalty",
            f"{eos.value:g} is subtracted from the score; must be 0 or more",
            f"algorithm.missing_eos_penalty={-eos.value:g}, or"
            f" {{mode: replace, value: {eos.value:g}}}",
        )
    if overlong is not None and overlong.cache > overlong.max_length:
        yield Problem(
            "overlong_penalty starts below no tokens at all",
            "algorithm.overlong_penalty.cache",
            f"cache {overlong.cache} is more than max_length {overlong.max_length}",
            f"algorithm.overlong_penalty.cache={overlong.max_length // 5 or 1}",
        )


def _correction_problems(config: Switches, generation: GenerationConfig) -> Iterator[Problem]:
    rule = config.correction
    if rule.floor > rule.cap:
        yield Problem(
            "no correction weight can be kept",
            "algorithm.correction.floor",
            f"floor {rule.floor:g} is above cap {rule.cap:g}",
            "algorithm.correction.floor=0",
        )
    region = rule.geometric_range
    if region is not None and not region[0] <= 1 <= region[1]:
        yield Problem(
            "geometric_range leaves out completions whose policy has not moved",
            "algorithm.correction.geometric_range",
            f"found [{region[0]:g}, {region[1]:g}]; 1, the weight without any difference, must be"
            " inside",
            "algorithm.correction.geometric_range=[0.8,1.25], or null",
        )
    mode = common_config.correction_mode(config, generation.backend, generation.overlap)
    filters = inexact_settings(generation)
    if mode == "none" or not filters:
        return
    off = {"top_p": "1.0", "top_k": "0", "min_p": "null", "repetition_penalty": "1.0"}
    off |= {"min_tokens": "0", "kwargs": "{}"}
    shown = rule.mode if rule.mode == mode else f"{rule.mode} ({mode} with {generation.backend})"
    yield Problem(
        "the sampler's log-probabilities cannot be corrected",
        "algorithm.correction.mode",
        f"correction.mode is {shown}, and generation.{', generation.'.join(filters)} cut or bend"
        " what is sampled: its log-probabilities are those of another distribution",
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
    yield Problem(
        "the step's prompts do not divide into equal mini-batches",
        "algorithm.num_minibatches",
        f"train.prompts_per_step = {num_prompts} = {num_prompts // n} * {n} + {num_prompts % n}",
        f"algorithm.num_minibatches={valid}, or "
        f"train.prompts_per_step={n * (num_prompts // n) or n}"
        f" or {n * (num_prompts // n + 1)}",
    )


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
            " with no KL, so they look cheaper than their siblings; drop is advised"
        )
    if config.zero_std_groups == "drop":
        yield "algorithm.zero_std_groups=drop also drops those groups' pull towards the reference"
