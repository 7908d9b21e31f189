"""Trials of a sweep are what they would be alone, whatever is done to the others meanwhile; and
who gets turns, who is stopped early, how it ends (there with trials that only pretend)."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Ended, Rloo, strict
from resume_cases import differing, left, untimed
from sweep_cases import SMOKE, trials

from rloo_cli.checkpoint import manifest
from rloo_cli.utils.files import read_json

FOUR = ("algorithm.beta=0.0,0.05", "train.learning_rate=1e-3,3e-3")
# A reward that holds a run in its step 4 until there is a file.
GATE = """
import time
from pathlib import Path

def gate(completions, trainer_state, **kwargs):
    while trainer_state.step == 3 and not Path("go").exists():
        time.sleep(0.02)
    return [0.0 for _ in completions]
"""
GATED = ("reward=[unique_chars,function]", "reward.function.path=mine.py:gate",
         "data.eval_split=null")  # fmt: skip


def until(done: Callable[[], Any], process: subprocess.Popen[str], limit: float = 120) -> Any:
    """What `done` gives once it is true; the process must live that long."""
    end = time.monotonic() + limit
    while not (found := done()):
        assert process.poll() is None and time.monotonic() < end, "it ended, or took too long"
        time.sleep(0.02)
    return found


def test_four_interleaved_configurations_equal_the_four_alone_bit_for_bit(quick: Rloo) -> None:
    words = (*SMOKE, *FOUR, "max_steps=5", "checkpoint.every=2", "train.lr_scheduler=cosine")
    began = time.monotonic()
    ended = quick("sweep", *words, "--chunk", "2", "--name", "s")
    took = time.monotonic() - began
    assert ended.code == 0 and ended.out.endswith("4 trials, 0 failed\n"), ended.said
    found = trials(quick)
    lines = [strict(quick.folder / "runs" / m["name"] / "metrics.jsonl") for m in found]
    counted = sum(row.get("step_time", 0.0) for rows in lines for row in rows)
    assert counted < took  # with what a trial waits for the others it would be several times that
    order = [line.split()[0] for line in ended.out.splitlines() if "  step 2/5  " in line]
    assert order == ["1", "2", "3", "4"]  # in turns, and none to its end at once
    assert len({m["name"] for m in found}) == 4
    for trial in found:
        alone(quick, trial)


def alone(rloo: Rloo, trial: dict[str, Any], *more: str) -> None:
    """The trial's run equals that of the same words, alone and undisturbed."""
    ended = rloo("train", *trial["words"], f"name={trial['name']}", *more, "root=alone")
    assert ended.code == 0, ended.said
    one, other = (rloo.folder / root / trial["name"] for root in ("runs", "alone"))
    assert not differing(left(one), left(other)), trial["words"]


@pytest.mark.slow
def test_one_is_stopped_and_one_cloned_in_flight_and_both_go_on_exactly(quick: Rloo) -> None:
    (quick.folder / "mine.py").write_text(GATE)
    words = (*SMOKE, *GATED, "max_steps=8", "checkpoint.every=1", "train.lr_scheduler=cosine")
    rate = "train.learning_rate=1e-3,2e-3"
    sweep = quick.start("sweep", *words, rate, "--chunk", "2", "--name", "s")
    until(lambda: [m["step"] for m in trials(quick)] == [2, 2], sweep)
    said = quick("sweep", "clone", "s", "1", "train.learning_rate=5e-3").out
    assert "step 4" in said, said
    name = trials(quick)[1]["name"]
    said = quick("sweep", "stop", "s", name[-6:]).out
    assert said.startswith(f"{name} ") and "step 2" in said, said
    (quick.folder / "go").touch()
    assert sweep.wait(200) == 0, (quick.folder / "out").read_text()
    parent, stopped, clone = trials(quick)
    assert (parent["state"], stopped["state"], clone["state"]) == (
        "finished", "stopped", "finished",
    )  # fmt: skip
    assert (clone["parent"], clone["cloned_at"]) == (parent["name"], 4)
    follows(quick, parent, clone)
    run = quick.folder / "runs" / stopped["name"]
    assert read_json(run / "run.json")["state"] == "stopped"
    assert manifest.list_checkpoints(run)[0].name == "checkpoint-2"
    ended = quick("train", *stopped["words"], f"name={stopped['name']}", "resume=auto")
    assert ended.code == 0 and "step 2 of 8" in ended.out, ended.said
    alone(quick, stopped)


def follows(rloo: Rloo, parent: dict[str, Any], clone: dict[str, Any]) -> None:
    """The clone begins where its parent stood, with its own rate, and is a run as any other."""
    before, after = (rloo.folder / "runs" / m["name"] for m in (parent, clone))
    rows = {r["step"]: untimed(r) for r in strict(before / "metrics.jsonl")}
    first, second, *_ = [untimed(r) for r in strict(after / "metrics.jsonl")]
    of_rate = {k for k in first if first[k] != rows[5].get(k)}
    assert first["step"] == 5 and of_rate <= {"lr", "learning_rate"}, of_rate
    assert first["learning_rate"] == 5 * rows[5]["learning_rate"]
    sample = Path("samples", "step_000005.jsonl")
    assert (before / sample).read_text() == (after / sample).read_text()
    assert second["step"] == 6 and second["kl"] != rows[6]["kl"]
    facts = read_json(after / "run.json")
    assert facts["changes"][0]["train.learning_rate"] == [0.001, 0.005]
    assert facts["came_from"] == clone["start"]
    alone(rloo, clone, f"resume={clone['start']}", "resume_allow_changes=true")


@pytest.mark.slow
def test_an_interrupt_saves_every_trial_and_the_same_command_goes_on_with_all(
    quick: Rloo,
) -> None:
    (quick.folder / "mine.py").write_text(GATE)
    words = (*SMOKE, *GATED, "max_steps=5", "checkpoint.every=0", "algorithm.beta=0.0,0.05",
             "--chunk", "2", "--name", "s")  # fmt: skip
    sweep = quick.start("sweep", *words)
    until(lambda: [m["step"] for m in trials(quick)] == [2, 2], sweep)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(100) == 75, (quick.folder / "out").read_text()
    said = (quick.folder / "out").read_text()
    assert "rloo sweep resume runs/s\n" in said and "2 trials, 0 failed, 2 " in said
    for trial in trials(quick):
        facts = read_json(quick.folder / "runs" / trial["name"] / "run.json")
        assert (trial["state"], facts["code"]) == ("waiting", 75)
        assert manifest.newest_checkpoint(quick.folder / "runs" / trial["name"])[0] is not None
    (quick.folder / "go").touch()
    ended = quick("sweep", *words)
    assert ended.code == 0 and ended.out.endswith("2 trials, 0 failed\n"), ended.said
    alone(quick, trials(quick)[1])


@pytest.mark.slow
def test_a_clone_that_has_hardly_begun_goes_on_with_its_sweep(quick: Rloo) -> None:
    (quick.folder / "mine.py").write_text(GATE)
    words = (*SMOKE, *GATED, "max_steps=6", "checkpoint.every=1", "--chunk", "2", "--name", "s")
    sweep = quick.start("sweep", *words)
    until(lambda: [m["step"] for m in trials(quick)] == [2], sweep)
    assert quick("sweep", "clone", "s", "1", "algorithm.beta=0.2", "name=mine").code == 0
    (quick.folder / "go").touch()
    until(lambda: len(trials(quick)) == 2, sweep)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(100) == 75, (quick.folder / "out").read_text()
    ended = quick("sweep", *words, "checkpoint.every=2")
    assert ended.code == 0 and ended.out.endswith("2 trials, 0 failed\n"), ended.said
    _, clone = trials(quick)
    assert (clone["name"], clone["state"], clone["cloned_at"]) == ("mine", "finished", 4)
    alone(quick, clone, f"resume={clone['start']}", "resume_allow_changes=true")


# Who gets turns, and how it ends.

THREE = ("sweep", "+recipe=smoke", "algorithm.beta=0.0,0.01,0.02", "max_steps=6", "--chunk", "2",
         "--name", "s", "resume_allow_changes=true")  # fmt: skip


@pytest.fixture
def fake(quick: Rloo) -> Rloo:
    """The command, whose trials are `fake_trial`s without plans."""
    return planned(quick, {})


def planned(rloo: Rloo, plans: dict[int, dict[str, Any]]) -> Rloo:
    """The same, with plans for some of them."""
    return replace(rloo, environment=rloo.environment | {"FAKE_TRIALS": json.dumps(plans)})


def order(text: str) -> str:
    """The trials' numbers in the order in which they ended chunks, those at step 0 left out."""
    lines = [line for line in text.splitlines() if line[:1].isdigit() and "  step " in line]
    lines = [line for line in lines if "step 0/" not in line]
    return "".join(line.split()[0] for line in lines)


def states(rloo: Rloo) -> list[str]:
    return [f"{m['state']} {m['step']}" for m in trials(rloo)]


def steps(rloo: Rloo, number: int) -> list[int]:
    """The steps that a trial has logged."""
    path = rloo.folder / "runs" / trials(rloo)[number - 1]["name"] / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def held(rloo: Rloo, *words: str) -> Any:
    """A sweep whose first trial is in its second chunk, held there; the others are at step 2."""
    sweep = rloo.start(*words)
    until(lambda: [m["step"] for m in trials(rloo)] == [2, 2, 2], sweep)
    return sweep


def released(rloo: Rloo, sweep: Any) -> Ended:
    (rloo.folder / "go").touch()
    code = sweep.wait(60)
    return Ended(code, (rloo.folder / "out").read_text(), "")


def test_trials_have_turns_one_after_the_other(fake: Rloo) -> None:
    ended = fake(*THREE)
    assert ended.code == 0, ended.said
    assert order(ended.out) == "123" * 2  # at the third boundary they end
    assert states(fake) == ["finished 6"] * 3


@pytest.mark.slow
def test_several_train_at_the_same_time_with_jobs(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 0}})
    sweep = fake.start(*THREE, "--jobs", "2")
    until(lambda: states(fake)[1:] == ["finished 6"] * 2, sweep)
    assert steps(fake, 2) == [1, 2, 3, 4, 5, 6] and trials(fake)[0]["step"] == 0
    assert released(fake, sweep).code == 0


@pytest.mark.slow
def test_no_two_trials_train_at_once_without_jobs(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 2}})
    sweep = held(fake, *THREE)
    assert [m["state"] for m in trials(fake)] == ["training", "waiting", "waiting"]
    assert released(fake, sweep).code == 0


def test_a_promoted_trial_gets_two_chunks_for_each_of_the_others(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 2}})
    sweep = held(fake, *THREE, "max_steps=10")
    said = fake("sweep", "promote", "s", "2").out
    assert "2 chunks" in said and "step 2" in said, said
    ended = released(fake, sweep)
    # Its fifth chunk is its last, at whose end it says nothing.
    assert ended.code == 0 and order(ended.out) == "123" + "1232" + "123" + "13"
    assert trials(fake)[1]["share"] == 2


def test_the_worse_half_is_stopped_where_all_have_come_to(fake: Rloo) -> None:
    words = [w.replace("0.0,0.01,0.02", "0.0,0.01,0.02,0.03") for w in THREE]
    ended = fake(*words, "max_steps=8", "--keep", "2", "--at", "3", "--keep", "1", "--at", "5")
    assert ended.code == 0, ended.said
    assert states(fake) == ["stopped 3", "stopped 3", "stopped 5", "finished 8"]
    assert trials(fake)[0]["why"].startswith("--keep 2 --at 3: rank 4")
    assert ended.out.endswith("4 trials, 0 failed\n")


@pytest.mark.slow
def test_a_promoted_trial_waits_for_the_others_where_they_are_compared(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 2}})
    sweep = held(fake, *THREE, "max_steps=10", "--keep", "1", "--at", "6", "--by", "loss:min")
    fake("sweep", "promote", "s", "2")
    assert released(fake, sweep).code == 0
    assert states(fake) == ["stopped 6", "stopped 6", "finished 10"]


def test_a_trial_that_fails_leaves_the_others_and_goes_on_later(quick: Rloo) -> None:
    failing = planned(quick, {2: {"fail": [3, 7]}})
    ended = failing(*THREE)
    assert ended.code == 7 and ended.out.endswith("3 trials, 1 failed\n"), ended.said
    assert "   error: it fails" in ended.out and "step 2 (exit code 7" in ended.out
    assert [m["state"] for m in trials(quick)] == ["finished", "failed", "finished"]
    ended = planned(quick, {})("sweep", "resume", "s")
    assert ended.code == 0 and states(quick) == ["finished 6"] * 3, ended.said
    assert steps(quick, 2) == [1, 2, 3, 4, 5, 6] and order(ended.out) == "2" * 2
    runs = [read_json(quick.folder / "runs" / m["name"] / "run.json") for m in trials(quick)]
    assert [facts["attempt"] for facts in runs] == [1, 2, 1]  # the others were left alone


def test_an_interrupt_ends_all_and_none_that_has_not_begun_is_started(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 0}})
    sweep = fake.start(*THREE)
    until(lambda: trials(fake) and trials(fake)[0]["state"] == "training", sweep)
    until(lambda: [*(fake.folder / "runs").glob("*/run.json")], sweep)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(60) == 75
    assert [m["state"] for m in trials(fake)] == ["waiting"] * 3
    assert len([*(fake.folder / "runs").glob("*/run.json")]) == 1
    (fake.folder / "go").touch()
    ended = fake(*THREE)
    assert ended.code == 0 and states(fake) == ["finished 6"] * 3, ended.said


@pytest.mark.slow
def test_what_was_stopped_stays_so_when_the_others_go_on(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 2}})
    sweep = held(fake, *THREE)
    assert "step 2" in fake("sweep", "stop", "s", "3").out
    name = trials(fake)[2]["name"]
    assert_refused(fake("sweep", "stop", "s", "3"), 2, name, fix="rloo sweep show")
    assert_refused(fake(*THREE), 2, "runs/s", fix="rloo sweep show runs/s")
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(60) == 75
    (fake.folder / "go").touch()
    ended = fake("sweep", "resume", "runs/s")
    assert ended.code == 0, ended.said
    assert states(fake) == ["finished 6", "finished 6", "stopped 2"]
    shown = fake("sweep", "show", "s").out
    assert "stopped" in shown and shown.endswith("runs/s: finished\n")
    ended = fake(*THREE)
    assert ended.code == 0 and ended.out.endswith("nothing to do\n")


@pytest.mark.slow
def test_a_clone_of_one_that_has_ended_needs_a_checkpoint(quick: Rloo) -> None:
    fake = planned(quick, {1: {"hold": 2}, 3: {"fail": [1, 1]}})
    sweep = fake.start(*THREE)
    until(lambda: [m["state"] for m in trials(fake)] == ["training", "waiting", "failed"], sweep)
    ended = fake("sweep", "clone", "s", "3", "algorithm.beta=0.5")
    assert_refused(ended, 2, trials(fake)[2]["name"], fix="rloo train +recipe=smoke")
    assert_refused(fake("sweep", "clone", "s", "3", "algorithm.betta=0.5"), 2, "algorithm.beta")
    assert len(trials(fake)) == 3
    assert released(fake, sweep).code == 1
