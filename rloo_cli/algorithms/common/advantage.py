"""From rewards to advantages: baselines, division by a std, normalising (docs/OBJECTIVES.md).

Everything is float64, (P, K). Before every division by a std the raw values are compared with each
other: equal floats have a std of about 1e-9 and not of 0, and dividing by it would make a gradient
out of rounding (test vectors EQ and LOO-STD).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rloo_cli.algorithms.common import dialect
from rloo_cli.config.schema import Positive, key

if TYPE_CHECKING:
    from torch import Tensor

SCALE_EPS = 1e-4  # TRL's, for group and batch std and for normalize_advantages
LOO_STD_EPS = 1e-6  # NeMo RL's
EMA = 0.9  # the share of the moving average that stays in a step


class Config(dialect.Config):
    baseline: Literal["loo", "group_mean", "batch_mean", "ema", "greedy", "value", "none"] = key(
        "Subtracted from a reward: mean of its siblings, of its group, of the step; moving average"
        " of earlier steps; score of the greedy completion (remax); value model (ppo); 0"
    )
    advantage_scale: Literal["none", "group", "batch", "loo_std"] = key(
        "Divide advantages by the std of scores: of the group, the step, or the siblings"
    )
    normalize_advantages: bool = key("Centre the step's advantages and divide them by their std")
    zero_std_groups: Literal["keep", "drop", "resample"] = key(
        "Groups whose scores are all equal: train on them, leave them out, or take new prompts"
    )
    max_resample: Positive = key(
        "Most rounds of new prompts per step with zero_std_groups=resample"
    )


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of advantages: whole groups of one step, or the whole step."""

    score: Tensor  # (P, K) float64, shaped
    kl: Tensor | None  # (P, K) float64, of each completion; None = none is measured
    scorable: Tensor  # (P, K) bool, at least one reward gave a score
    state: Mapping[str, float] = field(default_factory=dict)  # `next_state` of the step before
    greedy_score: Tensor | None = None  # (P,) float64 of greedy completions; NaN = no score
    normalize: bool = True  # False for single micro-batches, whose gradient is scaled afterwards


@dataclass(frozen=True)
class Advantages:
    """The result of `Algorithm.advantages`."""

    reward: Tensor  # (P, K) float64, score minus beta * KL; 0 where unscorable
    advantage: Tensor  # (P, K) float64, exactly 0 outside `usable`
    usable: Tensor  # (P, K) bool, scorable completions whose group has enough of them
    norm_skipped: bool  # normalize_advantages was on, and its guard left the advantages as they are
    factor: float  # the factor of the normalisation: 1 / (std + 1e-4), or 1


def needs_whole_step(config: Config) -> bool:
    """Whether advantages depend on other groups; if not, groups may be computed separately."""
    by_step = config.baseline == "batch_mean" or config.advantage_scale == "batch"
    return by_step or config.normalize_advantages


def values_differ(values: Tensor, mask: Tensor) -> Tensor:
    """Whether any two of the masked values of a row are unequal. (G, K), (G, K) -> (G, 1) bool"""
    largest = values.masked_fill(~mask, -float("inf")).amax(-1, keepdim=True)
    return largest > values.masked_fill(~mask, float("inf")).amin(-1, keepdim=True)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked values of each row; 0 when there are none. (G, K), (G, K) -> (G, 1)"""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor) -> Tensor:
    """Std of the masked values, Bessel-corrected; 0 below two of them. (G, K), (G, K) -> (G, 1)"""
    square = ((values - masked_mean(values, mask)) * mask).square().sum(-1, keepdim=True)
    return (square / (mask.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


def usable_completions(scorable: Tensor, config: Config) -> Tensor:
    """Which completions can have an advantage: some need a sibling. (P, K) -> (P, K) bool"""
    if config.baseline in ("loo", "group_mean"):
        return scorable & (scorable.sum(-1, keepdim=True) >= 2)
    return scorable


def next_state(
    reward: Tensor, scorable: Tensor, config: Config, state: Mapping[str, float]
) -> dict[str, float]:
    """The state that later steps need: baseline=ema's average, and the weight in it.

    b <- .9 b + .1 mean reward, from 0; w <- .9 w + .1 is the share of b that is not that 0.
    (P, K), (P, K) ->
    """
    if config.baseline != "ema" or not bool(scorable.any()):
        return dict(state)
    mean = float(reward[scorable].mean())
    b, w = state.get("ema", 0.0), state.get("ema_weight", 0.0)
    return {"ema": EMA * b + (1 - EMA) * mean, "ema_weight": EMA * w + (1 - EMA)}


def subtract_baseline(values: Tensor, config: Config, inputs: AdvantageInputs) -> Tensor:
    """Values minus their baseline, 0 outside `usable`. (P, K) -> (P, K)

    loo: A_i = r_i - mean of the n-1 others = n/(n-1) * (r_i - group mean), in the second form
    (RLOO, arXiv 2402.14740; Kool et al. 2019). group_mean is (n-1)/n of it.
    """
    usable = usable_completions(inputs.scorable, config)
    if config.baseline in ("none", "value"):
        return values.masked_fill(~usable, 0.0)
    if config.baseline == "ema":  # of earlier steps, so it does not depend on the step's rewards
        weight = inputs.state.get("ema_weight", 0.0)
        b = inputs.state["ema"] / weight if weight else 0.0
        return (values - b).masked_fill(~usable, 0.0)
    if config.baseline == "greedy":
        assert inputs.greedy_score is not None
        return (values - inputs.greedy_score[:, None]).masked_fill(~usable, 0.0)
    pool, mask = _comparison_pool(values, usable, config)
    out = values - masked_mean(pool, mask)
    if config.baseline == "loo":
        n = usable.sum(-1, keepdim=True).to(values.dtype)
        out = out * n / (n - 1).clamp(min=1)
    return out.masked_fill(~(usable & values_differ(pool, mask)), 0.0)


def scale_advantages(advantage: Tensor, score: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Advantages divided by a std of scores; left alone where those scores are all equal.

    group, batch: GRPO, arXiv 2402.03300, with Bessel's correction. loo_std: NeMo RL, the std of
    the siblings' scores; with fewer than two siblings an advantage is not divided.
    (P, K), (P, K), (P, K) -> (P, K)
    """
    if config.advantage_scale == "none":
        return advantage
    eps = SCALE_EPS
    if config.advantage_scale == "batch":
        score, mask = score.reshape(1, -1), mask.reshape(1, -1)
    elif config.advantage_scale == "loo_std":
        eps = LOO_STD_EPS
        itself = score.new_ones(score.shape[-1]).diag().bool()
        score, mask = score[:, None, :].expand(-1, len(itself), -1), mask[:, None, :] & ~itself
    divisor = (masked_std(score, mask) + eps).masked_fill(~values_differ(score, mask), 1.0)
    return advantage / (divisor.squeeze(-1) if config.advantage_scale == "loo_std" else divisor)


def clips_advantages(config: Config) -> bool:
    """Whether reward_clip_range clips advantages: their mean over a group is then not 0."""
    limits = getattr(config, "reward_clip_range", None)
    return limits is not None and config.dialect in dialect.CLIPS_ADVANTAGES


def clip_advantages(advantage: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Advantages as they are, or in [low, high] of reward_clip_range where a dialect clips them.

    They are exactly 0 outside `mask`, even where the range excludes 0. (P, K), (P, K) -> (P, K)
    """
    if not clips_advantages(config):
        return advantage
    limits: list[float] = config.reward_clip_range  # type: ignore[attr-defined]
    return advantage.clamp(*limits).masked_fill(~mask, 0.0)


def normalize_over_step(
    reward: Tensor, advantage: Tensor, mask: Tensor, inputs: AdvantageInputs, config: Config
) -> Advantages:
    """(A - mean) / (std + 1e-4) over the step's usable completions, with normalize_advantages.

    Guard: where only KL differs between siblings, and no score does, dividing would enlarge
    beta * KL a thousandfold (NORM-KL). (P, K) each
    """
    if not (config.normalize_advantages and inputs.normalize):
        return Advantages(reward, advantage, mask, False, 1.0)
    flat, flat_mask = advantage.reshape(1, -1), mask.reshape(1, -1)
    telling = bool(values_differ(*_comparison_pool(inputs.score, mask, config)).any())
    guarded = config.dialect not in dialect.UNGUARDED and not telling
    if guarded or not bool(values_differ(flat, flat_mask)):
        return Advantages(reward, advantage, mask, True, 1.0)
    divisor = masked_std(flat, flat_mask) + dialect.NORM_EPS.get(str(config.dialect), SCALE_EPS)
    scaled = ((flat - masked_mean(flat, flat_mask)) / divisor).masked_fill(~flat_mask, 0.0)
    return Advantages(reward, scaled.view_as(advantage), mask, False, 1 / float(divisor))


def _comparison_pool(values: Tensor, mask: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The rows within which rewards are compared: groups, or the whole step as one row."""
    if config.baseline in ("loo", "group_mean"):
        return values, mask
    return values.reshape(1, -1), mask.reshape(1, -1)
