"""Rewards run together, hang, block and try to end the process."""

import asyncio
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from reward_cases import PLAIN, failure, group, reward, run, values

from rloo_cli.rewards.engine.arguments import RewardContext
from rloo_cli.rewards.engine.scoring import score_groups


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_reward_cannot_end_the_process(kind: type[BaseException]) -> None:
    def fn(completions):
        raise kind(0)

    async def afn(completions):
        raise kind(0)

    async def task(completions):  # from a task of its own, which would end the loop's thread
        async def leave():
            raise kind(0)

        kept = asyncio.ensure_future(leave())
        await asyncio.sleep(0.05)
        assert kept.done()
        return [1.0, 1.0]

    for f in (fn, afn):
        assert kind.__name__ in str(failure(f))
        assert "must not end" in str(failure(f))
    assert values(task) == [1.0, 1.0]
    assert values(lambda completions: [1, 2]) == [1.0, 2.0]


def test_sys_exit_zero_inside_a_reward_is_a_failure() -> None:
    assert "SystemExit: 0" in str(failure(lambda completions: sys.exit(0)))


def test_a_hung_function_is_left_behind_at_its_deadline() -> None:
    release = threading.Event()

    def hangs(completions):
        release.wait(60)
        return [1.0, 1.0]

    error = failure(hangs, timeout_s=0.2)
    assert "no answer within timeout_s = 0.2 s" in str(error)
    assert "in hangs" in error.problems[0].why  # where it hung
    release.set()


def test_what_a_hung_function_says_later_is_not_heard() -> None:
    release, done = threading.Event(), threading.Event()

    def late(completions, log_extra):
        release.wait(60)
        log_extra("x", [1, 1])
        done.set()
        return [1.0, 1.0]

    scores = run(late, timeout_s=0.1, on_error="none", max_error_rate=1.0)
    release.set()
    assert done.wait(10)
    assert scores.raw.isnan().all() and scores.extras == {}


def test_a_hung_coroutine_is_cancelled_and_others_go_on() -> None:
    async def hangs(completions):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(60)  # it refuses, the first time
                raise

    async def good(completions):
        await asyncio.sleep(0.01)
        return [1.0]

    lenient = {"on_error": "none", "max_error_rate": 1.0, "timeout_s": 0.2}
    scores = score_groups(
        [reward(hangs, "hangs", **lenient), reward(good, "good")], [group("a")], PLAIN
    )
    assert scores.raw[0].isnan().all() and scores.raw[1].item() == 1.0
    assert scores.error_rate == {"hangs": 1.0, "good": 0.0}
    assert "blocked" not in str(failure(hangs, timeout_s=0.1))


def test_a_coroutine_that_blocks_the_loop_is_found_and_the_next_step_works() -> None:
    release = threading.Event()

    async def blocks(completions):
        release.wait(60)

    error = failure(blocks, timeout_s=0.1)
    assert "blocked" in str(error) and "in blocks" in error.problems[0].why

    async def good(completions):
        return [1.0, 1.0]

    assert values(good, timeout_s=5) == [1.0, 1.0]  # before the blocked one is free
    release.set()


def test_async_rewards_run_with_each_other_and_with_sync_ones() -> None:
    # Each waits for something that only the other ones do: in a row they would all time out.
    flags = {name: threading.Event() for name in ("a", "b", "sync")}

    def coroutine(name: str) -> Any:
        async def fn(completions):
            flags[name].set()
            while not all(f.is_set() for f in flags.values()):
                await asyncio.sleep(0.01)
            return [1.0]

        return reward(fn, name, timeout_s=10)

    def sync(completions):
        flags["sync"].set()
        assert all(f.wait(10) for f in flags.values())
        return [2.0]

    rewards = [coroutine("a"), reward(sync, "sync", timeout_s=10), coroutine("b")]
    scores = score_groups(rewards, [group("x")], PLAIN)
    assert scores.raw.flatten().tolist() == [1.0, 2.0, 1.0]
    assert all(s >= 0 for s in scores.seconds.values())


def test_the_calls_of_one_async_reward_run_together() -> None:
    arrived: set[str] = set()

    async def fn(completions):
        arrived.update(completions)
        while len(arrived) < 3:
            await asyncio.sleep(0.01)
        return [1.0]

    assert values(fn, group("a", "b", "c"), scope="row", timeout_s=10) == [1.0, 1.0, 1.0]


def test_results_are_placed_by_row_whatever_ends_first() -> None:
    async def fn(completions):
        await asyncio.sleep(0.05 if completions == ["a"] else 0.0)
        return [float(ord(completions[0]))]

    assert values(fn, group("a", "b"), group("c", "d"), scope="row") == [97.0, 98.0, 99.0, 100.0]


def test_the_event_loop_lives_on_between_steps() -> None:
    loops = []

    async def fn(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0, 0.0]

    run(fn)
    run(fn)
    assert loops[0] is loops[1]


def test_a_plain_function_may_return_a_coroutine() -> None:
    async def inner():
        return [1.0, 1.0]

    assert values(lambda completions: inner()) == [1.0, 1.0]


def test_waiting_can_be_given_up() -> None:
    release = threading.Event()

    def stop() -> None:
        raise InterruptedError

    context = RewardContext(conversational=False, trainer_state=SimpleNamespace(step=1), poll=stop)
    start = time.monotonic()
    with pytest.raises(InterruptedError):
        run(lambda completions: release.wait(60), context=context)
    assert time.monotonic() - start < 30
    release.set()
