"""The policy term: ratios, clipping, and their metrics (docs/OBJECTIVES.md).

A unit has one ratio: it is a completion (ratio_level sequence or geometric) or a token. The
clipped surrogate is PPO's (arXiv 1707.06347, eq. 7), `delta` dual-clip PPO's (arXiv 1912.09729),
`geometric` GSPO's ratio (arXiv 2507.18071).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from rloo_cli.algorithms.common import loss_types
from rloo_cli.algorithms.common.importance_weights import Weights
from rloo_cli.config.schema import Frozen, key
from rloo_cli.data.segments import segment_mean, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch


class Config(Frozen):
    policy_loss: Literal["clip", "reinforce", "cispo", "sapo", "luspo", "vespo"] | None = key(
        "PPO's clipped ratio; log-probability times advantage (equal gradients on-policy); CISPO's"
        " capped weight, SAPO's soft gate, LUSPO's clip times length, VESPO's; null = by loss_type"
    )
    ratio_level: Literal["sequence", "token", "geometric"] | None = key(
        "One ratio per completion, per token, or per completion to the power 1/length; null = by"
        " loss_type"
    )
    epsilon: float = key("Clip the ratio below 1 - epsilon", ge=0)
    epsilon_high: float | None = key(
        "Clip the ratio above 1 + epsilon_high; null = epsilon. With cispo the cap of weights",
        ge=0,
    )
    epsilon_tokens: int | None = key(
        "Widen the clip range of a completion of T tokens, more than these, to the power"
        " sqrt(T / epsilon_tokens): (1 - epsilon)^s to (1 + epsilon_high)^s; null = one range",
        ge=1,
    )
    delta: float | None = key("Bounds the ratio for A<0, above 1 + epsilon_high; null = off", gt=1)
    log_ratio_clamp: float = key("Log-ratios are clamped to +- this, so exp is finite", gt=0)
    sapo_temperature_pos: float = key("policy_loss=sapo: steepness of the gate where A > 0", gt=0)
    sapo_temperature_neg: float = key("policy_loss=sapo: steepness of the gate where A <= 0", gt=0)
    allow_stale: bool = key("Let policy_loss=reinforce make several updates per step")
    off_policy_threshold: float | None = key(
        "Leave completions with A<0 out of the policy term whose tokens' log-probabilities fell by"
        " more than this on average since they were sampled; null = never",
        gt=0,
    )

    @property
    def upper(self) -> float:
        """1 + epsilon_high, epsilon where it is null."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def cap(self) -> float:
        """CISPO's largest weight, epsilon_high itself; infinite where it is null."""
        return float("inf") if self.epsilon_high is None else self.epsilon_high

    @property
    def clips(self) -> bool:
        """Whether ratios outside the clip range lose their gradient."""
        return self.policy_loss in ("clip", "luspo")


@dataclass(frozen=True)
class Loss:
    """One micro-batch's share of an update's loss, and the values its metrics need. U = N or S."""

    total: Tensor  # () with gradient: policy + kl
    policy: Tensor  # () detached
    kl: Tensor  # () detached, beta included; 0 unless kl_in=loss
    ratio: Tensor  # (U,) detached
    low: Tensor  # (U,) bool, ratio < 1 - epsilon and A < 0: clipped (never with reinforce)
    high: Tensor  # (U,) bool, ratio > 1 + epsilon_high and A > 0: clipped (never with reinforce)
    delta: Tensor  # (U,) bool, ratio > delta and A < 0
    unit_mask: Tensor  # (U,) bool, units that count: unmasked tokens, or completions with one
    row_low: Tensor  # (S,) share of a completion's units in `low`; 0 where it has none
    row_high: Tensor  # (S,) share of a completion's units in `high`
    log_ratio_sq: Tensor  # (U,) square of the completion's summed (or the token's) logp - old_logp
    weight: Tensor | None = None  # (N,) or (S,) correction weights; None = no correction
    raw_weight: Tensor | None = None  # (N,) or (S,) weights before the correction's mode
    capped: Tensor | None = None  # (U,) bool, cispo: ratio > cap and A > 0
    bonus: Tensor | None = None  # () detached, entropy_coef * entropy, which is subtracted
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # your own, by name, (N,) or (S,)


def policy_ratios(
    logp: Tensor,
    old_logp: Tensor,
    micro_batch: MicroBatch,
    config: Config,
    weights: Weights | None = None,
) -> Tensor:
    """exp(logp - old_logp) of each unit, with gradient. (N,), (N,) -> (U,)

    Token weights cannot multiply a completion's ratio, so there they weigh the gradient of its
    log: log rho = sg(sum of d) + sum_t w_t * (logp_t - sg(logp_t)), d = logp - old_logp.
    """
    d = micro_batch.mask * (logp - old_logp)
    if weights is not None and weights.by_token and config.ratio_level != "token":
        d = d.detach() + micro_batch.mask * weights.weight * (logp - logp.detach())
    if config.ratio_level == "sequence":
        d = _sum_by_sequence(d, micro_batch)
    elif config.ratio_level == "geometric":
        d = _mean_by_sequence(d, micro_batch)
    return d.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()


def clip_range(config: Config, micro_batch: MicroBatch) -> tuple[float | Tensor, float | Tensor]:
    """The ratios between which nothing is clipped; (S,) each with epsilon_tokens.

    The ratio of a completion is a product over its tokens: noise of sigma a token makes its log
    sigma * sqrt(T), and so do these bounds grow. Where T <= epsilon_tokens they are as written.
    """
    low, high = 1 - config.epsilon, config.upper
    if config.epsilon_tokens is None:
        return low, high
    tokens = _sum_by_sequence(micro_batch.mask, micro_batch)
    power = (tokens / config.epsilon_tokens).clamp(min=1).sqrt()
    return max(low, 0.0) ** power, high**power


def clipped_term(
    ratio: Tensor,
    advantage: Tensor,
    config: Config,
    bounds: tuple[float | Tensor, float | Tensor] | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1-epsilon, 1+epsilon_high) A), at most -delta A where A < 0.

    `bounds`: those of `clip_range`, where lengths move them. (U,), (U,) -> (U,)
    """
    low, high = bounds or (1 - config.epsilon, config.upper)
    inside = ratio.clamp(cast("Tensor", low), cast("Tensor", high))  # both numbers or both tensors
    gain = (ratio * advantage).minimum(inside * advantage)
    if config.delta is not None:
        gain = gain.where(advantage >= 0, gain.maximum(config.delta * advantage))
    return -gain


def policy_term(
    logp: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    micro_batch: MicroBatch,
    config: Config,
    weights: Weights | None,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """The policy's loss per unit, or per token where it is a factor times logp.

    `advantage` may be (N,) where terms are per token. Weights that `policy_ratios` applied do not
    multiply again. `log_ratio` (N,) is logp - old_logp, which only vespo needs.
    (N,), (U,), (S,) -> (U,) or (N,)
    """
    kind = config.policy_loss
    tokens = kind in ("reinforce", "cispo", "vespo") or config.ratio_level == "token"
    a = _to_tokens(advantage, micro_batch) if tokens else advantage
    if kind == "vespo":  # its weight contains the correction
        d = logp if log_ratio is None else log_ratio
        return loss_types.vespo_term(logp, d, a, micro_batch, weights)
    if kind == "reinforce":
        term = -a * logp
    elif kind == "cispo":
        term = loss_types.cispo_term(logp, _to_tokens(ratio, micro_batch), a, config.cap)
    elif kind == "sapo":
        term = loss_types.sapo_term(
            ratio, a, config.sapo_temperature_pos, config.sapo_temperature_neg
        )
    else:
        term = clipped_term(ratio, a, config, clip_range(config, micro_batch))
    if kind == "luspo":  # counts once for each of its tokens
        term = term * _sum_by_sequence(micro_batch.mask, micro_batch)
    if weights is None:
        return term
    if tokens:
        return term * _to_tokens(weights.weight, micro_batch)
    return term if weights.by_token else term * weights.weight


def off_policy_mask(
    logp: Tensor, sampler_logp: Tensor, advantage: Tensor, micro_batch: MicroBatch, config: Config
) -> Tensor | None:
    """What off_policy_threshold leaves in the policy term: DeepSeek-V3.2's sequence mask.

    `sampler_logp` has the sampler's log-probabilities, or old_logp where it has none. With an
    advantage per token, its own sign counts for each token.
    (N,), (N,), (S,) or (N,) -> bool as advantage; None = all
    """
    if config.off_policy_threshold is None:
        return None
    fall = _mean_by_sequence((sampler_logp - logp).detach(), micro_batch)
    near = fall <= config.off_policy_threshold
    near = near if near.shape == advantage.shape else near[micro_batch.sequence_ids]
    return near | (advantage >= 0)


def build_loss(
    policy: Tensor,
    kl: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    micro_batch: MicroBatch,
    config: Config,
    weights: Weights | None,
    bonus: Tensor | None = None,
) -> Loss:
    """The `Loss` from scalars with gradient, (U,) ratios, (N,) log-ratios, (S,) or (N,) A."""
    ratio, d = ratio.detach(), (micro_batch.mask * log_ratio).detach()
    unit = micro_batch.mask
    if config.ratio_level == "token":
        advantage = _to_tokens(advantage, micro_batch)
    else:
        d, unit = _sum_by_sequence(d, micro_batch), _sum_by_sequence(unit, micro_batch)
    counted = unit > 0
    if advantage.shape != unit.shape:  # kl_credit=to_go needs reinforce here: nothing clips
        advantage, counted = ratio.new_zeros(unit.shape), counted & False
    clips = counted & config.clips
    lowest, highest = clip_range(config, micro_batch)
    low = clips & (ratio < lowest) & (advantage < 0)
    high = clips & (ratio > highest) & (advantage > 0)
    capped = None
    if config.policy_loss == "cispo":
        capped = counted & (ratio > config.cap) & (advantage > 0)
    return Loss(
        total=policy + kl if bonus is None else policy + kl - bonus,
        policy=policy.detach(),
        kl=kl.detach(),
        ratio=ratio,
        low=low,
        high=high,
        delta=clips & (ratio > (config.delta or float("inf"))) & (advantage < 0),
        unit_mask=unit > 0,
        row_low=_flagged_share(low, micro_batch),
        row_high=_flagged_share(high, micro_batch),
        log_ratio_sq=d.square(),
        weight=None if weights is None else weights.weight,
        raw_weight=None if weights is None else weights.raw,
        capped=capped,
        bonus=None if bonus is None else bonus.detach(),
    )


def _flagged_share(flags: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Share of each completion's units that are flagged. (U,) -> (S,)"""
    share = flags.to(micro_batch.mask.dtype)
    return _mean_by_sequence(share, micro_batch) if _is_per_token(share, micro_batch) else share


def _sum_by_sequence(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Sum over the tokens of each completion. (N,) -> (S,)"""
    return segment_sum(values, micro_batch.sequence_ids, micro_batch.num_sequences)


def _mean_by_sequence(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Mean over the unmasked tokens of each completion. (N,) -> (S,)"""
    index, count = micro_batch.sequence_ids, micro_batch.num_sequences
    return segment_mean(values, micro_batch.mask, index, count)


def _is_per_token(values: Tensor, micro_batch: MicroBatch) -> bool:
    # Every completion has a token, so S = N only where each has one and both readings agree.
    return values.shape == micro_batch.sequence_ids.shape


def _to_tokens(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return values if _is_per_token(values, micro_batch) else values[micro_batch.sequence_ids]
