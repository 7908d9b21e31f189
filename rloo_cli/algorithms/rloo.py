"""RLOO, REINFORCE leave-one-out (arXiv 2402.14740, after Kool et al. 2019), whole.

A completion is one action. For the K completions y_i of a prompt, with scores s_i,

    r_i   = s_i - beta * sum_t (old_logp_t - ref_logp_t)     reward: score minus KL
    A_i   = r_i - mean of the K-1 siblings' r                advantage: leave-one-out
    rho_i = pi(y_i) / pi_old(y_i)                            ratio: of the whole completion
    loss  = -1/B sum_i min(rho_i A_i, clip(rho_i) A_i)       clip: to [1 - epsilon, 1 + epsilon]

over the B completions of an update; on-policy, where rho is 1, its gradient is REINFORCE's. With
`correction.mode=truncate`, the default with vLLM, each term has a weight (`_sampler_weights`). A
config whose switches have the values of `PLAIN` computes this; for others, and for the relatives of
RLOO, see `common/family.py`. P prompts have K completions each; a micro-batch has S completions
with N tokens, of which token n belongs to the completion `sequence_ids[n]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.family import family_advantages
from rloo_cli.algorithms.common.hooks import AdvantageInputs, Advantages, Loss, LossInputs
from rloo_cli.config.schema import MAX_GENERATIONS, key

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

# The values of the switches that make the formula the one above.
PLAIN = {
    "dialect": None, "by_token": False,
    "kl_in": "reward", "kl_estimator": "k1", "kl_in_baseline": True, "kl_credit": "sequence",
    "baseline": "loo", "advantage_scale": "none", "normalize_advantages": False,
    "policy_loss": "clip", "ratio_level": "sequence", "loss_agg": "sequence_sum",
    "epsilon_tokens": None, "delta": None, "off_policy_threshold": None, "entropy_coef": 0.0,
    "adaptive_entropy": None, "top_entropy_quantile": 1.0, "trust_region": None, "pass_at_k": None,
}  # fmt: skip


class Config(Switches):
    name: Literal["rloo"] = key("REINFORCE leave-one-out")
    num_generations: int = key(
        "Completions per prompt, at least 2 for a leave-one-out", ge=2, le=MAX_GENERATIONS
    )


C = TypeVar("C", bound=Switches, covariant=True)


class RLOO(Algorithm[C]):
    """RLOO by the formula above, or with the switches of its family."""

    def __init__(self, config: C):
        super().__init__(config)
        rule = self.config.correction  # of a sampler whose log-probabilities are not old_logp
        truncated = rule.mode == "truncate" and rule.level == "sequence"
        corrects = truncated and rule.geometric_range is None
        plain = all(getattr(self.config, name) == value for name, value in PLAIN.items())
        self.is_plain = plain and (corrects or rule.mode == "none")

    def sequence_kl(self, old_logp: Tensor, ref_logp: Tensor, micro_batch: MicroBatch) -> Tensor:
        """sum_t (old_logp_t - ref_logp_t) of each completion, float64. (N,), (N,) -> (S,)"""
        if not self.is_plain:
            return super().sequence_kl(old_logp, ref_logp, micro_batch)
        return sum_tokens(old_logp.double() - ref_logp.double(), micro_batch)

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards, and each minus the mean of its siblings'. (P, K) each -> (P, K) each

        r_i - mean of the n - 1 siblings is computed as n / (n - 1) * (r_i - mean of all n). A
        completion that has no score, or no sibling with one, is not usable.
        """
        if not self.is_plain:
            return family_advantages(inputs, self.config)
        score, scorable = inputs.score, inputs.scorable  # (P, K)
        kl = score * 0.0 if inputs.kl is None else inputs.kl  # (P, K)
        reward = (score - self.config.beta * kl).masked_fill(~scorable, 0.0)  # (P, K)
        usable = scorable & (scorable.sum(-1, keepdim=True) >= 2)  # (P, K)
        n = usable.sum(-1, keepdim=True)  # (P, 1)
        mean = (reward * usable).sum(-1, keepdim=True) / n.clamp(min=1)  # (P, 1)
        advantage = (reward - mean) * n / (n - 1).clamp(min=1)  # (P, K)
        # Equal rewards have advantages of exactly 0, not the rounding error of their mean.
        highest = reward.masked_fill(~usable, -float("inf")).amax(-1, keepdim=True)  # (P, 1)
        lowest = reward.masked_fill(~usable, float("inf")).amin(-1, keepdim=True)  # (P, 1)
        advantage = advantage.masked_fill(~(usable & (highest > lowest)), 0.0)
        return Advantages(reward, advantage, usable, norm_skipped=False, factor=1.0)

    def loss(self, inputs: LossInputs) -> Loss:
        """A micro-batch's share of -1/B sum_i min(rho_i A_i, clip(rho_i) A_i), B = denominator."""
        if not self.is_plain:
            return super().loss(inputs)
        config, micro_batch, advantage = self.config, inputs.micro_batch, inputs.advantage  # (S,)
        log_rho = sum_tokens(inputs.logp - inputs.old_logp, micro_batch)  # (S,) with gradient
        rho = log_rho.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()  # (S,)
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        lowest, highest = 1 - config.epsilon, 1 + epsilon_high
        gain = (rho * advantage).minimum(rho.clamp(lowest, highest) * advantage)  # (S,)
        weight, raw_weight = self._sampler_weights(inputs.old_logp, micro_batch)  # (S,)
        term = -gain if weight is None else -gain * weight  # (S,)
        tokens = sum_tokens(micro_batch.mask, micro_batch)  # (S,)
        trained = tokens > 0  # (S,) False for completions that are masked
        total = (term * trained).sum() / inputs.denominator  # ()
        rho, log_rho = rho.detach(), log_rho.detach()
        low = trained & (rho < lowest) & (advantage < 0)  # (S,) no gradient: the clip acted
        high = trained & (rho > highest) & (advantage > 0)  # (S,)
        return Loss(
            total=total, policy=total.detach(), kl=total.detach() * 0.0, ratio=rho,
            low=low, high=high, delta=low & False, unit_mask=trained,
            row_low=low.to(tokens.dtype), row_high=high.to(tokens.dtype),
            log_ratio_sq=log_rho.square(), weight=weight, raw_weight=raw_weight,
        )  # fmt: skip

    def _sampler_weights(
        self, old_logp: Tensor, micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """pi_old(y_i) / mu(y_i) within its limits, for a sampler mu that is not exactly pi_old.

        -> the weights, and the weights before their limits; None, None without a correction. A
        token without a log-probability from mu counts as equally probable. (N,) -> (S,), (S,)
        """
        rule, behaviour = self.config.correction, micro_batch.behaviour_logp
        if rule.mode == "none":
            return None, None
        mu = old_logp if behaviour is None else behaviour.to(old_logp.dtype)  # (N,)
        mu = mu.where(~mu.isnan(), old_logp)
        raw = sum_tokens((old_logp - mu).detach(), micro_batch).clamp(-20.0, 20.0).exp()  # (S,)
        return raw.clamp(rule.floor, rule.cap), raw


def sum_tokens(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Sum over the trained tokens of each completion, whose mask is 1. (N,) -> (S,)"""
    zeros = values.new_zeros(micro_batch.num_sequences)
    return zeros.index_add(0, micro_batch.sequence_ids, micro_batch.mask * values)
