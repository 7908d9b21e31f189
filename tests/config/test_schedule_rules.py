"""A warm-up that outlasts the run, and intervals above it, are refused, shortened or named."""

import pytest
import torch
from cli_cases import Rloo

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.idle_keys import idle_notes
from rloo_cli.config.schema import RunConfig, TrainConfig
from rloo_cli.distributed.optimizer import build_lr_schedule, warmup_note
from rloo_cli.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["max_steps=2", "train.warmup_steps=100"], "train.warmup_steps=0"),
        (["max_steps=20", "train.warmup_steps=20"], "train.warmup_steps=2"),
        (["max_steps=10", "algorithm.num_iterations=2", "train.warmup_steps=20"],
         "train.warmup_steps=2"),
    ],
)  # fmt: skip
def test_a_warm_up_as_long_as_the_run_is_refused(words: list[str], fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(compose_config(["+recipe=smoke", "train.lr_scheduler=linear", *words]))
    [problem] = refused.value.problems
    assert "train.warmup_steps" in problem.where and problem.fix == fix


@pytest.mark.parametrize(
    "words",
    [
        ["max_steps=20", "train.warmup_steps=19", "train.lr_scheduler=linear"],
        ["max_steps=10", "algorithm.num_iterations=2", "train.warmup_steps=19",
         "train.lr_scheduler=linear"],
        ["max_steps=2", "train.warmup_steps=100", "train.lr_scheduler=constant"],
        ["max_steps=null", "train.epochs=1", "train.warmup_steps=100"],
    ],
)  # fmt: skip
def test_a_warm_up_within_the_run_or_a_run_of_unknown_length_passes(words: list[str]) -> None:
    check_config(compose_config(["+recipe=smoke", *words]))


def learning_rates(warmup: int, updates: int) -> list[float]:
    """The rates of a linear schedule, as shares of the peak."""
    keys = {"lr_scheduler": "linear", "lr_scheduler_kwargs": {}, "warmup_steps": warmup}
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = build_lr_schedule(optimizer, TrainConfig.model_construct(**keys), updates)
    rates = []
    for _ in range(updates):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def test_a_schedule_that_would_end_in_its_warm_up_warms_up_for_a_tenth_of_the_updates() -> None:
    assert learning_rates(20, 1) == [1.0]
    assert learning_rates(20, 10)[:2] == [0.0, 1.0]
    assert learning_rates(4, 10)[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_shortened_warm_up_is_named_with_its_key_and_numbers() -> None:
    keys = {"lr_scheduler": "linear", "warmup_steps": 20}
    note = warmup_note(TrainConfig.model_construct(**keys), 10)
    assert "1 updates" in note and "warmup_steps=20" in note
    assert warmup_note(TrainConfig.model_construct(**keys), 100) == ""


def test_a_supervised_training_on_few_rows_trains_with_its_learning_rate(rloo: Rloo) -> None:
    words = ("sft", "+recipe=smoke", "+debug=cpu", "sft.data.max_samples=16")
    ended = rloo(*words)
    assert ended.code == 0 and "warmup_steps=20" in ended.said, ended.said
    assert "held-out" in ended.said


@pytest.mark.parametrize("key", ["eval.every", "checkpoint.every", "logging.every"])
def test_an_interval_above_the_number_of_steps_is_named(key: str) -> None:
    section, _, name = key.partition(".")
    held_out = {"data": {"eval_split": "test"}}
    values = held_out | {"max_steps": 10, section: {name: 11}}
    assert "max_steps" in str(idle_notes([key], RunConfig, values))
    values = {"max_steps": 10, section: {name: 10}}
    assert "max_steps" not in str(idle_notes([key], RunConfig, values))


def test_a_supervised_training_needs_no_reward_and_a_run_does() -> None:
    composed = compose_config(["+recipe=smoke", "reward=null"])
    check_config(composed, needs_reward=False)
    with pytest.raises(ConfigError) as refused:
        check_config(composed)
    assert "reward" in refused.value.problems[0].where


def test_sft_trains_by_a_recipe_without_a_reward(rloo: Rloo) -> None:
    ended = rloo("sft", "+recipe=smoke", "+debug=cpu", "reward=null")
    assert ended.code == 0, ended.said
