"""Recorded episodes: computed and scored again, without environment and sampler."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from episode_runs import world_words
from loop_cases import cache
from replay_cases import recorded_run

from rloo_cli.agents.common import call_parsers
from rloo_cli.data.batch import Turn
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.inspection.reward_what_if import judge_reward
from rloo_cli.inspection.step_replay import replay_step

pytestmark = pytest.mark.wide

CONVERSATION = """
def score(completions, environments, sampled_ids, **kwargs):
    assert all(m["role"] in ("assistant", "tool", "user") for c in completions for m in c)
    assert any(len(c) > 1 for c in completions)
    return [sum(m["role"] == "tool" for m in c) + len(i) / 10
            for c, i in zip(completions, sampled_ids)]
"""


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[None]:
    with (
        mock.patch.dict(os.environ, RLOO_CACHE=cache()),
        mock.patch.dict(call_parsers.PARSERS),
    ):
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three recorded steps whose environment is gone."""
    folder = tmp_path_factory.mktemp("episodes")
    words = world_words(folder)
    run = recorded_run(folder, *words, "max_steps=3", "checkpoint.every=1")
    (folder / "world.py").unlink()
    return run


@pytest.mark.process
def test_a_record_keeps_turns_masks_rewards_and_failures(recorded: Path) -> None:
    rows = [r for n in (1, 2, 3) for g in read_rollout_record(recorded, n).batch.groups
            for r in g.rollouts]  # fmt: skip
    for row in rows:
        assert row.turns and isinstance(row.turns[0], Turn) and row.mask is not None
        flat = [i for t in row.turns for i in (*t.prompt_ids, *t.sampled_ids)]
        assert flat == row.completion_ids
        assert row.length == sum(len(t.sampled_ids) for t in row.turns)
        assert row.episode_facts["turns"] == len(row.turns)
        assert (row.failed is None) == (row.environment_reward is not None)
        assert [t.logp for t in row.turns] == [t.logp for t in row.turns if t.logp]
    assert any(len(r.turns) > 1 and r.turns[1].observation for r in rows)
    failed = [r for r in rows if r.failed is not None]
    assert failed and len(failed) < len(rows)
    assert {r.opening_ids is None for r in rows} == {True, False}


@pytest.mark.process
def test_a_recorded_episode_comes_out_bit_for_bit_without_its_environment(recorded: Path) -> None:
    for step, earlier in ((1, []), (3, [])):
        found = replay_step(recorded, step)
        assert not found.found and not found.tolerance, found.to_json()
        assert found.updated_before == earlier and not found.notes
        rows = [r for g in read_rollout_record(recorded, step).batch.groups for r in g.rollouts]
        assert found.comparison.compared["log-probability"] == sum(r.length for r in rows)
        assert found.comparison.compared["reward environment"] == len(rows) == 9


def test_another_reward_gets_the_conversation(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(CONVERSATION)
    verdict = judge_reward(recorded, f"{tmp_path}/new.py:score")
    failed = sum(
        r.failed is not None
        for n in (1, 2, 3)
        for g in read_rollout_record(recorded, n).batch.groups
        for r in g.rollouts
    )
    assert verdict.whole is not None and verdict.whole.completions == 27
    assert verdict.whole.compared == 27 - failed  # a row that failed has no score under any reward
