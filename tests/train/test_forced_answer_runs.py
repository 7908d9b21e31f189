"""Runs with generation.answer_budget: what is trained on, counted, recorded, and refused."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from assert_refused import assert_refused
from loop_cases import ENDS, EXACT, PLAIN, apart, cache, checked, gradient, row_logp, sampled, step
from loop_cases import alone as make
from loop_cases import make as make_with_held_out
from replay_cases import last_line, recorded_run
from resume_cases import attempt, tensors

from rloo_cli.checkpoint.step_state import dump_step, load_step
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.evaluation.evaluate import answer_eval_sets
from rloo_cli.inspection.step_replay import replay_step
from rloo_cli.run import Run, StepProgress
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

TEXT, AT, TOKENS = "ab", 3, 2
BUDGET = f"generation.answer_budget={{at: {AT}, text: '{TEXT}', tokens: {TOKENS}}}"
LAYOUTS = ("shared", "packed", "padded")


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[None]:
    with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
        yield


def begun(folder: Path, *words: str, **options: Any) -> tuple[Run, Batch]:
    """A run with a budget, and its first batch; some completions end in time, most do not."""
    run = make(folder, BUDGET, ENDS, *words, **options)
    run.generator.load(run.policy, run.state.updates)
    batch = sampled(run)
    forced = [r.has_forced_answer for g in batch.groups for r in g.rollouts]
    assert any(forced) and not all(forced)
    return run, batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_the_sampled_tokens_alone(tmp_path: Path, layout: str) -> None:
    run, batch = begun(tmp_path, *PLAIN, "algorithm.beta=0", f"train.layout={layout}")
    k = batch.score.shape[1]
    advantage = (
        batch.shaped - (batch.shaped.sum(1, keepdim=True) - batch.shaped) / (k - 1)
    ).float()
    total = torch.zeros(())
    for p, group in enumerate(batch.groups):
        for i, r in enumerate(group.rollouts):
            sampled_ids = [not AT <= n < AT + len(TEXT) for n in range(len(r.completion_ids))]
            logp = row_logp(run.policy, batch, p, i)[torch.tensor(sampled_ids)]
            total = total - advantage[p, i] * logp.sum()
    expected = gradient(run, total / batch.score.numel())
    moved, _, _ = step(run, batch)
    assert apart(-moved / 0.01, expected) < 10 * EXACT


def test_other_ids_in_place_of_the_text_change_nothing_before_it(tmp_path: Path) -> None:
    run, batch = begun(tmp_path)

    def before_the_text() -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """The targets; log-probabilities of the tokens before the text; the gradient of these."""
        packed = run.policy.pack(batch.groups, whole_group_slices(batch.groups, range(4)))
        lengths = [r.length for g in batch.groups for r in g.rollouts]
        logp = run.policy.logp(packed).logp
        first = torch.cat([row[:AT] for row in logp.split(lengths)])
        return packed.target.tolist(), first.detach(), gradient(run, first.sum())

    ids, logp, grad = before_the_text()
    assert len(ids) == sum(r.length for g in batch.groups for r in g.rollouts)
    for r in (r for g in batch.groups for r in g.rollouts if r.has_forced_answer):
        r.completion_ids[AT : AT + len(TEXT)] = [77, 78]
    others = before_the_text()
    assert others[0] == ids  # none of the text's ids is predicted
    assert torch.equal(others[1], logp) and apart(others[2], grad) < EXACT


def test_lengths_entropy_and_kl_leave_the_text_out(tmp_path: Path) -> None:
    run, batch = begun(tmp_path, "algorithm.beta=0.1")
    rows = [r for g in batch.groups for r in g.rollouts]
    _, line, _ = step(run, batch)
    lengths = [sum(r.mask) if r.mask else len(r.completion_ids) for r in rows]
    assert line["completions/mean_length"] == sum(lengths) / len(rows)
    assert line["completions/max_length"] == AT + TOKENS
    assert line["completions/answer_forced_share"] == sum(r.mask is not None for r in rows) / 16
    assert line["sampling/missing_frac"] == 0.0
    logps = [x for r in rows for x in r.behaviour_logp or [] if not math.isnan(x)]
    assert line["sampling/entropy"] == pytest.approx(-sum(logps) / sum(lengths))
    assert line["sampling/logp_diff_max"] < 1e-4
    for group in batch.groups:
        for columns in (group.old_logp, group.ref_logp):
            assert columns is not None
            assert [len(c) for c in columns] == [r.length for r in group.rollouts]
    kl = [float((o - r).sum()) for g in batch.groups
          for o, r in zip(g.old_logp or [], g.ref_logp or [], strict=True)]  # fmt: skip
    assert line["objective/kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)


def test_without_a_budget_there_is_no_share(tmp_path: Path) -> None:
    run = make(tmp_path, ENDS)
    run.generator.load(run.policy, 0)
    assert "completions/answer_forced_share" not in step(run)[1]


def test_an_evaluation_forces_answers_too(tmp_path: Path) -> None:
    run = make_with_held_out(tmp_path, BUDGET, "data.eval_split=test")
    run.generator.load(run.policy, 0)
    answered = answer_eval_sets(run, run.state.seen_by_rewards(run))
    samples = [s for one in answered.values() for s in one.samples]
    assert samples and max(s["completion_length"] for s in samples) == AT + TOKENS
    forced = [s for s in samples if s.get("answer_forced")]
    assert forced and all(TEXT in s["completion"] for s in forced)


def test_a_checkpoint_within_a_step_gives_every_forced_answer_back(tmp_path: Path) -> None:
    run, batch = begun(tmp_path)
    again = load_step(*dump_step(StepProgress(batch)), run.prompts).batch
    for group, other in zip(batch.groups, again.groups, strict=True):
        for row, read in zip(group.rollouts, other.rollouts, strict=True):
            assert (row.mask, row.completion_ids) == (read.mask, read.completion_ids)
            assert row.has_forced_answer == read.has_forced_answer and row.text == read.text
            assert repr(row.behaviour_logp) == repr(read.behaviour_logp)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four recorded steps with forced answers and a KL in the rewards."""
    return recorded_run(tmp_path_factory.mktemp("recorded"), BUDGET, ENDS)


def test_a_recorded_step_with_forced_answers_comes_out_bit_for_bit(recorded: Path) -> None:
    for number in (1, 4):
        found = replay_step(recorded, number)
        assert not found.found and not found.tolerance, found.to_json()
        batch = read_rollout_record(recorded, number).batch
        rows = [r for g in batch.groups for r in g.rollouts]
        assert any(r.has_forced_answer for r in rows)
        assert found.comparison.compared["log-probability"] == sum(r.length for r in rows)
    assert 0 < last_line(recorded)["completions/answer_forced_share"] <= 1


def test_a_run_that_was_stopped_within_a_step_ends_as_an_undisturbed_one(
    recorded: Path, tmp_path: Path
) -> None:
    words = (BUDGET, ENDS, "logging.rollouts_every=1", "data.eval_split=null", "checkpoint.every=2")
    assert not attempt(tmp_path, *words, stop_at=20)
    assert attempt(tmp_path, *words)
    ours, theirs = (tensors(f / "final/model.safetensors") for f in (tmp_path / "smoke", recorded))
    assert ours == theirs


@pytest.mark.parametrize(
    "words",
    [("generation.overlap=ahead", "algorithm.correction.mode=auto"), ("algorithm=ppo",),
     ("algorithm=grpo", "algorithm.num_minibatches=2"), ("algorithm=remax",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_run_of_two_steps_trains_with(words: tuple[str, ...], tmp_path: Path) -> None:
    assert attempt(tmp_path, BUDGET, ENDS, "max_steps=2", "data.eval_split=null", *words)
    line = last_line(tmp_path / "smoke")
    assert line["step"] == 2 and 0 < line["completions/answer_forced_share"] <= 1
    assert math.isfinite(line["grad_norm"]) and line["completions/max_length"] <= AT + TOKENS


REFUSED = {  # words -> the key that is named, what can be pasted
    "an agent": (
        ["agent=tools", "agent.tools=[rloo_cli.data.synthetic.tool_tasks:multiply]"],
        "generation.answer_budget", "generation.answer_budget=null",
    ),
    "carry": (["generation.overlap=carry"], "generation.answer_budget", "overlap=ahead"),
    "a structure": (
        ["generation.kwargs={structured_outputs: {regex: '[0-9]+'}}"],
        "generation.kwargs", "generation.answer_budget=null",
    ),
    "min_tokens": (["generation.min_tokens=2"], "generation.min_tokens", "generation.min_tokens=0"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "key", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_a_budget_does_not_go_with_is_refused(
    words: list[str], key: str, fix: str, sentence: Any
) -> None:
    checked((), tuple(words))
    with pytest.raises(ConfigError) as caught:
        checked((), (BUDGET, *words))
    assert_refused(caught, key=key, fix=fix)
    sentence(caught)


def test_a_budget_without_a_limit_for_the_answer_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        checked((), ("generation.answer_budget={at: 3, text: ab, tokens: 0}",))
    assert_refused(caught, key="generation.answer_budget.tokens")


def test_a_text_that_leaves_too_little_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with (
        mock.patch("rloo_cli.train.build.RunBuilder.load_model", side_effect=AssertionError),
        pytest.raises(ConfigError) as caught,
    ):
        make(tmp_path, BUDGET, "generation.max_completion_length=6")
    assert_refused(caught, key="generation.answer_budget", fix="max_completion_length=7")
