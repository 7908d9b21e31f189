"""generation=replay: the recorded run's own update, bit for bit; what does not fit is refused."""

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from assert_refused import assert_refused
from loop_cases import cache
from replay_cases import HEAD_FACTS, last_line, recorded_run
from resume_cases import attempt, tensors

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group
from rloo_cli.data.rollout_record import read_rollout_record, write_rollout_record
from rloo_cli.generation import RecordedGenerator, replay
from rloo_cli.generation.common.record_player import RecordPlayer
from rloo_cli.utils.errors import ConfigError, DataError, GenerationError

pytestmark = pytest.mark.wide

REPLAYED = ("data.eval_split=null", "checkpoint.every=2", "name=replayed", "generation=replay")


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[None]:
    with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("recorded"))


def replayed(root: Path, recorded: Path, *words: str) -> Path:
    """A run that trains from the record."""
    assert attempt(root, *REPLAYED, f"generation.replay.path={recorded}", *words)
    return root / "replayed"


def player(recorded: Path) -> tuple[RecordPlayer, list[Group], list[list[int]]]:
    """A player at the second step, its empty groups, and the seeds that they were drawn with."""
    found = RecordPlayer(recorded)
    assert isinstance(found, RecordedGenerator)
    offsets = found.recorded_draws(1).prompt_offsets
    groups = read_rollout_record(recorded, 2).batch.groups
    assert offsets == [g.prompt_offset for g in groups]
    empty = [Group(g.prompt_offset, {}, g.prompt, g.prompt_ids) for g in groups]
    return found, empty, [[r.seed for r in g.rollouts] for g in groups]


def test_the_same_config_makes_the_same_weights_bit_for_bit(recorded: Path, tmp_path: Path) -> None:
    folder = replayed(tmp_path, recorded, "logging.rollouts_every=1")
    weights = [tensors(f / "final" / "model.safetensors") for f in (recorded, folder)]
    assert weights[0] == weights[1]
    for step in (1, 4):  # the record of a replay is the same record
        ours, other = (read_rollout_record(f, step) for f in (folder, recorded))
        assert ours.head["digest"] == other.head["digest"]
    line, before = last_line(folder), last_line(recorded)
    assert line["loss"] == before["loss"] and line["grad_norm"] == before["grad_norm"]
    assert "sampling/ess" not in line  # nothing is corrected: the policy is the sampler


def test_another_learning_rate_is_off_policy_and_corrected(recorded: Path, tmp_path: Path) -> None:
    words = ("train.learning_rate=1e-3", "algorithm.beta=0.0", "data.eval_split=test")
    folder = replayed(tmp_path, recorded, *words, "max_steps=3", "eval.max_samples=2")
    line = last_line(folder)
    assert line["step"] == 3 and "eval_reward" in line  # the model itself answers held-out prompts
    steps = [x for x in (folder / "metrics.jsonl").read_text().splitlines() if "sampling/ess" in x]
    assert len(steps) == 3


@pytest.mark.slow
def test_a_resumed_replay_goes_on_at_its_step(recorded: Path, tmp_path: Path) -> None:
    looks: list[int] = []
    words = (*REPLAYED, f"generation.replay.path={recorded}")
    whole = tmp_path / "whole" / "replayed"
    assert attempt(whole.parent, *words, looks=looks)
    assert not attempt(tmp_path, *words, stop_at=looks[-1] * 2 // 3)
    folder = replayed(tmp_path, recorded)
    weights = [tensors(f / "final" / "model.safetensors") for f in (whole, folder)]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def fitting(recorded: Path) -> dict[str, Any]:
    """The plain config of a run that fits the record."""
    words = ["+recipe=smoke", f"root={recorded.parent}", "distributed.threads=1", "max_steps=4"]
    words += [*REPLAYED, f"generation.replay.path={recorded}"]
    return check.dump_config(check.check_config(compose_config(words)))


def changed(values: dict[str, Any], key: str, value: object) -> RunConfig:
    """The config with another value of one key."""
    values = copy.deepcopy(values)
    *sections, leaf = key.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    inner[leaf] = value
    return check.build_run_config(values)


@pytest.mark.slow_but("checkpoint.every-1-none", "generation.replay.path-no-truncate")
@pytest.mark.parametrize(
    ("key", "value", "mode"),
    [
        ("checkpoint.every", 1, "none"), ("distributed.threads", 2, "none"),
        ("train.learning_rate", 1e-3, "truncate"), ("max_steps", 3, "truncate"),
        ("generation.temperature", 0.9, "truncate"), ("generation.replay.path", "no", "truncate"),
    ],
)  # fmt: skip
def test_auto_correction_is_the_recorded_runs_own_only_with_its_config(
    fitting: dict[str, Any], key: str, value: object, mode: str
) -> None:
    run = check.resolve_config(changed(fitting, key, value))
    assert run.algorithm.model_dump()["correction"]["mode"] == mode


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation.replay.path", None),
        ("generation.replay.path", "nowhere"),
        ("name", "smoke"),
        ("max_steps", 6),
        ("algorithm.num_generations", 2),
        ("train.prompts_per_step", 2),
        ("seed", 2),
        ("data.shuffle", False),
        ("generation.max_completion_length", 8),
    ],
)
def test_what_the_record_does_not_have_is_refused_by_the_check(
    fitting: dict[str, Any], key: str, value: object, recorded: Path, sentence
) -> None:
    assert not [*replay.rules(check.build_run_config(fitting))]
    (problem,) = replay.rules(changed(fitting, key, value))
    sentence(problem.render().replace(os.getcwd(), "HERE"), folder=recorded)
    assert problem.where == ("generation.replay.path" if key in ("name", "max_steps") else key)


def test_all_of_it_is_said_at_once(recorded: Path) -> None:
    words = ["+recipe=smoke", "algorithm=remax", "algorithm.num_generations=3", "seed=4", *REPLAYED]
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config([*words, f"generation.replay.path={recorded}"]))
    names = sorted(p.what.partition(" ")[0] for p in caught.value.problems)
    assert names == ["algorithm", "algorithm.num_generations", "seed"]


def test_other_data_are_refused_before_a_model_loads(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        replayed(tmp_path, recorded, 'data.split="train[:32]"')
    assert_refused(refused, 4, "32 prompts", where="data.path")
    assert not [*tmp_path.glob("replayed/checkpoint*")]


def test_other_tokens_are_refused(recorded: Path, tmp_path: Path, fitting: dict[str, Any]) -> None:
    copied = Path(shutil.copytree(recorded, tmp_path / "copied", symlinks=True))
    record = read_rollout_record(copied, 1)
    kept = {n: record.head[n] for n in HEAD_FACTS}
    write_rollout_record(copied, record.batch, kept | {"vocab_size": 7})
    fitting = copy.deepcopy(fitting)
    fitting["model"]["path"] = str(recorded / "final")
    (problem,) = replay.rules(changed(fitting, "generation.replay.path", str(copied)))
    assert problem.where == "model.path" and "the record's had 7" in problem.what
    write_rollout_record(copied, record.batch, kept | {"tokenizer": "x"})
    assert not [*replay.rules(changed(fitting, "generation.replay.path", str(copied)))]
    with pytest.raises(ConfigError) as refused:
        replayed(tmp_path, copied)
    assert_refused(refused, 2, "tokenizer")


def test_each_group_gets_one_completion_per_seed_in_order_and_is_told_of_once(
    recorded: Path,
) -> None:
    found, groups, seeds = player(recorded)
    told: list[int] = []
    turned = [[*reversed(s)] for s in seeds]
    found.play_recorded(groups, turned, told.append)
    assert told == [0, 1, 2, 3]
    assert [[r.seed for r in g.rollouts] for g in groups] == turned


def test_a_completion_does_not_depend_on_its_neighbours(recorded: Path) -> None:
    found, groups, seeds = player(recorded)
    found.play_recorded(groups, seeds)
    alone = Group(groups[2].prompt_offset, {}, "", groups[2].prompt_ids)
    found.play_recorded([alone], [seeds[2][1:2]])
    assert alone.rollouts == groups[2].rollouts[1:2]


def test_nothing_is_played_that_was_drawn_for_something_else(recorded: Path) -> None:
    found, groups, seeds = player(recorded)
    with pytest.raises(GenerationError, match="seed 5"):
        found.play_recorded(groups[:1], [[5]])
    groups[1].prompt_ids = [1, 2]
    with pytest.raises(GenerationError, match="another prompt"):
        found.play_recorded(groups[1:2], seeds[1:2])
    with pytest.raises(GenerationError, match="no sampler"):
        found.generate(groups, seeds)
    with pytest.raises(DataError):
        found.recorded_draws(7)
