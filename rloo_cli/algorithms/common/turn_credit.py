"""Rewards of an episode's turns: as a part of its score, or as credit for its turns.

An environment may say after each turn what that turn earned. `turn_rewards: sum` adds these to what
it says of the whole episode, `last` takes the last one alone: the episode has one score, and one
advantage. With `credit` the score is that of `sum`, and a turn's tokens get what was earned from
that turn on. c_{i,u} is what turn u of episode i earned, times the weight of its reward; n_i are
its turns, s_i its score:

    G_{i,t} = s_i - beta KL_i - sum_{u<t} c_{i,u}             the return to go
    A_{i,t} = G_{i,t} - mean of G_{j,t} over the siblings j that have a turn t
              (where none has one: over all siblings, each at its last turn)

A sibling's returns do not depend on what this episode sampled, nor does whether it has a turn t, so
that the baseline changes no expected gradient. A group in which no turn has a reward of its own,
and all have as many turns, has the advantages of leave-one-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from rloo_cli.algorithms.common import dialect, kl
from rloo_cli.algorithms.common.token_advantage import (
    Grid,
    StepTokens,
    TokenAdvantages,
    discounted_sum_to_go,
)
from rloo_cli.config.schema import key
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.config.schema import RunConfig

ENVIRONMENT = "environment"  # the type of the reward through which turns' rewards are scored
# Policy losses with a term for every token, whatever ratio_level is.
TOKEN_LOSSES = ("reinforce", "cispo", "vespo")


class Config(dialect.Config):
    turn_rewards: Literal["sum", "last", "credit"] = key(
        "Rewards of an episode's turns: their sum, or the last one, is part of its score; credit ="
        " a turn's tokens get what is earned from that turn on"
    )

    @property
    def by_token(self) -> bool:
        """Whether each token has its own advantage, which needs the whole step's completions."""
        return self.turn_rewards == "credit"


def credit_turns(step: StepTokens, config: Any) -> TokenAdvantages:
    """Advantages of every token, exactly 0 where the mask is. (N,) -> (N,)

    `config`: an algorithm's switches, with `turn_rewards: credit`.
    """
    assert step.turn is not None and step.turn_reward is not None and step.num_turns is not None
    penalty, to_go = _kl_penalties(step, config)
    rewards = step.turn_reward
    returns = step.score[:, None] - (rewards.cumsum(1) - rewards)  # (S, U)
    if config.kl_in_baseline:
        returns = returns - penalty[:, None]
    advantage = subtract_turn_baseline(returns, step.num_turns, step.group, config.baseline)
    by_token = advantage[step.sequence, step.turn]
    if not config.kl_in_baseline:
        by_token = by_token - (penalty[step.sequence] if to_go is None else to_go)
    return TokenAdvantages(by_token.masked_fill(step.mask == 0, 0.0))


def subtract_turn_baseline(
    returns: Tensor, num_turns: Tensor, group: Tensor, baseline: str
) -> Tensor:
    """Returns to go less the mean of the siblings' at the same turn. (S, U), (S,), (S,) -> (S, U)

    `num_turns`: turns that each episode has; what a row holds beyond them means nothing.
    `baseline` none: the returns as they are.
    """
    if baseline == "none":
        return returns
    out = returns.clone()
    for i in range(len(returns)):
        siblings = (group == group[i]).nonzero().squeeze(-1)
        siblings = siblings[siblings != i]
        for t in range(int(num_turns[i])):
            same = siblings[num_turns[siblings] > t]
            found = returns[same, t]
            if not len(same):  # each at the last turn that it has
                found = returns[siblings, (num_turns[siblings] - 1).clamp(min=0)]
            if len(found):
                out[i, t] = returns[i, t] - found.mean()
    return out


def _kl_penalties(step: StepTokens, config: Any) -> tuple[Tensor, Tensor | None]:
    """beta * KL of each completion, (S,), and with kl_credit=to_go that of each token on, (N,)."""
    if step.ref is None or not kl.in_reward(config):
        return step.score * 0.0, None
    grid = Grid(step)  # without tokens that are masked, whose log-probabilities may be NaN
    k = config.beta * grid.rows(kl.estimate_kl(step.old - step.ref, config))
    to_go = grid.flat(discounted_sum_to_go(k, 1.0)) if config.kl_credit == "to_go" else None
    return k.sum(1), to_go


def turn_reward_problems(run: RunConfig, config: Any) -> Iterator[Problem]:
    """What turns' rewards do not go together with. `config`: the algorithm's switches."""
    how = config.turn_rewards
    if how == "sum":
        return
    if run.agent is None or not any(r.type == ENVIRONMENT for r in run.rewards.values()):
        why = "agent is null" if run.agent is None else "no reward is of the type environment"
        yield Problem(
            f"turn_rewards={how}, and no turn can have a reward",
            "algorithm.turn_rewards",
            f"{why}; an environment's turns are scored by reward=environment",
            "agent=class reward=environment, or algorithm.turn_rewards=sum",
        )
    if how == "credit":
        yield from _credit_problems(config)


def _credit_problems(config: Any) -> Iterator[Problem]:
    """Settings under which a turn has no advantage of its own, or which look at one score only."""
    fits: dict[str, tuple[bool, str]] = {  # key -> whether it fits, and the value that does
        "dialect": (config.dialect is None, "null"),
        "baseline": (config.baseline in ("loo", "none"), "loo"),
        "advantage_scale": (config.advantage_scale == "none", "none"),
        "normalize_advantages": (not config.normalize_advantages, "false"),
        "normalize_rewards": (not config.normalize_rewards, "false"),
        "multi_reward": (config.multi_reward == "sum", "sum"),
        "reward_clip_range": (config.reward_clip_range is None, "null"),
        "missing_eos_penalty": (config.eos_penalty.mode != "replace", "{mode: none, value: 0.0}"),
        "zero_std_groups": (config.zero_std_groups == "keep", "keep"),
        "ratio_level": (config.ratio_level == "token" or config.policy_loss in TOKEN_LOSSES,
                        "token"),
    }  # fmt: skip
    if config.name in ("ppo", "reinforce_pp"):
        yield Problem(
            f"{config.name} gives every token a credit of its own",
            "algorithm.turn_rewards",
            f"turn_rewards=credit with algorithm.name={config.name}",
            "algorithm.turn_rewards=sum, or algorithm=rloo",
        )
        return
    for name, (fit, value) in fits.items():
        if not fit:
            yield Problem(
                "turn_rewards=credit gives every turn an advantage of its own",
                f"algorithm.{name}",
                f"found {getattr(config, name)}, which is for one advantage of a whole completion",
                f"algorithm.{name}={value}, or algorithm.turn_rewards=sum",
            )
