"""Computes means over seeds with Student's interval, and differences seed by seed.

A mean of n seeds has the interval ± t * s / sqrt(n), with t the 97.5 % quantile of Student's
distribution with n - 1 degrees of freedom and s the sample standard deviation: it covers 95 % if
values vary over seeds about normally. One seed has no interval, and none is made up for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds; `half_width`: half of its interval's width, None of a single seed."""

    mean: float
    half_width: float | None
    n: int

    @property
    def low(self) -> float:
        """The interval's lower end; the mean if there is no interval."""
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        """The interval's upper end; the mean if there is no interval."""
        return self.mean + (self.half_width or 0.0)

    def text(self, digits: int = 3) -> str:
        """The text `0.812 ± 0.031`, or the mean alone if there is no interval."""
        mean = f"{self.mean:.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.{digits}f}"


def mean_with_interval(values: Sequence[float]) -> Estimate | None:
    """The mean of values with its interval; None without values."""
    n = len(values)
    if n == 0:
        return None
    if n == 1:
        return Estimate(values[0], None, 1)
    if min(values) == max(values):  # exactly, where a sum would leave a residue
        return Estimate(values[0], 0.0, n)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Estimate(mean, student_t_quantile(n - 1) * spread / math.sqrt(n), n)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Ours minus theirs, seed by seed, over the seeds that both have; None without any."""
    both = sorted(set(ours) & set(theirs))
    return mean_with_interval([ours[seed] - theirs[seed] for seed in both])


def describe_difference(difference: Estimate | None) -> str:
    """The conclusion that a difference allows, in words."""
    if difference is None:
        return "no seed in common"
    if difference.half_width is None:
        return "one seed, which says nothing"
    if difference.mean == difference.half_width == 0:
        return "the same, seed by seed"
    if difference.low <= 0 <= difference.high:
        return "not told apart"
    return "higher" if difference.mean > 0 else "lower"


def student_t_quantile(degrees_of_freedom: int) -> float:
    """t with P(|T| <= t) = 95 % for T of Student's distribution with so many degrees of freedom.

    >>> round(student_t_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1.0
    while student_t_probability(high, degrees_of_freedom) < CONFIDENCE_LEVEL:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if student_t_probability(middle, degrees_of_freedom) < CONFIDENCE_LEVEL:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_t_probability(t: float, degrees_of_freedom: int) -> float:
    """P(|T| <= t) for Student's distribution: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees_of_freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees_of_freedom, 2):  # the last power of the cosine is df - 2
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
