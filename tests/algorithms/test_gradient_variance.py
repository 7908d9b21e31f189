"""How noisy each estimator's gradient is, on a bandit small enough to go through all samples.

Three actions, K completions of one token each: every way to draw them is gone through with its
probability, so mean and variance are exact, and no seed decides anything.
"""

import itertools

import pytest
import torch
from algorithm_cases import micro
from hook_calls import of_name
from torch import Tensor

from rloo_cli.config.compose import compose_config

SCORES = torch.tensor([1.0, 1.5, 3.0], dtype=torch.float64)
LOGITS = torch.tensor([0.3, 0.0, -0.5], dtype=torch.float64)


def gradients(name: str, k: int, *words: str) -> tuple[Tensor, Tensor]:
    """Of each draw of k actions: its probability and its gradient of the loss. -> (M,), (M, 3)"""
    words = (f"algorithm={name}", f"algorithm.num_generations={k}", "algorithm.beta=0", *words)
    own = of_name(name)
    config = own.resolved(
        own.Config(**compose_config([*words]).values["algorithm"]), "transformers"
    )
    weights, found = [], []
    for draw in itertools.product(range(3), repeat=k):
        actions = torch.tensor(draw)
        score = SCORES[actions][None]
        a = own.advantages(score, None, score == score, config).advantage[0]
        logits = LOGITS.clone().requires_grad_()
        logp = logits.log_softmax(0)[actions]
        loss = own.loss(logp, logp.detach(), None, micro([1] * k), a, config, float(k))
        (slope,) = torch.autograd.grad(loss.total, logits)
        weights.append(LOGITS.softmax(0)[actions].prod())
        found.append(slope)
    return torch.stack(weights), torch.stack(found)


def mean_and_variance(name: str, k: int, *words: str) -> tuple[Tensor, float]:
    """The expected gradient, and the trace of its covariance. -> (3,), number"""
    weight, found = gradients(name, k, *words)
    mean = (weight[:, None] * found).sum(0)
    return mean, float((weight[:, None] * (found - mean).square()).sum())


def true_gradient() -> Tensor:
    """Of minus the expected score, at the logits."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(-(logits.softmax(0) * SCORES).sum(), logits)[0]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_leave_one_out_is_unbiased_and_less_noisy_than_no_baseline(k: int) -> None:
    plain, noisy = mean_and_variance("reinforce", k, "algorithm.baseline=none")
    mean, calm = mean_and_variance("rloo", k)
    torch.testing.assert_close(plain, true_gradient(), rtol=0, atol=1e-12)
    torch.testing.assert_close(mean, true_gradient(), rtol=0, atol=1e-12)
    print(f"K {k}: variance {noisy:.4f} without a baseline, {calm:.4f} with leave-one-out")
    assert calm < noisy / 2


def test_the_variance_falls_with_more_completions_and_not_with_a_shift_of_all_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loo = [mean_and_variance("rloo", k)[1] for k in (2, 3, 4)]
    assert loo == sorted(loo, reverse=True)
    _, before = mean_and_variance("reinforce", 2, "algorithm.baseline=none")
    monkeypatch.setattr(f"{__name__}.SCORES", SCORES + 10)
    assert mean_and_variance("rloo", 2)[1] == pytest.approx(loo[0])
    assert mean_and_variance("reinforce", 2, "algorithm.baseline=none")[1] > 10 * before


def test_the_groups_own_mean_is_a_smaller_step_in_the_same_direction() -> None:
    mean, variance = mean_and_variance("rloo", 3, "algorithm.baseline=group_mean")
    loo, of_loo = mean_and_variance("rloo", 3)
    torch.testing.assert_close(mean * 3 / 2, loo, rtol=0, atol=1e-12)
    assert variance * 9 / 4 == pytest.approx(of_loo)
