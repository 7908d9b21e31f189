"""Runs that do not end well: a reward that raises, data that does not fit, signals."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import Rloo, rloo, strict

from rloo_cli.files import read_json
from rloo_cli.machine import started

__all__ = ["rloo"]  # a fixture


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str], limit: float) -> None:
    end = time.monotonic() + limit
    while not happened():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(p) for p in found.read_text().split()] if found.exists() else []
    return [*direct, *(inner for child in direct for inner in children(child))]


def gone(pids: list[int], limit: float = 20) -> bool:
    """Whether these processes end within some seconds (a zombie has ended)."""
    end = time.monotonic() + limit
    while any(started(pid) for pid in pids):
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
    assert 'mine.py", line 7, in late' in ended.err and 'mine.py", line 3, in helper' in ended.err
    assert "ValueError: no score for" in ended.err and "Traceback" not in ended.err
    assert f"{rloo.folder}/mine.py:5, step 1" in ended.err
    assert "rloo_cli" not in ended.err  # none of ours
    run = rloo.folder / "runs" / "smoke"
    assert read_json(run / "debug" / "reward_error.json")["rewards"][0]["reward"] == "function"
    assert [r["step"] for r in strict(run / "metrics.jsonl")] == [0, 1]
    facts = read_json(run / "run.json")
    assert (facts["state"], facts["code"]) == ("failed", 5)
    assert "Traceback" in (run / "logs" / "attempt_1" / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.path=mine.jsonl"], 4, ["no column 'prompt'", "data.prompt_column=question"]),
        (
            ["data.path=mine.jsonl", "data.prompt_column=question"],
            4,
            ["needs the data column 'solution'", "columns found: answer"],
        ),
    ],
)
def test_data_that_does_not_fit_ends_with_4_and_leaves_no_run(
    words: list[str], code: int, said: list[str], rloo: Rloo
) -> None:
    (rloo.folder / "mine.py").write_text(REWARDS)
    (rloo.folder / "mine.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    reward = ["reward=function", "reward.function.path=mine.py:needs", "data.eval_split=null"]
    ended = rloo("train", "+recipe=smoke", *reward, *words)
    assert ended.code == code, ended.said
    assert "Traceback" not in ended.said
    for part in said:
        assert part in ended.err
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
    ("number", "code", "state"),
    [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 75, None)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_a_run_with_its_code_and_leaves_no_process(
    number: int, code: int, state: str | None, rloo: Rloo
) -> None:
    process, pids = start(rloo)
    process.send_signal(number)
    assert process.wait(20) == code
    assert gone(pids)
    said = (rloo.folder / "out").read_text()
    assert "Traceback" not in said and "stopped by " in said
    run = rloo.folder / "runs" / "smoke"
    assert not (run / "final").exists()
    assert read_json(run / "run.json")["code"] == code
    assert state in (None, read_json(run / "run.json")["state"])
    strict(run / "metrics.jsonl")


def test_an_interrupt_ends_a_whole_sweep(rloo: Rloo) -> None:
    process, pids = start(rloo, "--multirun", "algorithm.beta=0.0,0.05")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert gone(pids) and len([*(rloo.folder / "runs").iterdir()]) == 1


def test_an_interrupt_while_libraries_load_ends_without_a_traceback(rloo: Rloo) -> None:
    process = rloo.start("train", "+recipe=smoke")
    wait_for(lambda: bool(children(process.pid)), process, 60)
    pids = children(process.pid)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert gone(pids) and "Traceback" not in (rloo.folder / "out").read_text()


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
    assert read_json(rloo.folder / "runs" / "smoke" / "run.json")["state"] == "training"
    ended = rloo("train", "+recipe=smoke", "max_steps=1", "logging.samples=0")
    assert ended.code == 0, ended.said
    assert "an attempt that did not finish is now in runs/smoke.attempt1" in ended.out
