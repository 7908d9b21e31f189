"""RLOO, REINFORCE leave-one-out: the formula (arXiv 2402.14740, after Kool et al. 2019).

A completion is one action. For the K completions y_i of a prompt, with scores s_i,

    r_i  = s_i - beta * sum_t (old_logp_t - ref_logp_t)      reward: score minus KL
    A_i  = r_i - mean of the K-1 siblings' r                 advantage: leave-one-out
    loss = -1/N sum_i min(rho_i A_i, clip(rho_i) A_i)        rho_i = pi(y_i) / pi_old(y_i)

over the N completions of an update; on-policy, where rho is 1, its gradient is REINFORCE's. The
other switches stand in the files beside this one, and so does the loss (`objective`). What another
algorithm's file does not say is as it is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rloo_cli.algorithms.common import advantage
from rloo_cli.algorithms.common.advantage import (
    Advantages,
    Known,
    needs_whole_step,
    remember,
    usable,
)
from rloo_cli.algorithms.common.aggregate import denominator
from rloo_cli.algorithms.common.forward_passes import early, forwarded, one_factor
from rloo_cli.algorithms.common.kl import in_reward, sequence_kl, to_go, token_advantages
from rloo_cli.algorithms.common.loss import loss
from rloo_cli.algorithms.common.rules import Switches, problems, resolved, warnings, why_separate
from rloo_cli.algorithms.common.score import combine, shape, truncation
from rloo_cli.algorithms.common.token_advantage import token_table, value_loss
from rloo_cli.config.schema import key

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Config", "advantages", "combine", "denominator", "early", "forwarded", "loss"]
__all__ += ["needs_whole_step", "one_factor", "problems", "remember", "resolved", "sequence_kl"]
__all__ += ["shape", "token_advantages", "token_table", "truncation", "usable", "value_loss"]
__all__ += ["warnings", "why_separate"]


class Config(Switches):
    name: Literal["rloo"] = key("REINFORCE leave-one-out")
    num_generations: int = key("Completions per prompt, at least 2 for a leave-one-out", ge=2)


def advantages(
    score: Tensor, kl: Tensor | None, scorable: Tensor, config: Switches, known: Known | None = None
) -> Advantages:
    """Rewards and advantages of whole groups, or of the whole step if `needs_whole_step`, from
    shaped scores and `sequence_kl` in float64, scorable bool: (P, K) each, and so back.
    """
    pull = config.beta * kl if kl is not None and in_reward(config) else score * 0.0
    reward = (score - pull).masked_fill(~scorable, 0.0)
    compared = reward if config.kl_in_baseline else score
    a = advantage.centred(compared, scorable, config, known or Known())
    rows = advantage.usable(scorable, config)
    a = advantage.limited(advantage.scaled(a, score, scorable, config), rows, config)
    if not config.kl_in_baseline and not to_go(config):  # to_go: token_advantages does it
        a = (a - pull).masked_fill(~rows, 0.0)
    return advantage.normalized(reward, a, score, rows, config)
