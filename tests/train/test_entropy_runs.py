"""Adaptive entropy and the tokens of the highest entropy in whole steps, stops and resumes."""

import random
from types import SimpleNamespace

import pytest
import torch
from assert_refused import assert_refused
from loop_cases import ENDS, PLAIN, alone, apart, gradient, row_logp, sampled, step
from resume_cases import attempt, differing, left
from two_ranks import two_ranks

from rloo_cli.algorithms.common.family import adapt_entropy, entropy_weight
from rloo_cli.checkpoint import manifest
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.run import RunState
from rloo_cli.train.step import control_entropy
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

A = "algorithm."
ADAPTIVE = f"{A}adaptive_entropy={{target:5.0,delta:0.05,min:0.0,max:0.12}}"
TOP = f"{A}top_entropy_quantile=0.4"


def entropies(run, group, rollout):
    """Of each token's distribution, with gradient."""
    ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
    with native_attention(run.policy.model):
        logits = run.policy.model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def test_only_the_tokens_of_the_highest_entropy_are_trained_on(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, TOP, f"{A}beta=0", f"{A}entropy_coef=0.5")
    batch = sampled(run)
    score = batch.raw[0]
    value = 4 / 3 * (score - score.mean(1, keepdim=True))
    found = [[entropies(run, g, r) for r in g.rollouts] for g in batch.groups]
    every = torch.cat([e.detach() for row in found for e in row])
    least = every.sort().values[round(0.6 * (len(every) - 1) + 0.499)]
    chosen = [[e.detach() >= least for e in row] for row in found]
    count = sum(int(c.sum()) for row in chosen for c in row)
    assert 0.35 < count / len(every) < 0.45
    total = torch.zeros(())
    for p, row in enumerate(chosen):
        for k, own in enumerate(row):
            total = (
                total - (float(value[p, k]) * row_logp(run.policy, batch, p, k) * own).sum() / 16
            )
            total = total - 0.5 * (found[p][k] * own).sum() / count
    expected = gradient(run, total)
    assert apart(-step(run, batch)[0] / 0.01, expected) < 1e-3
    assert run.forward_plan.separate is not None and run.layout_choice.head == "model"
    # The quantile is over all tokens, also of groups that have no advantage.
    only_top = alone(tmp_path, TOP, f"{A}beta=0", "name=top")
    assert only_top.forward_plan.every_completion


def test_the_weight_goes_up_below_the_target_and_acts_there_alone(tmp_path):
    config = alone(tmp_path, ADAPTIVE, f"{A}entropy_coef=0.1").config.algorithm
    control, acting, weights = {}, [], []
    for entropy in (6.0, 5.0, 4.9, 4.0, 5.1, 5.2, 5.3, 4.0):
        acting.append(entropy_weight(config, control))
        control = adapt_entropy(config, control, entropy)
        weights.append(control["coef"])
    assert weights == pytest.approx([0.05, 0.1, 0.12, 0.12, 0.07, 0.02, 0.0, 0.05])
    assert acting == pytest.approx([0.0, 0.0, 0.1, 0.12, 0.12, 0.0, 0.0, 0.0])


def test_an_update_that_is_skipped_does_not_move_the_weight(tmp_path):
    words = (ADAPTIVE, f"{A}num_iterations=2", "train.on_nonfinite=skip")
    run = alone(tmp_path, *PLAIN, ENDS, *words)
    real = run.optimizer.grad_norm
    run.optimizer.grad_norm = lambda factor: torch.tensor(float("nan"))
    step(run)
    assert run.state.entropy_control == {} and run.state.updates == 0
    run.optimizer.grad_norm = real
    _, row, _ = step(run)
    entropy = run.state.entropy_control["entropy"]
    assert entropy == pytest.approx(row["entropy"], rel=1e-2)  # of one update, not of both
    assert row["entropy_coef"] == pytest.approx(0.0) and run.state.updates == 2


@pytest.mark.parametrize(("shares", "mean"), [((2.0, 3.5), 5.5), ((None, 4.5), 4.5)])
def test_the_mean_entropy_is_that_of_all_ranks(tmp_path, shares, mean):
    algorithm = alone(tmp_path, ADAPTIVE, f"{A}entropy_coef=0.1").algorithm

    def controlled(world):
        share = shares[world.rank]
        share = None if share is None else torch.tensor(share, dtype=torch.float64)
        run = SimpleNamespace(world=world, algorithm=algorithm, state=RunState())
        return control_entropy(run, share)

    one, other = two_ranks(controlled)
    assert one == other == pytest.approx({"coef": 0.05 if mean > 5 else 0.12, "entropy": mean})


def test_a_weight_that_would_begin_outside_its_range_is_refused(sentence):
    words = ["+recipe=smoke", ADAPTIVE, f"{A}entropy_coef=0.5"]
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(words))
    assert_refused(caught, key=f"{A}entropy_coef", fix=f"{A}entropy_coef=0")
    sentence(caught, folder=paths.CONF)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow, id="all tokens"),
        pytest.param((TOP,), id="top tokens"),
    ],
)
def test_a_run_stopped_inside_a_step_goes_on_with_the_same_weight(tmp_path, more):
    updates = (f"{A}num_iterations=2", f"{A}num_minibatches=2", "train.learning_rate=0.05")
    given = ("algorithm=grpo", *updates, ADAPTIVE, *more, ENDS, "data.eval_split=null")
    given = (*given, f"{A}adaptive_entropy.target=5.4", "max_steps=3")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *given, looks=looks)
    draw, stops = random.Random(5), 0
    while not attempt(
        tmp_path / "cut", *given, stop_at=draw.randrange(20, len(looks) // 2) if stops < 5 else None
    ):
        stops += 1
    assert stops
    assert manifest.newest_checkpoint(tmp_path / "cut" / "smoke")[1] == []
    whole = left(tmp_path / "whole" / "smoke")
    assert not differing(whole, left(tmp_path / "cut" / "smoke"))
    assert whole["state"]["state"]["entropy_control"]["coef"] > 0
