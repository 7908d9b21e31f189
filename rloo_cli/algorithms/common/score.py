"""From the rewards' scores to one score per completion (docs/algorithms.md).

A NaN in `raw` means None: this reward does not apply to this completion. None is never 0; a
completion for which every reward returns None is unscorable and left out of baseline and loss.
Functions take the whole step at once: GDPO and normalize_rewards depend on all its completions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_cli.algorithms.common import dialect
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.family import masked_mean, masked_std, values_differ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

GDPO_EPS = 1e-4  # TRL's normalize_then_sum
NORM_EPS = 1e-8  # TRL 0.21's normalize_reward


def combine_scores(
    raw: Tensor, weights: Sequence[float], config: Switches
) -> tuple[Tensor, Tensor]:
    """One score per completion, and which completions have one.

    `raw` is float64, NaN = None; weights are not renormalized when some rewards are None. A reward
    of weight 0 is only a metric: it makes no completion scorable, otherwise None would become 0.
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
    score: Tensor, scorable: Tensor, lengths: Tensor, terminated: Tensor, config: Switches
) -> Tensor:
    """Overlong penalty, missing EOS, normalizing, clip: in this order, all before KL.

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
        # Equal scores are left unchanged; their float sums would give a std that is not quite 0.
        normalized = _normalize_along_rows(batch, mask, NORM_EPS).view_as(score)
        score = score.where(~values_differ(batch, mask), normalized)
    if config.reward_clip_range is not None and config.dialect not in dialect.CLIPS_ADVANTAGES:
        low, high = config.reward_clip_range
        score = score.clamp(low, high)
    return score.masked_fill(~scorable, 0.0)


def mask_truncated(scorable: Tensor, terminated: Tensor, config: Switches) -> tuple[Tensor, Tensor]:
    """mask_truncated_completions: which completions are in the baseline, and which in the loss.

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
