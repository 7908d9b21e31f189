"""`rloo doctor RUN`: each rule speaks where its fault is, and is silent where it is not."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_cases
import pytest
from compare_cases import write

from rloo_cli.cli import doctor
from rloo_cli.inspection.diagnosis import diagnose_run
from rloo_cli.reporting.health.rules import HEALTH_RULES, MIN_STEPS

Samples = Callable[[int, int, int], dict[str, Any]]  # step, draw, k -> fields of a sample
HEALTHY_METRICS = {
    "kl": 0.05, "entropy": 1.0, "completions/mean_length": 8.0, "completions/clipped_ratio": 0.1,
    "frac_reward_zero_std": 0.3, "grad_norm": 2.0, "learning_rate": 1e-4, "ratio/max": 1.2,
    "completions/most_common_frac": 0.2, "reward_std_batch": 0.5,
    "update/changed_frac": 0.8, "sampling/logp_diff_rms": 1e-4, "policy/approxkl_avg": 0.01,
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def healthy_sample(step: int, draw: int, k: int) -> dict[str, Any]:
    """Scores that depend on the completion, and not on its length."""
    dice = random.Random(f"{step} {draw} {k}")
    score = float(dice.random() < 0.3 + 0.02 * step)
    length, text = dice.randint(4, 12), f"answer {dice.randint(0, 99)} {score}"
    return {"score": score, "completion": text, "completion_length": length}


def make_run(
    sample: Samples = healthy_sample, steps: int = 24, rows: int = 1000, **metrics: Any
) -> Path:
    """A run's folder by hand. `metrics`: name (with __ for the slash) -> number, or by step."""
    folder = write(Path("runs"), "one", steps=0, scores=())
    lines, ledger = [], [{"ledger": 1, "step": 0, "place": 0, "prompts": rows}]
    (folder / "samples").mkdir()
    values = HEALTHY_METRICS | {name.replace("__", "/"): v for name, v in metrics.items()}
    for step in range(1, steps + 1):
        draws = [4 * (step - 1) + i for i in range(4)]
        samples = [
            {"draw": draw, "k": k, "prompt": f"What is {draw % rows}?"} | sample(step, draw, k)
            for draw in draws
            for k in range(4)
        ]
        reward = sum(s["score"] for s in samples) / len(samples)
        got = {n: v(step) if callable(v) else v for n, v in values.items()}
        lines.append({"step": step, "step_time": 1.0, "reward": reward, **got})
        ledger.append({"step": step, "place": draws[0], "rows": [d % rows for d in draws]})
        text = "".join(json.dumps(s) + "\n" for s in samples)
        (folder / f"samples/step_{step:06d}.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ledger.jsonl").write_text(
        "".join(json.dumps(e | {"check": ""}) + "\n" for e in ledger)
    )
    return folder


def change_config(folder: Path, **sections: dict[str, Any]) -> None:
    import yaml

    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    path.write_text(yaml.safe_dump(config))


def named(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose_run(folder).findings]


def test_a_healthy_run_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert named(folder) == []
    assert doctor.run(["one"]) == 0
    assert "no known problem" in capsys.readouterr().out


def with_length(step: int, draw: int, k: int) -> dict[str, Any]:
    length = 4 + step // 4 + k
    return {"score": float(length), "completion": "a" * length, "completion_length": length}


def of_the_prompt(step: int, draw: int, k: int) -> dict[str, Any]:
    return healthy_sample(step, draw, k) | {"score": float(draw % 7)}


def by_chance(step: int, draw: int, k: int) -> dict[str, Any]:
    score = random.Random(f"{step} {draw} {k}").random()
    return {"score": score, "completion": f"same {k // 2}", "completion_length": 8}


def all_alike(step: int, draw: int, k: int) -> dict[str, Any]:
    return healthy_sample(step, draw, k) | {"score": 1.0}


def with_one_text(step: int, draw: int, k: int) -> dict[str, Any]:
    """A reward that pays for one text: the policy learns it, and nothing else."""
    paid = random.Random(f"{step} {draw} {k}").random() < step / 12
    return healthy_sample(step, draw, k) | {"score": float(paid), "completion": f"yes {paid}"}


def wrong_and_alike(step: int, draw: int, k: int) -> dict[str, Any]:
    """Of four prompts one is right and three are wrong, whatever is sampled."""
    right = draw % 4 == 0
    return healthy_sample(step, draw, k) | {"score": float(right), "completion": f"{draw}"}


def up_and_down(step: int) -> float:
    return float(step % 2)


def add_evaluations(folder: Path, scores: list[float]) -> None:
    lines = [
        {"step": 8 * i, "eval_reward": score, "eval_samples": 50} for i, score in enumerate(scores)
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_a_held_out_score_that_falls_while_the_reward_rises_is_named_and_advised() -> None:
    folder = make_run()
    add_evaluations(folder, [0.3, 0.4, 0.1, 0.1])
    found = diagnose_run(folder)
    (finding,) = found.findings
    assert finding.name == "the held-out score falls"
    assert "eval_reward" in finding.figures and "0.4 at step 8" in finding.figures
    assert [step for step, text in found.advice if "eval_reward" in text] == [24]


def test_a_held_out_score_that_recovers_or_wavers_within_its_noise_is_not_named() -> None:
    for scores in ([0.4, 0.1, 0.1, 0.5], [0.4, 0.3, 0.35, 0.3]):
        folder = make_run()
        add_evaluations(folder, scores)
        assert named(folder) == []
        shutil.rmtree(folder)


def test_a_policy_that_mastered_its_prompts_repeats_itself_and_has_no_finding() -> None:
    def mastered(step: int, draw: int, k: int) -> dict[str, Any]:
        score = 1.0 if draw == 50 else min(0.7, step / 12)  # one prompt allows more than others
        return wrong_and_alike(step, draw, k) | {"score": score}

    found = named(make_run(mastered))
    assert "duplicate completions" not in found and "one completion for all prompts" not in found


@pytest.mark.parametrize(
    ("name", "sample", "metrics"),
    [
        ("reward hacking by length", with_length, {"completions__mean_length": lambda s: 4 + s}),
        ("no spread within groups", all_alike, {"frac_reward_zero_std": 1.0}),
        ("all completions are truncated", healthy_sample, {"completions__clipped_ratio": 1.0}),
        ("KL runs away", healthy_sample, {"kl": lambda step: 0.1 * step}),
        ("entropy collapse", by_chance, {"entropy": lambda step: 2.0 * 0.7**step}),
        ("updates are rounded away", healthy_sample, {"update__changed_frac": 0.0}),
        ("sampler and trainer disagree", healthy_sample, {"sampling__logp_diff_rms": 0.05}),
        ("learning rate too high", healthy_sample, {"ratio__max": 50.0}),
        ("learning rate too low", by_chance, {"kl": 1e-6}),
        ("the reward ignores the completion", of_the_prompt, {"frac_reward_zero_std": 1.0}),
        ("the reward ignores the completion", by_chance, {}),
        ("one completion for all prompts", with_one_text, {"completions__most_common_frac": 0.99}),
        ("duplicate completions", wrong_and_alike, {}),
        ("high variance", healthy_sample, {"reward_std_batch": 0.0, "reward": up_and_down}),
    ],
)
def test_a_fault_is_named(name: str, sample: Samples, metrics: dict[str, Any]) -> None:
    assert name in named(make_run(sample, **metrics))


LATE = "sampler and trainer disagree late in completions"


def test_a_sampler_that_is_wrong_late_in_completions_alone_is_named(tmp_path: Path) -> None:
    words = ["generation.max_completion_length=80", "generation.min_tokens=70"]
    run = loop_cases.alone(tmp_path, *words)
    batch = loop_cases.sampled(run)
    for rollout in (r for group in batch.groups for r in group.rollouts):
        assert rollout.behaviour_logp is not None and len(rollout.behaviour_logp) > 64
        late = [logp - 0.3 for logp in rollout.behaviour_logp[64:]]
        rollout.behaviour_logp = rollout.behaviour_logp[:64] + late
    line = loop_cases.step(run, batch)[1]
    gaps = {k.replace("/", "__"): v for k, v in line.items() if k.startswith("sampling/logp_diff")}
    assert named(make_run(**gaps)) == [LATE]


def test_a_gap_that_is_the_same_at_every_depth_is_not_one_of_late_tokens() -> None:
    everywhere = {"sampling__logp_diff_from0": 0.05, "sampling__logp_diff_from64": 0.06}
    folder = make_run(sampling__logp_diff_rms=0.05, **everywhere)
    assert named(folder) == ["sampler and trainer disagree"]
    shutil.rmtree(folder)
    rounding = {"sampling__logp_diff_from0": 1e-6, "sampling__logp_diff_from64": 1e-4}
    assert named(make_run(**rounding)) == []


def test_data_that_stands_twice_in_the_file_or_in_the_held_out_set_is_named() -> None:
    def doubled(step: int, draw: int, k: int) -> dict[str, Any]:
        return healthy_sample(step, draw, k) | {"prompt": f"What is {draw // 2}?"}

    assert named(make_run(doubled)) == ["data is seen twice"]


def test_held_out_prompts_that_were_trained_on_are_named_and_a_second_epoch_is_not() -> None:
    folder = make_run(rows=20)
    assert named(folder) == []
    asked = [{"prompt": f"What is {n}?", "score": 1.0} for n in (1, 2, 300, 400)]
    text = "".join(json.dumps(sample) + "\n" for sample in asked)
    (folder / "samples/eval_000024.jsonl").write_text(text)
    assert named(folder) == ["data is seen twice"]


def test_one_of_two_rewards_that_has_all_the_say_is_named() -> None:
    def two(step: int, draw: int, k: int) -> dict[str, Any]:
        sample = healthy_sample(step, draw, k)
        long = float(sample["completion_length"])
        return sample | {"rewards": {"right": sample["score"], "length": long}}

    folder = make_run(two)
    change_config(folder, reward={"right": {"weight": 1.0}, "length": {"weight": 0.1}})
    assert "one reward drowns the others" not in named(folder)
    change_config(folder, reward={"right": {"weight": 1.0}, "length": {"weight": 50.0}})
    (finding,) = [f for f in diagnose_run(folder).findings if "drowns" in f.name]
    assert "length has 100" in finding.figures and "right" in finding.figures


def test_one_reward_drowns_the_others_only_after_some_steps() -> None:
    def two(step: int, draw: int, k: int) -> dict[str, Any]:
        sample = healthy_sample(step, draw, k)
        long = float(sample["completion_length"])
        return sample | {"rewards": {"right": sample["score"], "length": long}}

    for steps, found in ((MIN_STEPS - 1, []), (MIN_STEPS, ["one reward drowns the others"])):
        folder = make_run(two, steps=steps)
        change_config(folder, reward={"right": {"weight": 1.0}, "length": {"weight": 50.0}})
        assert named(folder) == found
        shutil.rmtree(folder)


@pytest.mark.parametrize(("penalty", "found"), [(1.2, ["sampling is truncated"]), (1.0, [])])
def test_a_repetition_penalty_samples_from_another_distribution(
    penalty: float, found: list[str]
) -> None:
    folder = make_run()
    change_config(folder, generation={"repetition_penalty": penalty})
    assert named(folder) == found


def test_sampling_from_a_part_of_the_distribution_is_named_and_is_not_a_mismatch() -> None:
    folder = make_run(sampling__logp_diff_rms=0.2, sampling__logp_diff_mean=0.1)
    change_config(folder, generation={"top_p": 0.9, "top_k": 0})
    assert named(folder) == ["sampling is truncated"]


def test_a_mismatch_is_of_staleness_where_the_weights_were_behind() -> None:
    stale = diagnose_run(make_run(sampling__logp_diff_rms=0.2, staleness__mean=1.0))
    assert "staleness" in stale.findings[0].figures


@pytest.mark.parametrize("asked", [{"min_tokens": 16}, {"ignore_eos": True}])
def test_completions_of_a_length_that_was_asked_for_are_not_truncated(
    asked: dict[str, Any],
) -> None:
    folder = make_run(completions__clipped_ratio=1.0)
    assert named(folder) == ["all completions are truncated"]
    change_config(folder, generation=asked)
    assert named(folder) == []


def test_without_a_gradient_no_update_is_rounded_away() -> None:
    found = named(make_run(all_alike, update__changed_frac=0.0, grad_norm=0.0))
    assert "updates are rounded away" not in found


def test_a_float32_trainer_has_a_smaller_gap_to_its_sampler_than_a_bfloat16_one() -> None:
    folder = make_run(sampling__logp_diff_rms=0.01)
    for dtype, found in (("float32", ["sampler and trainer disagree"]), ("bfloat16", [])):
        change_config(folder, model={"dtype": dtype})
        assert named(folder) == found
        change_config(folder, model={"dtype": "auto"})  # then the saved model says it
        (folder / "final").mkdir(exist_ok=True)
        (folder / "final/config.json").write_text(json.dumps({"dtype": dtype}))
        assert named(folder) == found


def test_weights_that_were_behind_may_differ_more_in_float32() -> None:
    folder = make_run(sampling__logp_diff_rms=0.01, staleness__mean=1.0)
    change_config(folder, model={"dtype": "float32"})
    assert named(folder) == []


@pytest.mark.parametrize(("last", "found"), [(0.5, ["entropy collapse"]), (0.9, [])])
def test_entropy_may_fall_where_the_reward_goes_half_of_the_way(
    last: float, found: list[str]
) -> None:
    def rising(step: int, draw: int, k: int) -> dict[str, Any]:
        chance = 0.3 + (last - 0.3) * step / 24
        score = float(random.Random(f"{step} {draw} {k}").random() < chance)
        return healthy_sample(step, draw, k) | {"score": score, "completion": f"{draw} {score}"}

    assert named(make_run(rising, entropy=lambda step: 2.0 * 0.7**step)) == found


EPISODE_METRICS = {
    "agent__turns": 2.0, "agent__calls": 2.0, "agent__bad_calls": 0.2, "agent__errors": 0.1,
    "agent__failures": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "figures"),
    [
        ({"agent__failures": 0.7}, "70%"),
        ({"agent__bad_calls": 1.5}, "1.5 could not"),
        ({"agent__calls": 0.0, "agent__bad_calls": 1.0}, "1 could not"),
        ({"agent__errors": 1.5}, "1.5 ended"),
        ({"agent__calls": 0.0, "agent__bad_calls": 0.0, "agent__errors": 0.0}, "no tool was"),
    ],
)
def test_tools_that_fail_and_calls_that_cannot_be_read_are_named(
    metrics: dict[str, float], figures: str
) -> None:
    (finding,) = diagnose_run(make_run(**EPISODE_METRICS | metrics)).findings
    assert finding.name == "tools or environments fail" and figures in finding.figures


def turns_of(*said: str) -> list[dict[str, Any]]:
    """An episode with a call in each turn but the last."""
    turns = [{"told": [], "said": text, "calls": []} for text in said]
    for number, turn in enumerate(turns[1:]):
        turn["told"] = [{"role": "tool", "content": f"answer {number}"}]
    return turns


def test_a_score_that_comes_with_another_turn_is_not_hacked_by_length() -> None:
    def two_turns(step: int, draw: int, k: int) -> dict[str, Any]:
        sample = healthy_sample(step, draw, k)
        called = random.Random(f"{step} {draw} {k} called").random() < step / 24
        of_a_turn = random.Random(f"{step} {draw} {k} length").randint(4, 5) + step // 8
        long = of_a_turn * (1 + called)
        turns = turns_of(*["42"] * (1 + called))
        return sample | {"score": float(called), "completion_length": long, "turns": turns}

    # Turns grow, too, and say nothing of the score; their number does.
    growing = {"completions__mean_length": lambda s: (4.5 + s / 8) * (1 + s / 24)}
    episodes = EPISODE_METRICS | growing | {"agent__turns": lambda s: 1 + s / 24}
    assert named(make_run(two_turns, **episodes)) == []


def test_turns_that_grow_with_their_score_are_hacked_by_length() -> None:
    def one_turn(step: int, draw: int, k: int) -> dict[str, Any]:
        return with_length(step, draw, k) | {"turns": turns_of("a" * (4 + step // 4 + k))}

    growing = {"completions__mean_length": lambda s: 4 + s}
    (finding,) = diagnose_run(make_run(one_turn, **EPISODE_METRICS | growing)).findings
    assert finding.name == "reward hacking by length" and "length of a turn" in finding.figures


def test_episodes_with_one_last_answer_and_other_turns_before_it_are_not_equal() -> None:
    def by_first_turn(step: int, draw: int, k: int) -> dict[str, Any]:
        sample = by_chance(step, draw, k)
        return sample | {"turns": turns_of(f"call {sample['score']}", "done")}

    metrics: dict[str, Any] = {"frac_reward_zero_std": 0.3}
    folder = make_run(by_chance, **metrics)
    assert named(folder) == ["the reward ignores the completion"]
    shutil.rmtree(folder)
    assert named(make_run(by_first_turn, **EPISODE_METRICS | metrics)) == []


def test_equal_prompts_of_an_environment_may_be_different_tasks() -> None:
    def guess(step: int, draw: int, k: int) -> dict[str, Any]:
        return healthy_sample(step, draw, k) | {"prompt": "Guess the number."}

    folder = make_run(guess, **EPISODE_METRICS)
    assert named(folder) == ["data is seen twice"]
    change_config(folder, agent={"kind": "class"})
    assert named(folder) == []


def test_completions_that_are_cut_off_in_their_last_turn_are_named_as_such() -> None:
    metrics = EPISODE_METRICS | {"completions__clipped_ratio": 1.0}
    (finding,) = diagnose_run(make_run(**metrics)).findings
    assert finding.name == "all completions are truncated" and "last turn" in finding.figures


def test_the_verb_exits_with_20_and_tells_figures_and_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(kl=lambda step: 0.1 * step)
    assert doctor.run(["one"]) == 20
    shown = capsys.readouterr().out
    assert all(
        x in shown for x in ("KL runs away", "kl went from", "algorithm.beta", "#kl-runs-away")
    )
    assert doctor.run(["one", "--json"]) == 20
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "KL runs away"


def test_damaged_and_empty_runs_are_read_as_far_as_they_can_be() -> None:
    folder = make_run(kl=lambda step: 0.1 * step)
    (folder / "config.yaml").write_text("[")
    (folder / "ledger.jsonl").write_text("no entry\n")
    (folder / "samples/step_000003.jsonl").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("cut\n")
    got = diagnose_run(folder)
    assert [f.name for f in got.findings] == ["KL runs away"]
    damaged = {Path(text.partition(":")[0]).name for text in got.problems}
    assert damaged == {"config.yaml", "metrics.jsonl", "ledger.jsonl"}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "run.json":
            path.write_text("")
    assert diagnose_run(folder).findings == []


def test_every_finding_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/inspect.md").read_text()
    titles = [rule.title for rule in HEALTH_RULES.values() if rule.found]
    assert len(titles) == len({*titles}) == 19
    for title in titles:
        assert f'<a id="{title.lower().replace(" ", "-")}"></a>{title} |' in page


def test_a_rule_judges_a_run_that_goes_on_or_a_whole_one_and_silences_rules_of_the_table() -> None:
    for rule in HEALTH_RULES.values():
        assert rule.check or rule.found
        assert bool(rule.check) == bool(rule.metrics)
        assert bool(rule.found) == bool(rule.title)
        assert {*rule.silences} <= {*HEALTH_RULES}
