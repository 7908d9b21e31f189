"""Gold answers and the model's answers as math-verify reads them, and what is too much for it."""

import pytest
from reward_cases import PLAIN
from test_reward_examples import group, shipped, values

from rloo_cli.rewards.common import math_equal
from rloo_cli.rewards.engine.scoring import score_groups

# A bare gold answer as MATH-500 and DeepScaleR write them, a right answer and a wrong one.
GOLDS = [
    (r"3\sqrt{13}", r"\sqrt{117}", "3"),
    (r"2\pi", r"2\pi", "2"),
    (r"10^{-3}", r"\frac{1}{1000}", "10"),
    ("x^2 - 4", "(x-2)(x+2)", "4"),
    ("2^{10}", "1024", "2"),
    ("5!", "120", "5"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", "1"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})", "3"),
    (r"\frac{\pi}{4}", r"\frac{\pi}{4}", r"\frac{\pi}{2}"),
    (r"\dfrac{5}{6}", r"\frac{5}{6}", "5"),
    ("p - q", "-q + p", "q - p"),
    ("(6,31,-1)", "(6, 31, -1)", "(6, 31, 1)"),
    (r"\text{Evelyn}", r"\text{Evelyn}", r"\text{Bob}"),
    (r"\frac{14}{3}", r"\frac{28}{6}", "14"),
    (r"90^\circ", "90", "9"),
    (r"11\sqrt2", r"11\sqrt{2}", "11"),
    (r"5 \times 10^{-3}", "0.005", "5"),
    ("y = 2x + 3", "y = 3 + 2x", "3"),
    ("[2,5)", "[2,5)", "2"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty, 2) \cup (3, \infty)", "2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "2"),
    ("1, 2, 3", "3, 2, 1", "3"),
    ("1e-3", "0.001", "1"),
    ("$1e-3$", "1e-3", "-3 + e"),
    ("1,234", "1234", "1"),
    ("1 234", "1234", "234"),
    ("\N{MINUS SIGN}5", "-5", "5"),
    (r"50\%", r"50\%", "5"),
    ("$18", "18", "8"),
    (r"\$18.90", "18.9", "18"),
    ("18 dollars", "18", "1"),
    ("42.", "42", "4"),
    ("even", r"\text{even}", "odd"),
    ("no real solution", r"\text{no real solution}", "0"),
    ("She has 3 + 4 = 7 and loses 2.\n#### 5", "5", "7"),
    (r"so it is $2\pi$", r"2\pi", "2"),
]


@pytest.mark.process
def test_a_bare_gold_answer_is_read_whole() -> None:
    wrong = {}
    for gold, right, other in GOLDS:
        texts: list[str | None] = [rf"Thus \boxed{{{right}}}", rf"Thus \boxed{{{other}}}"]
        found = math_equal.compare_answers(texts, [gold, gold], 20, 300.0).correct
        if found != [True, False]:
            wrong[gold] = found
    assert not wrong


def test_a_gold_answer_of_which_only_a_part_can_be_read_scores_nobody_and_is_counted() -> None:
    for gold in (r"\frac{1}{2", "He is 5 years old, and then 8", "about 7 of them", "  "):
        found = math_equal.compare_answers([r"\boxed{1}", r"\boxed{8}"], [gold, gold], 20, 300.0)
        assert (found.correct, found.num_unread_gold) == ([None, None], 2), gold


def test_answers_that_are_too_much_do_not_add_up_to_the_time_of_the_call() -> None:
    hopeless = r"\boxed{9^{9^{9^{9}}}}"
    tight = math_equal.compare_answers([hopeless] * 40, ["4"] * 40, 5, 2.0)
    assert {*tight.correct} <= {False, None}  # None: the machine was too busy to read the gold
    assert tight.num_slow >= 30
    # With five seconds for each of them this call would take fifteen, and fail after eight.
    step = group(hopeless, hopeless, r"\boxed{4}", hopeless, solution="4")
    reward = shipped("accuracy", timeout_s=8.0, answer_timeout_s=5)
    found = values(reward, step)
    assert found[2] == 1.0 and {*found[:2], found[3]} <= {0.0, None}


def test_the_share_of_answers_that_took_too_long_is_a_metric() -> None:
    scores = score_groups(
        [shipped("accuracy", answer_timeout_s=1)],
        [group(r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4}", solution="4"), group("", "", solution="-")],
        PLAIN,
    )
    assert scores.metrics == {"accuracy/timeout_frac": 0.25, "accuracy/gold_unread_frac": 0.5}
