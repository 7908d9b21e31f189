"""Wins, ties and losses: the rate, its interval, and the rate at equal lengths."""

import math
import random

import pytest

from rloo_cli.evaluation.judges.win_rate import compute_win_rate, rate_at_equal_lengths


def test_invalid_pairs_are_counted_and_in_no_denominator() -> None:
    got = compute_win_rate(
        [1.0, 0.5, 0.0, None, None, 1.0], [(3, 1), (1, 1), (1, 2), (99, 0), (0, 99), (3, 4)]
    )
    assert (got.wins, got.ties, got.losses, got.invalid, got.num_judged) == (2, 1, 1, 2, 4)
    assert got.rate == 2.5 / 4
    assert (got.length, got.other_length) == (2.0, 2.0)  # of judged pairs


def test_without_a_verdict_nothing_is_claimed() -> None:
    got = compute_win_rate([None, None], [(1, 1), (1, 1)])
    assert got.invalid == 2 and got.num_judged == 0
    assert got.rate is got.low is got.high is got.controlled is got.length is None
    assert compute_win_rate([], []).rate is None


def test_the_published_344_of_1000_have_their_interval() -> None:
    got = compute_win_rate([1.0] * 344 + [0.0] * 656, [(1, 1)] * 1000)
    # 34.4 +- 2.9 %; Wilson's ends are .3152 and .3740
    assert (got.low, got.high) == pytest.approx((0.3152, 0.3740), abs=4e-4)


def test_a_tie_is_not_half_a_win_and_half_a_loss() -> None:
    ties, halves = ([v] * 25 + [w] * 25 for v, w in ((0.5, 0.5), (1.0, 0.0)))
    tied, split = (compute_win_rate(v, [(1, 1)] * 50) for v in (ties, halves))
    assert tied.rate == split.rate == 0.5
    assert tied.high is not None and split.high is not None
    assert 0.5 < tied.high < split.high - 0.05


def test_equal_values_leave_some_doubt() -> None:
    for value in (0.0, 0.5, 1.0):
        got = compute_win_rate([value] * 8, [(1, 1)] * 8)
        assert got.low is not None and got.high is not None
        assert got.high - got.low > 0.2 and got.low <= value <= got.high


def test_a_judge_of_length_alone_has_one_half_at_equal_lengths() -> None:
    draw = random.Random(1)
    differences = [draw.randint(-10, 30) for _ in range(2000)]
    values = [float(draw.random() < 1 / (1 + math.exp(-0.2 * d))) for d in differences]
    rate = sum(values) / len(values)
    controlled = rate_at_equal_lengths(values, differences)
    assert rate > 0.7 and controlled == pytest.approx(0.5, abs=0.04)


def test_what_length_does_not_explain_remains() -> None:
    draw = random.Random(2)
    differences = [draw.randint(-20, 20) for _ in range(2000)]
    values = [float(draw.random() < 0.8) for _ in differences]
    assert rate_at_equal_lengths(values, differences) == pytest.approx(0.8, abs=0.03)


def test_the_regression_is_that_of_the_library() -> None:
    sklearn = pytest.importorskip("sklearn.linear_model")
    draw = random.Random(3)
    differences = [draw.randint(-9, 9) for _ in range(200)]
    values = [float(draw.random() < 1 / (1 + math.exp(-0.3 * d - 0.4))) for d in differences]
    fit = sklearn.LogisticRegression(C=1e9, tol=1e-10).fit([[d] for d in differences], values)
    expected = fit.predict_proba([[0]])[0][1]
    assert rate_at_equal_lengths(values, differences) == pytest.approx(expected, abs=1e-5)


UNDEFINED = {
    "too few": ([1.0, 0.0], [1, -1]),
    "all won": ([1.0] * 5, [1, -1, 2, -2, 0]),
    "lengths separate them": ([1.0, 1.0, 0.0, 0.0], [5, 3, -3, -5]),
    "ours are always longer": ([1.0, 0.0, 1.0, 0.0], [5, 3, 2, 9]),
    "theirs are always longer": ([1.0, 0.0, 1.0, 0.0], [-5, -3, -2, -9]),
    "all longer by the same": ([1.0, 0.0, 1.0, 0.0], [4, 4, 4, 4]),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_it_is_not_there_where_it_is_not_defined(case: str) -> None:
    assert rate_at_equal_lengths(*UNDEFINED[case]) is None


def test_of_equal_lengths_it_is_the_rate() -> None:
    assert rate_at_equal_lengths([1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0]) == 0.75
