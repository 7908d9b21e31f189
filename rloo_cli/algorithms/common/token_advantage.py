"""A whole step's tokens at once, for algorithms in which every token has an advantage of its own.

They are computed once per step, on the CPU and on every rank alike, before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.batch import Batch, Rollout

WHITE_EPS = 1e-8  # added to the variance


@dataclass(frozen=True)
class StepTokens:
    """The completions of a step that are trained on, S of them, in float64; N sampled tokens."""

    score: Tensor  # (S,) shaped
    group: Tensor  # (S,) the index of the completion's group
    sequence: Tensor  # (N,) the index of the token's completion
    mask: Tensor  # (N,) 1 = trained on; all of them were sampled by the policy
    old: Tensor  # (N,) old_logp, at the KL's temperature
    ref: Tensor | None  # (N,) ref_logp; None = there is no reference
    value: Tensor | None  # (N,) values; None = there is no value model
    # With turn_rewards=credit, where every completion is an episode of up to U turns:
    turn: Tensor | None = None  # (N,) the index of the token's turn
    num_turns: Tensor | None = None  # (S,) turns that each has
    turn_reward: Tensor | None = None  # (S, U) what each turn earned, weighted; 0 = nothing


def collect_step_tokens(
    batch: Batch, indices: Sequence[tuple[int, int]], turn_weight: float | None = None
) -> tuple[StepTokens, list[int]]:
    """Flat columns of the completions with these (group, completion) indices, and their lengths.

    `turn_weight`: the weight of what turns earn; None = their columns are not needed.
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
    """Which turn each token is of, how many there are, and what they earned."""
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


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of `Algorithm.token_advantages`."""

    advantage: Tensor  # (N,) exactly 0 where the mask is
    returns: Tensor | None = None  # (N,) what the value model is fitted to
    norm_skipped: bool = False  # not whitened: no two scores of the step differ


class Grid:
    """The trained tokens of each completion (S, T), in order and without gaps, of columns (N,)."""

    def __init__(self, step: StepTokens):
        self.step, self.kept = step, step.mask > 0
        sequence = step.sequence[self.kept]
        ones = sequence.new_ones(len(sequence))
        self.count = sequence.new_zeros(len(step.score)).index_add(0, sequence, ones)
        before = self.count.cumsum(0) - self.count
        self.place = (sequence, ones.cumsum(0) - 1 - before[sequence])
        self.width = int(self.count.max()) if len(sequence) else 0

    def rows(self, column: Tensor) -> Tensor:
        """(N,) -> (S, T), 0 beyond a completion's last trained token."""
        out = column.new_zeros(len(self.count), self.width)
        return out.index_put(self.place, column[self.kept])

    def flat(self, rows: Tensor) -> Tensor:
        """(S, T) -> (N,), exactly 0 where the mask is."""
        return rows.new_zeros(len(self.kept)).masked_scatter(self.kept, rows[self.place])

    def at_end(self, score: Tensor) -> Tensor:
        """(S,) -> (S, T): each completion's score on its last trained token, 0 elsewhere."""
        out, trained = score.new_zeros(len(score), self.width), self.count > 0
        index = (trained.nonzero().squeeze(-1), (self.count - 1)[trained])
        return out.index_put(index, score[trained])

    @property
    def there(self) -> Tensor:
        """(S, T) bool: there is a trained token."""
        return self.rows(self.step.mask.clamp(max=1)) > 0


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
