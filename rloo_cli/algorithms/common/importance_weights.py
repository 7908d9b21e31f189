"""Importance weights for a sampler that differs from the trainer (docs/OBJECTIVES.md).

The sampler's log-probabilities (behaviour_logp) are not quite the trainer's (old_logp): other
kernels, other dtype, older weights. w = exp(old_logp - behaviour_logp) multiplies the policy term,
never the KL term, and has no gradient. TIS truncates it; MIS and IcePop drop weights outside
[floor, cap]. `geometric_range` is a trust region beside it: completions whose policy has moved too
far since they were sampled have the weight 0. The siblings' baseline needs no weight:
E_mu[w_i grad log pi(y_i) b_i] = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rloo_cli.config.schema import Frozen, key
from rloo_cli.data.segments import segment_mean, segment_sum
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

GeometricRange = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
# What correction.mode=auto stands for where completions are sampled with older weights: truncated
# token weights, and a trust region by the mean of a completion's tokens.
OVERLAP_CORRECTION = {
    "mode": "truncate", "level": "token", "cap": 2.0, "floor": 0.0, "geometric_range": [0.8, 1.25],
}  # fmt: skip
LARGEST = 20.0  # exponents are clamped to +-20, so that a weight is never infinite


class CorrectionConfig(Frozen):
    mode: Literal["auto", "none", "truncate", "mask", "filter", "bypass"] = key(
        "auto = truncate with vLLM, none with transformers, with generation.overlap as"
        " docs/overlap.md says; bypass = old_logp is the sampler's"
    )
    level: Literal["token", "sequence", "geometric"] = key(
        "What has a weight: tokens, completions, or completions by their mean; filter: see floor"
    )
    cap: float = key("Largest weight", gt=0)
    floor: float = key(
        "Smallest weight; filter drops completions whose geometric weight is not in [floor, cap]",
        ge=0,
    )
    geometric_range: GeometricRange | None = key(
        "Leave completions out of the policy term whose weight by their tokens' mean is outside,"
        " as [0.99, 1.01]; null = none"
    )


class Config(Frozen):
    correction: CorrectionConfig = key("Correction for a sampler whose log-probabilities differ")


@dataclass(frozen=True)
class Weights:
    """Correction weights: (N,) by token, else (S,)."""

    weight: Tensor  # (N,) or (S,), the factor of the policy term
    raw: Tensor  # (N,) or (S,) before the mode, for sampling/ess
    by_token: bool


def correction_mode(config: Config, backend: str, overlap: str = "none") -> str:
    """`correction.mode`, with auto resolved for a generation backend and its overlap."""
    mode = config.correction.mode
    return str(auto_correction(backend, overlap)["mode"]) if mode == "auto" else mode


def auto_correction(backend: str, overlap: str = "none") -> JsonObject:
    """The keys of `correction` that its mode auto stands for."""
    if overlap != "none":
        return dict(OVERLAP_CORRECTION)
    return {"mode": "none" if backend == "transformers" else "truncate"}


def correction_weights(old_logp: Tensor, micro_batch: MicroBatch, config: Config) -> Weights | None:
    """The weights at the configured level, or None where there are none to apply.

    A missing or NaN behaviour_logp counts as equal to old_logp. `filter` keeps or drops a
    completion by its geometric weight, and gives the kept ones their untruncated token weights.
    Raises ValueError for mode auto, which a run's config has resolved. (N,) -> (N,) or (S,)
    """
    rule = config.correction
    if rule.mode == "auto":
        raise ValueError("correction.mode is auto: train with what resolved_values says")
    if rule.mode in ("none", "bypass"):
        return None
    behaviour = sampler_logprobs(old_logp, micro_batch)
    delta = micro_batch.mask * (old_logp - behaviour).detach()
    level = "token" if rule.mode == "filter" else rule.level
    raw = _reduce_to_level(delta, micro_batch, level).clamp(-LARGEST, LARGEST).exp()
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
    weight = _reduce_to_level(delta, micro_batch, "geometric").exp()
    return weight[micro_batch.sequence_ids] if by_token else weight


def ratio_base(old_logp: Tensor, micro_batch: MicroBatch, config: Config) -> Tensor:
    """The denominator of the ratio: old_logp, or with bypass the sampler's. (N,) -> (N,)"""
    bypass = config.correction.mode == "bypass"
    return sampler_logprobs(old_logp, micro_batch) if bypass else old_logp


def sampler_logprobs(old_logp: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The sampler's log-probabilities, old_logp where they are missing. (N,) -> (N,)"""
    if micro_batch.behaviour_logp is None:
        return old_logp
    behaviour = micro_batch.behaviour_logp.to(old_logp.dtype)
    return behaviour.where(~behaviour.isnan(), old_logp)


def _reduce_to_level(delta: Tensor, micro_batch: MicroBatch, level: str) -> Tensor:
    if level == "token":
        return delta
    index, count = micro_batch.sequence_ids, micro_batch.num_sequences
    if level == "sequence":
        return segment_sum(delta, index, count)
    return segment_mean(delta, micro_batch.mask, index, count)
