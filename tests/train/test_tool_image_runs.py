"""Whole runs whose environment shows images: sampler and trainer see the same, and they go on,
are recorded and computed again bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import vision_cases as v
from cli_cases import strict
from episode_runs import ALONE, image_world_words, left_but_times
from replay_cases import RECORD
from resume_cases import attempt, differing
from test_vision_runs import words_of

from rloo_cli.agents.common import call_parsers
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.inspection.step_replay import replay_step

pytestmark = pytest.mark.wide


def run_words(folder: Path, rows: Path, *more: str) -> list[str]:
    return [*words_of(rows), *image_world_words(folder), ALONE, "max_steps=2", *more]


@pytest.fixture(scope="module", autouse=True)
def parsers() -> Iterator[None]:
    """The world changes what is read as a call."""
    with mock.patch.dict(call_parsers.PARSERS):
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 0, 2, 1, 0, 1, 2, 1), id="both"),
        pytest.param((0,) * 8, id="tools", marks=pytest.mark.slow),
    ],
)
def rows(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with and without images, and prompts of text alone."""
    return v.rows_file(tmp_path_factory.mktemp("rows"), request.param)


@pytest.fixture(scope="module")
def recorded(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that records them."""
    folder = tmp_path_factory.mktemp("recorded")
    assert attempt(folder, *RECORD, *run_words(folder, rows))
    return folder / "smoke"


def test_the_trainer_sees_what_the_sampler_saw(recorded: Path) -> None:
    for step in (1, 2):
        batch = read_rollout_record(recorded, step).batch
        turns = [t for g in batch.groups for r in g.rollouts for t in r.turns or []]
        assert sum(bool(turn.images) for turn in turns) > 3
        assert {turn.observation[0]["content"] for turn in turns if turn.observation} <= {
            "see [image]"
        }
    rows = strict(recorded / "metrics.jsonl")
    assert all(row["sampling/logp_diff_max"] < 1e-4 for row in rows)
    assert any(row["agent/calls"] > 0 for row in rows)


def test_a_recorded_step_with_its_images_comes_out_bit_for_bit(recorded: Path) -> None:
    for step in (1, 2):
        found = replay_step(recorded, step)
        assert not found.found and not found.tolerance, found.to_json()


@pytest.mark.slow_but("tools")
def test_a_run_that_was_stopped_between_turns_ends_as_one_that_was_not(
    rows: Path, tmp_path: Path
) -> None:
    looks: list[int] = []
    words = run_words(tmp_path, rows, "algorithm.num_minibatches=2")
    assert attempt(tmp_path / "straight", *words, looks=looks)
    stops = 0
    for at in (len(looks) // 3, len(looks) // 2):
        stops += not attempt(tmp_path / "cut", *words, stop_at=at)
    assert stops == 2 and attempt(tmp_path / "cut", *words)
    one, other = (left_but_times(tmp_path / name / "smoke") for name in ("straight", "cut"))
    for lines in (one["metrics"], other["metrics"]):
        for line in lines:  # a slow tool changes which turns are sampled beside which: a rounding
            for name in [n for n in line if n.startswith("sampling/")]:
                line.pop(name)
    assert differing(one, other) == []
