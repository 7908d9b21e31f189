"""`rloo replay`: a recorded step comes out as it was; what differs is named; other rewards."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from assert_refused import assert_refused
from fork_cases import Forked
from loop_cases import cache, digits
from replay_cases import HEAD_FACTS, RECORD, edit_record, recorded_run
from resume_cases import attempt, state

from rloo_cli.cli import main
from rloo_cli.data import rollout_files
from rloo_cli.data.batch import Batch
from rloo_cli.data.rollout_record import read_rollout_record, write_rollout_record
from rloo_cli.inspection.reward_what_if import judge_reward, rank_correlation
from rloo_cli.inspection.step_replay import replay_bases, replay_step
from rloo_cli.train.build import RunBuilder
from rloo_cli.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.wide

# Four updates of every step, whose later ones are not on-policy; no KL in the rewards.
SEVERAL = ("algorithm.num_iterations=2", "algorithm.num_minibatches=2", "algorithm.beta=0.0")
FLIPPED = (
    "def flipped(completions, **kwargs):\n"
    "    return [-(len(set(text)) / max(1, len(text))) for text in completions]\n"
)
LOOKS: list[int] = []  # at the signals, of the first run
SAME = FLIPPED.replace("def flipped", "def plain").replace("-(", "(")


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[None]:
    with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a KL in its rewards."""
    return recorded_run(tmp_path_factory.mktemp("recorded"), looks=LOOKS)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one reward, with four updates a step."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "old.py").write_text(SAME)
    words = ("reward=function", f"reward.function.path={folder}/old.py:plain")
    return recorded_run(folder, *words, *SEVERAL)


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    """The first run's folder, for one test alone."""
    return Path(shutil.copytree(recorded, tmp_path / "smoke", symlinks=True))


def test_every_recorded_step_comes_out_bit_for_bit_and_the_folder_stays(recorded: Path) -> None:
    before = state(recorded)
    assert {s: b.name for s, b in replay_bases(recorded).items()} == {
        1: "the first model", 2: "the first model", 3: "checkpoint-2", 4: "checkpoint-2",
    }  # fmt: skip
    for step, earlier in ((1, []), (2, [1]), (3, []), (4, [3])):
        found = replay_step(recorded, step)
        assert not found.found and not found.tolerance, found.to_json()
        assert found.updated_before == earlier and not found.notes
        compared = found.comparison.compared
        assert compared["reward unique_chars"] == compared["advantage"] == 16
        assert compared["log-probability"] == compared["log-probability of the reference"] > 100
        assert compared["loss"] == compared["gradient norm"] == 1
    assert state(recorded) == before


def test_several_updates_of_a_step_come_out_bit_for_bit(several: Path) -> None:
    found = replay_step(several, 4)
    assert not found.found and not found.tolerance, found.to_json()
    assert found.comparison.compared["loss"] == 4


def test_a_changed_score_is_named_by_row_and_reward_and_nothing_else_is(copy: Path) -> None:
    def change(batch: Batch) -> None:
        batch.raw[batch.names.index("length_tokens"), 2, 1] += 1.0

    edit_record(copy, 3, change)
    found = replay_step(copy, 3)
    assert found.comparison.differing == {"reward length_tokens": 1}
    first = found.comparison.first
    assert first is not None and first.what == "reward length_tokens"
    offset = read_rollout_record(copy, 3).batch.groups[2].prompt_offset
    assert (first.draw, first.completion) == (offset, 1)
    assert first.recorded == (first.computed or 0.0) + 1.0


def test_a_changed_log_probability_is_named_by_its_token(copy: Path) -> None:
    def change(batch: Batch) -> None:
        columns = batch.groups[1].old_logp
        assert columns is not None
        columns[2][4] -= 1e-6

    edit_record(copy, 1, change)
    first = replay_step(copy, 1).comparison.first
    assert first is not None and first.what == "log-probability"
    assert (first.completion, first.token) == (2, 4) and first.text
    assert not replay_step(copy, 1, tolerance=1e-4).found


def test_a_reward_that_was_a_python_callable_is_taken_from_the_record(tmp_path: Path) -> None:
    words = ("max_steps=2", "checkpoint.every=1", "logging.rollouts_keep_last=1")
    folder = recorded_run(tmp_path, *words, digits=digits)
    assert [*rollout_files.list_rollout_files(folder)] == [2]
    found = replay_step(folder, 2)
    assert found.base == "checkpoint-1"
    assert not found.found and "digits: a Python callable" in found.notes[0]


def test_value_models_and_tokens_advantages_come_out_bit_for_bit(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path, "algorithm=ppo", "max_steps=1", "algorithm.num_minibatches=2")
    found = replay_step(folder, 1)
    assert not found.found, found.to_json()
    assert {"value", "advantage of a token", "return of a token"} <= {*found.comparison.compared}


@pytest.mark.slow
def test_completions_that_were_sampled_ahead_come_out_bit_for_bit(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path, "generation.overlap=ahead", "algorithm.beta=0.1")
    for step in (1, 4):  # of the weights that train on them, and of older ones
        found = replay_step(folder, step)
        assert not found.found and not found.tolerance, found.to_json()


HEADS = {"tokenizer": (ConfigError, 2, "model.tokenizer"), "fingerprint": (DataError, 4, "data")}


@pytest.mark.parametrize("fact", HEADS)
def test_other_tokens_and_other_data_are_refused_before_a_model_loads(
    fact: str, copy: Path, sentence
) -> None:
    record = read_rollout_record(copy, 1)
    kept = {name: record.head[name] for name in HEAD_FACTS}
    assert "entropy_control" not in kept["state"]  # older records have it, as {}
    write_rollout_record(copy, record.batch, kept | {fact: "1234abcd"})
    error, code, where = HEADS[fact]
    with (
        mock.patch.object(RunBuilder, "load_model", side_effect=AssertionError),
        pytest.raises(error) as caught,
    ):
        replay_step(copy, 1)
    assert_refused(caught, code, where)
    sentence(caught, copy.parent)


def test_nothing_is_trained_on_that_was_sampled_for_another_prompt(copy: Path) -> None:
    def change(batch: Batch) -> None:
        batch.groups[2].prompt_ids[0] += 1

    edit_record(copy, 1, change)
    offset = read_rollout_record(copy, 1).batch.groups[2].prompt_offset
    with pytest.raises(DataError, match=f"draw {offset} has a different prompt"):
        replay_step(copy, 1)


@pytest.mark.slow
def test_a_resumed_run_moves_later_records_aside_and_replays_as_a_whole(
    recorded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "smoke"
    assert not attempt(tmp_path, *RECORD, stop_at=LOOKS[-1] * 7 // 8)
    for path in folder.glob("checkpoint-3*"):  # as if it was killed, and not stopped
        shutil.rmtree(path)
    assert max(rollout_files.list_rollout_files(folder)) == 3
    assert attempt(tmp_path, *RECORD)
    assert [p.name for p in (folder / "rollouts.attempt1.tail").iterdir()] == [
        "step_000003.safetensors"
    ]
    assert [*rollout_files.list_rollout_files(folder)] == [1, 2, 3, 4]
    for step in (1, 4):
        ours, other = (read_rollout_record(f, step) for f in (folder, recorded))
        assert ours.head["digest"] == other.head["digest"]
    assert not replay_step(folder, 4).found


def test_steps_without_a_way_to_them_are_named(copy: Path, sentence) -> None:
    rollout_files.rollout_path(copy, 1).unlink()
    for step, key in (2, "3-4"), (1, "2-4"), (1, "no recorded rollouts"):
        if key.startswith("no"):
            shutil.rmtree(copy / "rollouts")
        with pytest.raises(ConfigError) as caught:
            replay_step(copy, step)
        assert_refused(caught, 2, key)
        sentence(caught, copy.parent)


def test_a_checkpoint_inside_a_step_is_no_place_to_begin(copy: Path) -> None:
    assert replay_bases(copy)[4].checkpoint == copy / "checkpoint-2"
    (copy / "checkpoint-2").rename(copy / "checkpoint-2-1")
    assert replay_bases(copy)[4].checkpoint is None


def test_a_damaged_record_ends_a_replay_with_its_name(copy: Path) -> None:
    path = rollout_files.rollout_path(copy, 3)
    path.write_bytes(path.read_bytes()[:-1])
    for work in (lambda: replay_step(copy, 4), lambda: judge_reward(copy, "x.py:fn")):
        with pytest.raises((DataError, ConfigError)) as caught:
            work()
        assert len(caught.value.problems) == 1


def test_minus_the_score_flips_every_advantage(several: Path, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(FLIPPED)
    (tmp_path / "same.py").write_text(SAME)
    before = state(several)
    verdict = judge_reward(several, f"{tmp_path}/new.py:flipped")
    assert verdict.whole is not None and len(verdict.steps) == 4
    for step in (*verdict.steps, verdict.whole):
        assert step.correlation == step.correlation_in_groups == -1.0
        assert step.flipped == step.advantages > 0 and step.flipped_share == 1.0
        assert not step.silenced and not step.woken
    example = verdict.examples[0]
    assert example["old_score"] == -example["new_score"]
    assert example["old_advantage"] == -example["new_advantage"] and example["prompt"]
    same = judge_reward(several, f"{tmp_path}/same.py:plain", [2]).steps[0]
    assert same.correlation == 1.0 and not same.flipped
    assert state(several) == before


def test_an_unchanged_reward_has_the_recorded_advantages_with_their_kl(
    tmp_path: Path, recorded: Path
) -> None:
    (tmp_path / "old.py").write_text(
        "def both(completions, completion_ids, **kwargs):\n"
        "    pairs = zip(completions, completion_ids)\n"
        "    return [float(len(set(t))) + 0.01 * len(ids) for t, ids in pairs]\n"
    )
    for step in judge_reward(recorded, f"{tmp_path}/old.py:both").steps:
        assert step.correlation == pytest.approx(1.0) and step.advantages > 8
        assert not step.flipped and not step.largest_change  # with the KL, bit for bit


def test_rank_correlation_shares_the_ranks_of_equal_values() -> None:
    a, b = np.array([1.0, 2, 2, 3, np.nan]), np.array([10.0, 30, 20, 40, 5])
    assert rank_correlation(a, b) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr
    assert rank_correlation(a, -b) == pytest.approx(-0.9486832980505138)
    assert rank_correlation(a, np.ones(5)) is None


def test_the_verb_exits_with_20_where_a_step_differs(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(*words: str) -> tuple[int, str]:
        code = main.find_verb(["replay", str(copy), *words])()
        return code, capsys.readouterr().out

    code, said = verb()
    assert code == 0 and "recorded steps        1-4" in said and "checkpoint-2: 3-4" in said
    code, said = verb("--step", "1")
    assert code == 0 and "no difference" in said

    def change(batch: Batch) -> None:
        assert batch.advantage is not None
        batch.advantage[0, 0] *= 2

    edit_record(copy, 1, change)
    code, said = verb("--step", "1", "--json")
    got = json.loads(said)
    assert code == 20 and got["found"] and got["comparison"]["first"]["what"] == "advantage"
    code, said = verb("--step", "1")
    assert code == 20 and "difference: advantage (draw " in said
    (tmp_path / "new.py").write_text(FLIPPED)
    code, said = verb("--reward", f"{tmp_path}/new.py:flipped", "-n", "1")
    assert code == 0 and "all" in said and said.count("completion ") == 2
    code, said = verb("--reward", f"{tmp_path}/new.py:flipped", "--step", "2", "--json")
    assert code == 0 and [s["step"] for s in json.loads(said)["steps"]] == [2]
    for words in (("--reward", "no.py:fn"), ("--tolerance", "0.1"), ("--step", "9")):
        with pytest.raises(ConfigError):
            verb(*words)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_by_one_process(forked: Forked) -> None:
    words = ("+recipe=smoke", "distributed=ddp", "distributed.num_processes=2", "max_steps=2")
    words += ("logging.rollouts_every=1", "data.eval_split=null", "checkpoint.every=1")
    assert forked("train", *words, ranks=2) == 0, forked.said()
    folder = forked.folder / "runs" / "smoke"
    assert read_rollout_record(folder, 2).batch.score.shape == torch.Size([4, 4])
    found = replay_step(folder, 2)
    assert not found.found and 0 < found.tolerance < 1e-3, found.to_json()
    assert "ranks 2 → 1" in found.notes[0]
