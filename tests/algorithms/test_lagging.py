"""Completions of older weights (generation.overlap): what the correction makes of the gradient."""

from itertools import product

import pytest
import torch
from algorithm_cases import advantages, corrected, micro, row_gradient
from torch import Tensor

from rloo_cli.algorithms.common.family import family_loss
from rloo_cli.algorithms.common.hooks import LossInputs
from rloo_cli.algorithms.common.importance_weights import correction_weights

VOCABULARY, LENGTH = 4, 3
OUTCOMES = torch.tensor([*product(range(VOCABULARY), repeat=LENGTH)])  # (64, 3), every completion


def token_logp(logits: Tensor) -> Tensor:
    """Log-probabilities of every outcome's tokens. (LENGTH, VOCABULARY) -> (64, LENGTH)"""
    return logits.log_softmax(-1)[torch.arange(LENGTH), OUTCOMES]


def made_tables() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the trained policy and of the older one that sampled, and each outcome's score."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(LENGTH, VOCABULARY, generator=draw, dtype=torch.float64)
    older = logits + 0.4 * torch.randn(LENGTH, VOCABULARY, generator=draw, dtype=torch.float64)
    return logits, older, torch.randn(len(OUTCOMES), generator=draw, dtype=torch.float64)


def expected_gradient(cap: float) -> Tensor:
    """The loss's gradient at the logits, as its mean over all pairs that the older one samples."""
    logits, older, scores = made_tables()
    theta = logits.clone().requires_grad_()
    new, old = token_logp(theta), token_logp(older)
    probability = old.sum(1).exp()
    pairs = torch.tensor([*product(range(len(OUTCOMES)), repeat=2)])
    leave_one_out = advantages(scores[pairs].tolist())
    advantage = (leave_one_out * probability[pairs].prod(1, keepdim=True)).reshape(-1)
    rows = pairs.reshape(-1)
    batch = micro([LENGTH] * len(rows), behaviour=old[rows].reshape(-1))
    batch.mask = batch.mask.double()
    logp = new[rows].reshape(-1)
    config = corrected("sequence", "truncate", cap)
    inputs = LossInputs(logp, logp.detach(), None, batch, advantage, 2.0)
    family_loss(inputs, config).total.backward()
    assert theta.grad is not None
    return -theta.grad


def gradient_of_mean(weight: Tensor, value: Tensor) -> Tensor:
    """The sum over outcomes of weight * value * grad log pi. (64,), (64,)"""
    theta = made_tables()[0].clone().requires_grad_()
    (weight * value * token_logp(theta).sum(1)).sum().backward()
    assert theta.grad is not None
    return theta.grad


def test_the_expected_gradient_is_the_policy_s_own_where_no_weight_is_cut() -> None:
    logits, _, scores = made_tables()
    true = gradient_of_mean(token_logp(logits).sum(1).exp(), scores)
    assert (expected_gradient(1e9) - true).abs().max() < 1e-10


@pytest.mark.parametrize("cap", [1.5, 1.0, 0.5])
def test_a_cap_s_bias_is_the_closed_form(cap: float) -> None:
    logits, older, scores = made_tables()
    policy, sampler = token_logp(logits).sum(1).exp(), token_logp(older).sum(1).exp()
    capped = torch.minimum(policy, cap * sampler)
    assert (capped < policy).any()
    biased = gradient_of_mean(capped, scores - (sampler * scores).sum())
    true = gradient_of_mean(policy, scores)
    assert (expected_gradient(cap) - biased).abs().max() < 1e-10
    assert (biased - true).abs().max() > 1e-3


def test_a_completion_outside_the_geometric_range_has_no_policy_term() -> None:
    """Means of log-ratios: ln 1.2, ln 0.9, ln 1.3, by hand; the range is [0.85, 1.25]."""
    steps = [[1.2, 1.2], [1.8, 0.45], [1.3, 1.3, 1.3]]
    old = torch.tensor([r for row in steps for r in row], dtype=torch.float64).log()
    batch = micro([2, 2, 3], behaviour=torch.zeros(7, dtype=torch.float64))
    batch.mask = batch.mask.double()
    rule = {"geometric_range": [0.85, 1.25]}
    tokens = correction_weights(old, batch, corrected("token", "truncate", 2.0, rule=rule))
    assert tokens is not None
    wanted = [1.2, 1.2, 1.8, 0.45, 0.0, 0.0, 0.0]
    assert tokens.weight.tolist() == pytest.approx(wanted, abs=1e-12)
    assert tokens.raw.tolist() == pytest.approx([r for row in steps for r in row], abs=1e-12)
    whole = correction_weights(old, batch, corrected("sequence", "truncate", 2.0, rule=rule))
    assert whole is not None
    assert whole.weight.tolist() == pytest.approx([1.44, 0.81, 0.0], abs=1e-12)
    logp = old.clone().requires_grad_()
    advantage = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    config = corrected("token", "truncate", 2.0, rule=rule)
    family_loss(LossInputs(logp, old, None, batch, advantage, 1.0), config).total.backward()
    assert logp.grad is not None
    assert (row_gradient(logp.grad, batch) != 0).tolist() == [True, True, False]
