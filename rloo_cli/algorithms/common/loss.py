"""A micro-batch's share of an update's loss: policy term, KL, entropy (docs/OBJECTIVES.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.algorithms.common import aggregate, importance_weights, policy_loss
from rloo_cli.algorithms.common.kl import loss_term

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.algorithms.common.config import Switches
    from rloo_cli.data.packing import Micro


def loss(
    logp: Tensor,
    old: Tensor,
    ref: Tensor | None,
    micro: Micro,
    advantage: Tensor,
    config: Switches,
    denominator: float,
    kl_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    tokens: float = 1.0,
) -> policy_loss.Loss:
    """A micro-batch's share of the update's loss: the `total`s and their gradients add up to it.

    logp (N,) with gradient, old and ref (N,) without; advantage (S,), or (N,) where every token
    has its own; kl_logp (N,) is logp at the temperature of the KL, if that differs; entropy (N,)
    with gradient, where a bonus is asked for, whose mean is over the update's `tokens`.
    """
    weights = importance_weights.weights(old, micro, config)
    base = importance_weights.ratio_base(old, micro, config)
    rho = policy_loss.ratios(logp, base, micro, config, weights)
    term = policy_loss.policy_term(logp, rho, advantage, micro, config, weights, logp - base)
    kept = policy_loss.kept(logp, importance_weights.sampled(old, micro), advantage, micro, config)
    if kept is not None:
        term = term * (kept if kept.shape == term.shape else kept[micro.sequence])
    policy = aggregate.total(term, micro, config) / denominator
    penalty = bonus = policy.detach() * 0.0
    if ref is not None and config.kl_in == "loss":
        k = loss_term(logp if kl_logp is None else kl_logp, ref, logp - base, micro, config)
        penalty = aggregate.total(k, micro, config) / denominator
    if config.entropy_coef and entropy is not None:
        bonus = config.entropy_coef * (entropy * micro.mask).sum() / tokens
    return policy_loss.measured(
        policy, penalty, rho, logp - base, advantage, micro, config, weights, bonus
    )
