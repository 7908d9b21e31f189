"""What a run writes: lines of metrics, samples, notes and advice."""

import json
from types import SimpleNamespace

import pytest
from loop_cases import ENDS, digits, sampled, step, timeless, updated
from loop_cases import alone as make

from rloo_cli.reporting.log import RunLog
from rloo_cli.train import loop
from rloo_cli.train.between_steps import log_step
from rloo_cli.utils.metrics import merge_steps


def lines(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_several_steps_are_weighed_by_what_each_mean_was_taken_over():
    rows = [
        {"kl": 1.0, "reward": 1.0, "reward/a/mean": 1.0, "loss": 1.0, "time/update": 1.0},
        {"kl": 4.0, "reward": 4.0, "reward/a/mean": 4.0, "loss": 4.0, "time/update": 4.0},
    ]
    counts = [
        {"tokens": 30, "scored": 10, "reward/a": 5, "updates": 1},
        {"tokens": 10, "scored": 20, "reward/a": 5, "updates": 0},
    ]
    expected = {"kl": 1.75, "reward": 3.0, "reward/a/mean": 2.5, "loss": 1.0, "time/update": 2.5}
    assert merge_steps(rows, counts) == expected


def test_squares_shares_and_what_a_reward_logged_merge_by_their_counts():
    rows = [
        {"sampling/logp_diff_rms": 3.0, "staleness/frac_lag0": 1.0, "mine": 1.0,
         "sampling/logp_diff_lag0": 3.0},
        {"sampling/logp_diff_rms": 1.0, "staleness/frac_lag1": 1.0, "mine": 4.0,
         "sampling/logp_diff_lag0": 1.0},
    ]  # fmt: skip
    counts = [
        {"gap_tokens": 10, "sampled_tokens": 30, "gap_lag0": 1, "mine": 1},
        {"gap_tokens": 30, "sampled_tokens": 10, "gap_lag0": 3, "mine": 2},
    ]
    assert merge_steps(rows, counts) == {
        "sampling/logp_diff_rms": 3**0.5, "staleness/frac_lag0": 0.75, "mine": 3.0,
        "sampling/logp_diff_lag0": 3**0.5, "staleness/frac_lag1": 0.25,
    }  # fmt: skip


def test_extremes_are_true_extremes_and_counters_the_last_value():
    rows = [
        {"ratio/min": 0.5, "ratio/max": 1.5, "completions/min_length": 3, "step": 1, "episode": 8,
         "clip_ratio/low_min": 0.0, "advantages/abs_max": 2.0, "num_tokens": 50, "lr": 0.2,
         "completions/max_length": 9, "clip_ratio/high_max": 1.0, "data/truncated": 1,
         "memory/peak_gb": 3.0, "sampling/logp_diff_max": 0.1},
        {"ratio/min": 0.9, "ratio/max": 1.1, "completions/min_length": 5, "step": 2, "episode": 16,
         "clip_ratio/low_min": 0.5, "advantages/abs_max": 1.0, "num_tokens": 90, "lr": 0.1,
         "completions/max_length": 7, "clip_ratio/high_max": 0.0, "data/truncated": 1,
         "memory/peak_gb": 2.0, "sampling/logp_diff_max": 0.3},
    ]  # fmt: skip
    assert merge_steps(rows, [{}, {}]) == {
        "ratio/min": 0.5, "ratio/max": 1.5, "completions/min_length": 3, "step": 2, "episode": 16,
        "clip_ratio/low_min": 0.0, "advantages/abs_max": 2.0, "num_tokens": 90, "lr": 0.1,
        "completions/max_length": 9, "clip_ratio/high_max": 1.0, "data/truncated": 1,
        "memory/peak_gb": 3.0, "sampling/logp_diff_max": 0.3,
    }  # fmt: skip


def test_a_step_without_a_value_or_with_a_nan_takes_no_part():
    rows = [{"loss": float("nan"), "reward": 1.0}, {"loss": 2.0}, {"loss": 4.0, "kl": float("inf")}]
    assert merge_steps(rows, [{}, {}, {}]) == {"loss": 3.0, "reward": 1.0}


def test_every_third_step_and_the_last_are_written_with_the_means_of_all(tmp_path):
    words = (ENDS, "max_steps=4", "train.learning_rate=1e-3", "seed=5")
    single = make(tmp_path, *words)
    loop.run_training_loop(single)
    every = lines(single)
    (tmp_path / "again").mkdir()
    run = make(tmp_path / "again", *words, "logging.every=3")
    loop.run_training_loop(run)
    found = lines(run)
    assert [row["step"] for row in found] == [3, 4] and run.log.metrics_lines == found
    first = every[:3]
    for name in ("reward", "loss", "reward_std", "grad_norm", "completions/mean_length"):
        assert found[0][name] == pytest.approx(sum(r[name] for r in first) / 3), name
    totals = [r["objective/kl"] for r in first]
    tokens = [r["completions/mean_length"] * 16 for r in first]
    assert len(set(tokens)) > 1
    assert found[0]["kl"] == pytest.approx(sum(totals) * 16 / sum(tokens))
    assert found[0]["completions/max_length"] == max(r["completions/max_length"] for r in first)
    assert found[0]["ratio/min"] == min(r["ratio/min"] for r in first)
    assert found[0]["num_tokens"] == first[-1]["num_tokens"]
    for name in ("entropy", "sampling/entropy"):
        weighted = sum(r[name] * n for r, n in zip(first, tokens, strict=True))
        assert found[0][name] == pytest.approx(weighted / sum(tokens)), name
    assert timeless(found[1]) == timeless(every[3])


def test_completions_per_second_are_of_this_attempt_alone(tmp_path):
    run = make(tmp_path)
    run.state.episodes = run.episodes_before = 1000  # of attempts before this one
    _, row, _ = step(run)
    assert row["episode"] == 1016 and row["eps"] * run.clock.elapsed() >= 16
    assert row["eps"] * row["step_time"] <= 16


def test_what_was_not_written_when_the_run_stopped_is_written_at_the_end(tmp_path):
    run = make(tmp_path, "logging.every=10", "max_steps=20")
    for _ in range(2):
        batch = sampled(run)
        updates = updated(run, batch)
        run.state.advance(batch)
        log_step(run, batch, updates)
    assert not (run.folder / "metrics.jsonl").exists()
    run.log.close()
    run.log.close()
    assert [row["step"] for row in lines(run)] == [2]


def test_values_that_are_not_finite_are_left_out_of_the_line(tmp_path):
    log = RunLog(tmp_path, 1, 1, aliases=False)
    assert log.append_line({"a": float("nan"), "b": 1.0, "c": float("-inf"), "d": 2}) == {
        "b": 1.0,
        "d": 2,
    }
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"b": 1.0, "d": 2}


def test_aliases_are_added_only_when_asked_for(tmp_path):
    plain = step(make(tmp_path, ENDS))[1]
    row = step(make(tmp_path, ENDS, "logging.trl_aliases=true"))[1]
    theirs = "sampling/sampling_logp_difference"
    assert row[f"{theirs}/mean"] == row["sampling/logp_diff_mean"]
    assert row[f"{theirs}/max"] == row["sampling/logp_diff_max"]
    assert row["rewards/digits/mean"] == row["reward/digits/mean"]
    assert not any(name.startswith(("rewards/", theirs)) for name in plain)


def noted(completion_ids, log_extra, log_metric, **_):
    log_extra("first_id", [ids[0] for ids in completion_ids])
    log_metric("longest", max(map(len, completion_ids)))
    scores = digits(completion_ids)
    return [None if len(i) == 1 else s for i, s in zip(completion_ids, scores, strict=True)]


def test_samples_hold_everything_about_every_row_of_every_nth_step(tmp_path):
    words = [ENDS, "logging.samples_every=2", "max_steps=5", "algorithm.beta=0.3", "seed=2"]
    run = make(tmp_path, *words, rewards={"told": noted})
    batches = []
    for _ in range(5):
        _, row, batch = step(run)
        batches.append(batch)
        assert row["longest"] == batch.rollout_values("length").max()
    names = sorted(path.name for path in (run.folder / "samples").iterdir())
    assert names == ["step_000002.jsonl", "step_000004.jsonl"]
    text = (run.folder / "samples/step_000002.jsonl").read_text()
    rows, batch = [json.loads(line) for line in text.splitlines()], batches[1]
    assert sum("token_strip" in row for row in rows) == 2
    assert len(rows) == 16 and [(r["draw"], r["k"]) for r in rows] == [
        (g.prompt_offset, k) for g in batch.groups for k in range(4)
    ]
    numbers = [row["advantage"] for row in rows if row["advantage"] is not None]
    least, most = min(numbers), max(numbers)
    for i, row in enumerate(rows):
        group, p, k = batch.groups[i // 4], i // 4, i % 4
        rollout = group.rollouts[k]
        assert row["prompt"] == group.prompt and row["completion"] == rollout.text
        assert row["seed"] == rollout.seed and row["weight_version"] == rollout.weight_version
        assert row["finish_reason"] == rollout.finish_reason
        assert row["terminated"] == rollout.terminated
        assert row["prompt_length"] == len(group.prompt_ids)
        assert row["completion_length"] == len(rollout.completion_ids)
        assert row["first_id"] == rollout.completion_ids[0]
        if "tokens" in row:
            assert row["advantage"] in (least, most)
            tokens, length = row["tokens"], len(rollout.completion_ids)
            assert len(tokens["text"]) == length == len(tokens["logp"])
            assert tokens["logp"] == pytest.approx(group.old_logp[k].tolist(), rel=1e-4)
            assert tokens["sampler_logp"] == pytest.approx(rollout.behaviour_logp, rel=1e-4)
            assert tokens["lag"] == 1 - rollout.weight_version and "advantage" not in tokens
        if batch.scorable[p, k]:
            assert row["rewards"] == {"told": row["score"]} and row["shaped"] == row["score"]
            assert row["reward"] == pytest.approx(row["score"] - 0.3 * row["kl"])
            assert row["advantage"] == float(batch.advantage[p, k])
        else:
            assert row["rewards"] == {"told": None}
            assert [row[n] for n in ("score", "shaped", "kl", "reward", "advantage")] == [None] * 5


def test_a_group_that_was_dropped_has_scores_and_no_kl_in_its_samples(tmp_path):
    def first_group_flat(completion_ids, **_):
        return [0.5 if i < 4 else s for i, s in enumerate(digits(completion_ids))]

    run = make(tmp_path, "algorithm.zero_std_groups=drop", rewards={"some": first_group_flat})
    step(run)
    text = (run.folder / "samples/step_000001.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [r["score"] for r in rows[:4]] == [0.5] * 4
    assert {r["kl"] for r in rows[:4]} == {r["advantage"] for r in rows[:4]} == {None}
    assert all(r["kl"] is not None for r in rows[4:])


def notes_of(run):
    notes = []
    run.log.note = notes.append
    return notes


def test_a_note_is_said_once_whatever_numbers_are_in_it(tmp_path):
    def fewer_each_time(completion_ids, trainer_state, **_):
        scores = digits(completion_ids)
        return [None if i <= trainer_state.step else s for i, s in enumerate(scores)]

    run = make(tmp_path, "max_steps=3", rewards={"some": fewer_each_time})
    notes = notes_of(run)
    loop.run_training_loop(run)
    assert len([n for n in notes if "no reward scored" in n]) == 1
    assert "1 of 16 rows" in notes[0] and len(notes) == 1


def test_advice_is_printed_once(tmp_path):
    def constant(completion_ids, **_):
        return [1.0] * len(completion_ids)

    run = make(tmp_path, "max_steps=8", "generation.max_completion_length=4",
               rewards={"constant": constant})  # fmt: skip
    notes = notes_of(run)
    loop.run_training_loop(run)
    advice = [n for n in notes if n.startswith("advice: ")]
    assert len([n for n in advice if "frac_reward_zero_std" in n]) == 1
    assert len([n for n in advice if "clipped_ratio" in n]) == 1


def test_the_display_gets_each_line_and_one_sample_per_prompt(tmp_path):
    run = make(tmp_path, ENDS, "logging.every=2", "max_steps=3")
    shown = []
    run.log.display = SimpleNamespace(
        step=lambda row, samples=(): shown.append((row, samples)),
        phase=lambda name: None,
        note=lambda text: None,
    )
    loop.run_training_loop(run)
    assert [row["step"] for row, _ in shown] == [2, 3]
    assert all([s["k"] for s in samples] == [0, 0, 0, 0] for _, samples in shown)
