"""`target`: a run ends when the lower bound of its held-out score has reached it."""

import json
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from loop_cases import checked
from resume_cases import attempt

from rloo_cli.checkpoint import manifest
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.rules_target import held_out_score_names
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.wide

# The held-out score of this run is about 5.5, and the lower end of its interval about 4.3.
SCORED = ("reward=unique_chars", "eval.at_start=false", "eval.every=2", "max_steps=4")
REACHED, MEAN_ALONE = "target.at_least=3.5", "target.at_least=5.0"
METRIC = "target.metric=eval_reward"


def lines(root: Path) -> list[dict[str, Any]]:
    text = (root / "smoke" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_whose_lower_bound_has_reached_the_target_ends_there(tmp_path: Path) -> None:
    assert attempt(tmp_path, *SCORED, METRIC, REACHED)
    folder, found = tmp_path / "smoke", lines(tmp_path)
    summary = read_json(folder / "summary.json")
    target = summary["target"]
    assert summary["steps"] == 2 and target["step"] == 2 and target["reached"] is True
    assert target["low"] == found[-1]["eval_reward/low"] >= target["at_least"] == 3.5
    assert target["metric"] == "eval_reward" and target["confidence"] == 0.95
    spent = sum(line["step_time"] for line in found if "step_time" in line)
    assert target["seconds"] == pytest.approx(spent, abs=0.01) and spent > 0
    assert (folder / "final" / "model.safetensors").is_file()
    assert manifest.newest_checkpoint(folder)[0] == folder / "checkpoint-2"
    assert len(found) == 3 and attempt(tmp_path, *SCORED, METRIC, REACHED)
    assert lines(tmp_path) == found  # nothing was left to do


def test_the_bound_counts_and_not_the_mean(tmp_path: Path) -> None:
    assert attempt(tmp_path, *SCORED, METRIC, MEAN_ALONE)
    target = read_json(tmp_path / "smoke" / "summary.json")["target"]
    assert target["low"] < 5.0 < target["value"]
    assert target["reached"] is False and target["step"] == 4  # it trained to max_steps


def test_the_clock_adds_up_over_a_stop_and_a_target_can_be_raised(tmp_path: Path) -> None:
    words = (*SCORED, METRIC, MEAN_ALONE, "eval.every=3", "logging.every=2", "checkpoint.every=1")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *words, looks=looks)
    assert not attempt(tmp_path / "cut", *words, stop_at=len(looks) * 3 // 4)
    done = read_json(tmp_path / "cut" / "smoke" / "run.json")["progress"]["step"]
    assert 0 < done < 4
    words = (*words[:-4], REACHED, *words[-3:])  # lowered: the evaluation of step 3 reaches it
    assert attempt(tmp_path / "cut", *words)
    target = read_json(tmp_path / "cut" / "smoke" / "summary.json")["target"]
    assert target["reached"] and target["step"] == 3
    first, last = (line for line in lines(tmp_path / "cut") if "step_time" in line)
    assert (first["step"], last["step"]) == (2, 3)
    assert target["seconds"] == pytest.approx(2 * first["step_time"] + last["step_time"], abs=0.01)
    higher = [word.replace("3.5", "100") for word in words]
    assert attempt(tmp_path / "cut", *higher)
    target = read_json(tmp_path / "cut" / "smoke" / "summary.json")["target"]
    assert target["step"] == 4 and not target["reached"] and target["at_least"] == 100


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("target.metric=eval_rewrd",), "target.metric"),
        (("target.metric=eval_pass@4",), "target.metric"),
        (("data.eval_split=null",), "target.metric"),
        (("target.at_least=null",), "target.at_least"),
        (("eval.every=0",), "eval.every"),
        (("target.confidence=0.9",), "target.confidence"),
    ],
)
def test_a_target_that_no_run_can_reach_is_refused_by_its_key(
    words: tuple[str, ...], key: str, sentence: Any
) -> None:
    given = ["+recipe=smoke", METRIC, REACHED, "eval.every=2", *words]
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(given))
    assert_refused(refused, 2, key, where="command line")
    sentence(refused)


def test_the_scores_that_a_target_may_name_are_those_of_an_evaluation(tmp_path: Path) -> None:
    more = ("eval.num_generations=3", "eval.pass_at=[1,2]", "max_steps=2")
    sets = "eval.sets={one: {split: test}, two: {split: test}}"
    assert attempt(tmp_path, *SCORED, *more, sets)
    found = {name for name in lines(tmp_path)[-1] if f"{name}/se" in lines(tmp_path)[-1]}
    config = checked((), (*SCORED, *more, sets))
    names = held_out_score_names(config.eval, config.rewards, config.held_out)
    assert found <= {*names} and {*names} <= {*lines(tmp_path)[-1]}
