"""RLOO, REINFORCE leave-one-out: the formula (arXiv 2402.14740, after Kool et al. 2019).

A completion is one action. For the K completions y_i of a prompt, with scores s_i,

    r_i  = s_i - beta * sum_t (old_logp_t - ref_logp_t)      reward: score minus KL
    A_i  = r_i - mean of the K-1 siblings' r                 advantage: leave-one-out
    loss = -1/N sum_i min(rho_i A_i, clip(rho_i) A_i)        rho_i = pi(y_i) / pi_old(y_i)

over the N completions of an update; on-policy, where rho is 1, its gradient is REINFORCE's. The
other switches are in `common/`, and so is the loss (`common/loss.py`). The hooks that this class
does not define have the defaults of `common/base.py`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from rloo_cli.algorithms.common import advantage
from rloo_cli.algorithms.common.advantage import AdvantageInputs, Advantages
from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.kl import charges_kl_to_go, in_reward
from rloo_cli.config.schema import MAX_GENERATIONS, key


class Config(Switches):
    name: Literal["rloo"] = key("REINFORCE leave-one-out")
    num_generations: int = key(
        "Completions per prompt, at least 2 for a leave-one-out", ge=2, le=MAX_GENERATIONS
    )


C = TypeVar("C", bound=Switches, covariant=True)


class RLOO(Algorithm[C]):
    """The advantage is the reward minus the mean of the siblings' rewards, or another baseline."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards and advantages of whole groups. (P, K) each -> (P, K) each"""
        score, kl, config = inputs.score, inputs.kl, self.config
        penalty = config.beta * kl if kl is not None and in_reward(config) else score * 0.0
        reward = (score - penalty).masked_fill(~inputs.scorable, 0.0)
        compared = reward if config.kl_in_baseline else score
        a = advantage.subtract_baseline(compared, config, inputs)
        usable = advantage.usable_completions(inputs.scorable, config)
        a = advantage.scale_advantages(a, score, inputs.scorable, config)
        a = advantage.clip_advantages(a, usable, config)
        # With kl_credit=to_go the KL is subtracted token by token.
        if not config.kl_in_baseline and not charges_kl_to_go(config):
            a = (a - penalty).masked_fill(~usable, 0.0)
        return advantage.normalize_over_step(reward, a, usable, inputs, config)
