"""From what the rewards say to one score per completion (docs/OBJECTIVES.md).

A NaN in `raw` means None: this reward does not apply to this row. None is never 0; a row for
which every reward says None is unscorable and leaves the baseline and the loss. Both functions
want the whole step at once: GDPO and normalize_rewards look at all of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rloo_cli.algorithms.common import dialect
from rloo_cli.algorithms.common.advantage import masked_mean, masked_std, values_differ
from rloo_cli.config.schema import Frozen, Positive, key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

GDPO_EPS = 1e-4  # TRL's normalize_then_sum
NORM_EPS = 1e-8  # TRL 0.21's normalize_reward


class EosPenalty(Frozen):
    mode: Literal["none", "subtract", "replace"] = key(
        "Score of a truncated completion: as it is, minus value, or value"
    )
    value: float = key("Score units: above 0 to subtract; the new score to replace with")


class OverlongPenalty(Frozen):
    max_length: Positive = key("Tokens from which on the whole penalty of -weight is added")
    cache: Positive = key("Tokens below max_length over which it grows from 0, linearly")
    weight: float = key("Score units, the size of the whole penalty", ge=0)


class Config(dialect.Config):
    multi_reward: Literal["sum", "normalize_then_sum"] = key(
        "Weighted sum, or GDPO: each reward normalised in its group, then the sum over the step"
    )
    normalize_rewards: bool = key("Centre the step's scores and divide them by their std")
    reward_clip_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = key(
        "Clip shaped scores, before KL, to [lo, hi]; null = no clip"
    )
    missing_eos_penalty: EosPenalty | float = key(
        "Truncated completions: {mode, value}; a bare number is subtracted from their score"
    )
    overlong_penalty: OverlongPenalty | None = key(
        "DAPO's length penalty {max_length, cache, weight}; null = none"
    )
    mask_truncated_completions: bool | Literal["drop"] = key(
        "Truncated completions: true = out of the loss only, drop = out of the baseline too"
    )

    @property
    def eos_penalty(self) -> EosPenalty:
        """missing_eos_penalty, a bare number written out."""
        found = self.missing_eos_penalty
        return found if isinstance(found, EosPenalty) else EosPenalty(mode="subtract", value=found)


def combine_scores(raw: Tensor, weights: Sequence[float], config: Config) -> tuple[Tensor, Tensor]:
    """One score per row, and which rows have one. Weights are not renormalised when some are None.

    `raw` is the step's (F, P, K) float64, NaN = None; `weights` the F rewards' weights. A reward
    of weight 0 is only a metric: it makes no row scorable, else it would turn None into 0.
    Returns score (P, K), 0 where there is none, and scorable (P, K) bool.
    (F, P, K), F -> (P, K), (P, K)
    """
    given = ~raw.isnan()
    if config.dialect in dialect.NONE_IS_ZERO:
        raw, given = raw.nan_to_num(0.0), given | True
    factor = raw.new_tensor(list(weights))[:, None, None]
    value = raw.masked_fill(~given, 0.0)
    scorable = (given & (factor != 0)).any(0)
    if config.multi_reward == "normalize_then_sum":
        value = _normalize_along_rows(value, given, GDPO_EPS)
        batch = (value * factor).sum(0).reshape(1, -1)
        return _normalize_along_rows(batch, scorable.reshape(1, -1), GDPO_EPS).view_as(
            scorable
        ), scorable
    return (value * factor).sum(0), scorable


def shape_step_scores(
    score: Tensor, scorable: Tensor, lengths: Tensor, terminated: Tensor, config: Config
) -> Tensor:
    """Overlong penalty, missing EOS, normalising, clip: in this order, all before KL.

    Of the whole step: score (P, K) float64, scorable (P, K) bool, lengths (P, K) trained tokens,
    terminated (P, K) bool. Unscorable rows stay 0. Overlong is DAPO's (arXiv 2503.14476).
    (P, K), (P, K), (P, K), (P, K) -> (P, K)
    """
    if config.overlong_penalty is not None:
        rule = config.overlong_penalty
        over = (rule.max_length - rule.cache - lengths.to(score.dtype)) / rule.cache
        score = score + rule.weight * over.clamp(-1, 0)
    eos = config.eos_penalty
    if eos.mode == "subtract":
        score = score - eos.value * (~terminated).to(score.dtype)
    elif eos.mode == "replace":
        score = score.masked_fill(~terminated, eos.value)
    if config.normalize_rewards:
        batch, rows = score.reshape(1, -1), scorable.reshape(1, -1)
        # Equal scores are left alone; their float sums would leave a std that is not quite 0.
        score = score.where(
            ~values_differ(batch, rows), _normalize_along_rows(batch, rows, NORM_EPS).view_as(score)
        )
    if config.reward_clip_range is not None and config.dialect not in dialect.CLIPS_ADVANTAGES:
        low, high = config.reward_clip_range
        score = score.clamp(low, high)
    return score.masked_fill(~scorable, 0.0)


def mask_truncated(scorable: Tensor, terminated: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """mask_truncated_completions: which rows still count in the baseline, which leave the loss.

    `true` takes truncated rows out of the loss only; `drop` makes them unscorable as well. Apply
    between `combine` and `shape`; the second result is `pack`'s `dropped`.
    (P, K), (P, K) -> scorable (P, K), masked (P, K)
    """
    if config.mask_truncated_completions is False:
        return scorable, scorable.new_zeros(scorable.shape)
    kept = scorable & terminated if config.mask_truncated_completions == "drop" else scorable
    return kept, ~terminated


def _normalize_along_rows(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Centred and divided by std + eps along the last axis; exactly 0 where all are equal."""
    moved = (values - masked_mean(values, mask)) / (masked_std(values, mask) + eps)
    return moved.masked_fill(~(mask & values_differ(values, mask)), 0.0)
