"""The distance to the reference: estimators, and where they go (docs/OBJECTIVES.md, KL).

d = old_logp - ref_logp per sampled token: never the moving logp, so that with several updates per
step the penalty stays KL[pi_old || pi_ref]. Estimators: J. Schulman, "Approximating KL
divergence", 2020. In the reward only k1 has the gradient of KL(policy || reference); in the loss
k1 has none at all, k2 has that gradient and k3 the one of KL(reference || policy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rloo_cli.algorithms.common import dialect
from rloo_cli.config.schema import key
from rloo_cli.data.segments import segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

LARGEST = 20.0  # exponents are clamped to +-20


class Config(dialect.Config):
    beta: float = key("Weight of KL(policy || reference); 0 = no reference is loaded", ge=0)
    kl_in: Literal["reward", "loss", "none"] = key(
        "Subtracted from the score, added to the loss, or only logged"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "Per token, d = old_logp - ref_logp: d, d^2/2, or exp(-d) - 1 + d"
    )
    kl_in_baseline: bool = key(
        "The baseline is of score - beta*KL (a masked sibling has the KL 0); false = of the score"
        " alone"
    )
    kl_credit: Literal["sequence", "to_go"] = key(
        "Charge each token for its whole completion's KL, or only for the KL from itself on"
    )
    kl_temperature: Literal["sampling", "one"] = key(
        "KL of the policies at the sampling temperature, or at temperature 1"
    )
    kl_ratio_weighted: bool = key("kl_in=loss: multiply each token's KL by its ratio")

    @property
    def needs_reference(self) -> bool:
        """Whether a KL is measured, and so a reference model is needed."""
        return self.beta > 0 or self.kl_in == "none"


def estimate_kl(log_ratio: Tensor, config: Config) -> Tensor:
    """k1, k2 or k3 of d = log p - log q at samples of p, in nats. (N,) -> (N,)"""
    if config.dialect in dialect.SCORE_FUNCTION_KL:
        log_ratio = log_ratio.clamp(-LARGEST, LARGEST)
    k = log_ratio
    if config.kl_estimator == "k2":
        k = log_ratio.square() / 2
    elif config.kl_estimator == "k3":
        k = (-log_ratio).clamp(-LARGEST, LARGEST).expm1() + log_ratio
    limit = dialect.TOKEN_KL_LIMIT.get(str(config.dialect))
    return k if limit is None else k.clamp(-limit, limit)


def sequence_kl(
    old_logp: Tensor, ref_logp: Tensor, micro_batch: MicroBatch, config: Config
) -> Tensor:
    """KL_i, summed (not averaged) over each completion's unmasked tokens, in nats and float64.

    With kl_temperature=one, both log-probabilities are those at temperature 1.
    (N,), (N,) -> (S,)
    """
    k = micro_batch.mask * estimate_kl(old_logp.double() - ref_logp.double(), config)
    return segment_sum(k, micro_batch.sequence_ids, micro_batch.num_sequences)


def in_reward(config: Config) -> bool:
    """Whether rewards depend on the reference at all."""
    return config.kl_in == "reward" and config.beta > 0


def charges_kl_to_go(config: Config) -> bool:
    """Whether each token has an advantage of its own, by the KL that comes after it."""
    by_token = getattr(config, "by_token", False)  # then `token_advantages` has subtracted it
    return in_reward(config) and config.kl_credit == "to_go" and not by_token


def charge_tokens(
    advantage: Tensor,
    usable: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    micro_batch: MicroBatch,
    config: Config,
) -> Tensor:
    """With kl_credit=to_go, A_i - beta * sum_{u>=t} m*k per token; else A_i as it is.

    `usable` (S,) says which completions have an advantage: the tokens of others stay at 0. The
    tokens of a completion are neighbours and in order, as in a `MicroBatch`.
    (S,), (S,), (N,), (N,) -> (N,) or (S,)
    """
    if ref_logp is None or not charges_kl_to_go(config):
        return advantage
    k = micro_batch.mask * estimate_kl(old_logp.double() - ref_logp.double(), config)
    ends = segment_sum(k, micro_batch.sequence_ids, micro_batch.num_sequences).cumsum(0)
    rest = ends[micro_batch.sequence_ids] - k.cumsum(0) + k  # of this token and those after it
    spread = advantage[micro_batch.sequence_ids] - config.beta * rest
    return spread.masked_fill(~usable[micro_batch.sequence_ids], 0.0)


def kl_loss_term(
    logp: Tensor, ref_logp: Tensor, log_ratio: Tensor, micro_batch: MicroBatch, config: Config
) -> Tensor:
    """beta * k(logp - ref_logp) per token, with gradient, for kl_in=loss.

    kl_ratio_weighted multiplies by exp(log_ratio), with gradient, where `log_ratio` is the
    token's logp - old_logp: exact for k1 and k3, wrong for k2. (N,), (N,), (N,) -> (N,)
    """
    k = estimate_kl(logp - ref_logp, config)
    if config.dialect in dialect.SCORE_FUNCTION_KL:  # a factor of 1 with the gradient of logp,
        free = k.abs() < dialect.TOKEN_KL_LIMIT[str(config.dialect)]  # but where a clamp acted
        k = (k * (logp - logp.detach()).exp()).where(free, k)
    if config.kl_ratio_weighted:
        k = k * log_ratio.clamp(-LARGEST, LARGEST).exp()
    return config.beta * k
