"""From the rewards' scores to one score per completion (docs/OBJECTIVES.md).

A NaN in `raw` means None: this reward does not apply to this completion. None is never 0; a
completion for which every reward returns None is unscorable and left out of baseline and loss.
Functions take the whole step at once: GDPO and normalize_rewards depend on all its completions.
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
    cache: Positive = key("Tokens below max_length over which the penalty grows linearly from 0")
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
        """missing_eos_penalty, with a bare number as an `EosPenalty`."""
        eos = self.missing_eos_penalty
        return eos if isinstance(eos, EosPenalty) else EosPenalty(mode="subtract", value=eos)


def combine_scores(raw: Tensor, weights: Sequence[float], config: Config) -> tuple[Tensor, Tensor]:
    """One score per completion, and which completions have one.

    `raw` is float64, NaN = None; weights are not renormalised when some rewards are None. A reward
    of weight 0 is only a metric: it makes no completion scorable, else it would turn None into 0.
    (F, P, K), F -> score (P, K), 0 where there is none, scorable (P, K) bool
    """
    present = ~raw.isnan()
    if config.dialect in dialect.NONE_IS_ZERO:
        raw, present = raw.nan_to_num(0.0), present | True
    factor = raw.new_tensor(list(weights))[:, None, None]
    value = raw.masked_fill(~present, 0.0)
    scorable = (present & (factor != 0)).any(0)
    if config.multi_reward == "normalize_then_sum":
        value = _normalize_along_rows(value, present, GDPO_EPS)
        batch, mask = (value * factor).sum(0).reshape(1, -1), scorable.reshape(1, -1)
        return _normalize_along_rows(batch, mask, GDPO_EPS).view_as(scorable), scorable
    return (value * factor).sum(0), scorable


def shape_step_scores(
    score: Tensor, scorable: Tensor, lengths: Tensor, terminated: Tensor, config: Config
) -> Tensor:
    """Overlong penalty, missing EOS, normalising, clip: in this order, all before KL.

    `score` is float64, `lengths` count trained tokens. Unscorable completions stay 0. The overlong
    penalty is DAPO's (arXiv 2503.14476). (P, K), (P, K), (P, K), (P, K) -> (P, K)
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
        batch, mask = score.reshape(1, -1), scorable.reshape(1, -1)
        # Equal scores are left alone; their float sums would leave a std that is not quite 0.
        normalized = _normalize_along_rows(batch, mask, NORM_EPS).view_as(score)
        score = score.where(~values_differ(batch, mask), normalized)
    if config.reward_clip_range is not None and config.dialect not in dialect.CLIPS_ADVANTAGES:
        low, high = config.reward_clip_range
        score = score.clamp(low, high)
    return score.masked_fill(~scorable, 0.0)


def mask_truncated(scorable: Tensor, terminated: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """mask_truncated_completions: which completions count in the baseline, which leave the loss.

    `true` takes truncated completions out of the loss only; `drop` makes them unscorable as well.
    It is applied between `combine_scores` and `shape_step_scores`.
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
