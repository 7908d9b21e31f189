"""What holds for every score, ratio and split: the algorithms' arithmetic on generated cases."""

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_cases import advantages, column, config, corrected, micro, table
from hook_calls import rloo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from rloo_cli.algorithms.common import family, importance_weights
from rloo_cli.data.packing import MicroBatch

numbers = st.floats(-100, 100, allow_nan=False, width=32)
scores = st.integers(2, 9).flatmap(
    lambda k: st.lists(st.lists(numbers, min_size=k, max_size=k), min_size=1, max_size=4)
)
seeds = st.integers(0, 2**31 - 1)
AGGS = ["sequence_sum", "sequence_mean", "token_mean", "constant"]
LEVELS = ["sequence", "token", "geometric"]
quick = settings(max_examples=60, deadline=None)


def close(a: Tensor, b: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def like(groups: list[list[float]], seed: int) -> list[list[float]]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(len(groups), len(groups[0]), generator=made).double().tolist()


@quick
@given(scores, numbers)
def test_advantages_do_not_see_a_shift_of_all_scores(groups: list[list[float]], c: float) -> None:
    shifted = [[s + c for s in g] for g in groups]
    close(advantages(shifted), advantages(groups))


@quick
@given(scores, seeds)
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]], seed: int) -> None:
    total = advantages(groups, like(groups, seed)).sum(-1)
    close(total, torch.zeros_like(total))


@quick
@given(scores, seeds)
def test_permuting_a_group_permutes_its_advantages(groups: list[list[float]], seed: int) -> None:
    order = torch.randperm(len(groups[0]), generator=torch.Generator().manual_seed(seed))
    mixed = tensor(groups, dtype=torch.float64)[:, order].tolist()
    close(advantages(mixed), advantages(groups)[:, order])


@quick
@given(numbers, st.integers(2, 16), st.sampled_from(["loo", "group_mean", "batch_mean"]))
def test_equal_scores_give_exactly_zero(score: float, k: int, baseline: str) -> None:
    assert advantages([score] * k, baseline=baseline).abs().max() == 0.0


@quick
@given(scores, seeds, st.floats(0.01, 50))
def test_scaling_scores_and_beta_scales_advantages(
    groups: list[list[float]], seed: int, c: float
) -> None:
    kl, scaled = like(groups, seed), [[c * s for s in g] for g in groups]
    for keys in ({}, {"kl_in_baseline": False}, {"baseline": "none"}, {"baseline": "batch_mean"}):
        found = advantages(scaled, kl, beta=0.05 * c, **keys)
        close(found, c * advantages(groups, kl, beta=0.05, **keys), atol=1e-7)


@quick
@given(scores, seeds, st.sampled_from(["none", "group", "loo_std"]))
def test_any_split_into_groups_gives_the_same_advantages(
    groups: list[list[float]], seed: int, scale: str
) -> None:
    kl, keys = like(groups, seed), {"advantage_scale": scale, "kl_in_baseline": False}
    assert not rloo.needs_whole_step(config(**keys))
    alone = [advantages(g, [row], **keys) for g, row in zip(groups, kl, strict=True)]
    close(torch.cat(alone), advantages(groups, kl, **keys), atol=0)


def test_what_needs_the_whole_step_says_so() -> None:
    assert rloo.needs_whole_step(config(baseline="batch_mean"))
    assert rloo.needs_whole_step(config(advantage_scale="batch"))
    assert rloo.needs_whole_step(config(normalize_advantages=True))


def example(seed: int, groups: int = 3, k: int = 2) -> dict[str, Any]:
    """Ragged rows with a masked row, masked tokens, and everything per token in float64."""
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (groups * k,), generator=made).tolist()
    n = sum(lengths)
    old, ref, behaviour, step = 0.5 * torch.randn(4, n, generator=made).double()
    mask = (torch.rand(n, generator=made) < 0.8).float()
    mask[: lengths[0]] = 0
    a = torch.randn(groups * k, generator=made).double()
    return {
        "lengths": lengths,
        "mask": mask,
        "a": a,
        "k": k,
        "columns": {"old": old, "ref": ref, "behaviour": old + 0.1 * behaviour},
        "logp": old + 0.3 * step,
    }


def run(case: dict[str, Any], rows: list[int], c: Any, logp: Tensor, n: float) -> Any:
    """The loss of some of the case's rows, as one micro-batch."""
    starts = torch.tensor([0, *case["lengths"]]).cumsum(0).tolist()
    places = [p for r in rows for p in range(starts[r], starts[r + 1])]
    cut = {name: values[places] for name, values in case["columns"].items()}
    m = micro([case["lengths"][r] for r in rows], case["mask"][places], cut["behaviour"])
    return rloo.loss(logp[places], cut["old"], cut["ref"], m, case["a"][rows], c, n)


@pytest.mark.slow_but(
    "sequence-sequence_sum", "token-sequence_sum", "token-constant", "geometric-constant"
)
@pytest.mark.parametrize("agg", AGGS)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, loss=st.sampled_from(["clip", "reinforce"]), rule=st.sampled_from(LEVELS))
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(
    agg: str, level: str, seed: int, loss: str, rule: str
) -> None:
    keys = {"loss_agg": agg, "ratio_level": level, "policy_loss": loss, "kl_in": "loss"}
    c = corrected(rule, "truncate", 1.1, 0.9, kl_estimator="k3", **keys)
    case = example(seed)
    n = family.update_denominator(c, 6, int(case["mask"].sum()), 1, 8)
    results = []
    for split in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[2, 3, 0, 1], [4, 5]]):
        logp = case["logp"].clone().requires_grad_()
        outs = [run(case, rows, c, logp, n) for rows in split]
        total = torch.stack([out.total for out in outs]).sum()
        total.backward()
        assert logp.grad is not None
        assert torch.stack([out.policy + out.kl for out in outs]).sum().isclose(total.detach())
        results.append((total.detach(), logp.grad))
        assert (logp.grad[case["mask"] == 0] == 0).all()
    for total, gradient in results[1:]:
        close(total, results[0][0])
        close(gradient, results[0][1])


@pytest.mark.parametrize("agg", AGGS)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, rule=st.sampled_from(["token", "sequence", "geometric"]))
def test_on_policy_clip_and_reinforce_have_the_same_gradient(
    agg: str, seed: int, rule: str
) -> None:
    case = example(seed)
    found = []
    for loss, level in (("clip", "token"), ("reinforce", "token"), ("clip", "sequence")):
        c = corrected(rule, "truncate", 1.1, 0.9, policy_loss=loss, ratio_level=level, loss_agg=agg)
        logp = case["columns"]["old"].clone().requires_grad_()
        run(case, list(range(6)), c, logp, 6.0).total.backward()
        found.append(logp.grad)
    close(found[0], found[1])
    if agg == "sequence_sum":  # elsewhere a row's ratio stands at each of its tokens
        close(found[2], found[1])


def test_policy_gradient_agrees_with_finite_differences_on_three_tokens() -> None:
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(3, generator=made).double()
    tokens, m = torch.tensor([0, 2, 1, 1, 0]), micro([3, 2])
    a = torch.tensor([0.7, -0.4], dtype=torch.float64)
    old = (logits + 0.05 * torch.randn(3, generator=made)).log_softmax(0)[tokens]
    ref = torch.randn(3, generator=made).double().log_softmax(0)[tokens]
    keys = {"kl_in": "loss", "kl_estimator": "k3", "kl_ratio_weighted": True}
    for level in LEVELS:
        c = config(ratio_level=level, epsilon=0.5, **keys)

        def value(z: Tensor, c: Any = c) -> Tensor:
            return rloo.loss(z.log_softmax(0)[tokens], old, ref, m, a, c, 2.0).total

        z = logits.clone().requires_grad_()
        value(z).backward()  # type: ignore[no-untyped-call]
        steps = 1e-6 * torch.eye(3, dtype=torch.float64)
        slopes = [(value(logits + s) - value(logits - s)) / 2e-6 for s in steps]
        assert z.grad is not None
        close(z.grad, torch.stack(slopes), atol=1e-8)


def test_the_expected_gradient_is_that_of_the_expected_reward() -> None:
    """Over all pairs of completions: unbiased for K = 2 with KL in the reward (2.5)."""
    z = tensor([0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    rewards, beta = tensor([1.0, 0.2, -0.3], dtype=torch.float64), 0.3
    logp, ref = z.log_softmax(0), tensor([0.1, 0.0, 0.4], dtype=torch.float64).log_softmax(0)
    p, c, total = logp.detach().exp(), config(beta=beta, num_generations=2), logp.sum() * 0
    for i in range(3):
        for j in range(3):
            x, r, m = logp[[i, j]], ref[[i, j]], micro([1, 1])
            score = rewards[[i, j]][None]
            pull = rloo.sequence_kl(x.detach(), r, m, c)[None]
            a = rloo.advantages(score, pull, score < 9, c).advantage[0]
            total = total + p[i] * p[j] * rloo.loss(x, x.detach(), r, m, a, c, 2.0).total
    total.backward()  # type: ignore[no-untyped-call]
    free = z.detach().clone().requires_grad_()
    q = free.log_softmax(0)
    (-(q.exp() * (rewards - beta * (q - ref))).sum()).backward()
    assert z.grad is not None and free.grad is not None
    close(z.grad, free.grad)


def test_a_group_of_one_scorable_row_has_no_advantage_whatever_its_kl() -> None:
    for keys in ({}, {"kl_in_baseline": False}, {"baseline": "group_mean"}):
        score, scorable = table([[1.0, None], [1.0, 0.0]])
        pull = torch.ones(2, 2, dtype=torch.float64)
        found = rloo.advantages(score, pull, scorable, config(num_generations=2, **keys))
        assert found.advantage[0].tolist() == [0.0, 0.0]
        assert found.usable.tolist() == [[False, False], [True, True]]
        assert found.reward[0, 1] == 0.0


def test_a_lone_scorable_row_does_not_shift_the_normalised_others() -> None:
    with_lone = advantages([[1, 0, 0], [5, None, None]], normalize_advantages=True)
    close(with_lone[:1], advantages([[1, 0, 0]], normalize_advantages=True))
    assert with_lone[1].tolist() == [0.0, 0.0, 0.0]
    kl, keys = [[0.3, 0.1, 0.2]] * 2, {"kl_in_baseline": False, "normalize_advantages": True}
    assert advantages([[1, 0, 0], [5, None, None]], kl, **keys)[1].tolist() == [0.0, 0.0, 0.0]


def test_normalising_looks_at_what_the_baseline_compares() -> None:
    groups, keys = [[1.0, 1.0], [0.0, 0.0]], {"normalize_advantages": True}
    found = advantages(groups, baseline="batch_mean", **keys)
    close(found, tensor([[0.5, 0.5], [-0.5, -0.5]]).double() / (1 / 3**0.5 + 1e-4))
    score, scorable = table(groups)
    assert rloo.advantages(score, None, scorable, config(**keys)).norm_skipped


def test_equal_advantages_are_not_normalised_though_scores_differ() -> None:
    keys = {"normalize_advantages": True, "baseline": "none", "beta": 1.0}
    assert advantages([0.2, 0.1, 0.1], [0.1, 0, 0], **keys).tolist() == [[0.1, 0.1, 0.1]]


def test_kl_outside_the_baseline_is_added_afterwards() -> None:
    kl = tensor([[0.3, 0.2, 0.5, -0.3]], dtype=torch.float64)
    found = advantages([1, 0, 0.5, 0], kl.tolist(), beta=0.1, kl_in_baseline=False)
    close(found, advantages([1, 0, 0.5, 0]) - 0.1 * kl)


@pytest.mark.parametrize("where", ["loss", "none"])
def test_kl_elsewhere_leaves_reward_and_advantage_alone(where: str) -> None:
    score, scorable = table([1, 0, 0.5, 0])
    c = config(kl_in=where, kl_estimator="k3")
    found = rloo.advantages(score, score + 1, scorable, c)
    close(found.reward, score)
    close(found.advantage, advantages([1, 0, 0.5, 0]))


@pytest.mark.parametrize("log_ratio", [10.0, 90.0, 1e4])
@pytest.mark.parametrize("level", LEVELS)
def test_a_huge_ratio_stays_finite(level: str, log_ratio: float) -> None:
    for dtype in (torch.float32, torch.float64):
        logp = tensor([log_ratio], dtype=dtype, requires_grad=True)
        a = tensor([-1.0], dtype=torch.float64)
        out = rloo.loss(logp, tensor([0.0]), None, micro([1]), a, config(ratio_level=level), 1.0)
        out.total.backward()
        assert logp.grad is not None and logp.grad.isfinite().all()
        assert out.total.isfinite() and out.total <= torch.tensor(20.0).double().exp() * 1.001


@pytest.mark.parametrize("d", [-5000.0, 5000.0])
def test_a_huge_kl_or_weight_stays_finite(d: float) -> None:
    old, ref, m = tensor([d]).double(), tensor([0.0]).double(), micro([1])
    for name in ("k1", "k2", "k3"):
        assert rloo.sequence_kl(old, ref, m, config(kl_estimator=name)).isfinite().all()
    c = config(kl_in="loss", kl_estimator="k3", kl_ratio_weighted=True)
    assert rloo.loss(old, ref, ref, m, tensor([0.0]).double(), c, 1.0).total.isfinite()
    m.behaviour_logp = ref
    for mode in ("truncate", "mask", "filter"):
        found = importance_weights.correction_weights(old, m, corrected("sequence", mode))
        assert found is not None
        assert found.weight.isfinite().all() and found.raw.isfinite().all()


def test_clip_shares_are_counted_per_row_over_unmasked_tokens() -> None:
    logp = column([[0.5, 0.0, 0.5, 0.0], [-0.5, -0.5]])
    m = micro([4, 2], mask=tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    a = tensor([1.0, -1.0], dtype=torch.float64)
    out = rloo.loss(logp, logp * 0, None, m, a, config(ratio_level="token"), 1.0)
    close(out.row_high, tensor([1 / 3, 0.0]), atol=1e-6)
    close(out.row_low, tensor([0.0, 1.0]), atol=1e-6)
    assert out.unit_mask.sum() == 5
    assert out.log_ratio_sq.tolist() == [0.25, 0, 0, 0, 0.25, 0.25]
    rows = rloo.loss(logp, logp * 0, None, m, a, config(), 1.0)
    assert rows.row_high.tolist() == [1.0, 0.0] and rows.row_low.tolist() == [0.0, 1.0]
    assert rows.log_ratio_sq.tolist() == [0.25, 1.0]


def test_nothing_is_clipped_with_reinforce() -> None:
    logp, a = column([[0.9], [-0.9]]), tensor([1.0, -1.0], dtype=torch.float64)
    c = config(policy_loss="reinforce")
    out = rloo.loss(logp, logp * 0, None, micro([1, 1]), a, c, 1.0)
    assert not (out.low | out.high | out.delta).any()


def test_an_epsilon_high_of_its_own_bounds_the_upper_side_only() -> None:
    c = config(epsilon=0.2, epsilon_high=0.0)
    assert c.upper == 1.0 and config(epsilon=0.2).upper == 1.2
    rho, a = tensor([1.1, 0.9]).double(), tensor([1.0, -1.0]).double()
    term = family.policy_term(rho.log(), rho, a, micro([1, 1]), c, None)
    close(term, tensor([-1.0, 0.9]).double(), atol=1e-6)


def token_weighted(mode: str, level: str = "sequence", **keys: Any) -> tuple[Any, Tensor]:
    old = column([[-1, -2, -0.5]])
    m = micro([3], behaviour=tensor([-1.2, -3.0, -0.4]))
    logp, a = (old + 0.05).requires_grad_(), tensor([1.0], dtype=torch.float64)
    out = rloo.loss(logp, old, None, m, a, corrected(level, mode, 2.0, **keys), 1.0)
    out.total.backward()
    assert logp.grad is not None
    return out, logp.grad


def test_token_weights_weigh_the_gradient_of_a_sequence_ratio_and_not_its_value() -> None:
    rho = torch.tensor(0.15).double().exp()
    out, gradient = token_weighted("truncate", "token")
    close(out.ratio, rho[None], atol=1e-6)
    close(out.total.detach(), -rho, atol=1e-6)
    close(gradient, -rho * tensor([1.221403, 2.0, 0.904837]).double(), atol=1e-5)


def test_sequence_weights_multiply_the_term_and_are_reported() -> None:
    out, gradient = token_weighted("truncate")
    close(gradient, -2 * torch.tensor(0.15).double().exp() * torch.ones(3).double(), atol=1e-6)
    assert out.weight.tolist() == [2.0] and out.raw_weight[0] > 3


def test_masked_tokens_have_no_part_in_a_weight_and_filter_weighs_tokens() -> None:
    old, behaviour = column([[-1, -2], [-1, -2]]), tensor([-1.5, -9.0, -1.5, -1.5])
    m = micro([2, 2], mask=tensor([1.0, 0.0, 1.0, 1.0]), behaviour=behaviour)
    found = importance_weights.correction_weights(old, m, corrected("sequence", "truncate"))
    assert found is not None
    close(found.weight, tensor([0.5, 0.0]).double().exp())
    found = importance_weights.correction_weights(
        old, m, corrected("sequence", "filter", floor=1.1)
    )
    assert found is not None and found.by_token
    close(found.weight, tensor([0.5, 0.0, -torch.inf, -torch.inf]).double().exp())


def test_bypass_puts_the_sampler_into_the_ratio_where_it_said_something() -> None:
    old, m = column([[-1, -2]]), micro([2], behaviour=tensor([-1.5, float("nan")]))
    a = tensor([1.0], dtype=torch.float64)
    out = rloo.loss(old, old, None, m, a, corrected("token", "bypass", ratio_level="token"), 1.0)
    close(out.ratio, tensor([0.5, 0.0]).double().exp())
    assert out.weight is None


def test_correction_leaves_the_kl_term_alone() -> None:
    old, m = column([[-1, -2]]), micro([2], behaviour=tensor([-3.0, -4.0]))
    a, keys = tensor([0.0], dtype=torch.float64), {"kl_in": "loss", "kl_estimator": "k3"}
    with_rule = rloo.loss(old, old, old - 1, m, a, corrected("sequence", "truncate", **keys), 1.0)
    without = rloo.loss(old, old, old - 1, m, a, config(**keys), 1.0)
    close(with_rule.kl, without.kl)


def test_auto_correction_must_be_resolved_first() -> None:
    auto = rloo.Config(**(config().model_dump() | {"correction": RULE}))
    assert rloo.resolved(auto, "vllm_server").correction.mode == "truncate"
    assert rloo.resolved(auto, "transformers").correction.mode == "none"
    x, m = column([[-1.0]]), micro([1])
    with pytest.raises(ValueError, match="resolved"):
        rloo.loss(x, x, None, m, tensor([1.0]), auto, 1.0)


RULE = {"mode": "auto", "level": "sequence", "cap": 3.0, "floor": 0.0, "geometric_range": None}


def test_to_go_credits_each_token_with_the_kl_still_to_come() -> None:
    c = config(kl_credit="to_go", kl_in_baseline=False, policy_loss="reinforce", beta=0.1)
    old, ref = column([[1, 2, 4], [8, 16]]), column([[0, 0, 0], [0, 0]])
    m = micro([3, 2], mask=tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    a = tensor([1.0, 0.0], dtype=torch.float64)
    found = rloo.token_advantages(a, tensor([True, True]), old, ref, m, c)
    close(found, tensor([0.5, 0.6, 0.6, -2.4, -1.6]).double(), atol=1e-6)
    alone = rloo.token_advantages(a, tensor([True, False]), old, ref, m, c)
    close(alone, tensor([0.5, 0.6, 0.6, 0.0, 0.0]).double(), atol=1e-6)
    score, scorable = table([1.0, 0.0])
    pull = rloo.sequence_kl(old, ref, m, c)[None]
    out = rloo.loss(old, old, ref, m, found, c, 1.0)
    close(out.total, -(found * old * m.mask).sum())
    assert out.ratio.tolist() == [1.0, 1.0] and not (out.low | out.high).any()
    sequence = rloo.advantages(score, pull, scorable, c)
    close(sequence.advantage, tensor([[1.0, -1.0]]).double())
    close(sequence.reward, score - 0.1 * pull)


def test_kl_temperature_one_uses_its_own_logp_in_the_loss() -> None:
    x, other, m = column([[-1.0]]), column([[-2.0]]), micro([1])
    c = config(kl_in="loss", kl_estimator="k2", beta=1.0)
    out = rloo.loss(x, x, x, m, tensor([0.0]).double(), c, 1.0, kl_logp=other)
    close(out.kl, tensor(0.5).double())


def test_a_reward_of_weight_zero_makes_no_row_scorable() -> None:
    nan = float("nan")
    raw = tensor([[[1.0, nan]], [[0.3, 0.4]]]).double()
    score, scorable = rloo.combine(raw, [1.0, 0.0], config())
    assert score.tolist() == [[1.0, 0.0]] and scorable.tolist() == [[True, False]]


GDPO = "normalize_then_sum"


def test_normalize_then_sum_lets_rewards_of_any_size_weigh_alike() -> None:
    nan = float("nan")
    first = tensor([[1.0, 0.0, 0.0, nan], [2.0, 2.0, 2.0, 2.0]]).double()
    raw = torch.stack([first, 1000 * first])
    found, scorable = rloo.combine(raw, [1.0, 1.0], config(multi_reward=GDPO))
    z = tensor([2 / 3, -1 / 3, -1 / 3]).double()
    std = tensor([1.0, 0.0, 0.0]).double().std()
    summed = torch.cat([z / (std + 1e-4) + 1000 * z / (1000 * std + 1e-4), torch.zeros(4).double()])
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    close(found[scorable], expected)
    assert found[~scorable].tolist() == [0.0]
    equal, _ = rloo.combine(0 * first[None, :, :3] + 0.1, [1.0], config(multi_reward=GDPO))
    assert equal.abs().max() == 0.0
    tenths, wholes = ([[s] * 3, [1.0, 0.0, 0.0]] for s in (0.1, 2.0))  # equal is equal
    pair = [torch.tensor([x], dtype=torch.float64) for x in (tenths, wholes)]
    first, second = (rloo.combine(x, [1.0], config(multi_reward=GDPO))[0] for x in pair)
    close(first, second, atol=0)


def test_normalize_rewards_leaves_equal_scores_alone_and_clip_comes_last() -> None:
    ended = torch.ones(1, 3, dtype=torch.bool)
    c = config(normalize_rewards=True)
    equal = tensor([[0.1, 0.1, 0.1]]).double()
    assert rloo.shape(equal, ended, ended, ended, c).tolist() == equal.tolist()
    score = tensor([[10.0, 20.0, 60.0]]).double()
    shaped = rloo.shape(score, ended, ended, ended, c)
    close(shaped, (score - 30) / (score.std() + 1e-8))
    c = config(normalize_rewards=True, reward_clip_range=[-0.5, 1.0])
    close(rloo.shape(score, ended, ended, ended, c), shaped.clamp(-0.5, 1.0))
    some = tensor([[True, True, False]])
    pair = rloo.shape(score, some, ended, ended, c)
    assert pair[0, 2] == 0 and pair[0, 0] == -0.5
    c = config(missing_eos_penalty={"mode": "replace", "value": -1.0})
    assert rloo.shape(score, some, ended, ~ended, c).tolist() == [[-1.0, -1.0, 0.0]]


def test_a_denominator_is_never_zero() -> None:
    for agg in AGGS:
        assert rloo.denominator(config(loss_agg=agg), 0, 0, 0, 8) == 1.0
    empty = micro([2], mask=torch.zeros(2))
    x, a = column([[-1.0, -1.0]]), tensor([1.0]).double()
    for agg in [*AGGS, "token_mean_local"]:
        assert rloo.loss(x, x, None, empty, a, config(loss_agg=agg), 1.0).total == 0


def test_float32_columns_agree_with_float64_ones() -> None:
    case, c = example(7), config()
    exact = run(case, list(range(6)), c, case["logp"], 6.0).total
    single = {name: values.float() for name, values in case["columns"].items()}
    rough = run(case | {"columns": single}, list(range(6)), c, case["logp"].float(), 6.0).total
    torch.testing.assert_close(rough.double(), exact, rtol=5e-6, atol=5e-6)


def test_a_micro_batch_has_what_the_loss_looks_at() -> None:
    wanted = {"mask", "sequence_ids", "num_sequences", "behaviour_logp"}
    assert wanted <= set(vars(MicroBatch)) | set(MicroBatch.__dataclass_fields__)


@pytest.mark.process
def test_the_registry_reads_the_schema_without_torch() -> None:
    code = "import sys, rloo_cli.algorithms.rloo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@quick
@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.floats(0.01, 0.9), seeds)
def test_the_clip_range_grows_with_the_root_of_the_length(
    lengths: list[int], epsilon: float, seed: int
) -> None:
    index = torch.repeat_interleave(torch.arange(len(lengths)), tensor(lengths))
    batch = SimpleNamespace(
        mask=torch.ones(len(index)).double(), sequence_ids=index, num_sequences=len(lengths)
    )
    plain = config(epsilon=epsilon, epsilon_high=None, epsilon_tokens=None)
    wide = plain.model_copy(update={"epsilon_tokens": 100})
    power = tensor([max(1.0, n / 100) ** 0.5 for n in lengths], dtype=torch.float64)
    low, high = family.clip_range(wide, batch)
    close(low.log() / power, torch.full_like(power, math.log(1 - epsilon)))
    close(high.log() / power, torch.full_like(power, math.log(1 + epsilon)))
    assert family.clip_range(plain, batch) == (1 - epsilon, 1 + epsilon)
    ratio = torch.rand(len(lengths), generator=torch.Generator().manual_seed(seed)).double() * 3
    a = torch.ones_like(ratio)
    logp = torch.zeros_like(batch.mask)
    close(family.policy_term(logp, ratio, a, batch, wide, None), -ratio.minimum(high))
    close(family.policy_term(logp, ratio, -a, batch, wide, None), ratio.maximum(low))
