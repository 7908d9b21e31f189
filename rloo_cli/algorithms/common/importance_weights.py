"""Importance weights for a sampler that differs from the trainer (docs/algorithms.md).

The sampler's log-probabilities (behaviour_logp) differ slightly from the trainer's (old_logp):
other kernels, dtype or weights. w = exp(old_logp - behaviour_logp) multiplies the policy term,
never the KL term, and has no gradient. TIS truncates it; MIS and IcePop drop weights outside
[floor, cap]. `geometric_range` is an additional trust region: completions whose policy has moved
too far since they were sampled get the weight 0. The siblings' baseline needs no weight:
E_mu[w_i grad log pi(y_i) b_i] = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.data.segments import segment_mean, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

LARGEST = 20.0  # exponents are clamped to +-20, so that a weight is never infinite


@dataclass(frozen=True)
class Weights:
    """Correction weights: (N,) by token, else (S,)."""

    weight: Tensor  # (N,) or (S,), the factor of the policy term
    raw: Tensor  # (N,) or (S,) before the mode, for sampling/ess
    by_token: bool


def correction_weights(
    old_logp: Tensor, micro_batch: MicroBatch, config: Switches
) -> Weights | None:
    """The weights at the configured level, or None if none apply.

    A missing or NaN behaviour_logp counts as equal to old_logp. `filter` keeps or drops a
    completion by its geometric weight, and gives the kept ones their untruncated token weights.
    Raises ValueError for mode auto, which a run's config has resolved. (N,) -> (N,) or (S,)
    """
    rule = config.correction
    if rule.mode == "auto":
        raise ValueError("correction.mode is auto: use resolved_values first")
    if rule.mode in ("none", "bypass"):
        return None
    behaviour = sampler_logprobs(old_logp, micro_batch)
    delta = micro_batch.mask * (old_logp - behaviour).detach()
    level = "token" if rule.mode == "filter" else rule.level
    raw = reduce_to_level(delta, micro_batch, level).clamp(-LARGEST, LARGEST).exp()
    weight = raw.clamp(rule.floor, rule.cap)
    if rule.mode != "truncate":
        bounded = raw if rule.mode == "mask" else _geometric_weight(delta, micro_batch, True)
        weight = raw.masked_fill(~((bounded >= rule.floor) & (bounded <= rule.cap)), 0.0)
    if rule.geometric_range is not None:
        lowest, highest = rule.geometric_range
        mean = _geometric_weight(delta, micro_batch, level == "token")
        weight = weight.masked_fill(~((mean >= lowest) & (mean <= highest)), 0.0)
    return Weights(weight, raw, level == "token")


def _geometric_weight(delta: Tensor, micro_batch: MicroBatch, by_token: bool) -> Tensor:
    """Each completion's weight by its tokens' mean. (N,) -> (N,) by token, else (S,)"""
    weight = reduce_to_level(delta, micro_batch, "geometric").exp()
    return weight[micro_batch.sequence_ids] if by_token else weight


def sampler_logprobs(old_logp: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The sampler's log-probabilities, old_logp if they are missing. (N,) -> (N,)"""
    if micro_batch.behaviour_logp is None:
        return old_logp
    behaviour = micro_batch.behaviour_logp.to(old_logp.dtype)
    return behaviour.where(~behaviour.isnan(), old_logp)


def reduce_to_level(values: Tensor, micro_batch: MicroBatch, level: str | None) -> Tensor:
    """Values of tokens unchanged (`token`), or their sum over the tokens of each completion
    (`sequence`), or their mean over its unmasked tokens (`geometric`). (N,) -> (N,) or (S,)"""
    if level == "token":
        return values
    index, count = micro_batch.sequence_ids, micro_batch.num_sequences
    if level == "sequence":
        return segment_sum(values, index, count)
    return segment_mean(values, micro_batch.mask, index, count)
