"""Rewards in worker processes, and scoring that begins while completions are still being made."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import reward_cases
from assert_refused import assert_refused
from reward_cases import COMMON, PLAIN, STATE, failure, group, reward, values

from rloo_cli.rewards.engine import worker_calls
from rloo_cli.rewards.engine.arguments import RewardContext
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.scoring import RewardFailed, Scores, ScoringStep, score_groups
from rloo_cli.rewards.function import Config
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.process

CODE = """
import ctypes, os, signal, sys, threading, time

def length(completions, trainer_state, log_extra, log_metric, factor=1.0):
    log_extra("pid", [os.getpid()] * len(completions))
    log_metric("seen_step", trainer_state.step)
    print("said by a reward")
    return [factor * len(c) for c in completions]

def leaves(completions, **kwargs):
    if "bad" in completions[0]:
        os._exit(0)
    return [1.0] * len(completions)

def crashes(completions):
    ctypes.string_at(0)

def kills(completions):
    os.kill(os.getpid(), signal.SIGKILL)

def exits(completions):
    sys.exit(0)

def holds_the_lock(completions):
    # One C call that never lets Python's lock go: no thread of this process runs any more.
    ctypes.PyDLL(None).pause()

def raises(completions):
    raise ValueError("no such answer")

def sleeps(completions):
    time.sleep(0.2 * len(completions))
    return [float(len(c)) for c in completions]

def odd(completions, log_extra):
    log_extra("thing", [lambda: 0] * len(completions))
    return [1.0] * len(completions)
"""


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """`make(name, **keys)`: a reward of CODE in worker processes."""
    (tmp_path / "code.py").write_text(CODE)
    rewards: list[Reward] = []

    def make(name: str, **keys: Any) -> Reward:
        given = COMMON | {"workers": 1, "kwargs": {}, "path": f"{tmp_path}/code.py:{name}"} | keys
        rewards.append(build_reward(name, Config(**given)))
        return rewards[-1]

    yield make
    for one in rewards:
        for pool in one.pools:
            pool.close()


def run(one: Reward, *texts: str) -> Scores:
    return score_groups([one], [group(*texts)], PLAIN)


def refused(one: Reward, *texts: str) -> RewardFailed:
    with pytest.raises(RewardFailed) as caught:
        run(one, *texts)
    return caught.value


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 10
    while child_process.process_start_time(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not child_process.process_start_time(pid)


def test_a_worker_gives_what_a_thread_gives_and_lives_on(made, capfd) -> None:
    one = made("length", kwargs={"factor": 2.0})
    first, second = run(one, "a", "bcd"), run(one, "a", "bcd")
    assert first.raw.flatten().tolist() == second.raw.flatten().tolist() == [2.0, 6.0]
    assert first.extras == second.extras and first.extras["pid"][0] != os.getpid()
    assert first.metrics == {"seen_step": STATE.step}
    got = capfd.readouterr()
    assert "said by a reward" in got.err and "said" not in got.out


def test_workers_share_out_rows_and_results_come_back_in_their_places(made) -> None:
    one = made("length", workers=2, scope="row")
    scores = score_groups([one], [group("a", "bcd"), group("ef", "")], PLAIN)
    assert scores.raw.flatten().tolist() == [1.0, 3.0, 2.0, 0.0]
    assert len(one.pools[0].idle) <= 2


@pytest.mark.slow_but(
    "leaves-exited during the call, with exit code 0", "crashes-with signal 11", "odd-pickle"
)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaves", "exited during the call, with exit code 0"),
        ("crashes", "with signal 11"),
        ("kills", "with signal 9"),
        ("exits", "SystemExit: 0 (a reward must not end the process)"),
        ("raises", "ValueError: no such answer"),
        ("odd", "pickle"),
    ],
)
def test_what_a_reward_does_to_its_process_is_a_failure_of_the_call(made, name, said) -> None:
    assert said in str(refused(made(name), "bad"))


def test_a_reward_that_never_lets_the_lock_go_is_killed_at_its_deadline(made) -> None:
    one = made("holds_the_lock", timeout_s=2.0)
    pool = worker_calls.reward_worker_pool(one)
    pool.start_idle()
    pid = pool.idle[0].pid
    error = refused(one, "a")
    assert "timeout_s = 2 s" in str(error)
    assert "in holds_the_lock" in error.problems[0].why  # told from outside of the lock
    wait_until_gone(pid)


def test_the_call_after_a_lost_one_gets_a_new_process(made) -> None:
    one = made("leaves", on_error="none", max_error_rate=0.5, scope="row")
    scores = run(one, "good", "bad", "fine")
    assert scores.raw.isnan().flatten().tolist() == [False, True, False]
    assert scores.error_rate == {"leaves": pytest.approx(1 / 3)}


def test_code_that_cannot_be_loaded_in_a_worker_fails_as_in_a_thread(made, tmp_path) -> None:
    one = made("length")
    (tmp_path / "code.py").write_text("raise RuntimeError('gone')")  # since it was checked
    assert "RuntimeError: gone" in str(refused(one, "a"))


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    one = reward(lambda completions: [1.0], workers=1)
    with pytest.raises(ConfigError) as caught:
        worker_calls.reward_worker_pool(one)
    assert_refused(caught, 2, "workers")


def test_an_async_reward_has_no_workers() -> None:
    async def fn(completions):
        return [1.0]

    with pytest.raises(ConfigError) as caught:
        reward(fn, workers=2)
    assert_refused(caught, 2, "reward.mine.workers", fix="reward.mine.workers=0")


def test_what_a_worker_prints_is_labelled_with_its_reward(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "loud.py").write_text(
        "import os, sys\ndef f(completions):\n"
        "    print('on stdout'); os.system('echo of a process >&2')\n    return [1.0]\n"
    )
    keys = {"workers": 1, "kwargs": {}, "path": f"{tmp_path}/loud.py:f"}
    one = build_reward("loud", Config(**COMMON | keys))
    run(one, "a")
    one.pools[0].close()
    said = capfd.readouterr()
    assert said.out == ""
    label = "printed by reward loud: "
    assert {f"{label}on stdout", f"{label}of a process"} <= {*said.err.splitlines()}


def test_workers_end_with_us_however_we_end(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(reward_cases.__file__).parent)!r})
from reward_cases import COMMON
from rloo_cli.rewards.engine.worker_calls import reward_worker_pool
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.function import Config
keys = dict(workers=1, kwargs={{}}, path="{tmp_path}/code.py:sleeps")
one = build_reward("x", Config(**COMMON | keys))
worker = reward_worker_pool(one).take_new()
try:
    worker.request(([0], {{"completions": ["a"] * 1000}}, []), 3.0)
except TimeoutError:  # it is in a call that takes minutes
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(  # the worker has its standard error: we would wait for both
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert done.returncode == -9
    wait_until_gone(int(done.stdout))


def test_groups_are_scored_while_others_are_still_being_made() -> None:
    seen: list[list[str]] = []
    both = threading.Event()

    def fn(completions):
        seen.append(completions)
        both.set()
        return [1.0] * len(completions)

    def whole(completions):
        return [2.0] * len(completions)

    groups = [group("a", "b"), group()]  # the second is not made yet
    rewards = [reward(fn, "early", scope="group"), reward(whole, "late")]
    stage = ScoringStep(rewards, groups, PLAIN, 2)
    stage.submit_group(0)
    assert both.wait(10) and seen == [["a", "b"]]
    groups[1].rollouts = group("c", "d").rollouts
    stage.submit_group(1)
    scores = stage.wait_for_scores()
    assert scores.raw.tolist() == [[[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]
    assert sorted(seen) == [["a", "b"], ["c", "d"]]


def test_equal_rows_are_asked_once_though_their_groups_come_one_by_one() -> None:
    asked: list[str] = []

    def fn(completions):
        asked.extend(completions)
        return [float(len(c)) for c in completions]

    one = reward(fn, cache=True, scope="group")
    assert score_groups(
        [one], [group("aa", "b"), group("aa", "aa")], PLAIN
    ).raw.flatten().tolist() == [
        2.0,
        1.0,
        2.0,
        2.0,
    ]
    assert sorted(asked) == ["aa", "b"]


def test_an_abandoned_step_makes_no_further_calls() -> None:
    calls, go = [], threading.Event()

    def fn(completions):
        calls.append(completions)
        go.wait(10)
        return [1.0]

    stage = ScoringStep([reward(fn, scope="row")], [group("a", "b", "c")], PLAIN, 3)
    stage.submit_group(0)
    while not calls:
        time.sleep(0.01)
    stage.abandon()
    go.set()
    time.sleep(0.2)
    assert calls == [["a"]]


def test_waiting_for_a_slow_reward_can_be_given_up() -> None:
    class Enough(Exception):
        pass

    def poll() -> None:
        raise Enough

    go = threading.Event()
    slow = reward(lambda completions: go.wait(10))
    with pytest.raises(Enough):
        score_groups([slow], [group("a")], RewardContext(False, STATE, poll))
    go.set()


def test_thread_and_worker_agree_on_a_wrong_return(made) -> None:
    assert "returned None" in str(failure(lambda completions: None))
    assert values(lambda completions: [len(c) for c in completions]) == [1.0, 1.0]
