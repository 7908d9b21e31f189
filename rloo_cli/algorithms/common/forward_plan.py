"""Which forward passes an update needs, and which can be skipped exactly (README, Fast)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.family import usable_completions, values_differ

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.config.schema import RunConfig


@dataclass(frozen=True)
class ForwardPlan:
    """The forward passes of an update."""

    reference: bool  # the reference's log-probabilities are needed: a KL is measured
    value_model: bool  # a value model predicts the value of every token
    by_scores: bool  # advantages need no log-probability: they are known before the update
    separate: str | None  # why old_logp needs a separate pass; None = the training forward has it
    every_completion: bool  # none is skipped because its advantage is 0


def forward_plan(run: RunConfig, config: Switches) -> ForwardPlan:
    """The plan of a run. `config` is its algorithm's, with loss_type resolved."""
    # The KL term and the entropy bonus have a gradient in every completion.
    pulled = config.trains_kl_of_unscored or config.has_entropy_bonus
    ranked = config.top_entropy_quantile < 1  # among all tokens
    by_tokens = config.loss_agg == "token_mean_local"  # a mean over a micro-batch's tokens
    return ForwardPlan(
        reference=config.needs_reference or config.teacher_server is not None,
        value_model=config.baseline == "value",
        by_scores=needs_no_logprobs(config),
        separate=_separate_pass_reason(run, config),
        every_completion=pulled or ranked or by_tokens,
    )


def needs_no_logprobs(config: Switches) -> bool:
    """Whether advantages need no log-probability: no KL is in the reward."""
    return not in_reward(config) and not config.by_token


def needs_whole_step(config: Switches) -> bool:
    """Whether advantages depend on other groups; if not, groups may be computed separately."""
    by_step = config.baseline == "batch_mean" or config.advantage_scale == "batch"
    return by_step or config.normalize_advantages


def normalizes_by_one_factor(config: Switches) -> bool:
    """Whether normalizing is one factor of the whole gradient, known once all KLs are.

    The mean of whole groups' leave-one-out advantages is exactly 0, so (A - mean) / (std + eps) is
    A times one factor (C3). This fails with a baseline from outside the group, with a KL not
    in the baseline, with divisors that differ between siblings, and if advantages are clipped.
    The factor applies only to advantages: it must not multiply an entropy bonus.
    """
    grouped = config.compares_in_groups and config.kl_in_baseline
    alike = config.advantage_scale in ("none", "group") and not config.clips_advantages
    alone = not config.has_entropy_bonus
    return config.normalize_advantages and grouped and alike and alone


def _separate_pass_reason(run: RunConfig, config: Switches) -> str | None:
    """Why old_logp needs a separate pass; None if the training forward computes it.

    The latter needs one mini-batch (C1), no dropout (C4), and advantages that need no other group's
    KL (C3). Whether a group's completions share a micro-batch (C2) depends on their lengths: the
    loop checks it in each step. The sampler correction is compatible: it only reads old_logp.
    """
    if config.by_token:
        return "per-token advantages need the whole step first"
    if config.top_entropy_quantile < 1:
        return "which tokens are trained on is known from all entropies (top_entropy_quantile)"
    if run.train.old_logp == "separate":
        return "train.old_logp=separate"
    if config.num_minibatches > 1:
        return "several optimizer steps per pass (algorithm.num_minibatches)"
    if not run.model.disable_dropout:
        return "dropout may be on (model.disable_dropout=false)"
    one_pass = needs_no_logprobs(config) or normalizes_by_one_factor(config)
    if one_pass or not needs_whole_step(config):
        return None
    return "advantages need every group's KL before the first update"


def needed_completions(
    score: Tensor, scorable: Tensor, masked: Tensor, config: Switches, plan: ForwardPlan
) -> Tensor:
    """The completions whose log-probabilities affect the update.

    Masked ones have neither loss nor KL. Those without a score, or without a sibling that has one,
    have no advantage; nor has a group of equal scores, if no KL is in the reward and no clipping
    or normalizing moves its advantages away from 0. (This is decided from the scores: an
    A of 0 may be computed with a rounding error, which normalizing divides by 1e-4.)
    (P, K), (P, K) bool, (P, K) bool -> (P, K) bool
    """
    needed = ~masked
    if plan.every_completion:
        return needed
    needed = needed & usable_completions(scorable, config)
    # If the mean of advantages is not 0, normalizing also moves those of equal scores.
    moved = config.normalize_advantages and config.advantage_scale == "loo_std"
    moved = moved or config.clips_advantages  # to a range that may exclude 0
    logged = config.kl_in == "none" and config.beta > 0  # a KL that is only logged covers all
    if config.compares_in_groups and plan.by_scores and not moved and not logged:
        needed = needed & values_differ(score, scorable)
    return needed
