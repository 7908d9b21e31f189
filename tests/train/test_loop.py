"""One step of the loop against the same step computed by hand, and what it may not depend on."""

from itertools import chain

import pytest
import torch
from loop_cases import (
    ENDS,
    EXACT,
    PLAIN,
    apart,
    flat,
    leave_one_out,
    policy_gradient,
    sampled,
    step,
    table,
    timeless,
)
from loop_cases import alone as make

from rloo_cli.algorithms.common.hooks import AdvantageInputs
from rloo_cli.train import loop
from rloo_cli.train import step as train_step

CUTS = [("4", "null"), ("8", "4"), ("16", "8"), ("8", "16")]
KINDS = {
    "as it comes": [],
    "without KL": ["algorithm.beta=0"],
    "old_logp in a pass of its own": ["algorithm.num_iterations=2", "algorithm.num_minibatches=2"],
    "normalized over the step": ["algorithm.normalize_advantages=true"],
    "divided by the step's std": ["algorithm.advantage_scale=batch"],
    "the step's mean as baseline": ["algorithm.baseline=batch_mean"],
    "mean over tokens": ["algorithm.loss_agg=token_mean", "algorithm.ratio_level=token"],
    "only valid rows counted": [
        "algorithm.loss_denominator=valid",
        "algorithm.mask_truncated_completions=true",
    ],
    "KL in the loss": ["algorithm.kl_in=loss", "algorithm.kl_estimator=k3"],
}


@pytest.mark.slow_but("as it comes", "KL in the loss")
@pytest.mark.parametrize("kind", KINDS)
def test_update_and_loss_do_not_depend_on_how_the_batch_is_cut(tmp_path, kind):
    found = []
    for micro, no_grad in CUTS:
        sizes = [f"train.micro_batch_size={micro}", f"train.no_grad_batch_size={no_grad}"]
        run = make(tmp_path, *PLAIN, ENDS, *KINDS[kind], *sizes)
        moved, row, _ = step(run)
        found.append((moved, row))
    (moved, row), *others = found
    exact = EXACT * run.state.updates  # each update starts from the rounding of the last
    assert float(moved.norm()) > 0
    for other, again in others:
        assert apart(other, moved) < exact
        for name in ("loss", "policy_loss", "grad_norm", "entropy", "reward"):
            assert again[name] == pytest.approx(row[name], rel=1e-4, abs=EXACT), name


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradient_is_that_of_leave_one_out_advantages_computed_by_hand(tmp_path, beta):
    run = make(tmp_path, *PLAIN, ENDS, f"algorithm.beta={beta}")
    batch = sampled(run)
    scores = [[float(s) for s in row] for row in batch.raw[0]]
    reward = scores
    if beta:
        now, ref = table(run.policy, batch), table(run.reference, batch)
        reward = [
            [s - beta * float((n - r).sum()) for s, n, r in zip(*rows, strict=True)]
            for rows in zip(scores, now, ref, strict=True)
        ]
    value = leave_one_out(reward)
    expected = policy_gradient(run, batch, value)
    moved, row, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < 5e-5  # two roundings of a weight of 1 to an update
    assert torch.allclose(batch.advantage, torch.tensor(value).double(), atol=1e-4)
    assert row["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert abs(row["advantages/mean"]) < 1e-12


FUSED = {
    "beta 0": ["algorithm.beta=0"],
    "beta 0.3": ["algorithm.beta=0.3"],
    "KL at temperature 1": [
        "algorithm.beta=0.3",
        "generation.temperature=0.7",
        "algorithm.kl_temperature=one",
    ],
    "KL at temperature 1, in the loss": [
        "algorithm.beta=0.3",
        "generation.temperature=0.7",
        "algorithm.kl_temperature=one",
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
    ],
    "KL to go at temperature 1, two passes": [
        "algorithm.beta=0.3",
        "generation.temperature=0.7",
        "algorithm.kl_temperature=one",
        "algorithm.kl_credit=to_go",
        "algorithm.kl_in_baseline=false",
        "algorithm.ratio_level=token",
        "algorithm.num_iterations=2",
    ],
    "two passes": ["algorithm.beta=0.3", "algorithm.num_iterations=2"],
    "sampler correction": ["algorithm.correction.mode=truncate"],
}


@pytest.mark.slow_but("beta 0", "KL at temperature 1, in the loss", "sampler correction")
@pytest.mark.parametrize("kind", FUSED)
def test_old_logp_of_the_training_forward_gives_the_update_of_a_separate_pass(tmp_path, kind):
    one = make(tmp_path, *PLAIN, ENDS, *FUSED[kind], "train.micro_batch_size=8")
    apart_ = [*FUSED[kind], "train.old_logp=separate", "name=apart"]
    two = make(tmp_path, *PLAIN, ENDS, *apart_, "train.micro_batch_size=8")
    assert (
        one.forward_plan.separate is None and two.forward_plan.separate == "train.old_logp=separate"
    )
    moved, row, batch = step(one)
    again, other, twin = step(two)
    assert apart(moved, again) < EXACT
    assert torch.allclose(batch.advantage, twin.advantage, atol=1e-5)
    assert "time/old_logp" in other and "time/old_logp" not in row
    for name in row.keys() & other.keys():
        if not name.startswith(("time/", "perf/", "step_time", "eps")) and "/time" not in name:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name


def test_kl_at_temperature_one_is_that_of_the_untempered_policies(tmp_path):
    run = make(tmp_path, ENDS, "generation.temperature=0.7", "algorithm.kl_temperature=one")
    batch = sampled(run)
    now, ref = table(run.policy, batch), table(run.reference, batch)
    wanted = [
        [float((n - r).sum()) for n, r in zip(*rows, strict=True)]
        for rows in zip(now, ref, strict=True)
    ]
    step(run, batch)
    assert torch.allclose(batch.kl, torch.tensor(wanted).double(), atol=1e-4)


def spy(monkeypatch):
    """The plans the loop made."""
    plans = []

    def planned(run, batch, iteration):
        plans.append((iteration, found := loop_plans(run, batch, iteration)))
        return found

    loop_plans = train_step.plan_updates
    monkeypatch.setattr(train_step, "plan_updates", planned)
    return plans


def test_updates_are_iterations_times_minibatches_permuted_anew_each_time(tmp_path, monkeypatch):
    plans = spy(monkeypatch)
    words = ["algorithm.num_iterations=3", "algorithm.num_minibatches=2", "max_steps=2"]
    run = make(tmp_path, *PLAIN, ENDS, *words, "train.prompts_per_step=8")
    made, advance = [], run.optimizer.step
    run.optimizer.step = lambda norm: (made.append(norm), advance(norm))
    loop.run_training_loop(run)
    assert len(made) == run.state.updates == 2 * 3 * 2
    orders = [[[i for i, _ in chain(*p.micro_batches)] for p in found] for _, found in plans]
    for order in orders:
        assert sorted(chain(*order)) == [*range(8)] and [len(part) for part in order] == [4, 4]
    assert len({str(order) for order in orders}) == len(orders) == 6
    assert {p.denominator for _, found in plans for p in found} == {16}


def test_ratio_is_measured_from_the_policy_at_the_start_of_the_step(tmp_path):
    run = make(tmp_path, *PLAIN, ENDS, "algorithm.num_iterations=2", "algorithm.num_minibatches=2")
    batch = sampled(run)
    start = table(run.policy, batch)
    _, row, _ = step(run, batch)
    for p, group in enumerate(batch.groups):
        for k, old in enumerate(group.old_logp):
            assert torch.allclose(old, start[p][k], atol=1e-5)
    end = table(run.policy, batch)
    assert max(float((e - s).abs().max()) for e, s in zip(end[0], start[0], strict=True)) > 1e-3
    assert row["ratio/max"] > 1.001 and row["ratio/min"] < 0.999
    assert row["policy/approxkl_avg"] > 0


def test_one_update_per_step_has_a_ratio_of_exactly_one(tmp_path):
    _, row, _ = step(make(tmp_path, ENDS))
    assert row["ratio/min"] == row["ratio/max"] == 1.0
    assert row["clip_ratio/region_mean"] == row["policy/approxkl_avg"] == 0.0


@pytest.mark.slow_but("normalize_advantages=true-4", "baseline=batch_mean-16")
@pytest.mark.parametrize("micro", ["4", "16"])
@pytest.mark.parametrize(
    "switch", ["normalize_advantages=true", "advantage_scale=batch", "baseline=batch_mean"]
)
def test_step_wide_advantages_are_those_of_the_whole_batch(tmp_path, switch, micro):
    run = make(tmp_path, ENDS, f"algorithm.{switch}", f"train.micro_batch_size={micro}")
    _, _, batch = step(run)
    inputs = AdvantageInputs(batch.shaped, batch.kl, batch.scorable)
    whole = run.algorithm.advantages(inputs).advantage
    assert torch.equal(batch.advantage, whole)
    parts = [
        run.algorithm.advantages(
            AdvantageInputs(batch.shaped[[p]], batch.kl[[p]], batch.scorable[[p]])
        ).advantage
        for p in range(4)
    ]
    assert not torch.allclose(torch.cat(parts), whole)


def test_two_runs_of_one_seed_are_equal_bit_for_bit_and_another_seed_is_not(tmp_path):
    def go(seed):
        run = make(tmp_path, ENDS, f"seed={seed}", "max_steps=3", "train.learning_rate=1e-3")
        loop.run_training_loop(run)
        return flat(run), [timeless(row) for row in run.log.metrics_lines]

    (first, rows), (again, same), (other, others) = go(1), go(1), go(2)
    assert torch.equal(first, again) and rows == same and len(rows) == 3
    assert not torch.equal(first, other) and rows[-1]["reward"] != others[-1]["reward"]


def share_of_small_ids(completion_ids, **_):
    return [sum(i < 130 for i in ids) / len(ids) for ids in completion_ids]


def test_thirty_steps_of_an_easy_problem_raise_the_reward(tmp_path):
    words = ["max_steps=30", "train.learning_rate=3e-3", "generation.max_completion_length=8"]
    words += ["train.prompts_per_step=8", "algorithm.beta=0"]
    run = make(tmp_path, *words, rewards={"small": share_of_small_ids}, noise=0.0)
    loop.run_training_loop(run)
    rewards = [row["reward"] for row in run.log.metrics_lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_places_and_counts_advance_by_what_was_consumed(tmp_path):
    run = make(tmp_path, ENDS, "max_steps=3")
    loop.run_training_loop(run)
    assert (run.state.step, run.state.updates, run.state.place) == (3, 3, 12)
    assert run.state.episodes == 48
    assert [row["episode"] for row in run.log.metrics_lines] == [16, 32, 48]
    assert run.state.tokens == run.log.metrics_lines[-1]["num_tokens"]


@pytest.mark.slow_but(
    "sequence_sum-all-<lambda>", "token_mean-all-<lambda>", "token_mean_local-all-<lambda>"
)
@pytest.mark.parametrize(
    ("agg", "denominator", "expected"),
    [
        ("sequence_sum", "all", lambda rows, tokens, micros: rows["all"]),
        ("sequence_sum", "valid", lambda rows, tokens, micros: rows["valid"]),
        ("sequence_mean", "valid", lambda rows, tokens, micros: rows["valid"]),
        ("token_mean", "all", lambda rows, tokens, micros: tokens["all"]),
        ("token_mean", "valid", lambda rows, tokens, micros: tokens["valid"]),
        ("constant", "all", lambda rows, tokens, micros: rows["all"] * 16),
        ("token_mean_local", "all", lambda rows, tokens, micros: micros),
    ],
)
def test_an_update_is_divided_by_what_its_aggregation_counts(tmp_path, agg, denominator, expected):
    def first_group_silent(completion_ids, **_):
        return [None] * 4 + [float(i) for i in range(len(completion_ids) - 4)]

    words = [f"algorithm.loss_agg={agg}", f"algorithm.loss_denominator={denominator}"]
    words += ["algorithm.mask_truncated_completions=true", "train.micro_batch_size=8"]
    run = make(tmp_path, ENDS, *words, rewards={"most": first_group_silent})
    batch = sampled(run)
    (plan,) = train_step.plan_updates(run, batch, 0)
    ended, length = batch.rollout_values("terminated"), batch.rollout_values("length")
    assert 0 < ended[1:].sum() < 12
    rows = {"all": 16, "valid": int(ended[1:].sum())}
    tokens = {"all": int(length[ended].sum()), "valid": int(length[1:][ended[1:]].sum())}
    assert plan.denominator == expected(rows, tokens, 2)
    assert plan.num_tokens == tokens["valid"] and len(plan.micro_batches) == 2
