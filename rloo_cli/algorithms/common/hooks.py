"""Inputs and outputs of an algorithm's hooks (base.py).

P prompts with K completions each; a micro-batch has S completions with N sampled tokens. A unit
has one ratio to the old policy: a token or a completion, U = N or S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of advantages: whole groups of one step, or the whole step."""

    score: Tensor  # (P, K) float64, shaped
    kl: Tensor | None  # (P, K) float64, per completion; None = not measured
    scorable: Tensor  # (P, K) bool, at least one reward gave a score
    state: Mapping[str, float] = field(default_factory=dict)  # `next_state` of the step before
    greedy_score: Tensor | None = None  # (P,) float64 of greedy completions; NaN = no score
    normalize: bool = True  # False for single micro-batches: their gradient is scaled later


@dataclass(frozen=True)
class Advantages:
    """The result of `Algorithm.advantages`."""

    reward: Tensor  # (P, K) float64, score minus beta * KL; 0 where unscorable
    advantage: Tensor  # (P, K) float64, exactly 0 outside `usable`
    usable: Tensor  # (P, K) bool, scorable completions whose group has enough of them
    norm_skipped: bool  # the guard of normalize_advantages left them unchanged
    factor: float  # the factor of the normalization: 1 / (std + 1e-4), or 1


@dataclass(frozen=True)
class StepTokens:
    """The completions of a step that are trained on, S of them, in float64; N sampled tokens."""

    score: Tensor  # (S,) shaped
    group: Tensor  # (S,) the index of the completion's group
    sequence: Tensor  # (N,) the index of the token's completion
    mask: Tensor  # (N,) 1 = trained on, 0 = left out; all N are sampled
    old: Tensor  # (N,) old_logp, at the KL's temperature
    ref: Tensor | None  # (N,) ref_logp; None without a reference
    value: Tensor | None  # (N,) values; None without a value model
    # With turn_rewards=credit, if every completion is an episode of up to U turns:
    turn: Tensor | None = None  # (N,) the index of the token's turn
    num_turns: Tensor | None = None  # (S,) turns of each
    turn_reward: Tensor | None = None  # (S, U) weighted reward of each turn; 0 = none


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of `Algorithm.token_advantages`."""

    advantage: Tensor  # (N,) exactly 0 where the mask is 0
    returns: Tensor | None = None  # (N,) targets of the value model
    norm_skipped: bool = False  # not whitened: all scores of the step are equal


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's loss: S completions with N tokens."""

    logp: Tensor  # (N,) with gradient
    old_logp: Tensor  # (N,) of the policy before the step's first update
    ref_logp: Tensor | None  # (N,) of the reference; None = no reference
    micro_batch: MicroBatch  # which token belongs to which completion, and which count
    advantage: Tensor  # (S,), or (N,) where every token has its own
    denominator: float  # what the update's sum is divided by
    kl_logp: Tensor | None = None  # (N,) logp at the KL's temperature, if different
    entropy: Tensor | None = None  # (N,) with gradient if entropy_coef is not 0
    num_tokens: float = 1.0  # of the whole update, for the mean of the entropy
    divergence: Tensor | None = None  # (N,) from a teacher's whole distributions, with gradient
    chosen: Tensor | None = None  # (N,) bool, of top_entropy_quantile; None = every token
    entropy_coef: float | None = None  # as adaptive_entropy has made it; None = the config's


@dataclass(frozen=True)
class Loss:
    """One micro-batch's share of an update's loss, and the values its metrics need. U = N or S."""

    total: Tensor  # () with gradient: policy + kl
    policy: Tensor  # () detached
    kl: Tensor  # () detached, beta included; 0 unless kl_in=loss
    ratio: Tensor  # (U,) detached
    low: Tensor  # (U,) bool, ratio < 1 - epsilon and A < 0: clipped (never with reinforce)
    high: Tensor  # (U,) bool, ratio > 1 + epsilon_high and A > 0: clipped (never with reinforce)
    delta: Tensor  # (U,) bool, ratio > delta and A < 0
    unit_mask: Tensor  # (U,) bool, units that count: unmasked tokens, or completions with one
    row_low: Tensor  # (S,) share of a completion's units in `low`; 0 without units
    row_high: Tensor  # (S,) share of a completion's units in `high`
    log_ratio_sq: Tensor  # (U,) square of the completion's summed (or the token's) logp - old_logp
    weight: Tensor | None = None  # (N,) or (S,) correction weights; None = no correction
    raw_weight: Tensor | None = None  # (N,) or (S,) weights before the correction's mode
    capped: Tensor | None = None  # (U,) bool, cispo: ratio > cap and A > 0
    bonus: Tensor | None = None  # () detached, entropy_coef * entropy, which is subtracted
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # your own, by name, (N,) or (S,)
    entropy: Tensor | None = None  # () detached, share of the mean entropy that the bonus is of
    kept: Tensor | None = None  # (N,) or (S,) bool, what trust_region keeps; None = everything


@dataclass(frozen=True)
class ValueLoss:
    """A micro-batch's share of an update's value loss, and the values its metrics need."""

    total: Tensor  # () with gradient, vf_coef included
    value: Tensor  # () detached, without vf_coef
    clipped: Tensor  # (N,) bool, more than epsilon_value from the value of the step's start
    counted: Tensor  # (N,) bool, trained tokens that have a return
