"""What is computed from held-out samples: pass@k by hand and by counting, absent scores, names."""

from fractions import Fraction
from itertools import combinations
from math import comb
from statistics import stdev

import pytest

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.evaluation.metrics import eval_set_metrics, pass_at_k
from rloo_cli.reporting import eval_lines


def settings(*words):
    return check_config(compose_config(["+recipe=smoke", *words])).eval


def sample(draw, score, k=None, **rewards):
    """A greedy sample, or with k a sampled one."""
    row = {"draw": draw, "greedy": k is None, "k": k or 0, "score": score, "rewards": rewards}
    return row | {"completion_length": 3, "terminated": True}


def group(draw, *scores):
    return [sample(draw, score, k, r=score) for k, score in enumerate(scores)]


# pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 0, 2, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - (3/4)(2/3)
        (4, 2, 2, 5 / 6),
        (4, 3, 2, 1.0),  # two that fail cannot be drawn
        (4, 1, 4, 1.0),
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (10, 3, 5, 11 / 12),  # 1 - 21/252
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_pass_at_k_is_the_share_of_all_draws_that_hold_one_that_passes():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                share = sum(map(any, draws)) / len(draws)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_pass_at_k_is_unbiased(p):
    n = 9
    for k in (1, 2, 5, 9):
        chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_is_exact_where_binomials_are_too_large_for_a_float():
    for c in (0, 1, 7, 400, 1999):
        exact = 1 - Fraction(comb(2000 - c, 1000), comb(2000, 1000))
        assert pass_at_k(2000, c, 1000) == pytest.approx(float(exact), abs=1e-12)
    assert pass_at_k(3000, 2999, 2500) == 1.0


@pytest.mark.parametrize(
    ("words", "ks"),
    [
        ([], [1]),
        (["eval.num_generations=8"], [1, 2, 4, 8]),
        (["eval.num_generations=6"], [1, 2, 4, 6]),
        (["eval.num_generations=8", "eval.pass_at=[5,1,5]"], [1, 5]),
        (["eval.num_generations=8", "eval.pass_at=[]"], []),
    ],
)
def test_k_are_powers_of_two_and_all_where_none_are_asked_for(words, ks):
    assert settings(*words).pass_ks == ks


# Means


def test_avg_and_pass_are_means_over_prompts():
    greedy = [sample(i, 0.0, None, r=0.0) for i in range(3)]
    sampled = [*group(0, 1.0, 1.0, 1.0, 1.0), *group(1, 1.0, 0.0, 0.0, 0.5), *group(2, 0, 0, 0, 0)]
    row = eval_set_metrics("", greedy + sampled, settings("eval.num_generations=4"), {})
    assert row["eval_reward"] == 0.0 and row["eval_avg@4"] == pytest.approx((1 + 1.5 / 4 + 0) / 3)
    assert row["eval_pass@1"] == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert row["eval_pass@2"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert row["eval_pass@4"] == pytest.approx(2 / 3)
    assert row["eval_sampled_unscored"] == 0 and not [k for k in row if k.endswith("/prompts")]


def test_a_completion_without_a_score_is_absent_and_counted():
    greedy = [sample(0, 2.0, None, r=2.0), sample(1, None, None, r=None)]
    # One passes of three; one of one; none of none.
    sampled = [*group(0, 1.0, None, 0.0, 0.0), *group(1, None, 1.0, None, None)]
    sampled += group(2, None, None, None, None)
    row = eval_set_metrics("", greedy + sampled, settings("eval.num_generations=4"), {})
    assert row["eval_reward"] == 2.0 and row["eval_unscored"] == 1 and row["eval_samples"] == 2
    assert row["eval_avg@4"] == pytest.approx((1 / 3 + 1) / 2)  # prompt 2 has no mean
    assert row["eval_sampled_unscored"] == 8
    assert row["eval_pass@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert row["eval_pass@1/prompts"] == 2
    assert row["eval_pass@2"] == pytest.approx(2 / 3) and row["eval_pass@2/prompts"] == 1
    assert "eval_pass@4" not in row  # no prompt has four


def test_where_nothing_has_a_score_there_is_no_mean():
    rows = [sample(0, None, None, r=None), *group(0, None, None)]
    row = eval_set_metrics("", rows, settings("eval.num_generations=2"), {})
    assert not [k for k in row if "reward" in k or "avg" in k or "pass" in k]
    assert row["eval_unscored"] == 1 and row["eval_sampled_unscored"] == 2


def test_one_passes_by_its_score_or_by_one_rewards_own_word():
    def rows():
        got = [(0.9, 1.0), (1.5, 0.0)]  # score, what the reward `right` says
        return [sample(0, 0.0, None, right=0.0)] + [
            sample(0, score, k, right=right) for k, (score, right) in enumerate(got)
        ]

    for words, passed in (
        ([], 0.5),
        (["eval.pass_threshold=0.5"], 1.0),
        (["eval.pass_threshold=2"], 0.0),
    ):
        row = eval_set_metrics("", rows(), settings("eval.num_generations=2", *words), {})
        assert row["eval_pass@1"] == passed
    chosen = settings("eval.num_generations=2").model_copy(update={"pass_reward": "right"})
    got = rows()
    got[2]["rewards"]["right"] = None  # it has a score, but not this one
    row = eval_set_metrics("", got, chosen, {})
    assert row["eval_pass@1"] == 1.0 and "eval_pass@2" not in row and "eval_avg@2" in row


def test_a_threshold_is_met_in_spite_of_binary_rounding():
    score, k = 0.7 + 0.2 + 0.1, settings("eval.num_generations=2")
    assert score < 1.0
    row = eval_set_metrics("", [sample(0, 0.0), *group(0, score, 0.999)], k, {})
    assert row["eval_pass@1"] == 0.5


# Names


def test_the_names_of_a_set_stand_in_its_metrics_and_files():
    row = eval_set_metrics("hard", [sample(0, 1.0, None, r=1.0)], settings(), {"r": 0.25})
    assert row["eval_hard_reward"] == 1.0 and row["eval_hard_reward/r/error_rate"] == 0.25
    assert all(name.startswith("eval_hard_") for name in row)
    assert eval_lines.eval_samples_name("hard", 10) == "eval_hard_000010"
    assert eval_lines.eval_samples_name("", 10) == "eval_000010"


def test_a_metric_belongs_to_the_longest_name():
    row = {"step": 3, "eval_a_reward": 1.0, "eval_a_b_reward": 2.0, "eval_a_b_pass@2": 0.5}
    assert eval_lines.split_by_set(row, ["a", "a_b"]) == {
        "a": {"reward": 1.0},
        "a_b": {"reward": 2.0, "pass@2": 0.5},
    }
    assert eval_lines.split_by_set({"step": 1, "eval_reward": 1.0}, [""]) == {"": {"reward": 1.0}}


def test_an_evaluation_is_told_from_a_step():
    assert eval_lines.is_evaluation({"step": 0, "eval_hard_reward": 1.0})
    assert not eval_lines.is_evaluation({"step": 1, "reward": 1.0, "step_time": 2.0})
    assert not eval_lines.is_evaluation({"step": 1, "reward": 1.0, "step_time": 2.0, "eval_x": 1.0})


def test_the_headline_is_each_sets_score_mean_and_largest_pass():
    row = {"step": 1, "eval_reward": 1.0, "eval_reward/r/mean": 1.0, "eval_samples": 3}
    assert eval_lines.headline_metrics(row) == [("held-out", "eval_reward")]
    names = ("reward", "avg@8", "pass@1", "pass@8")
    row = {f"eval_{n}_{m}": 0 for n in ("a", "b_c") for m in names}
    row["eval_a_pass@8/prompts"] = 3
    assert eval_lines.headline_metrics(row) == [
        ("held-out a", "eval_a_reward"),
        ("avg@8", "eval_a_avg@8"),
        ("pass@8", "eval_a_pass@8"),
        ("held-out b_c", "eval_b_c_reward"),
        ("avg@8", "eval_b_c_avg@8"),
        ("pass@8", "eval_b_c_pass@8"),
    ]
    assert eval_lines.headline_metrics({"step": 1, "reward": 1.0, "reward_std": 0.1}) == []


# Errors, clustered by prompt.


def test_every_mean_of_scores_has_its_error_and_its_interval():
    scores = [(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]
    samples = [s | {"prompt": "p", "row": {"n": s["draw"]}}
               for draw, each in enumerate(scores)
               for s in [sample(draw, each[0], r=each[0]), *group(draw, *each)]]  # fmt: skip
    got = eval_set_metrics("", samples, settings("eval.num_generations=2"), {})
    for name, values in {
        "reward": [1, 0, 1, 1], "reward/r/mean": [1, 0, 1, 1], "avg@2": [1, 0, 0.5, 1],
        "pass@1": [1, 0, 0.5, 1], "pass@2": [1, 0, 1, 1],
    }.items():  # fmt: skip
        assert got[f"eval_{name}/se"] == pytest.approx(stdev(values) / 2), name
        assert got[f"eval_{name}/low"] < got[f"eval_{name}"] < got[f"eval_{name}/high"], name


def test_a_row_that_is_there_many_times_is_one_prompt_and_an_image_makes_another():
    def error(**columns):
        samples = [
            sample(draw, float(draw < 2)) | {"prompt": "p", "row": {"a": draw % 2}}
            | {name: values[draw] for name, values in columns.items()}
            for draw in range(4)
        ]  # fmt: skip
        return eval_set_metrics("", samples, settings(), {}).get("eval_reward/se")

    assert error() == 0.0  # of two prompts, each with a 1 and a 0
    assert error(images=["a", "b", "c", "d"]) == pytest.approx(stdev([1, 1, 0, 0]) / 2)
