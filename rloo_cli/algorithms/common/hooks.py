"""What an algorithm's hooks (base.py) are given, and what they return.

P prompts with K completions each; a micro-batch has S completions with N tokens. A unit has one
ratio to the old policy: a token or a completion, U = N or S.
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


@dataclass(frozen=True)
class StepTokens:
    """The completions of a step that are trained on, S of them, in float64; N sampled tokens."""

    score: Tensor  # (S,) shaped
    group: Tensor  # (S,) the index of the completion's group
    sequence: Tensor  # (N,) the index of the token's completion
    mask: Tensor  # (N,) 1 = trained on; all of them were sampled by the policy
    old: Tensor  # (N,) old_logp, at the KL's temperature
    ref: Tensor | None  # (N,) ref_logp; None without a reference
    value: Tensor | None  # (N,) values; None without a value model
    # With turn_rewards=credit, where every completion is an episode of up to U turns:
    turn: Tensor | None = None  # (N,) the index of the token's turn
    num_turns: Tensor | None = None  # (S,) turns that each has
    turn_reward: Tensor | None = None  # (S, U) what each turn earned, weighted; 0 = nothing


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of `Algorithm.token_advantages`."""

    advantage: Tensor  # (N,) exactly 0 where the mask is
    returns: Tensor | None = None  # (N,) what the value model is fitted to
    norm_skipped: bool = False  # not whitened: no two scores of the step differ


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's loss: S completions with N tokens."""

    logp: Tensor  # (N,) with gradient
    old_logp: Tensor  # (N,) of the policy before the step's first update
    ref_logp: Tensor | None  # (N,) of the reference; None = there is none
    micro_batch: MicroBatch  # which token is of which completion, and which count
    advantage: Tensor  # (S,), or (N,) where every token has its own
    denominator: float  # what the update's sum is divided by
    kl_logp: Tensor | None = None  # (N,) logp at the KL's temperature, where that is another
    entropy: Tensor | None = None  # (N,) with gradient where entropy_coef is not 0
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
    row_low: Tensor  # (S,) share of a completion's units in `low`; 0 where it has none
    row_high: Tensor  # (S,) share of a completion's units in `high`
    log_ratio_sq: Tensor  # (U,) square of the completion's summed (or the token's) logp - old_logp
    weight: Tensor | None = None  # (N,) or (S,) correction weights; None = no correction
    raw_weight: Tensor | None = None  # (N,) or (S,) weights before the correction's mode
    capped: Tensor | None = None  # (U,) bool, cispo: ratio > cap and A > 0
    bonus: Tensor | None = None  # () detached, entropy_coef * entropy, which is subtracted
    entropy: Tensor | None = None  # () detached, share of the mean entropy that the bonus is of
    kept: Tensor | None = None  # (N,) or (S,) bool, what trust_region leaves; None = there is none
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # your own, by name, (N,) or (S,)


@dataclass(frozen=True)
class ValueLoss:
    """A micro-batch's share of an update's value loss, and the values its metrics need."""

    total: Tensor  # () with gradient, vf_coef included
    value: Tensor  # () detached, without vf_coef
    clipped: Tensor  # (N,) bool, more than epsilon_value from the value of the step's start
    counted: Tensor  # (N,) bool, trained tokens that have a return
