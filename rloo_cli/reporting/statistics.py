"""All statistics: intervals of scores and win rates, means over seeds, differences.

A score's interval is over its prompts. Completions of one prompt are one cluster, so that K samples
of a prompt do not count as K prompts. Scores between 0 and 1 get the interval of a share
(`share_limits`), others mean ± t * standard error.

A mean of n seeds has the interval ± t * e, with t the 97.5 % quantile of Student's distribution
with n - 1 degrees of freedom. e is s / sqrt(n), s the sample standard deviation over the seeds, or
the one implied by the scores' own errors, whichever is larger: seeds that agree better than their
prompts allow do so by chance. Without any error there is no interval, as for one seed.

`python bench/intervals.py` simulates what these intervals cover.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rloo_cli.utils.files import JsonObject

CONFIDENCE_LEVEL = 0.95
Z_95 = 1.959964  # of a standard normal: 95 % lie within
ADDED_SCORES = 1.5  # added at 0, and as many at 1, before a share's interval is taken
SPREAD_WEIGHT = 0.1  # of a prompt, in estimating how independent its completions are
ROUNDING_TOLERANCE = 1e-9  # relative; a smaller spread is what floating point leaves
NO_SPREAD = "no verdict: all seeds differ by the same amount, and the score's own error is unknown"


# Over prompts.


@dataclass(frozen=True)
class ScoreInterval:
    """A mean over prompts with its standard error and its 95 % interval; None if unknown."""

    mean: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


def score_interval(
    values: Sequence[float], prompts: Sequence[Hashable] | None = None, completions: int = 1
) -> ScoreInterval | None:
    """The mean of `values` with its error, clustered by prompt; None without values.

    `prompts`: the prompt of each value, None = one value each. `completions`: how many completions
    a value is the mean of.
    """
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    deviations: dict[Hashable, float] = defaultdict(float)  # prompt -> sum over its values
    for prompt, value in zip(prompts or range(len(values)), values, strict=True):
        deviations[prompt] += value - mean
    n = len(deviations)
    variance = n * math.fsum(d * d for d in deviations.values()) / len(values) ** 2
    error = math.sqrt(variance / (n - 1)) if n > 1 else None
    if min(values) >= 0 and max(values) <= 1:
        return ScoreInterval(mean, error, *share_limits(n, mean, variance, completions))
    if error is None or error <= ROUNDING_TOLERANCE * abs(mean):
        return ScoreInterval(mean)  # without variation there is no estimate of it
    half = student_t_quantile(n - 1) * error
    return ScoreInterval(mean, error, mean - half, mean + half)


def share_limits(n: int, mean: float, variance: float, completions: int = 1) -> tuple[float, float]:
    """The 95 % interval of the mean of n values between 0 and 1, with their variance over n.

    It is the normal interval after adding 1.5 values of 0 and 1.5 of 1 (Agresti and Coull 1998
    add 2 and 2 to a share; here the variance is that of the values, which counts ties). Near 0 and
    1 it covers where Wilson's does not, and neither end rises when a win becomes a tie.

    A value that is the mean of K completions varies by as little as 1 / K of a single one.
    The addition shrinks by the same factor.
    """
    single = mean * (1 - mean)  # the variance of values that are 0 or 1
    ratio = (n * variance + SPREAD_WEIGHT) / (n * single + SPREAD_WEIGHT)
    added = ADDED_SCORES * min(1.0, max(1 / completions, ratio))
    total = n + 2 * added
    middle = (n * mean + added) / total
    squares = (n * (variance + mean * mean) + added) / total
    half = Z_95 * math.sqrt(max(0.0, squares - middle * middle) / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def score_metrics(name: str, score: ScoreInterval | None) -> JsonObject:
    """The metrics of a mean: `name`, `name/se`, `name/low` and `name/high`, as far as known."""
    if score is None:
        return {}
    parts = (score.mean, score.standard_error, score.low, score.high)
    names = (name, f"{name}/se", f"{name}/low", f"{name}/high")
    return {key: value for key, value in zip(names, parts, strict=True) if value is not None}


def half_width_error(low: float, high: float) -> float:
    """The standard error implied by these limits; never 0 for a share, unlike its spread."""
    return (high - low) / (2 * Z_95)


# Over seeds.


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds; `half_width`: half of its interval's width, None without an interval.

    A single seed has none, nor have seeds that agree to the last digit.
    """

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


def mean_with_interval(
    values: Sequence[float], errors: Sequence[float | None] = ()
) -> Estimate | None:
    """The mean of values with its interval; None without values.

    `errors`: the standard error of each value by itself; they count if all are known.
    """
    n = len(values)
    if n == 0:
        return None
    if n == 1:
        return Estimate(values[0], None, 1)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    known = [error for error in errors if error is not None]
    own_error = math.hypot(*known) / n if len(known) == n else 0.0
    error = max(spread / math.sqrt(n), own_error)
    if error <= ROUNDING_TOLERANCE * max(map(abs, values)):
        return Estimate(values[0], None, n)
    return Estimate(mean, student_t_quantile(n - 1) * error, n)


def paired_difference(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    our_errors: Mapping[int, float] | None = None,
    their_errors: Mapping[int, float] | None = None,
) -> Estimate | None:
    """Ours minus theirs, seed by seed, over the seeds that both have; None without any.

    The errors are the standard errors of the values, by seed.
    """
    both = sorted(set(ours) & set(theirs))
    errors = [_error_of_difference(our_errors, their_errors, seed) for seed in both]
    return mean_with_interval([_difference(ours[seed], theirs[seed]) for seed in both], errors)


def _difference(ours: float, theirs: float) -> float:
    """Ours minus theirs; 0 if they differ only by rounding."""
    same = math.isclose(ours, theirs, rel_tol=ROUNDING_TOLERANCE, abs_tol=0.0)
    return 0.0 if same else ours - theirs


def _error_of_difference(
    our_errors: Mapping[int, float] | None, their_errors: Mapping[int, float] | None, seed: int
) -> float | None:
    ours, theirs = (our_errors or {}).get(seed), (their_errors or {}).get(seed)
    return None if ours is None or theirs is None else math.hypot(ours, theirs)


def describe_difference(difference: Estimate | None) -> str:
    """The conclusion from a difference, as text."""
    if difference is None:
        return "no seed in common"
    if difference.n == 1:
        return "one seed: no conclusion"
    if difference.half_width is None:
        return "the same, seed by seed" if difference.mean == 0 else NO_SPREAD
    if difference.low <= 0 <= difference.high:
        return "not told apart"
    return "higher" if difference.mean > 0 else "lower"


@cache
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
