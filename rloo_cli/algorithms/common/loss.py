"""A micro-batch's share of an update's loss: policy term, KL, entropy (docs/OBJECTIVES.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common import aggregate, importance_weights, policy_loss
from rloo_cli.algorithms.common.kl import kl_loss_term

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.algorithms.common.config import Switches
    from rloo_cli.data.packing import MicroBatch


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's loss: S completions with N tokens."""

    logp: Tensor  # (N,) with gradient
    old_logp: Tensor  # (N,) of the policy before the step's first update
    ref_logp: Tensor | None  # (N,) of the reference; None = there is none
    micro_batch: MicroBatch  # which token is of which completion, and which count
    advantage: Tensor  # (S,), or (N,) where every token has its own
    denominator: float  # what the update's sum is divided by
    kl_logp: Tensor | None = None  # (N,) logp at the KL's temperature, where that is another
    entropy: Tensor | None = None  # (N,) with gradient where entropy_coef is not 0
    num_tokens: float = 1.0  # of the whole update, for the mean of the entropy
    divergence: Tensor | None = None  # (N,) from a teacher's whole distributions, with gradient


def micro_batch_loss(inputs: LossInputs, config: Switches) -> policy_loss.Loss:
    """A micro-batch's share of the update's loss: the `total`s and their gradients add up to it."""
    logp, old, ref = inputs.logp, inputs.old_logp, inputs.ref_logp
    micro_batch, advantage, denominator = inputs.micro_batch, inputs.advantage, inputs.denominator
    weights = importance_weights.correction_weights(old, micro_batch, config)
    base = importance_weights.ratio_base(old, micro_batch, config)
    rho = policy_loss.policy_ratios(logp, base, micro_batch, config, weights)
    term = policy_loss.policy_term(logp, rho, advantage, micro_batch, config, weights, logp - base)
    sampler_logp = importance_weights.sampler_logprobs(old, micro_batch)
    kept = policy_loss.off_policy_mask(logp, sampler_logp, advantage, micro_batch, config)
    if kept is not None:
        term = term * (kept if kept.shape == term.shape else kept[micro_batch.sequence_ids])
    policy = aggregate.aggregate_loss(term, micro_batch, config) / denominator
    penalty = bonus = policy.detach() * 0.0
    if ref is not None and config.kl_in == "loss":
        kl_logp = logp if inputs.kl_logp is None else inputs.kl_logp
        k = kl_loss_term(kl_logp, ref, logp - base, micro_batch, config)
        penalty = aggregate.aggregate_loss(k, micro_batch, config) / denominator
    if config.entropy_coef and inputs.entropy is not None:
        bonus = config.entropy_coef * (inputs.entropy * micro_batch.mask).sum() / inputs.num_tokens
    return policy_loss.build_loss(
        policy, penalty, rho, logp - base, advantage, micro_batch, config, weights, bonus
    )
