"""Rules over the other metrics of a run: each returns a description with figures, or None.

The same rule judges a running run, by its last lines, and a whole run, by its last quarter. A
fault that looks different in a whole run has a second rule for it. Without data a rule is silent.
"""

import math
from collections.abc import Callable
from statistics import fmean, median, pstdev

from rloo_cli.reporting.health.evidence import Evidence

CLIP_SHARE = 0.2  # above it a fifth of the completions give no gradient: the policy moved too far
KL_STEPS, KL_FACTOR = 20, 3.0  # beta stops a drift this fast only after the damage
KL_FLOOR = 0.1  # nats per token; below it, tripling is only the way up from 0
KL_END = 1.0  # nats per token: each token e times as likely as under the reference
SMALL_KL = 1e-4  # nats per token at the end of a whole run
KL_JUMP = 10.0  # nats per completion in one step's updates
EARLY_STEPS = 4  # logged steps in which a high learning rate already shows
RATIO_LIMIT = 20.0  # a completion's ratio of new to old probability
UNCHANGED_SHARE = 1e-3  # of sampled weights that an update changes; 4096 are looked at
MIN_UPDATED_STEPS = 8  # with a gradient, before the rule fires
ENTROPY_SHARE = 0.1  # of the start's: then siblings are mostly equal and advantages 0
ZERO_STD_SHARE = 0.8  # above it four fifths of the sampling give no gradient
TRUNCATED_SHARE = 0.5  # above it most scores are of truncated texts
ALL_TRUNCATED_SHARE = 0.9  # of a whole run: hardly any completion ends on its own
ESS_SHARE = 0.5  # below it the correction's weights waste half of the batch
DEPTHS = (0, 64, 512, 4096)  # first positions of the bins of sampling/logp_diff_from<k>
DEPTH_FACTOR = 3.0  # of the sampler's gap late in completions to that of their first tokens
LOGP_FACTOR = 3.0  # growth of logp_diff_rms: sampler and trainer compute different models
LOGP_FLOOR = 0.04  # nats; bfloat16 alone gives .03 to .04, float32 .002
MISMATCH_RMS = 0.02  # nats; bfloat16 on both sides reaches that by rounding
FLOAT32_RMS = 0.004  # nats; two kernels of float32 differ by a thousandth, TF32 by .002
CLIPPED_UPDATES = 20  # fewer may be the start, where gradients are largest
NO_SIGNAL_STEPS = 20  # steps without two different scores in any group
MOST_COMMON_SHARE = 0.95  # of a step's completions are identical
FAILED_SHARE = 0.5  # of episodes without a score, or of failed calls
_KL_CAUSE = "the policy drifts from the reference, often by exploiting a weakness of the reward"


def updates_rounded_away(run: Evidence) -> str | None:
    """Hardly any weight changes in the dtype that computes and samples."""
    rates, norms = dict(run.metric_points("learning_rate")), dict(run.metric_points("grad_norm"))
    trained = [  # in steps with a gradient: otherwise no update could be rounded
        share
        for step, share in run.metric_points("update/changed_frac")
        if rates.get(step, 0.0) > 0 and norms.get(step, 0.0) > 0
    ]
    if len(trained) < MIN_UPDATED_STEPS or fmean(trained) >= UNCHANGED_SHARE:
        return None
    dtype = run.config_value("model.dtype")
    return (
        f"an update changes only {fmean(trained):.2%} of the weights (dtype {dtype}): the policy"
        " stays the same"
    )


def failing_calls(run: Evidence) -> str | None:
    """Episodes without a score, and calls that no tool answered."""
    failures, calls = run.end_mean("agent/failures"), run.end_mean("agent/calls")
    bad, errors = run.end_mean("agent/bad_calls"), run.end_mean("agent/errors")
    if failures is None or calls is None or bad is None or errors is None:
        return None
    if failures > FAILED_SHARE:
        return f"the environment of {failures:.0%} of the last episodes failed: they have no score"
    if bad + errors > FAILED_SHARE * max(calls, bad + errors):
        return (
            f"of {calls:.3g} calls per episode at the end, {bad:.3g} could not be parsed or"
            f" named an unknown tool or argument, and {errors:.3g} ended in an error of the tool"
        )
    if run.config_value("agent.kind") == "rollout":  # its function makes its own calls
        return None
    if not any(run.metric_values("agent/calls")) and not any(run.metric_values("agent/bad_calls")):
        return f"no tool was called in {run.steps} steps"
    return None


def rate_too_high(run: Evidence) -> str | None:
    """Ratios explode, an update moves the policy far, or the KL is large after a few steps."""
    ratios, jumps = run.metric_values("ratio/max"), run.metric_values("policy/approxkl_avg")
    exploded = [ratio for ratio in ratios if ratio > RATIO_LIMIT]
    if len(exploded) >= 2:
        most = f"at most {max(exploded):.3g}"
        return f"in {len(exploded)} steps a ratio is above {RATIO_LIMIT:g}, {most}"
    if sum(jump > KL_JUMP for jump in jumps) >= 2:
        return f"a step's updates move the policy by up to {max(jumps):.3g} nats"
    reward, early = run.start_and_end("reward"), run.metric_values("kl")[:EARLY_STEPS]
    if reward and early and max(early) > KL_END and reward[1] <= reward[0]:
        return f"kl is {max(early):.3g} after {len(early)} steps, but the reward has not risen"
    return None


def rate_too_low(run: Evidence) -> str | None:
    """The policy has not moved, and the reward is level."""
    kl, reward = run.end_mean("kl"), run.metric_values("reward")
    norms = run.metric_values("grad_norm")
    if kl is None or kl >= SMALL_KL or not norms or median(norms) <= 0 or len(reward) < 2:
        return None
    halves = reward[: len(reward) // 2], reward[len(reward) // 2 :]
    noise = pstdev(reward) / math.sqrt(max(1, len(reward) // 4))
    if abs(fmean(halves[1]) - fmean(halves[0])) > 2 * noise:
        return None
    rate = run.metric_values("learning_rate")[-1:]
    return (
        f"after {run.steps} steps the policy is {kl:.2g} nats per token from its start"
        f" (learning rate {rate[0] if rate else 0:g}), and the reward is level"
    )


def policy_clipping(run: Evidence) -> str | None:
    """The ratios of many completions are clipped."""
    share = run.recent_mean("clip_ratio/region_mean")
    if share is None or share <= CLIP_SHARE:
        return None
    return (
        f"clip_ratio/region_mean is {share:.2f}, over {CLIP_SHARE}: the policy moves so far in"
        " one step that its own completions are clipped away"
    )


def kl_rising(run: Evidence) -> str | None:
    """The KL grows fast."""
    values, now = run.recent_values("kl", KL_STEPS + 1), run.current_value("kl")
    if not values or now is None or now <= KL_FACTOR * max(values[0], KL_FLOOR):
        return None
    return f"kl went from {values[0]:.3g} to {now:.3g} in {KL_STEPS} steps: {_KL_CAUSE}"


def kl_far_away(run: Evidence) -> str | None:
    """The KL of a whole run is large at its end, however long it took."""
    kl = run.start_and_end("kl")
    if kl is None or kl[1] <= KL_END:
        return None
    return f"kl went from {kl[0]:.3g} to {kl[1]:.3g}: {_KL_CAUSE}"


def entropy_collapse(run: Evidence) -> str | None:
    """The policy became certain, in a whole run before it mastered its prompts."""
    # Over all completions if the sampler reports it, else over the forwarded ones, whose mean moves
    # with the share of groups that need no forward: these are the sure ones.
    name = "sampling/entropy" if "sampling/entropy" in run.metric_names() else "entropy"
    now, start = run.current_value(name), run.first_value(name)
    if now is None or start is None or start <= 0 or now >= ENTROPY_SHARE * start:
        return None
    if run.has_mastered():
        return None
    return (
        f"{name} fell from {start:.3g} to {now:.3g}: the completions of a prompt become equal,"
        " so the leave-one-out advantages vanish"
    )


def one_completion(run: Evidence) -> str | None:
    """Regardless of the reward: a policy that mastered its prompts answers them differently."""
    share = run.recent_mean("completions/most_common_frac")
    if share is None or share <= MOST_COMMON_SHARE:
        return None
    return (
        f"completions/most_common_frac is {share:.2f}, over {MOST_COMMON_SHARE}: different prompts"
        " get the same completion"
    )


def zero_spread(run: Evidence) -> str | None:
    """Most groups have no spread, and in a whole run not because the task is learnt."""
    # Groups kept by resampling have a spread; the discarded ones were paid for.
    sampled = "sampled_frac_reward_zero_std" in run.metric_names()
    name = "sampled_frac_reward_zero_std" if sampled else "frac_reward_zero_std"
    share = run.recent_mean(name)
    if share is None or share <= ZERO_STD_SHARE or run.is_learning():
        return None
    return (
        f"{name} is {share:.2f}: in most groups all completions score the same (all right or all"
        " wrong) and give no gradient"
    )


def no_signal(run: Evidence) -> str | None:
    """No group has had a spread for many steps."""
    values = run.recent_values("frac_reward_zero_std", NO_SIGNAL_STEPS)
    if not values or min(values) < 1.0:
        return None
    return (
        f"no learning signal for {NO_SIGNAL_STEPS} steps: in every group all scores were equal,"
        " so every advantage was 0"
    )


def many_truncated(run: Evidence) -> str | None:
    """Most completions are truncated."""
    share = run.recent_mean("completions/clipped_ratio")
    if share is None or share <= TRUNCATED_SHARE:
        return None
    return (
        f"completions/clipped_ratio is {share:.2f}: most completions hit the length limit, so the"
        " reward scores truncated texts"
    )


def all_truncated(run: Evidence) -> str | None:
    """Nearly all completions of a whole run are truncated, which the config does not intend."""
    share = run.recent_mean("completions/clipped_ratio")
    wanted = [run.config_value(f"generation.{key}") for key in ("min_tokens", "ignore_eos")]
    if share is None or share < ALL_TRUNCATED_SHARE or any(wanted):
        return None
    length = run.config_value("generation.max_completion_length")
    where = ", in their last turn" if run.metric_values("agent/turns") else ""
    return f"{share:.0%} of the last completions were truncated at {length} tokens{where}"


def low_ess(run: Evidence) -> str | None:
    """The correction's weights leave few completions."""
    share = run.recent_mean("sampling/ess")
    if share is None or share >= ESS_SHARE:
        return None
    return (
        f"sampling/ess is {share:.2f}, under {ESS_SHARE}: sampler and trainer disagree about the"
        " policy, and a few completions dominate the update"
    )


def logp_drift(run: Evidence) -> str | None:
    """Sampler and trainer drift apart."""
    name = "sampling/logp_diff_rms"
    now, start = run.recent_mean(name), run.first_value(name) or 0.0
    if run.recent_mean("staleness/mean"):  # older weights, an effect of generation.overlap
        return None
    if now is None or now <= LOGP_FACTOR * start or now <= LOGP_FLOOR:
        return None
    return (
        f"{name} went from {start:.3g} to {now:.3g}: sampler and trainer drift apart,"
        " by stale weights or a lower precision"
    )


def sampler_mismatch(run: Evidence) -> str | None:
    """Sampler and trainer of a whole run differ by more than rounding, early or late."""
    gap, lag = run.recent_mean("sampling/logp_diff_rms"), run.recent_mean("staleness/mean") or 0.0
    exact = lag == 0 and run.weights_dtype() == "float32"  # no rounding or update explains a gap
    if gap is None or gap < (FLOAT32_RMS if exact else MISMATCH_RMS):
        return None
    cause = (
        f"staleness: the weights that sampled are {lag:.2g} updates behind"
        if lag > 0
        else "numerics: the sampler had the same weights, so dtype or kernels differ"
    )
    return f"sampler and trainer differ by {gap:.3g} nats per token (root mean square); {cause}"


def mismatch_with_depth(run: Evidence) -> str | None:
    """Sampler and trainer agree at the start of completions and part late in them."""
    names = [f"sampling/logp_diff_from{first}" for first in DEPTHS]
    gaps = {name: gap for name in names if (gap := run.recent_mean(name)) is not None}
    if len(gaps) < 2:
        return None
    (first, early), (deepest, late) = next(iter(gaps.items())), list(gaps.items())[-1]
    if late < MISMATCH_RMS or late < DEPTH_FACTOR * early:
        return None
    return (
        f"{deepest} is {late:.3g} nats and {first} {early:.3g}: sampler and trainer agree at the"
        " start of completions and disagree late in them"
    )


def truncated_sampling(run: Evidence) -> str | None:
    """The config samples from another distribution than the gradient assumes."""
    limits: dict[str, Callable[[float], bool]] = {
        "top_p": lambda value: value < 1,
        "top_k": lambda value: value > 0,
        "min_p": lambda value: value > 0,
        "repetition_penalty": lambda value: value != 1,
    }
    if run.config_value("generation.return_sampling_mask") is True:  # the others are exact then
        limits = {"repetition_penalty": limits["repetition_penalty"]}
    set_keys = [
        f"generation.{name}={value:g}"
        for name, biased in limits.items()
        if isinstance(value := run.config_value(f"generation.{name}"), int | float)
        and biased(value)
    ]
    gap = run.end_mean("sampling/logp_diff_mean")
    if not set_keys:
        return None
    seen = f"; sampler and trainer differ by {gap:.3g} nats per token" if gap is not None else ""
    return f"{' and '.join(set_keys)}: the gradient assumes another distribution{seen}"


def every_update_clipped(run: Evidence) -> str | None:
    """For information: the gradient norm is above its limit in every update."""
    values = run.recent_values("grad_clip_fraction", CLIPPED_UPDATES)
    if not values or min(values) < 1.0:
        return None
    return (
        f"for information: every update was clipped for {CLIPPED_UPDATES} steps, which is normal"
        " with summed log-probabilities and only fixes each update's length"
    )
