"""REINFORCE++ (arXiv 2501.03262): PPO's token rewards and clipping without a value model.

    e_t  = -beta * k1_t + [t = T] s_i                    token reward
    G_t  = sum_{u >= t} gamma^(u-t) e_u                  return to go
    A_t  = (G_t - mean) / sqrt(var + 1e-8)               over all trained tokens of the step
    loss = -mean_t min(rho_t A_t, clip(rho_t) A_t)       rho_t = pi(y_t) / pi_old(y_t)

minus_group_mean: G_t = s_i - group mean on every token, whitened likewise, and the KL (k2) in the
loss. A step whose scores are all equal is not whitened: that would enlarge its KL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from rloo_cli.algorithms.common import completion_rules, rules
from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.family import estimate_kl
from rloo_cli.algorithms.common.hooks import StepTokens, TokenAdvantages
from rloo_cli.algorithms.common.token_advantage import Grid, discounted_sum_to_go, whiten_tokens
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import RunConfig, key
from rloo_cli.utils.errors import Problem, clash_problems


class Config(Switches):
    only_with: ClassVar = {".minus_group_mean=false": ("gamma",)}

    name: Literal["reinforce_pp"] = key("REINFORCE++")
    gamma: float = key("Discount per token of what comes later", gt=0, le=1)
    minus_group_mean: bool = key("Score minus its group's mean on every token; KL in the loss")

    @property
    def by_token(self) -> bool:
        """Every token has its own advantage, which needs the whole step."""
        return True


def _own_problems(config: Config) -> Iterator[Problem]:
    """Settings that per-token advantages or KLs, or a group mean, do not support."""
    refused = {  # switch -> whether it is refused, why, the fix
        "baseline": (
            config.baseline != "none",
            "its baseline is the mean over the step's tokens",
            "none, or algorithm.minus_group_mean=true",
        ),
        "ratio_level": (
            not config.has_token_terms,
            "it gives every token its own advantage, but a completion has only one ratio",
            "token",
        ),
        "kl_credit": (
            in_reward(config) and config.kl_credit == "sequence",
            "with kl_in=reward a token is charged for its own KL and what comes after it",
            "to_go",
        ),
    }
    yield from completion_rules.switch_problems(config, f"algorithm={config.name}", refused)
    if not config.minus_group_mean:
        return
    mean, number = "algorithm.minus_group_mean", "algorithm.num_generations"
    no_kl = "algorithm.kl_in=loss algorithm.kl_estimator=k2 algorithm.kl_credit=sequence"
    why = "no token has its own reward, to which its KL could be added"
    alone = "a group's mean needs siblings"
    clashes = [
        (in_reward(config), mean, "algorithm.kl_in=reward", why, no_kl),
        (config.num_generations < 2, number, f"{number}=1", alone, f"{number}=4"),
    ]
    yield from clash_problems(f"{mean}=true", clashes)


class ReinforcePlusPlus(RLOO[Config]):
    """Every token is compared with all others of the step."""

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Returns to go of every token, whitened over the step. (N,) -> (N,)"""
        config, grid = self.config, Grid(step)
        if config.minus_group_mean:
            n = int(step.group.max()) + 1 if len(step.group) else 0
            count = step.score.new_zeros(n).index_add(0, step.group, step.score * 0.0 + 1.0)
            total = step.score.new_zeros(n).index_add(0, step.group, step.score)
            gain = (step.score - (total / count.clamp(min=1))[step.group])[step.sequence]
        else:
            earned = grid.at_end(step.score)
            if step.ref is not None and in_reward(config):
                k = estimate_kl(step.old - step.ref, config)
                earned = earned - config.beta * grid.rows(k)
            gain = grid.flat(discounted_sum_to_go(earned, config.gamma))
        if len(step.score) == 0 or bool(step.score.max() == step.score.min()):
            return TokenAdvantages(gain * step.mask, norm_skipped=True)
        return TokenAdvantages(whiten_tokens(gain, step.mask))

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """Settings without effect on whitened tokens, or in conflict."""
        yield from super().rules(run)
        yield from rules.whitening_problems(self.config)
        yield from _own_problems(self.config)
