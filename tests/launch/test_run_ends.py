"""Runs that do not end well: a reward that raises, data that does not fit, signals."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo, children, strict

from rloo_cli.checkpoint import manifest
from rloo_cli.utils.child_process import process_start_time
from rloo_cli.utils.files import read_json


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str], limit: float) -> None:
    end = time.monotonic() + limit
    while not happened():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def gone(pids: list[int], limit: float = 20) -> bool:
    """Whether these processes end within some seconds (a zombie has ended)."""
    end = time.monotonic() + limit
    while any(process_start_time(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


REWARDS = """
def helper(text):
    raise ValueError(f"no score for {len(text)} characters")

def late(completions, trainer_state, **kwargs):
    if trainer_state.step == 1:
        return [helper(text) for text in completions]
    return [1.0 * len(text) for text in completions]

def needs(completions, solution):
    return [0.0 for _ in completions]
"""
DEAF = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)

def slow(completions, **kwargs):
    time.sleep(60)
"""


def test_a_reward_that_raises_ends_the_run_with_5_and_its_own_frames(rloo: Rloo) -> None:
    (rloo.folder / "mine.py").write_text(REWARDS)
    words = ["+recipe=smoke", "reward=function", "reward.function.path=mine.py:late"]
    ended = rloo("train", *words)
    assert ended.code == 5, ended.said
    assert "line 7, in late" in ended.err and "line 3, in helper" in ended.err
    assert "ValueError: no score" in ended.err and "Traceback" not in ended.err
    assert f"{rloo.folder}/mine.py:5, step 1" in ended.err
    assert "rloo_cli" not in ended.err  # none of ours
    run = rloo.folder / "runs" / "smoke"
    assert read_json(run / "debug" / "reward_error.json")["rewards"][0]["reward"] == "function"
    assert [r["step"] for r in strict(run / "metrics.jsonl")] == [0, 1]
    facts = read_json(run / "run.json")
    assert (facts["state"], facts["code"]) == ("failed", 5)
    assert "Traceback" in (run / "logs" / "attempt_1" / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["data.path=mine.jsonl"], "'prompt'", "data.prompt_column=question"),
        (["data.path=mine.jsonl", "data.prompt_column=question"], "'solution'", ""),
    ],
    ids=["prompt", "solution"],
)
def test_data_that_does_not_fit_ends_with_4_and_leaves_no_run(
    words: list[str], key: str, fix: str, rloo: Rloo, sentence
) -> None:
    (rloo.folder / "mine.py").write_text(REWARDS)
    (rloo.folder / "mine.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    reward = ["reward=function", "reward.function.path=mine.py:needs", "data.eval_split=null"]
    ended = rloo("train", "+recipe=smoke", *reward, *words)
    assert_refused(ended, 4, key, fix=fix)
    sentence(ended)
    assert "Traceback" not in ended.said
    assert not (rloo.folder / "runs").exists()


# Signals.


def start(rloo: Rloo, *words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that goes on for long, once it has done some steps; and its processes."""
    process = rloo.start("train", "+recipe=smoke", "max_steps=100000", "logging.samples=0", *words)
    wait_for(lambda: (rloo.folder / "out").read_text().count("s/step") > 3, process, 200)
    pids = children(process.pid)
    assert pids
    return process, pids


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("SIGINT", marks=pytest.mark.slow),
        "SIGTERM",
        "SIGHUP",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("SIGUSR1", "SIGUSR2")),
    ],
)
def test_a_signal_saves_the_run_and_ends_it_with_75_and_leaves_no_process(
    name: str, rloo: Rloo, hears_hangups: None
) -> None:
    process, pids = start(rloo)
    process.send_signal(signal.Signals[name])
    assert process.wait(60) == 75
    assert gone(pids)
    said = (rloo.folder / "out").read_text()
    assert "Traceback" not in said and "runs/smoke: stopped" in said
    run = rloo.folder / "runs" / "smoke"
    step = manifest.read_trainer_state(manifest.newest_checkpoint(run)[0] or run)["state"]["step"]
    assert f"after step {step}\n" in said and step > 3
    assert not (run / "final").exists()
    facts = read_json(run / "run.json")
    assert (facts["code"], facts["state"], facts["progress"]["step"]) == (75, "stopped", step)
    strict(run / "metrics.jsonl")
    command = next(line for line in said.splitlines() if line.startswith("  resume ")).partition(
        "rloo "
    )[2]
    words = [*shlex.split(command), f"max_steps={step + 1}", "train.lr_scheduler=constant"]
    ended = rloo(*words, "resume_allow_changes=true")
    assert ended.code == 0, ended.said
    assert f"resumes from runs/smoke/checkpoint-{step}" in ended.out


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_killed_with_6_and_leaves_nothing_behind(rloo: Rloo) -> None:
    process, pids = start(rloo, "distributed.timeout_s=4", "checkpoint.every=2")
    worker = read_json(rloo.folder / "runs" / "smoke" / "run.json")["ranks"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    assert process.wait(60) == 6
    assert gone(pids)
    said = (rloo.folder / "out").read_text()
    assert "no heartbeat" in said and "resume=auto" in said


@pytest.mark.slow
def test_an_interrupt_ends_a_whole_sweep(rloo: Rloo) -> None:
    process, pids = start(rloo, "--multirun", "algorithm.beta=0.0,0.05")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert gone(pids) and len([*(rloo.folder / "runs").iterdir()]) == 1


def test_an_interrupt_while_libraries_load_ends_without_a_traceback(rloo: Rloo) -> None:
    process = rloo.start("train", "+recipe=smoke")
    wait_for(lambda: bool(children(process.pid)), process, 60)
    pids = children(process.pid)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert gone(pids) and "Traceback" not in (rloo.folder / "out").read_text()


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_anything(rloo: Rloo) -> None:
    (rloo.folder / "mine.py").write_text(DEAF)
    words = ["+recipe=smoke", "reward=function", "reward.function.path=mine.py:slow"]
    process = rloo.start("train", *words)
    wait_for(lambda: "evaluation" in (rloo.folder / "out").read_text(), process, 200)
    pids = children(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two at once are one
    process.send_signal(signal.SIGINT)
    assert process.wait(8) == 130
    assert gone(pids)


def test_kill_9_of_the_launcher_takes_its_worker_along_and_the_next_start_goes_on(
    rloo: Rloo,
) -> None:
    process, pids = start(rloo)
    process.kill()
    process.wait()
    assert gone(pids)
    run = rloo.folder / "runs" / "smoke"
    assert read_json(run / "run.json")["state"] == "training"
    words = ("train", "+recipe=smoke", "max_steps=1", "logging.samples=0")
    ended = rloo(*words)
    assert ended.code == 2 and "resume=auto" in ended.err  # what is there is not overwritten
    ended = rloo(*words, "resume=auto", "train.lr_scheduler=constant", "resume_allow_changes=true")
    assert ended.code == 0, ended.said


@pytest.mark.slow
def test_a_signal_is_heard_while_a_reward_sleeps(rloo: Rloo) -> None:
    (rloo.folder / "mine.py").write_text(
        "import time\n\ndef slow(completions, **kwargs):\n    time.sleep(300)\n"
    )
    words = (
        "reward=function",
        "reward.function.path=mine.py:slow",
        "reward.function.timeout_s=400",
    )
    process = rloo.start("train", "+recipe=smoke", "data.eval_split=null", *words)
    wait_for(lambda: (rloo.folder / "runs/smoke/ledger.jsonl").exists(), process, 200)
    pids = children(process.pid)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert gone(pids)


@pytest.mark.slow
def test_a_signal_ends_a_load_that_takes_long(rloo: Rloo) -> None:
    rloo.environment.update(RLOO_ALLOW_FAULTS="1", RLOO_FAULTS="load@1=hang:300")
    process = rloo.start("train", "+recipe=smoke")
    wait_for(lambda: "loading the model" in (rloo.folder / "out").read_text(), process, 200)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
