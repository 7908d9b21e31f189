"""MaxRL's advantage and that of pass@k: what their gradient is, by every draw of a small policy.

A policy of one token over four symbols, K completions of one prompt: all 4^K groups are gone
through, each with its probability, so that the expectation has no noise.
"""

import itertools
import math

import pytest
import torch
from algorithm_cases import advantages, config, table
from assert_refused import assert_refused
from hook_calls import rloo

from rloo_cli.algorithms.common.family import best_of_k
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

LOGITS = (0.4, -0.3, 0.9, 0.0)
RIGHT = (0.0, 1.0, 0.0, 1.0)  # scores of the symbols
PARTLY = (0.3, -1.5, 2.0, 0.7)
MAXRL = {"baseline": "group_mean", "advantage_scale": "mean"}


def expected_gradient(scores, k, **keys):
    """Of 1/K sum_i A_i log pi(y_i), at the logits."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    symbols = torch.tensor([*itertools.product(range(4), repeat=k)])
    score = torch.tensor(scores, dtype=torch.float64)[symbols]
    found = rloo.advantages(score, None, score == score, config(num_generations=k, **keys))
    weight = logp.detach()[symbols].sum(1).exp()
    total = (weight * (found.advantage * logp[symbols]).sum(1)).sum() / k
    return torch.autograd.grad(total, logits)[0]


def gradient(objective):
    """Of a function of the symbols' probabilities, at the logits."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(objective(logits.softmax(0)), logits)[0]


def solved(p):
    return (p * torch.tensor(RIGHT, dtype=torch.float64)).sum()


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_maxrl_has_the_gradient_of_the_log_of_the_pass_rate_cut_after_k_terms(k):
    # log p = -sum_j (1 - p)^j / j: of its K - 1 first terms.
    series = gradient(lambda p: -sum((1 - solved(p)) ** j / j for j in range(1, k)))
    near(expected_gradient(RIGHT, k, **MAXRL), series)
    loo = expected_gradient(RIGHT, k, baseline="loo", advantage_scale="mean")
    near(loo, k / (k - 1) * series)
    assert not torch.allclose(series, gradient(lambda p: solved(p).log()), atol=1e-3)


def test_maxrls_advantage_is_the_reward_over_the_mean_less_one():
    rows = [
        [1.0, 0.0, 0.0, 1.0],
        [0.5, 2.0, 1.5, None],
        [0.0, 0.0, 0.0, 0.0],
        [-1.0, 0.5, 0.0, 0.0],
    ]
    found = advantages(rows, **MAXRL).tolist()
    assert found[0] == [1.0, -1.0, -1.0, 1.0]
    assert found[1] == pytest.approx([0.5 / (4 / 3) - 1, 0.5, 1.5 / (4 / 3) - 1, 0.0])
    assert found[2] == found[3] == [0.0] * 4  # a mean that is not above 0 is no pass rate


@pytest.mark.parametrize(("n", "k"), [(3, 2), (4, 2), (4, 3), (5, 4)])
def test_pass_at_k_has_the_gradient_of_one_of_k_being_right(n, k):
    exact = gradient(lambda p: 1 - (1 - solved(p)) ** k)
    near(expected_gradient(RIGHT, n, pass_at_k=k), exact)
    own_mean = expected_gradient(RIGHT, n, pass_at_k=k, baseline="group_mean")
    near(own_mean, (n - k) / n * exact)


@pytest.mark.parametrize(("n", "k"), [(3, 2), (5, 3)])
def test_pass_at_k_has_the_gradient_of_the_largest_of_k_scores(n, k):
    score = torch.tensor(PARTLY, dtype=torch.float64)
    draws = torch.tensor([*itertools.product(range(4), repeat=k)])
    best = score[draws].amax(1)
    exact = gradient(lambda p: (p[draws].prod(1) * best).sum())
    near(expected_gradient(PARTLY, n, pass_at_k=k), exact)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_best_of_k_is_the_mean_over_all_choices_of_siblings(k):
    rows = [[0.3, -1.0, 2.0, 2.0, 0.0], [1.0, None, 0.0, 0.0, 1.0], [None, 5.0, 3.0, None, None]]
    score, usable = table(rows)
    found = best_of_k(score, usable, k)
    for row, values in zip(found.tolist(), rows, strict=True):
        there = [i for i, x in enumerate(values) if x is not None]
        for i in there if len(there) >= k else ():
            siblings = itertools.combinations([values[j] for j in there if j != i], k - 1)
            largest = [max(values[i], *chosen) for chosen in siblings]
            assert row[i] == pytest.approx(math.fsum(largest) / len(largest), abs=1e-12)
        assert all(row[i] == 0 for i in range(5) if i not in there)


def test_pass_at_k_of_right_and_wrong_is_that_of_the_paper_before_its_division():
    # arXiv 2508.10751: with c wrong ones of n, 1 - C(c, k)/C(n, k) is the mean of the group's sets.
    n, k, right = 8, 3, 2
    a = advantages([1.0] * right + [0.0] * (n - right), pass_at_k=k, baseline="group_mean")[0]
    wrong = n - right
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    of_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    assert a.tolist() == pytest.approx([k * (1 - mean)] * right + [k * (of_wrong - mean)] * wrong)


def test_a_group_with_no_set_of_siblings_is_left_out():
    found = advantages([[1.0, 0.0, 0.0, None], [1.0, 0.0, None, None], [0.7] * 4], pass_at_k=2)
    assert found[0, :3].abs().min() > 0 and not found[1:].any() and not found[0, 3]
    score, scorable = table([[1.0, 0.0, None, None]])
    result = rloo.advantages(score, None, scorable, config(pass_at_k=2))
    assert not result.usable.any()


REFUSED = {
    "MaxRL without a group": ("advantage_scale=mean", "baseline=none", "algorithm=reinforce"),
    "pass@k without a group": ("pass_at_k=2", "baseline=none", "algorithm=reinforce"),
    "pass@k, divided": ("pass_at_k=2", "advantage_scale=group"),
    "pass@k of all": ("pass_at_k=4",),
    "pass@k with a KL among the rewards": ("pass_at_k=2", "beta=0.1"),
    "pass@k of turns": ("pass_at_k=2", "turn_rewards=credit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name, sentence):
    given = [w if w.startswith("algorithm=") else f"algorithm.{w}" for w in REFUSED[name]]
    if "beta=0.1" not in REFUSED[name]:
        given.append("algorithm.beta=0")
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", *given]))
    assert_refused(caught, key="algorithm." + REFUSED[name][0].partition("=")[0])
    sentence(caught, folder=paths.CONF)
