"""What `rloo migrate` does not convert is refused by its name, with what to do instead."""

import shlex
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused

from rloo_cli.cli.migrate import run
from rloo_cli.compat.migrate.other_trainers import OTHER_TRAINERS, other_trainer_error
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

CASES = yaml.safe_load((Path(__file__).parent / "other_trainers.yaml").read_text())


def words_of(case: dict) -> list[list[str]]:
    """Write a case's files; the words after `rloo migrate`, as a text and word by word."""
    for name, text in case.get("files", {}).items():
        Path(name).write_text(text)
    if "run" in case:
        return [[case["run"]], shlex.split(case["run"])]
    return [shlex.split(case["args"]) if "args" in case else [next(iter(case["files"]))]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["is"])
def test_what_is_not_converted_is_refused_by_its_name(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in words_of(case):
        with pytest.raises(ConfigError) as refused:
            run(words)
        (problem,) = refused.value.problems
        assert_refused(refused, 2, case["name"])
        assert case["name"] in problem.what
        assert problem.where and problem.why and problem.fix


def test_every_trainer_is_in_the_table_and_its_command_composes():
    named = {case["name"] for case in CASES}
    for title in OTHER_TRAINERS:
        assert any(name in title for name in named), title
        _, verb, *overrides = other_trainer_error(title, "").problems[0].fix.split()
        assert verb == "train"
        given = [word.replace("reward=NAME", "reward=length_tokens") for word in overrides]
        compose_config(given)


@pytest.mark.parametrize(
    "words",
    [
        "trl rloo --model_name_or_path org/verl --dataset_name allenai/open-instruct-rl --beta 0.1",
        "trl grpo --model_name_or_path m/m --dataset_name o/d --output_dir out/axolotl/slime",
        "swift rlhf --rlhf_type grpo --model m/m --dataset org/openrlhf#100",
        "/envs/axolotl/bin/python /home/slime/me/rloo.py --model_name_or_path m/m --beta 0.1",
    ],
)
def test_a_value_that_is_called_like_a_trainer_is_a_value(words, migrate):
    assert migrate(words).keys


def test_the_rule_of_a_script_says_what_to_change_in_it(tmp_path, monkeypatch, sentence):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from trl import RLOOTrainer\n")
    with pytest.raises(ConfigError) as refused:
        run(["train.py"])
    assert_refused(refused, 2, "train.py", fix="from rloo_cli.compat.trl import")
    sentence(refused)
