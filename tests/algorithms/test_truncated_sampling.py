"""Under a truncated sampler the gradient over the kept ids is unbiased, in fp64 and by enumeration.

A vocabulary of four, completions of two tokens: every pair of completions is weighted with its
probability, and the expected gradient is compared with that of the objective itself.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from algorithm_cases import config, corrected, micro
from generation_cases import config as sampler_config
from hook_calls import rloo
from torch import Tensor

from rloo_cli.data.packing import KeptIds
from rloo_cli.generation.hf import sampling
from rloo_cli.policy.masked_head import kept_logprobs

WORDS, TEMPERATURE, BETA = 4, 0.8, 0.3
FILTERS = {
    "top_p": {"top_p": 0.75},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.15},
    "all": {"top_p": 0.9, "top_k": 3, "min_p": 0.1},
}
Kept = list[list[int]]  # of each state, the ids that the sampler chooses from


def tables(seed: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of the policy, the reference and a sampler a little off, (5, 4); scores (4, 4).

    The first row is of the first token, row 1 + i of the second one after i.
    """
    draw = torch.Generator().manual_seed(seed)
    policy, reference, noise = torch.randn(3, 1 + WORDS, WORDS, generator=draw, dtype=torch.float64)
    score = torch.randn(WORDS, WORDS, generator=draw, dtype=torch.float64)
    return policy, reference, policy + 0.2 * noise, score


def kept_ids(logits: Tensor, **filters: Any) -> Kept:
    """What the sampler's own processors let through in each state."""
    settings = sampler_config(temperature=TEMPERATURE, **filters)
    process = sampling.logits_processors(settings, set(), 1, greedy=False)
    ids, counts = sampling.allowed_ids(process(torch.zeros(len(logits), 1).long(), logits.float()))
    found = [list(part) for part in torch.tensor(ids).split(counts)]
    return [[int(i) for i in part] for part in found]


def kept_logp(table: Tensor, kept: Kept, first: int, second: int) -> Tensor:
    """The package's log-probabilities of a completion's two tokens over the kept ids. (2,)"""
    states = (0, 1 + first)
    ids = torch.tensor([i for state in states for i in kept[state]])
    counts = torch.tensor([len(kept[state]) for state in states])
    token = torch.repeat_interleave(torch.arange(2), counts)
    target = kept[0].index(first), len(kept[0]) + kept[1 + first].index(second)
    chosen = table[torch.tensor(states)[token], ids]
    return kept_logprobs(chosen / TEMPERATURE, KeptIds(ids, token, torch.tensor(target)))[0]


def whole_logp(table: Tensor, kept: Kept, first: int, second: int) -> Tensor:
    """The same over the whole vocabulary, as it is without masks. (2,)"""
    logp = (table / TEMPERATURE).log_softmax(-1)
    return torch.stack([logp[0, first], logp[1 + first, second]])


def completions(kept: Kept) -> list[tuple[int, int]]:
    """Everything that the truncated sampler can say."""
    return [(first, second) for first in kept[0] for second in kept[1 + first]]


def right_gradient(table: Tensor, reference: Tensor, kept: Kept, score: Tensor) -> Tensor:
    """Of the expected score minus BETA times KL, both under distributions cut to the kept ids."""
    off = torch.full_like(table, -math.inf)
    for state, ids in enumerate(kept):
        off[state, ids] = 0.0
    p, q = ((t / TEMPERATURE + off).log_softmax(-1) for t in (table, reference))
    value = torch.zeros((), dtype=torch.float64)
    for first, second in completions(kept):
        logp = p[0, first] + p[1 + first, second]
        kl = logp - q[0, first] - q[1 + first, second]
        value = value + logp.exp() * (score[first, second] - BETA * kl)
    return torch.autograd.grad(value, table)[0]


def expected_gradient(
    table: Tensor, reference: Tensor, kept: Kept, score: Tensor, c: Any, sampler: Tensor,
    logp_of: Any = kept_logp,
) -> Tensor:  # fmt: skip
    """Of the package's loss of a group of two, over all pairs that the sampler can draw."""
    rows = completions(kept)
    ours = {row: logp_of(table, kept, *row) for row in rows}
    refs = {row: logp_of(reference, kept, *row) for row in rows}
    theirs = {row: kept_logp(sampler, kept, *row).detach() for row in rows}
    yes, total = torch.ones(1, 2, dtype=torch.bool), torch.zeros((), dtype=torch.float64)
    for pair in product(rows, repeat=2):
        logp, ref, behaviour = (torch.cat([of[row] for row in pair]) for of in (ours, refs, theirs))
        kl = (logp.detach() - ref).reshape(2, 2).sum(-1)[None]
        scores = torch.stack([score[row] for row in pair])[None]
        a = rloo.advantages(scores, kl, yes, c).advantage[0]
        batch = micro([2, 2], behaviour=behaviour)
        loss = rloo.loss(logp, logp.detach(), ref, batch, a, c, 2.0).total
        total = total + behaviour.sum().exp() * loss
    return -torch.autograd.grad(total, table)[0]


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_over_all_completions_the_gradient_is_that_of_the_truncated_policys_objective(
    filters: dict[str, Any],
) -> None:
    policy, reference, _, score = tables()
    kept = kept_ids(policy, **filters)
    assert any(len(ids) < WORDS for ids in kept) and any(len(ids) > 1 for ids in kept)
    policy.requires_grad_()
    right = right_gradient(policy, reference, kept, score)
    c = config(beta=BETA)
    found = expected_gradient(policy, reference, kept, score, c, policy.detach())
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    whole = expected_gradient(policy, reference, kept, score, c, policy.detach(), whole_logp)
    assert (whole - right).norm() > 0.03 * right.norm()  # what top_p alone would have done


def test_with_a_correction_it_is_unbiased_for_a_sampler_of_other_weights_too() -> None:
    policy, reference, sampler, score = tables()
    kept = kept_ids(sampler, top_p=0.75)  # the sampler decides which ids are kept
    policy.requires_grad_()
    right = right_gradient(policy, reference, kept, score)
    c = corrected("sequence", "truncate", cap=1e9, beta=BETA)
    found = expected_gradient(policy, reference, kept, score, c, sampler)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    plain = expected_gradient(policy, reference, kept, score, config(beta=BETA), sampler)
    assert (plain - right).norm() > 1e-3


def test_the_kl_to_the_reference_is_zero_where_both_models_are_the_same() -> None:
    policy, _, _, _ = tables()
    kept = kept_ids(policy, top_p=0.75)
    for row in completions(kept):
        gap = kept_logp(policy, kept, *row) - kept_logp(policy.clone(), kept, *row)
        assert not gap.any()
