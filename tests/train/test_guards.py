"""What stops a run: numbers that are not finite, and steps with nothing to learn from."""

import json
import math
from dataclasses import replace

import pytest
import torch
from loop_cases import ENDS, digits, flat, sampled, step, updated
from loop_cases import alone as make

from rloo_cli.train import guards, loop
from rloo_cli.utils.errors import NumbersError, RunError

NAN = float("nan")


def poison(run, at, name="layers.1"):
    """Make one gradient NaN in every update for which `at` says so; counts updates from 0."""
    weight = next(w for n, w in run.policy.model.named_parameters() if name in n)
    made = []

    def hook(gradient):
        made.append(0)
        return gradient * NAN if at(len(made) - 1) else gradient

    weight.register_hook(hook)


def nan_logp(run):
    """A forward with gradient whose last log-probability is NaN."""
    plain = run.policy.logp

    def broken(micro, want_entropy=False):
        found = plain(micro, want_entropy)
        return found._replace(logp=torch.cat([found.logp[:-1], found.logp[-1:] * NAN]))

    run.policy.logp = broken


def nan_reference(run):
    """A reference that does not know the probability of one token."""
    plain = run.reference.frozen_logp

    def broken(micro):
        found = plain(micro)
        return found._replace(logp=torch.cat([found.logp[:-1], found.logp[-1:] * NAN]))

    run.reference.frozen_logp = broken


def nan_score(run):
    """A score that became NaN after the validator saw it."""
    shape = run.algorithm.shape_scores

    def broken(*arguments):
        return shape(*arguments).index_fill(1, torch.tensor([0]), NAN)

    run.algorithm.shape_scores = broken


def nan_loss(run):
    """A loss that is NaN although its gradient is not."""
    whole = run.algorithm.loss

    def broken(*arguments):
        found = whole(*arguments)
        return replace(found, total=found.total + NAN)

    run.algorithm.loss = broken


WAYS = {
    "loss": nan_loss,
    "gradient": lambda run: poison(run, lambda n: True),
    "log-probability": nan_logp,
    "reference": nan_reference,
    "score": nan_score,
}


@pytest.mark.slow_but("loss-fused", "gradient-apart", "reference-fused", "score-apart")
@pytest.mark.parametrize("words", [[], ["algorithm.num_minibatches=2"]], ids=["fused", "apart"])
@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_is_not_finite_stops_the_run_and_leaves_the_weights(tmp_path, way, words):
    run = make(tmp_path, ENDS, "train.weight_decay=0.1", "train.learning_rate=1e-2", *words)
    step(run)
    before, moments = flat(run), [s["exp_avg"].clone() for s in states(run)]
    WAYS[way](run)
    batch = sampled(run)
    with pytest.raises(NumbersError) as caught:
        updated(run, batch)
    assert caught.value.code == 7 and "step 2" in str(caught.value)
    assert torch.equal(flat(run), before)
    assert all(torch.equal(a, b["exp_avg"]) for a, b in zip(moments, states(run), strict=True))
    assert all(w.grad is None for w in run.policy.model.parameters())
    lines = (run.folder / "debug/nonfinite_step_2/rows.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert len(rows) == 16 and [r["text"] for r in rows] == [
        r.text for g in batch.groups for r in g.rollouts
    ]


def states(run):
    return list(run.optimizer.inner.state.values())


def test_weights_that_overflowed_stop_the_run_at_the_next_sample(tmp_path):
    run = make(tmp_path, "train.optimizer_kwargs={lr: 1e30}", "max_steps=3")
    with pytest.raises(NumbersError) as caught:
        loop.run_training_loop(run)
    assert caught.value.code == 7 and run.state.step == 1


def test_a_nan_from_a_reward_never_reaches_the_loop(tmp_path):
    def nan(completions, **_):
        return [NAN] * len(completions)

    run = make(tmp_path, rewards={"nan": nan})
    before = flat(run)
    with pytest.raises(RunError) as caught:
        loop.run_training_loop(run)
    assert caught.value.code == 5 and torch.equal(flat(run), before)


def test_skip_lets_three_such_updates_in_a_row_pass_and_no_fourth(tmp_path):
    run = make(tmp_path, "train.on_nonfinite=skip", "max_steps=12")
    notes = listen(run)
    poison(run, lambda n: n in (0, 1, 2, 4, 5, 6) or n > 7)
    with pytest.raises(NumbersError):
        loop.run_training_loop(run)
    assert run.state.step == 11 and run.state.updates == 2
    skipped = [n for n in notes if "update skipped" in n]
    assert len(skipped) == 9 and "non-finite gradient" in skipped[0]
    assert [row["updates"] for row in run.log.metrics_lines] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert "loss" not in run.log.metrics_lines[0] and "loss" in run.log.metrics_lines[3]


def test_a_skipped_update_leaves_the_weights_and_the_schedule(tmp_path):
    run = make(tmp_path, "train.on_nonfinite=skip", "train.weight_decay=0.1", "max_steps=4")
    before, rate = flat(run), run.optimizer.learning_rate
    poison(run, lambda n: n == 0)
    moved, row, _ = step(run)
    assert not moved.any() and torch.equal(flat(run), before)
    assert run.optimizer.learning_rate == rate and "grad_norm" not in row
    assert float(step(run)[0].norm()) > 0


def listen(run):
    notes = []
    run.log.note = notes.append
    return notes


def scored_until(last):
    """A reward that scores the steps before `last`, and no row after."""

    def score(completion_ids, trainer_state, **_):
        scores = digits(completion_ids)
        return scores if trainer_state.step < last else [None] * len(scores)

    return score


ADAM = ("train.weight_decay=0.1", "train.learning_rate=1e-2")
WEIGHTS_REST = {
    "nothing is scored": ([], scored_until(2)),
    "nothing is scored, in four updates": (
        ["algorithm.num_iterations=2", "algorithm.num_minibatches=2"],
        scored_until(2),
    ),
    "nothing is scored, KL in the loss": (
        ["algorithm.kl_in=loss", "algorithm.kl_estimator=k3"],
        scored_until(2),
    ),
    "every completion is masked": (["algorithm.mask_truncated_completions=true"], digits),
    "every completion is dropped": (["algorithm.mask_truncated_completions=drop"], digits),
}


@pytest.mark.slow_but("nothing is scored", "every completion is dropped")
@pytest.mark.parametrize("kind", WEIGHTS_REST)
def test_a_step_with_nothing_to_learn_from_moves_no_weight(tmp_path, kind):
    words, reward = WEIGHTS_REST[kind]
    run = make(tmp_path, ENDS, *ADAM, *words, "max_steps=9", rewards={"some": reward})
    for _ in range(2):  # so that the optimizer has momentum
        assert float(step(run)[0].norm()) > 0
    if "completion" in kind:
        run.generator.stop_rule.terminated = lambda ids, reason: False
    updates = run.state.updates
    for _ in range(3):
        moved, row, _ = step(run)
        assert not moved.any() and run.state.updates == updates
        assert "loss" not in row and all(math.isfinite(v) for v in row.values())
    assert run.state.empty == 3 * run.config.updates_per_step


@pytest.mark.parametrize("words", [[], ["algorithm.num_iterations=2"]], ids=["one", "two"])
def test_ten_such_steps_in_a_row_stop_the_run(tmp_path, words):
    run = make(tmp_path, *words, "max_steps=20", rewards={"some": scored_until(3)})
    with pytest.raises(NumbersError) as caught:
        loop.run_training_loop(run)
    assert caught.value.code == 7 and run.state.step == 3 + guards.MAX_EMPTY_STEPS - 1
    assert "max_completion_length" in str(caught.value) and "100%" in str(caught.value)


def test_one_step_that_learns_starts_the_count_anew(tmp_path):
    def now_and_then(completion_ids, trainer_state, **_):
        scores = digits(completion_ids)
        return scores if trainer_state.step % 6 == 5 else [None] * len(scores)

    run = make(tmp_path, "max_steps=16", rewards={"some": now_and_then})
    loop.run_training_loop(run)
    assert run.state.updates == 2 and run.state.empty == 4


def test_a_minibatch_without_scores_makes_no_update_and_the_others_do(tmp_path):
    def first_half(completion_ids, **_):
        return [s if i < 8 else None for i, s in enumerate(digits(completion_ids))]

    words = ["algorithm.num_minibatches=4", "algorithm.zero_std_groups=drop"]
    run = make(tmp_path, *words, rewards={"half": first_half})
    _, row, batch = step(run)
    assert run.state.updates == 2 and batch.active == [0, 1] and row["groups/unscorable"] == 2
