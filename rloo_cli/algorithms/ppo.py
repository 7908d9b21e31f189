"""PPO: an advantage for every token from a learned value (arXiv 1707.06347, 1506.02438).

A token is one action. For the trained tokens t = 1..T of a completion with score s, and the value
V_t that the value model predicted for the text before token t when the step began,

    e_t  = -beta * k_t + [t = T] s                    token reward: KL everywhere, score at the end
    D_t  = e_t + gamma V_{t+1} - V_t,  V_{T+1} = 0
    A_t  = sum_l (gamma lam)^l D_{t+l}                generalized advantage estimation
    R_t  = A_t + V_t                                  return: what the value is fitted to
    loss = mean_t -min(rho_t A'_t, clip(rho_t) A'_t)  rho_t = pi(y_t) / pi_old(y_t)
           + vf_coef/2 mean_t max((V - R_t)^2, (clip(V, V_t +- epsilon_value) - R_t)^2)

with A' = (A - mean) / sqrt(var + 1e-8) over all trained tokens of the step. Masked tokens are left
out: token t + 1 is the next trained one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rloo_cli.algorithms.common import completion_rules, rules
from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.family import estimate_kl
from rloo_cli.algorithms.common.hooks import StepTokens, TokenAdvantages, ValueLoss
from rloo_cli.algorithms.common.token_advantage import Grid, discounted_sum_to_go, whiten_tokens
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import RunConfig, key
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch


class Config(Switches):
    name: Literal["ppo"] = key("PPO with a value model and generalized advantage estimation")
    gamma: float = key("Discount per token of what comes later", gt=0, le=1)
    lam: float = key("GAE's lambda: 1 = whole returns, 0 = the next value alone", ge=0, le=1)
    vf_coef: float = key("Weight of the value model's loss", ge=0)
    epsilon_value: float = key(
        "Clip range of value predictions, around those at the step's start", gt=0
    )
    whiten_rewards: bool = key("Divide token rewards by their std over the step, without centring")

    @property
    def by_token(self) -> bool:
        """Every token has its own advantage, which needs the whole step."""
        return True


class PPO(RLOO[Config]):
    """Every token is compared with the prediction of the value model."""

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Whitened advantages of the step's tokens by GAE (1506.02438, eq. 16), and returns.

        (N,), (N,) -> (N,), (N,)
        """
        config = self.config
        if step.value is None:  # no completion was forwarded: all are unusable or masked
            assert not step.mask.any(), "ppo needs values"
            return TokenAdvantages(step.mask, step.mask)
        grid = Grid(step)
        e, v = grid.at_end(step.score), grid.rows(step.value)
        if step.ref is not None and in_reward(config):
            e = e - config.beta * grid.rows(estimate_kl(step.old - step.ref, config))
        if config.whiten_rewards:
            e = grid.rows(whiten_tokens(grid.flat(e), step.mask, centre=False))
        later = v * 0.0
        later[:, :-1] = v[:, 1:]
        a = discounted_sum_to_go(e + config.gamma * later - v, config.gamma * config.lam)
        return TokenAdvantages(whiten_tokens(grid.flat(a), step.mask), grid.flat(a + v))

    def value_loss(self, values: Tensor, micro: MicroBatch, num_tokens: float) -> ValueLoss:
        """A micro-batch's share of the value loss: shares add up to the update's mean per token.

        `num_tokens` are those of the whole update, `values` (N,) have a gradient. A token without
        a return is not in the loss.
        """
        config = self.config
        assert micro.returns is not None and micro.value is not None
        counted = (micro.mask > 0) & ~micro.returns.isnan()
        target = micro.returns.to(values.dtype).where(counted, values.detach())
        before = micro.value.to(values.dtype).where(counted, values.detach())
        near = before + (values - before).clamp(-config.epsilon_value, config.epsilon_value)
        plain, clipped = (values - target).square(), (near - target).square()
        mean = 0.5 * plain.maximum(clipped).where(counted, 0.0).sum() / num_tokens
        far = ((values - before).abs() > config.epsilon_value) & counted
        return ValueLoss(config.vf_coef * mean, mean.detach(), far, counted)

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """The settings that PPO does not support, besides the conflicts of every algorithm."""
        yield from super().rules(run)
        config = self.config
        yield from rules.whitening_problems(config)
        gae = "GAE gives every token its own advantage, whitened over the step"
        refused = {  # switch -> whether it is refused, why, the fix
            "kl_credit": (in_reward(config) and config.kl_credit == "sequence", gae, "to_go"),
            "ratio_level": (config.ratio_level != "token", gae, "token"),
        }
        yield from completion_rules.switch_problems(config, "algorithm=ppo", refused)
