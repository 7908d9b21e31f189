"""On-policy distillation inside whole steps: gradients by hand, cuts, and a student that learns."""

import pytest
import torch
from loop_cases import ENDS, PLAIN, alone, apart, gradient, make, row_logp, sampled, step, updated
from torch import Tensor

from rloo_cli.policy.divergence import generalized_jsd
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.run import Run

pytestmark = pytest.mark.wide

CLOSE = 5e-5  # an update read off weights of 1, twice rounded
LARGE = (*PLAIN, "train.learning_rate=1.0")  # the gradient itself: a teacher's is small
TEACHER = ("algorithm=opd", "model.ref_path=make:tiny")
WHOLE = ("algorithm=gkd", "model.ref_path=make:tiny")
ALONE = ("reward=[]",)  # no reward at all


def logits(policy, batch, p: int, k: int) -> Tensor:
    """Of one completion's tokens, alone in a plain forward of the whole model. (T, V)"""
    group = batch.groups[p]
    ids = torch.tensor([group.prompt_ids + group.rollouts[k].completion_ids])
    with native_attention(policy.model):
        return policy.model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]


def tokens(batch) -> int:
    return int(batch.rollout_values("length").sum())


def pairs(batch) -> list[tuple[int, int]]:
    return [(p, k) for p, group in enumerate(batch.groups) for k in range(len(group.rollouts))]


def per_token(run: Run, batch, advantage: Tensor, beta: float) -> Tensor:
    """The gradient of -mean of (A - beta d_t) logp_t over all tokens, by plain forwards."""
    total = torch.zeros(())
    for p, k in pairs(batch):
        logp = row_logp(run.policy, batch, p, k)
        with torch.no_grad():
            d = logp - row_logp(run.reference, batch, p, k)
        total = total - ((advantage[p, k].float() - beta * d) * logp).sum()
    return gradient(run, total / tokens(batch))


@pytest.mark.parametrize("way", ["auto", "separate"])
def test_the_teacher_alone_gives_each_token_its_own_log_ratio(tmp_path, way):
    words = [*TEACHER, *ALONE, "algorithm.beta=0.5", f"train.old_logp={way}"]
    run = alone(tmp_path, *LARGE, ENDS, *words, rewards={})
    batch = sampled(run)
    expected = per_token(run, batch, torch.zeros(4, 4), 0.5)
    moved, row, _ = step(run, batch)
    assert apart(-moved, expected) < CLOSE
    assert row["kl"] != 0 and row["reward"] == 0
    assert (run.forward_plan.separate is None) == (way == "auto")


def test_beside_a_reward_the_teacher_is_charged_to_its_advantage(tmp_path):
    run = alone(tmp_path, *PLAIN, ENDS, *TEACHER, "algorithm.beta=0.3")
    batch = sampled(run)
    s = batch.raw[0]
    a = (s - s.mean(1, keepdim=True)) * 4 / 3
    expected = per_token(run, batch, a, 0.3)
    assert apart(-step(run, batch)[0] / 0.01, expected) < CLOSE
    torch.testing.assert_close(batch.advantage, a)


@pytest.mark.slow_cases("0.0-0.8")
@pytest.mark.parametrize(("beta", "temperature"), [(0.5, 1.0), (0.0, 0.8), (1.0, 1.0)])
def test_the_divergence_of_whole_distributions_moves_the_student(tmp_path, beta, temperature):
    words = [*WHOLE, *ALONE, f"algorithm.jsd_beta={beta}", f"generation.temperature={temperature}"]
    run = alone(tmp_path, *LARGE, ENDS, *words, "algorithm.beta=2.0", rewards={})
    batch, total = sampled(run), torch.zeros(())
    for p, k in pairs(batch):
        with torch.no_grad():
            teacher = logits(run.reference, batch, p, k)
        total = (
            total
            + generalized_jsd(logits(run.policy, batch, p, k), teacher, temperature, beta).sum()
        )
    expected = gradient(run, 2.0 * total / tokens(batch))
    moved, row, _ = step(run, batch)
    assert apart(-moved, expected) < CLOSE
    assert row["kl_loss"] == pytest.approx(2.0 * float(total.detach()) / tokens(batch), rel=1e-4)
    assert run.layout_choice.head == "model" and "teacher" in run.layout_choice.why


@pytest.mark.slow_cases("words1")
@pytest.mark.parametrize("words", [TEACHER, WHOLE, (*WHOLE, "algorithm.num_minibatches=2")])
def test_a_distilling_update_does_not_depend_on_how_it_was_cut(tmp_path, words):
    moves = []
    for cut in ("train.micro_batch_tokens=null", "train.micro_batch_tokens=60"):
        folder = tmp_path / cut[-4:]
        folder.mkdir()
        moves.append(step(alone(folder, *PLAIN, ENDS, cut, *words))[0])
    assert apart(moves[1], moves[0]) < 2e-4


def test_a_teacher_of_another_layout_gets_the_students(tmp_path, monkeypatch):
    from rloo_cli.policy import layouts

    def unshared(model, *_):
        return "it is the teacher" if getattr(model, "taught", False) else None

    load = layouts.choose_policy_layout

    def chosen(policy, wanted, length):
        policy.model.taught = type(policy).__name__ == "Reference"
        return load(policy, wanted, length)

    plain = step(alone(tmp_path, *PLAIN, ENDS, *WHOLE))[0]
    monkeypatch.setattr(layouts, "why_not_shared", unshared)
    monkeypatch.setattr(layouts, "choose_policy_layout", chosen)
    run = alone(tmp_path, *PLAIN, ENDS, *WHOLE, "name=other")
    assert run.policy.layout == run.reference.layout == "padded"
    assert "its teacher's" in str(run.layout_choice)
    assert apart(step(run)[0], plain) < CLOSE


def test_groups_of_equal_scores_are_taught_too(tmp_path):
    flat = {"flat": lambda completions, **_: [1.0] * len(completions)}
    moved, row, _ = step(alone(tmp_path, *PLAIN, ENDS, *TEACHER, rewards=flat))
    assert float(moved.norm()) > 0 and row["frac_reward_zero_std"] == 1
    assert row["perf/forwarded_frac"] == 1


@pytest.mark.slow_but("opd")
@pytest.mark.parametrize("words", [TEACHER, WHOLE], ids=["opd", "gkd"])
def test_the_students_kl_to_its_teacher_falls(tmp_path, words):
    """A student that noise took away from its teacher comes back, with no reward at all."""
    learn = ["train.learning_rate=1e-3", "train.lr_scheduler=constant", "train.max_grad_norm=1.0"]
    run = make(
        tmp_path, "data.eval_split=null", *words, *ALONE, *learn, "algorithm.num_generations=8",
        "train.prompts_per_step=8", rewards={}, noise=0.1,
    )  # fmt: skip
    kl = []
    for _ in range(12):
        batch = sampled(run)
        updates = updated(run, batch)
        run.state.advance(batch)
        kl.append(updates.to_metrics()["kl"])
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3]), kl
