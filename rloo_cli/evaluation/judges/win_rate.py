"""Verdicts of pairs -> wins, ties, losses, the rate with its interval, the rate at equal lengths.

A pair's value is 1 (won), 1/2 (a tie, or two orders that disagree) or 0 (lost); None is invalid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rloo_cli.reporting.statistics import score_interval

MAX_NEWTON_STEPS, NEWTON_TOLERANCE = 100, 1e-10
MAX_LOG_ODDS = 15.0  # larger ones mean that lengths separate wins from losses


@dataclass(frozen=True)
class WinRate:
    """Wins and losses of one set. Lengths are in tokens of the policy's tokenizer."""

    wins: int
    ties: int
    losses: int
    invalid: int
    rate: float | None  # None: no pair was judged
    low: float | None
    high: float | None
    length: float | None  # mean of ours
    other_length: float | None  # mean of theirs
    controlled: float | None  # the rate at equal lengths; None = not defined

    @property
    def num_judged(self) -> int:
        """Pairs with a verdict: the rate's denominator."""
        return self.wins + self.ties + self.losses


def compute_win_rate(values: Sequence[float | None], lengths: Sequence[tuple[int, int]]) -> WinRate:
    """Count pairs; `lengths` are ours and theirs of each. Lengths of invalid pairs are left out."""
    judged = [(v, *pair) for v, pair in zip(values, lengths, strict=True) if v is not None]
    verdicts = [v for v, _, _ in judged]
    interval = score_interval(verdicts)
    return WinRate(
        wins=verdicts.count(1.0),
        ties=verdicts.count(0.5),
        losses=verdicts.count(0.0),
        invalid=len(values) - len(verdicts),
        rate=interval.mean if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        length=sum(a for _, a, _ in judged) / len(judged) if judged else None,
        other_length=sum(b for _, _, b in judged) / len(judged) if judged else None,
        controlled=rate_at_equal_lengths(verdicts, [a - b for _, a, b in judged]),
    )


def rate_at_equal_lengths(values: Sequence[float], differences: Sequence[int]) -> float | None:
    """The win rate that a logistic regression predicts for a length difference of 0.

    P(win) = 1 / (1 + exp(-(a + b d))), d = (our tokens - theirs) / their standard deviation over
    the pairs, fitted by Newton's method to the values (a half counts as half a win and half a
    loss); the rate is 1 / (1 + exp(-a)). Dubois et al. 2024 (arXiv 2404.04475) control for length
    this way, with more terms. Returns None if it is not defined: fewer than three pairs, all
    of one value, one side longer in every pair (equal lengths would be extrapolated), lengths that
    separate wins from losses, differences that do not vary (unless all are 0).
    """
    n = len(values)
    if n < 3 or len(set(values)) == 1 or min(differences) > 0 or max(differences) < 0:
        return None
    mean = sum(differences) / n
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / n)
    if not spread:
        return sum(values) / n
    scaled = [d / spread for d in differences]
    a = b = 0.0
    for _ in range(MAX_NEWTON_STEPS):
        chance = [1 / (1 + math.exp(-max(-50.0, min(50.0, a + b * d)))) for d in scaled]
        left = [v - p for v, p in zip(values, chance, strict=True)]
        weight = [p * (1 - p) for p in chance]
        first, second = sum(left), sum(r * d for r, d in zip(left, scaled, strict=True))
        w = sum(weight)
        wd = sum(x * d for x, d in zip(weight, scaled, strict=True))
        wdd = sum(x * d * d for x, d in zip(weight, scaled, strict=True))
        if (whole := w * wdd - wd * wd) < NEWTON_TOLERANCE:
            return None
        step_a, step_b = (wdd * first - wd * second) / whole, (w * second - wd * first) / whole
        a, b = a + step_a, b + step_b
        if max(abs(a), abs(b)) > MAX_LOG_ODDS:
            return None
        if max(abs(step_a), abs(step_b)) < NEWTON_TOLERANCE:
            return 1 / (1 + math.exp(-a))
    return None
