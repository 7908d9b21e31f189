"""A whole step's tokens at once, for algorithms in which every token has its own advantage.

They are computed once per step, on the CPU and identically on every rank, before the first update.
PPO and REINFORCE++ compute theirs from `Grid`; `credit_turns` is for any algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.family import estimate_kl
from rloo_cli.algorithms.common.hooks import StepTokens, TokenAdvantages

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.batch import Batch, Rollout

WHITE_EPS = 1e-8  # added to the variance


def collect_step_tokens(
    batch: Batch, indices: Sequence[tuple[int, int]], turn_weight: float | None = None
) -> tuple[StepTokens, list[int]]:
    """Flat columns of the completions with these (group, completion) indices, and their lengths.

    `turn_weight`: the weight of turns' rewards; None = their columns are not needed.
    """
    import torch  # lazy: the registry reads the algorithms' schemas without torch

    groups = batch.groups
    rollouts = [groups[i].rollouts[k] for i, k in indices]
    lengths = [r.length for r in rollouts]

    def column(name: str) -> Tensor | None:
        """A completion that was not forwarded has NaN, and a mask of 0."""
        by_group = [getattr(groups[i], name) for i, _ in indices]
        if all(values is None for values in by_group):
            return None
        parts = [
            torch.full((length,), float("nan")) if values is None else values[k]
            for values, (_, k), length in zip(by_group, indices, lengths, strict=True)
        ]
        return torch.cat(parts).double()

    sequence = torch.repeat_interleave(torch.arange(len(indices)), torch.tensor(lengths).long())
    out = torch.tensor([bool(batch.masked[i, k]) for i, k in indices], dtype=torch.bool)
    score = torch.tensor([float(batch.shaped[i, k]) for i, k in indices], dtype=torch.float64)
    old = column("kl_logp")
    old = column("old_logp") if old is None else old
    step = StepTokens(
        score=score,
        group=torch.tensor([i for i, _ in indices]).long(),
        sequence=sequence,
        mask=(~out)[sequence].double(),
        old=torch.zeros(0, dtype=torch.float64) if old is None else old,
        ref=column("ref_logp"),
        value=column("value"),
    )
    if turn_weight is not None:
        step = replace(step, **_turn_columns(rollouts, turn_weight))
    return step, lengths


def _turn_columns(rollouts: Sequence[Rollout], weight: float) -> dict[str, Tensor]:
    """The turn of each token, the number of turns, and their rewards."""
    import torch  # lazy: the registry reads the algorithms' schemas without torch

    episodes = [r.turns or [] for r in rollouts]
    width = max(map(len, episodes), default=0)
    turn = [t for turns in episodes for t, x in enumerate(turns) for _ in x.sampled_ids]
    rows = [[x.reward or 0.0 for x in turns] + [0.0] * (width - len(turns)) for turns in episodes]
    rewards = torch.tensor(rows, dtype=torch.float64).reshape(len(episodes), width)
    return {
        "turn": torch.tensor(turn).long(),
        "num_turns": torch.tensor([len(turns) for turns in episodes]).long(),
        "turn_reward": weight * rewards,
    }


class Grid:
    """The trained tokens of each completion (S, T), in order and without gaps, of columns (N,)."""

    def __init__(self, step: StepTokens):
        self.kept = step.mask > 0
        sequence = step.sequence[self.kept]
        ones = sequence.new_ones(len(sequence))
        self.count = sequence.new_zeros(len(step.score)).index_add(0, sequence, ones)
        before = self.count.cumsum(0) - self.count
        self.index = (sequence, ones.cumsum(0) - 1 - before[sequence])
        self.width = int(self.count.max()) if len(sequence) else 0

    def rows(self, column: Tensor) -> Tensor:
        """(N,) -> (S, T), 0 beyond a completion's last trained token."""
        out = column.new_zeros(len(self.count), self.width)
        return out.index_put(self.index, column[self.kept])

    def flat(self, rows: Tensor) -> Tensor:
        """(S, T) -> (N,), exactly 0 where the mask is 0."""
        return rows.new_zeros(len(self.kept)).masked_scatter(self.kept, rows[self.index])

    def at_end(self, score: Tensor) -> Tensor:
        """(S,) -> (S, T): each completion's score on its last trained token, 0 elsewhere."""
        out, trained = score.new_zeros(len(score), self.width), self.count > 0
        index = (trained.nonzero().squeeze(-1), (self.count - 1)[trained])
        return out.index_put(index, score[trained])


def discounted_sum_to_go(values: Tensor, factor: float) -> Tensor:
    """sum_{u>=t} factor^(u-t) x_u of each row. (S, T) -> (S, T)"""
    out, rest = values.clone(), values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        rest = values[:, t] + factor * rest
        out[:, t] = rest
    return out


def whiten_tokens(column: Tensor, mask: Tensor, centre: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked tokens, Bessel's variance; exactly 0 outside.

    Equal values are only centred, to exactly 0. `centre` False keeps the mean. (N,), (N,) -> (N,)
    """
    trained = mask > 0
    values = column[trained]
    if not len(values):
        return column * 0.0
    equal = bool(values.max() == values.min())
    mean = values[0] if equal else values.mean()
    white = values - mean
    if not equal:
        white = white / (white.square().sum() / (len(values) - 1) + WHITE_EPS).sqrt()
    if not centre:
        white = white + mean
    return column.new_zeros(len(column)).masked_scatter(trained, white)


def credit_turns(step: StepTokens, config: Switches) -> TokenAdvantages:
    """Advantages of every token with turn_rewards=credit, 0 where the mask is 0. (N,) -> (N,)

    An environment may return a reward after each turn. `turn_rewards: sum` adds these to its
    reward for the whole episode, `last` takes only the last one: the episode has one score,
    and one advantage. With `credit` the score is that of `sum`, and a turn's tokens get the
    rewards from that turn on. c_{i,u} is the reward of turn u of episode i, times the weight of its
    reward; n_i is its number of turns, s_i its score:

        G_{i,t} = s_i - beta KL_i - sum_{u<t} c_{i,u}             the return to go
        A_{i,t} = G_{i,t} - mean of G_{j,t} over the siblings j that have a turn t
                  (where none has one: over all siblings, each at its last turn)

    A sibling's returns do not depend on what this episode sampled, nor does whether it has a turn
    t, so the baseline does not change the expected gradient. A group in which no turn has its own
    reward, and all have the same number of turns, gets the advantages of leave-one-out.
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
    """Returns to go minus the mean of the siblings' at the same turn. (S, U), (S,), (S,) -> (S, U)

    `num_turns`: turns of each episode; entries of a row beyond them are ignored.
    `baseline` none: the returns unchanged.
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
            if not len(same):  # each at its last turn
                found = returns[siblings, (num_turns[siblings] - 1).clamp(min=0)]
            if len(found):
                out[i, t] = returns[i, t] - found.mean()
    return out


def _kl_penalties(step: StepTokens, config: Switches) -> tuple[Tensor, Tensor | None]:
    """beta * KL of each completion, (S,), and with kl_credit=to_go from each token on, (N,)."""
    if step.ref is None or not in_reward(config):
        return step.score * 0.0, None
    grid = Grid(step)  # without masked tokens, whose log-probabilities may be NaN
    k = config.beta * grid.rows(estimate_kl(step.old - step.ref, config))
    to_go = grid.flat(discounted_sum_to_go(k, 1.0)) if config.kl_credit == "to_go" else None
    return k.sum(1), to_go
