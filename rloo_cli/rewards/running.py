"""Calls rewards: each in time, none able to take the process with it.

Every synchronous reward has a thread of its own that makes its calls one after the other, each in
a daemon thread that is left behind when `timeout_s` is over. Asynchronous rewards share one event
loop in one daemon thread, which lives on between steps (a client they keep stays usable) and is
replaced when one of them blocks it. What a reward raises, sys.exit() too, becomes a Failure.
Code that holds Python's lock for good (one endless C call) cannot be timed out from here.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from rloo_cli.rewards.arguments import Log
from rloo_cli.rewards.build import Reward
from rloo_cli.rewards.exits import refuse_exits
from rloo_cli.rewards.outcomes import Call, Failure, Outcome, judge, raised, timeout

TICK = 0.1  # seconds between two looks at `poll`
GRACE = 1.0  # seconds an event loop may be late before it counts as blocked


def run(
    jobs: Sequence[tuple[Reward, list[Call]]],
    rows: int,
    poll: Callable[[], None] | None = None,
) -> list[tuple[list[Outcome], float]]:
    """Outcomes of each reward's calls, and its wall seconds, in the order of `jobs`.

    `rows`: those of the step. All rewards run at the same time. A reward whose failures already
    decide the step makes no further calls: it may have fewer outcomes than calls.
    """
    refuse_exits()
    started = time.monotonic()
    futures = [_start(reward, calls, rows) for reward, calls in jobs]
    late = [_limit(reward) + GRACE + started for reward, _ in jobs]
    seconds = [0.0] * len(jobs)
    waiting = set(range(len(jobs)))
    stuck: dict[int, list[Outcome]] = {}
    while waiting:
        wait([futures[i] for i in waiting], TICK, return_when="FIRST_COMPLETED")
        if poll is not None:
            poll()
        now = time.monotonic()
        for i in sorted(waiting):
            reward, calls = jobs[i]
            if not futures[i].done() and reward.is_async and now > late[i]:
                stuck[i] = [_lost(reward, call) for call in calls]
            if futures[i].done() or i in stuck:
                seconds[i] = now - started
                waiting.discard(i)
    if stuck:
        _Loop.abandon()
    return [(stuck[i] if i in stuck else futures[i].result(), seconds[i]) for i in range(len(jobs))]


def _start(reward: Reward, calls: list[Call], rows: int) -> "Future[list[Outcome]]":
    if reward.is_async:
        return asyncio.run_coroutine_threadsafe(_run_async(reward, calls), _Loop.current())
    future: Future[list[Outcome]] = Future()

    def work() -> None:
        try:
            future.set_result(_run_sync(reward, calls, rows))
        except BaseException as error:  # a bug of ours: shown by result()
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=f"reward {reward.name}").start()
    return future


def _limit(reward: Reward) -> float:
    return reward.config.timeout_s * (reward.config.retries + 1)


# Synchronous rewards


def _run_sync(reward: Reward, calls: list[Call], rows: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    failed = 0
    for call in calls:
        for _ in range(reward.config.retries + 1):
            outcome = _try_sync(reward, call)
            if not outcome.failures:
                break
        outcomes.append(outcome)
        failed += len(outcome.failures)
        raises = reward.config.on_error == "raise"
        if failed and (raises or failed > reward.config.max_error_rate * rows):
            break  # the step is lost: do not wait for every other row to time out as well
    return outcomes


def _try_sync(reward: Reward, call: Call) -> Outcome:
    arguments, log = call.make()
    box: list[Any] = []

    def work() -> None:
        try:
            returned = reward.code(**arguments)
            if inspect.isawaitable(returned):  # a plain function that returns a coroutine
                returned = asyncio.run(_await(returned))
            box.append(returned)
        except BaseException as error:
            box.append(raised(error))

    thread = threading.Thread(target=work, daemon=True, name=f"reward {reward.name} call")
    thread.start()
    thread.join(reward.config.timeout_s)
    returned = box[0] if box else timeout(reward, thread.ident)
    return judge(reward, call, returned, log)


async def _await(awaitable: Any) -> Any:
    return await awaitable


# Asynchronous rewards


async def _run_async(reward: Reward, calls: list[Call]) -> list[Outcome]:
    return list(await asyncio.gather(*(_retried_async(reward, call) for call in calls)))


async def _retried_async(reward: Reward, call: Call) -> Outcome:
    for _ in range(reward.config.retries + 1):
        outcome = await _try_async(reward, call)
        if not outcome.failures:
            break
    return outcome


async def _try_async(reward: Reward, call: Call) -> Outcome:
    arguments, log = call.make()

    async def work() -> Any:
        try:
            return await reward.code(**arguments)
        except BaseException as error:  # SystemExit would end the loop's thread
            return raised(error)

    task = asyncio.ensure_future(work())
    # Not wait_for: it waits for a task that refuses to be cancelled.
    done, _ = await asyncio.wait({task}, timeout=reward.config.timeout_s)
    if not done:
        failure = timeout(reward, None)
        task.cancel()
        return judge(reward, call, failure, log)
    return judge(reward, call, task.result(), log)


def _lost(reward: Reward, call: Call) -> Outcome:
    """A call on a loop that no longer turns; the frames show who blocks it."""
    failure = timeout(reward, _Loop.thread.ident if _Loop.thread else None)
    why = f"{failure.message}; the event loop is blocked (time.sleep in an async reward?)"
    return judge(reward, call, Failure("timeout", why, failure.frames), Log(0))


class _Loop:
    """The one event loop of asynchronous rewards."""

    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None

    @classmethod
    def current(cls) -> asyncio.AbstractEventLoop:
        if cls.loop is None or cls.thread is None or not cls.thread.is_alive():
            cls.loop = asyncio.new_event_loop()
            cls.loop.set_exception_handler(_unless_at_exit)
            cls.thread = threading.Thread(
                target=cls._turn, args=(cls.loop,), daemon=True, name="async rewards"
            )
            cls.thread.start()
        return cls.loop

    @classmethod
    def abandon(cls) -> None:
        if cls.loop is not None:
            cls.loop.call_soon_threadsafe(cls.loop.stop)  # for when it is free again
        cls.loop = cls.thread = None

    @staticmethod
    def _turn(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # from a task of the user's
                loop.run_forever()
                break
        left = asyncio.all_tasks(loop)  # it was abandoned
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _unless_at_exit(loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
    """asyncio's own report, but nothing on tasks that timed out and still wait when we end."""
    if "was destroyed but it is pending" not in str(told.get("message")):
        loop.default_exception_handler(told)
