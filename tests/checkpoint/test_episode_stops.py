"""A stop in the middle of an episode loses nothing; what its tools were is part of the run."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from episode_runs import ALONE, left_but_times, world_words
from fork_cases import Forked
from resume_cases import differing

TURN = "turn@4"  # a step has two or three waves of turns after the first


def words(folder: Path, *more: str) -> tuple[str, ...]:
    common = ("train", "+recipe=smoke", "max_steps=3", "checkpoint.every=1")
    return (*common, "train.lr_scheduler=constant", *world_words(folder), ALONE, *more)


@pytest.mark.parametrize(
    ("action", "code"), [("kill9", 6), pytest.param("term", 75, marks=pytest.mark.slow)]
)
def test_a_run_that_is_stopped_between_two_turns_ends_as_one_left_alone(
    forked: Forked, action: str, code: int
) -> None:
    asked = words(forked.folder)
    assert forked(*asked, "root=whole") == 0, forked.said()
    whole = left_but_times(forked.folder / "whole" / "smoke")
    lines = whole["metrics"]
    assert max(line["agent/turns"] for line in lines) > 1
    assert any(line["agent/failures"] > 0 for line in lines)  # by a kill -9 of its own process
    assert all(line["agent/failures"] < 1 for line in lines)
    assert forked(*asked, f"root={action}", faults=f"{TURN}={action}") == code, forked.said()
    run = forked.folder / action / "smoke"
    assert not (run / "final").exists()
    assert forked(*asked, f"root={action}", "resume=auto") == 0, forked.said()
    assert not differing(whole, left_but_times(run))


def test_a_changed_tool_file_is_named_and_refused_on_resume(forked: Forked) -> None:
    asked = words(forked.folder)
    assert forked(*asked, faults="step@3=term") == 75, forked.said()
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    (digest,) = json.loads((run / "run.json").read_text())["code_files"].values()
    assert f"world.py:World, sha256 {digest}" in said
    path = forked.folder / "world.py"
    path.write_text(path.read_text() + "# other\n")
    assert forked(*asked, "resume=auto") == 2
    ended = Ended(2, "", forked.said())
    problem = assert_refused(ended, key=str(path), fix="resume_allow_changes=true")
    assert digest in problem.why
    assert forked(*asked, "resume=auto", "resume_allow_changes=true") == 0, forked.said()
    assert [*json.loads((run / "run.json").read_text())["code_files"].values()] != [digest]
