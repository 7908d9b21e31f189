"""A whole step's tokens at once, for algorithms in which every token has an advantage of its own.

The loop asks once per step, on the CPU and on every rank alike, before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WHITE_EPS = 1e-8  # added to the variance


@dataclass(frozen=True)
class StepTokens:
    """The completions of a step that are trained on: S of them with N tokens, in float64."""

    score: Tensor  # (S,) shaped
    group: Tensor  # (S,) which prompt draw
    sequence: Tensor  # (N,) which completion
    mask: Tensor  # (N,) 1 = sampled by the policy and trained on
    old: Tensor  # (N,) log-probabilities, at the KL's temperature
    ref: Tensor | None  # (N,) the reference's; None = there is none
    value: Tensor | None  # (N,) the value model's; None = there is none


@dataclass(frozen=True)
class TokenAdvantages:
    """What an algorithm makes of it."""

    advantage: Tensor  # (N,) exactly 0 where the mask is
    returns: Tensor | None = None  # (N,) what the value model is fitted to
    norm_skipped: bool = False  # not whitened: no two scores of the step differ


class Grid:
    """Trained tokens of flat columns as rows (S, T), in order and without gaps, and back."""

    def __init__(self, step: StepTokens):
        self.step, self.kept = step, step.mask > 0
        row = step.sequence[self.kept]
        self.count = row.new_zeros(len(step.score)).index_add(0, row, row.new_ones(len(row)))
        before = self.count.cumsum(0) - self.count
        self.place = (row, row.new_ones(len(row)).cumsum(0) - 1 - before[row])
        self.width = int(self.count.max()) if len(row) else 0

    def rows(self, column: Tensor) -> Tensor:
        """(N,) -> (S, T), 0 beyond a row's last trained token."""
        out = column.new_zeros(len(self.count), self.width)
        return out.index_put(self.place, column[self.kept])

    def flat(self, rows: Tensor) -> Tensor:
        """(S, T) -> (N,), exactly 0 where the mask is."""
        return rows.new_zeros(len(self.kept)).masked_scatter(self.kept, rows[self.place])

    def at_end(self, score: Tensor) -> Tensor:
        """(S,) -> (S, T): each row's number on its last trained token, 0 elsewhere."""
        out = score.new_zeros(len(score), self.width)
        some = self.count > 0
        index = (some.nonzero().squeeze(-1), (self.count - 1)[some])
        return out.index_put(index, score[some])

    @property
    def there(self) -> Tensor:
        """(S, T) bool: a trained token stands here."""
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
    kept = mask > 0
    values = column[kept]
    if not len(values):
        return column * 0.0
    equal = bool(values.max() == values.min())
    mean = values[0] if equal else values.mean()
    moved = values - mean
    if not equal:
        moved = moved / (moved.square().sum() / (len(values) - 1) + WHITE_EPS).sqrt()
    if not centre:
        moved = moved + mean
    return column.new_zeros(len(column)).masked_scatter(kept, moved)
