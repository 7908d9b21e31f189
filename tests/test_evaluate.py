"""The held-out split: what is reported of it, and that asking changes nothing."""

import json

import pytest
import torch
from loop_cases import ENDS, digits, flat, make
from test_loop import timeless

from rloo_cli import train as loop
from rloo_cli.evaluate import evaluate


def trained(tmp_path, *words, rewards=None):
    run = make(tmp_path, ENDS, "max_steps=4", "train.learning_rate=1e-3", *words, rewards=rewards)
    loop.train(run)
    return run


def is_eval(row):
    return any(name.startswith("eval_") for name in row)


@pytest.mark.parametrize("words", [[], ["algorithm.num_iterations=2", "logging.every=3"]])
def test_evaluation_changes_neither_weights_nor_metrics(tmp_path, words):
    without = trained(tmp_path / "a", *words, "eval.every=0")
    asked = trained(tmp_path / "b", *words, "eval.every=1", "eval.batch_size=5")
    assert torch.equal(flat(asked), flat(without))
    rows = [timeless(row) for row in asked.log.rows if not is_eval(row)]
    assert rows == [timeless(row) for row in without.log.rows]
    assert [r["step"] for r in asked.log.rows if is_eval(r)] == [1, 2, 3]  # the worker does the end
    assert vars(asked.state) == vars(without.state)
    for k in range(1, 5):
        name = f"samples/step_{k:06d}.jsonl"
        assert (asked.folder / name).read_text() == (without.folder / name).read_text()


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()


def test_metrics_are_means_over_the_rows_that_have_a_score(tmp_path):
    def some(completion_ids, **_):
        pairs = zip(completion_ids, digits(completion_ids), strict=True)
        return [score if len(ids) % 2 else None for ids, score in pairs]

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    words = ["reward.length.weight=0.5", "eval.batch_size=3"]
    run = make(tmp_path, ENDS, *words, rewards={"some": some, "length": length})
    row, samples = evaluate(run)
    assert len(samples) == row["eval_samples"] == 16
    assert [s["prompt"] for s in samples] == run.held_out.prompts
    said = [s["rewards"]["some"] for s in samples]
    assert 0 < sum(s is None for s in said) < 16
    known = [s for s in said if s is not None]
    assert row["eval_reward/some/mean"] == pytest.approx(sum(known) / len(known))
    whole = [0.5 * s["rewards"]["length"] + (s["rewards"]["some"] or 0.0) for s in samples]
    assert [s["score"] for s in samples] == pytest.approx(whole)
    assert row["eval_reward"] == pytest.approx(sum(whole) / 16)
    lengths = [s["completion_length"] for s in samples]
    assert row["eval_completions/mean_length"] == sum(lengths) / 16
    cut = sum(not s["terminated"] for s in samples) / 16
    assert row["eval_completions/clipped_ratio"] == cut
    assert json.loads((run.folder / "metrics.jsonl").read_text()) == {"step": 0, **row}
    kept = (run.folder / "samples/eval_000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in kept] == [s["completion"] for s in samples]


def test_answers_are_greedy_and_do_not_depend_on_how_many_are_asked_at_once(tmp_path):
    answers = []

    def tell(prompt_ids, completion_ids, **_):
        answers.extend(zip(prompt_ids, completion_ids, strict=True))
        return [0.0] * len(prompt_ids)

    for size, seed in ((1, 1), (16, 1), (5, 2)):
        words = (ENDS, f"eval.batch_size={size}", f"seed={seed}")
        run = make(tmp_path, *words, rewards={"tell": tell})
        evaluate(run)
    assert answers[:16] == answers[16:32] == answers[32:]
    for prompt, answer in answers[:16]:
        logits = run.policy.model(input_ids=torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_max_samples_takes_the_first_rows_of_the_split(tmp_path):
    run = make(tmp_path, "eval.max_samples=5")
    row, samples = evaluate(run)
    assert row["eval_samples"] == 5 and [s["prompt"] for s in samples] == run.held_out.prompts[:5]


def test_a_held_out_score_is_not_normalised_over_its_batch(tmp_path):
    run = make(tmp_path, ENDS, "algorithm.multi_reward=normalize_then_sum")
    row, samples = evaluate(run)
    assert row["eval_reward"] == pytest.approx(row["eval_reward/digits/mean"])
    assert len({s["score"] for s in samples}) > 1


def test_without_a_held_out_split_nothing_is_asked_or_written(tmp_path):
    run = make(tmp_path, "data.eval_split=null", "eval.every=1")
    assert evaluate(run) == ({}, [])
    loop.train(run)
    assert not any(is_eval(row) for row in run.log.rows) and len(run.log.rows) == 2


def test_rows_without_any_score_leave_no_mean(tmp_path):
    def silent(completion_ids, **_):
        return [None] * len(completion_ids)

    row, samples = evaluate(make(tmp_path, rewards={"silent": silent}))
    assert "eval_reward" not in row and "eval_reward/silent/mean" not in row
    assert all(s["score"] is None for s in samples) and row["eval_samples"] == 16


def test_the_seconds_of_an_evaluation_are_no_steps_seconds(tmp_path):
    run = make(tmp_path, "eval.every=1", "max_steps=3")
    clock = run.clock

    def slow(*arguments, **options):
        clock.step_began -= 1000.0  # as if it had taken so long
        return generate(*arguments, **options)

    generate = run.generator.generate
    run.generator.generate = lambda g, s, greedy=False: (slow if greedy else generate)(g, s, greedy)
    loop.train(run)
    assert all(row["step_time"] < 500 for row in run.log.rows if not is_eval(row))
