"""What happens to one rank happens to all: errors, signals, a save that fails on one of them."""

import pytest
from cli_cases import strict
from test_ranks import WORDS, spread

from rloo_cli.checkpoint import manifest

pytestmark = pytest.mark.ranks

SHORT = ("max_steps=3", "eval.at_start=false", "eval.max_samples=2")
REWARD = """
import os, signal
def score(completion_ids, trainer_state, **_):
    if trainer_state.step == 1 and os.environ["RANK"] == "1":
        {what}
    return [float(sum(ids) % 7) for ids in completion_ids]
"""


def reward(folder, what: str) -> list[str]:
    (folder / "mine.py").write_text(REWARD.format(what=what))
    return ["reward=function", "reward.function.path=mine.py:score"]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_reward_that_raises_on_one_rank_ends_all_with_its_error_said_once(forked, engine):
    own = reward(forked.folder, "raise KeyError('it is mine')")
    assert forked(*WORDS, *SHORT, *own, *spread(engine), "name=r", ranks=2) == 5
    said = forked.said()
    assert said.count("error: ") == 1 and "KeyError: 'it is mine'" in said, said
    run = forked.folder / "runs" / "r"
    assert (
        manifest.checkpoint_problem(run / "checkpoint-1") is None
    )  # what was done is kept, by all ranks


@pytest.mark.slow_but("ddp")
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_and_saves_all_at_the_same_step(forked, engine):
    own = reward(forked.folder, "os.kill(os.getpid(), signal.SIGUSR1)")
    assert forked(*WORDS, *SHORT, *own, *spread(engine), "name=s", ranks=2) == 75, forked.said()
    run = forked.folder / "runs" / "s"
    (saved,) = manifest.list_checkpoints(run)
    assert manifest.checkpoint_problem(saved) is None
    assert len(list(saved.glob("trainer/optimizer-*-of-2.safetensors"))) == 2
    again = ["resume=auto", "resume_allow_changes=true", *own[:1]]
    again += ["reward.function.path=mine.py:score"]
    reward(forked.folder, "pass")
    assert forked(*WORDS, *SHORT, *again, *spread(engine), "name=s", ranks=2) == 0, forked.said()
    assert [r["step"] for r in strict(run / "metrics.jsonl") if "loss" in r] == [1, 2, 3]


def test_a_rank_that_is_killed_while_the_run_is_built_is_what_the_others_say(forked):
    words = [*WORDS, *SHORT, *spread("ddp"), "name=b"]
    assert forked(*words, faults="load@1=kill9#1", ranks=2) in (5, 6)
    said = forked.said()
    assert "another rank " in said and "run was built" in said
    assert "Traceback" not in said and "bug in rloo" not in said


@pytest.mark.slow_but("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_is_no_checkpoint_and_the_run_goes_on(forked, rank):
    words = [*WORDS, *SHORT, *spread("fsdp2"), "name=f", "checkpoint.every=2"]
    assert forked(*words, faults=f"ckpt.write@2=enospc#{rank}", ranks=2) == 0, forked.said()
    assert "checkpoint-2 was not saved" in forked.said()
    run = forked.folder / "runs" / "f"
    assert [p.name for p in manifest.list_checkpoints(run)] == ["checkpoint-3"]
    assert not list(run.glob(".tmp*"))


def test_a_number_that_is_none_on_one_rank_stops_all_before_anything_is_updated(forked):
    words = [*WORDS, *SHORT, *spread("fsdp2"), "name=n"]
    assert forked(*words, faults="loss@3=nan#1", ranks=2) == 7, forked.said()
    said = forked.said()
    assert said.count("error: non-finite numbers") == 1 and "nothing was updated" in said
