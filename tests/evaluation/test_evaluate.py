"""Evaluation in a run: what is asked and reported, and that asking changes nothing."""

import json
import random

import numpy as np
import pytest
import torch
from loop_cases import ENDS, digits, flat, make, timeless

from rloo_cli.evaluation.evaluate import answer_eval_sets, evaluate_run
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.reporting import eval_lines
from rloo_cli.rewards.engine import step_calls
from rloo_cli.train import loop
from rloo_cli.utils import rng, signals
from rloo_cli.utils.errors import RewardError, Stopped

NONE = "data.eval_split=null"
SETS = ("eval.sets.hard={split: test}", "eval.sets.seen={split: train, max_samples: 20}")


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()


def trained(tmp_path, *words, rewards=None):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = [ENDS, "max_steps=4", "train.learning_rate=1e-3", "checkpoint.every=0"]
    run = make(tmp_path, *first, *words, rewards=rewards)
    loop.run_training_loop(run)
    return run


def samples_of(run, name="", step=0):
    path = run.folder / "samples" / f"{eval_lines.eval_samples_name(name, step)}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# Evaluating changes nothing.


def restless(completion_ids, trainer_state, **_):
    """Draws from every global generator, and looks at what was logged."""
    draw = random.random() + np.random.rand() + torch.rand(()).item()
    past = sum(sum(v for v in row.values()) for row in map(timeless, trainer_state.log_history))
    return [s + (i * draw + past) / 100 for i, s in enumerate(digits(completion_ids))]


ASKED = ["eval.every=1", "eval.num_generations=4", "eval.batch_size=5", *SETS]


@pytest.mark.slow_but("words0")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["algorithm.num_iterations=2", "logging.every=3"],
    ],
)
def test_evaluation_changes_nothing_in_the_run_bit_for_bit(tmp_path, words):
    without = trained(tmp_path / "a", *words, NONE, rewards={"restless": restless})
    alone = rng.capture_random_states()
    asked = trained(tmp_path / "b", *words, *ASKED, rewards={"restless": restless})
    after = rng.capture_random_states()
    assert torch.equal(flat(asked), flat(without))
    assert torch.equal(after.tensors["cpu"], alone.tensors["cpu"]) and after.plain == alone.plain
    rows = [timeless(row) for row in asked.log.metrics_lines if not eval_lines.is_evaluation(row)]
    assert rows == [timeless(row) for row in without.log.metrics_lines]
    steps = [row["step"] for row in asked.log.metrics_lines if eval_lines.is_evaluation(row)]
    assert steps == [0, 1, 2, 3, 4]
    assert vars(asked.state) | {"evaluated": 0} == vars(without.state) | {"evaluated": 0}
    for k in range(1, 5):
        name = f"samples/step_{k:06d}.jsonl"
        assert (asked.folder / name).read_text() == (without.folder / name).read_text()
    assert all(module.training for module in asked.policy.model.modules())


def test_what_a_cached_reward_said_while_evaluating_is_not_remembered_in_training(tmp_path):
    def lucky(completion_ids, **_):
        return [random.random() for _ in completion_ids]

    # The likeliest token always: the training prompts' answers are asked for before the training.
    words = ["generation.top_k=1", "reward.lucky.cache=true", "max_steps=1"]
    without = trained(tmp_path / "a", *words, NONE, rewards={"lucky": lucky})
    everything = "eval.sets.seen={split: train}"
    asked = trained(tmp_path / "b", *words, everything, rewards={"lucky": lucky})
    text = (without.folder / "samples/step_000001.jsonl").read_text()
    assert (asked.folder / "samples/step_000001.jsonl").read_text() == text


def test_the_global_generators_are_put_back_when_a_reward_fails(tmp_path):
    def broken(completion_ids, **_):
        torch.rand(3)
        raise ValueError("no")

    run = make(tmp_path, rewards={"broken": broken})
    before = torch.get_rng_state()
    with pytest.raises(RewardError):
        evaluate_run(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert not (run.folder / "metrics.jsonl").exists() and not (run.folder / "samples").exists()


def test_the_seconds_of_an_evaluation_are_no_steps_seconds(tmp_path):
    run = make(tmp_path, "eval.every=1", "max_steps=3", "checkpoint.every=0")
    clock = run.clock

    def slow(*arguments, **options):
        clock.step_started_at -= 1000.0  # as if it had taken so long
        return generate(*arguments, **options)

    generate = run.generator.generate
    run.generator.generate = lambda g, s, **o: (slow if o.get("greedy") else generate)(g, s, **o)
    loop.run_training_loop(run)
    assert all(row["step_time"] < 500 for row in run.log.metrics_lines if "step_time" in row)


def test_without_anything_held_out_nothing_is_asked_or_written(tmp_path):
    run = make(tmp_path, NONE, "eval.every=1", "checkpoint.every=0")
    assert evaluate_run(run) == {}
    loop.run_training_loop(run)
    assert (
        not any(eval_lines.is_evaluation(row) for row in run.log.metrics_lines)
        and len(run.log.metrics_lines) == 2
    )


# What is asked.


def test_answers_are_greedy_and_do_not_depend_on_how_many_are_asked_at_once(tmp_path):
    got = []

    def tell(prompt_ids, completion_ids, **_):
        got.extend(zip(prompt_ids, completion_ids, strict=True))
        return [0.0] * len(prompt_ids)

    for size, seed in ((1, 1), (16, 1), (5, 2)):
        words = (ENDS, f"eval.batch_size={size}", f"seed={seed}")
        run = make(tmp_path, *words, rewards={"tell": tell})
        evaluate_run(run)
    assert got[:16] == got[16:32] == got[32:]
    for prompt, answer in got[:16]:
        with native_attention(run.policy.model):
            logits = run.policy.model(input_ids=torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.wide
def test_sampled_answers_depend_on_seed_prompt_and_place_but_not_on_step_or_batch(tmp_path):
    run = make(tmp_path, ENDS, "eval.num_generations=3", "eval.batch_size=4")
    evaluate_run(run)
    run.state.step = 7
    evaluate_run(run)
    first = samples_of(run)
    assert samples_of(run, step=7) == first
    sampled = [s for s in first if not s["greedy"]]
    assert [(s["draw"], s["k"]) for s in sampled] == [(i, k) for i in range(16) for k in range(3)]
    assert len({s["seed"] for s in sampled}) == 48
    assert len({s["completion"] for s in sampled}) > 40
    whole = make(tmp_path, ENDS, "eval.num_generations=3", "eval.batch_size=100")
    evaluate_run(whole)
    assert len(samples_of(whole)) == 64
    assert [s["completion"] for s in samples_of(whole)] == [s["completion"] for s in first]
    other = make(tmp_path, ENDS, "eval.num_generations=3", "seed=2")
    evaluate_run(other)
    got = samples_of(other)
    assert [s["completion"] for s in got[:16]] == [s["completion"] for s in first[:16]]
    assert [s["completion"] for s in got[16:]] != [s["completion"] for s in first[16:]]


def test_a_batch_holds_eval_batch_size_completions_at_most(tmp_path):
    sizes = []

    def tell(completion_ids, num_generations, **_):
        sizes.append((len(completion_ids), num_generations))
        return [0.0] * len(completion_ids)

    words = ["eval.num_generations=3", "eval.batch_size=8", "eval.max_samples=7"]
    evaluate_run(make(tmp_path, *words, rewards={"tell": tell}))
    assert sizes == [(7, 1), (6, 3), (6, 3), (6, 3), (3, 3)]
    sizes.clear()
    evaluate_run(make(tmp_path, *words, "eval.batch_size=2", rewards={"tell": tell}))
    assert sizes[4:] == [(3, 3)] * 7  # a prompt's completions stay together


def test_the_temperature_of_evaluation_is_its_own(tmp_path):
    words = [ENDS, "eval.num_generations=2", "eval.max_samples=6"]
    usual = make(tmp_path, *words)
    evaluate_run(usual)
    first = [s["completion"] for s in samples_of(usual)]
    same = make(tmp_path, *words, "eval.temperature=1.0", "generation.temperature=0.5")
    evaluate_run(same)
    assert [s["completion"] for s in samples_of(same)] == first
    cold = make(tmp_path, *words, "eval.temperature=0.0001")
    evaluate_run(cold)
    got = samples_of(cold)
    for s in got[6:]:
        assert s["completion"] == got[s["draw"]]["completion"]
    assert [s["completion"] for s in got] != first


def test_a_signal_ends_an_evaluation_before_the_next_batch_is_sampled(tmp_path, monkeypatch):
    def generate(groups, seeds, greedy, arrived):
        asked.append(len(groups))
        first(groups, seeds, greedy=greedy, arrived=arrived)
        if len(asked) == 2:
            monkeypatch.setattr(step_calls, "wait_for_calls", heard)

    def heard(*arguments):
        wait(*arguments)
        monkeypatch.setattr(
            signals, "_received_signals", [(15, 0.0)]
        )  # when nobody waits for a reward any more

    run, asked, wait = make(tmp_path, "eval.batch_size=4"), [], step_calls.wait_for_calls
    first, run.generator.generate = run.generator.generate, generate
    with pytest.raises(Stopped):
        evaluate_run(run)
    assert asked == [4, 4] and not (run.folder / "metrics.jsonl").exists()


def test_a_signal_ends_an_evaluation_while_a_reward_is_waited_for(tmp_path, monkeypatch):
    def tell(completion_ids, **_):
        monkeypatch.setattr(signals, "_received_signals", [(15, 0.0)])
        return [0.0] * len(completion_ids)

    run = make(tmp_path, rewards={"tell": tell})  # one batch: only the wait can notice
    with pytest.raises(Stopped):
        evaluate_run(run)


# What is reported.


def test_metrics_are_means_over_the_rows_that_have_a_score(tmp_path):
    def some(completion_ids, **_):
        pairs = zip(completion_ids, digits(completion_ids), strict=True)
        return [score if sum(ids) % 2 else None for ids, score in pairs]

    def length(completion_ids, log_extra, **_):
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    words = ["reward.length.weight=0.5", "eval.batch_size=3"]
    run = make(tmp_path, ENDS, *words, rewards={"some": some, "length": length})
    row = evaluate_run(run)
    samples = samples_of(run)
    assert len(samples) == row["eval_samples"] == 16 and row["eval_unscored"] == 0
    assert [s["prompt"] for s in samples] == run.eval_sets[""].prompts
    assert [s["row"] for s in samples] == run.eval_sets[""].examples
    assert [s["tokens"] for s in samples] == [s["completion_length"] for s in samples]
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
    assert json.loads((run.folder / "metrics.jsonl").read_text()) == row | {"step": 0}


def test_every_sample_of_every_set_is_kept_in_a_file_of_the_set(tmp_path):
    run = make(tmp_path, ENDS, "eval.num_generations=2", *SETS)
    row = evaluate_run(run)
    assert {p.name for p in (run.folder / "samples").iterdir()} == {
        "eval_hard_000000.jsonl",
        "eval_seen_000000.jsonl",
    }
    for name, count in (("hard", 16), ("seen", 20)):
        samples = samples_of(run, name)
        assert [s["greedy"] for s in samples] == [True] * count + [False] * 2 * count
        assert {s["set"] for s in samples} == {name}
        assert row[f"eval_{name}_samples"] == count
        greedy = [s["score"] for s in samples[:count]]
        assert row[f"eval_{name}_reward"] == pytest.approx(sum(greedy) / count)
        sampled = [s["score"] for s in samples[count:]]
        assert row[f"eval_{name}_avg@2"] == pytest.approx(sum(sampled) / len(sampled))
    assert "eval_reward" not in row


def test_max_samples_takes_the_first_rows_of_the_split(tmp_path):
    run = make(tmp_path, "eval.max_samples=5")
    assert evaluate_run(run)["eval_samples"] == 5
    assert [s["prompt"] for s in samples_of(run)] == run.eval_sets[""].prompts[:5]


@pytest.mark.parametrize("k", [1, 3])
def test_a_held_out_score_is_not_normalised_over_its_batch(tmp_path, k):
    words = [f"eval.num_generations={k}", "algorithm.multi_reward=normalize_then_sum"]
    run = make(tmp_path, ENDS, *words)
    row = evaluate_run(run)
    assert row["eval_reward"] == pytest.approx(row["eval_reward/digits/mean"])
    assert all(s["score"] == pytest.approx(s["rewards"]["digits"]) for s in samples_of(run))


def test_failed_rewards_are_counted_and_never_zero(tmp_path):
    def half(completion_ids, **_):
        return [1.0 if i % 2 else float("nan") for i in range(len(completion_ids))]

    words = ["reward.half.on_error=none", "reward.half.max_error_rate=1"]
    row = evaluate_run(make(tmp_path, *words, "eval.batch_size=4", rewards={"half": half}))
    assert row["eval_reward/half/error_rate"] == 0.5 and row["eval_reward"] == 1.0
    assert row["eval_unscored"] == 8 and row["eval_samples"] == 16


def test_rewards_never_see_the_lines_of_evaluations(tmp_path):
    seen = []

    def look(completion_ids, trainer_state, **_):
        seen.append([row["step"] for row in trainer_state.log_history])
        return digits(completion_ids)

    trained(tmp_path, "eval.every=1", "max_steps=2", rewards={"look": look})
    assert seen == [[], [], [1], [1], [1, 2]]  # evaluation, step 1, evaluation, step 2, evaluation


def test_progress_is_told_set_by_set(tmp_path):
    run = make(tmp_path, "eval.num_generations=2", "eval.batch_size=20", *SETS)
    got = []
    answer_eval_sets(run, run.state.seen_by_rewards(run), lambda *said: got.append(said))
    hard = [("hard", 16, 48), ("hard", 36, 48), ("hard", 48, 48)]
    assert got == [*hard, ("seen", 20, 60), ("seen", 40, 60), ("seen", 60, 60)]
