"""Intervals of scores and win rates, and verdicts over seeds: what they cover, and when none is."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from statistics import fmean, stdev

import pytest

from rloo_cli.reporting import statistics
from rloo_cli.reporting.statistics import (
    describe_difference,
    half_width_error,
    paired_difference,
    score_interval,
    share_limits,
)

MIXES = [
    (1.0, 0.0), (0.99, 0.01), (0.98, 0.0), (0.95, 0.04), (0.9, 0.1), (0.7, 0.0), (0.5, 0.5),
    (0.5, 0.0), (0.3, 0.4), (0.1, 0.8), (0.0, 1.0),
]  # fmt: skip


def win_rate_limits(wins: int, ties: int, n: int) -> tuple[float, float]:
    mean = (wins + ties / 2) / n
    return share_limits(n, mean, (wins + ties / 4) / n - mean * mean)


def outcomes(n: int) -> Iterator[tuple[int, int]]:
    return ((w, t) for w, t in product(range(n + 1), repeat=2) if w + t <= n)


def chance(n: int, counts: tuple[int, int], mix: tuple[float, float]) -> float:
    """The probability of so many wins and ties in n pairs."""
    wins, ties = counts
    parts = (wins, ties, n - wins - ties)
    found = math.exp(math.lgamma(n + 1) - sum(math.lgamma(k + 1) for k in parts))
    return found * math.prod(p**k for p, k in zip((*mix, 1 - sum(mix)), parts, strict=True))


@pytest.mark.parametrize("n", [20, 50])
def test_a_win_rate_is_in_its_interval_for_every_mix(n: int) -> None:
    limits = {counts: win_rate_limits(*counts, n) for counts in outcomes(n)}
    covered = []
    for mix in MIXES:
        rate = mix[0] + mix[1] / 2
        inside = [c for c, (low, high) in limits.items() if low - 1e-9 <= rate <= high + 1e-9]
        covered.append(sum(chance(n, counts, mix) for counts in inside))
    assert min(covered) >= 0.93 and fmean(covered) >= 0.95


@pytest.mark.parametrize("n", [20, 50, 200])
def test_no_end_rises_when_a_win_becomes_a_tie_or_a_tie_a_loss(n: int) -> None:
    for wins, ties in outcomes(n):
        low, high = win_rate_limits(wins, ties, n)
        worse = [(wins - 1, ties + 1)] if wins else []
        worse += [(wins, ties - 1)] if ties else []
        for counts in worse:
            lower, upper = win_rate_limits(*counts, n)
            assert lower <= low + 1e-12 and upper <= high + 1e-12


def test_the_interval_of_a_share_is_at_most_a_tenth_wider_than_wilsons() -> None:
    for wins in range(51):
        z, p = statistics.Z_95, wins / 50
        wilson = 2 * z * math.sqrt(p * (1 - p) / 50 + z * z / 1e4) / (1 + z * z / 50)
        low, high = win_rate_limits(wins, 0, 50)
        assert high - low <= 1.1 * wilson


def test_the_standard_error_is_that_of_the_prompts_and_not_of_the_completions() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    alone = score_interval(values)
    twice = score_interval([v for v in values for _ in range(2)], list("aabbccdd"))
    assert alone is not None and twice is not None
    assert alone.standard_error == pytest.approx(stdev(values) / 2)
    assert (twice.standard_error, twice.low) == pytest.approx((alone.standard_error, alone.low))


def test_a_score_of_any_size_has_students_interval() -> None:
    found = score_interval([1.0, 2.0, 3.0])
    assert found is not None and found.low is not None and found.high is not None
    assert found.high - 2 == pytest.approx(2 - found.low)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3))


def test_scores_that_say_nothing_of_their_spread_have_no_interval() -> None:
    assert score_interval([]) is None
    for values in ([7.0], [7.0, 7.0, 7.0], [0.1 + 1.7, 1.8]):
        found = score_interval(values)
        assert found is not None and found.standard_error is found.low is found.high is None


def test_the_mean_of_eight_completions_is_known_better_than_one_but_not_eight_times() -> None:
    def width(completions: int, deviation: float) -> float:
        low, high = share_limits(60, 0.95, deviation, completions)
        return high - low

    single = 0.95 * 0.05
    assert width(8, single / 8) < 0.6 * width(1, single)
    assert width(8, single) == pytest.approx(width(1, single))  # all eight pass, or none
    assert share_limits(60, 1.0, 0.0, 8)[0] == share_limits(60, 1.0, 0.0, 1)[0] < 0.96


# Over seeds.


def verdict(ours: list[float], theirs: list[float], prompts: int | None) -> str:
    sides = [dict(enumerate(values)) for values in (ours, theirs)]
    errors = [
        {s: half_width_error(*share_limits(prompts, v, v - v * v)) for s, v in side.items()}
        if prompts else None
        for side in sides
    ]  # fmt: skip
    return describe_difference(paired_difference(*sides, *errors))


def test_seeds_that_agree_better_than_their_prompts_allow_are_not_told_apart() -> None:
    assert verdict([0.5625, 0.5625], [0.5, 0.5], 64) == "not told apart"
    assert verdict([0.5625, 0.578125], [0.5, 0.5], 64) == "not told apart"
    assert verdict([1.0, 1.0], [1.0, 1.0], 64) == "not told apart"


def test_equal_differences_without_a_known_error_are_no_verdict() -> None:
    assert verdict([0.5625, 0.5625], [0.5, 0.5], None) == statistics.NO_SPREAD
    assert verdict([0.1 + 0.2, 0.1 + 0.7], [0.2, 0.7], None) == statistics.NO_SPREAD
    assert "the same" in verdict([0.1 + 0.2, 0.5], [0.3, 0.5], None)


def called(draw: Callable[[float], float], means: tuple[float, float], seeds: int) -> float:
    """The share of 400 comparisons with a verdict, of scores over 200 prompts."""
    found = 0
    for _ in range(400):
        sides = [[draw(mean) for _ in range(seeds)] for mean in means]
        found += verdict(*sides, 200) in ("higher", "lower")
    return found / 400


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_models_are_seldom_told_apart(seeds: int) -> None:
    generator = random.Random(seeds)

    def draw(mean: float) -> float:
        return sum(generator.random() < mean for _ in range(200)) / 200

    assert called(draw, (0.5, 0.5), seeds) <= 0.06


def test_a_difference_of_15_points_is_told_with_five_seeds() -> None:
    generator = random.Random(5)

    def draw(mean: float) -> float:
        return sum(generator.random() < mean for _ in range(200)) / 200

    assert called(draw, (0.5, 0.65), 5) >= 0.8
