"""Calls rewards: each in time, none able to take the process with it.

A `Runner` makes one reward's calls of one step, from the moment they are submitted. A synchronous
reward has a thread of its own that makes its calls one after the other, each in a daemon thread
that is left behind when `timeout_s` is over; with `workers` it has that many threads, each with a
child process that is killed then (`workers`). Asynchronous rewards share one event loop in one
daemon thread, which lives on between steps (a client they keep stays usable) and is replaced when
one of them blocks it. What a reward raises, sys.exit() too, becomes a Failure. Without `workers`,
code that holds Python's lock for good (one endless C call) cannot be timed out from here.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from rloo_cli.rewards.engine.arguments import RewardCallLog
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.process_pool import call_in_worker
from rloo_cli.rewards.engine.results import (
    CallFailure,
    CallResult,
    RewardCall,
    failure_of_error,
    timeout_failure,
    to_call_result,
)
from rloo_cli.utils import console
from rloo_cli.utils.exit_guard import refuse_os_exit

CALL_POLL_S = 0.1  # seconds between two looks at `poll`
EVENT_LOOP_GRACE_S = 1.0  # seconds an event loop may be late before it counts as blocked


class RewardCalls:
    """One reward's calls of one step. `rows`: those of the step.

    A synchronous reward whose failures already decide the step makes no further calls: then there
    are fewer outcomes than calls. `seconds`: how long it had a call to make or to wait for.
    """

    def __init__(self, reward: Reward, num_completions: int):
        refuse_os_exit()
        self.reward, self.num_completions = reward, num_completions
        self.calls: list[
            tuple[RewardCall, Future[CallResult | None], float]
        ] = []  # with its deadline
        self.pending_calls: queue.SimpleQueue[tuple[RewardCall, Future[CallResult | None]] | None]
        self.pending_calls = queue.SimpleQueue()
        self.num_threads = 0
        self.num_failed = 0
        self.step_failed = False  # the step, by this reward's failures
        self.seconds = 0.0
        self._calls_in_flight, self._busy_since, self._lock = 0, 0.0, threading.Lock()

    def submit(self, call: RewardCall) -> None:
        """Make this call as soon as there is a place for it."""
        future: Future[CallResult | None] = Future()
        limit = self.reward.config.timeout_s * (self.reward.config.retries + 1) + EVENT_LOOP_GRACE_S
        self.calls.append((call, future, time.monotonic() + limit))
        self._count_call_started()
        future.add_done_callback(self._count_call_done)
        if self.reward.is_async:
            done = asyncio.run_coroutine_threadsafe(
                _call_async_with_retries(self.reward, call), _RewardEventLoop.current_loop()
            )
            done.add_done_callback(lambda told: _copy_future_result(told, future))
            return
        self.pending_calls.put((call, future))
        if self.num_threads < max(1, self.reward.config.workers):
            name = f"reward {self.reward.name}"
            threading.Thread(target=self._make_calls, daemon=True, name=name).start()
            self.num_threads += 1

    def close(self) -> None:
        """No more calls will come; those that wait are made unless the step is lost."""
        for _ in range(self.num_threads):
            self.pending_calls.put(None)

    def abandon(self) -> None:
        """What has not begun is not done, and what runs is left to itself."""
        self.step_failed = True
        self.close()

    def call_results(self) -> list[CallResult]:
        """What came of the calls that were made, all of them done."""
        return [made for _, future, _ in self.calls if (made := future.result()) is not None]

    def _make_calls(self) -> None:
        while (item := self.pending_calls.get()) is not None:
            call, future = item
            try:
                told = None if self.step_failed else self._call_with_retries(call)
            except BaseException as error:  # a bug of ours: shown by result()
                _set_future_result(future, error=error)
            else:
                _set_future_result(future, told)

    def _call_with_retries(self, call: RewardCall) -> CallResult:
        config = self.reward.config
        for _ in range(config.retries + 1):
            outcome = (
                call_in_worker(self.reward, call)
                if config.workers
                else _call_in_thread(self.reward, call)
            )
            if not outcome.failures:
                break
        with self._lock:
            self.num_failed += len(outcome.failures)
            raises = config.on_error == "raise"
            if self.num_failed and (
                raises or self.num_failed > config.max_error_rate * self.num_completions
            ):
                self.step_failed = True  # do not wait for every other row to time out as well
        return outcome

    def _count_call_started(self) -> None:
        with self._lock:
            self._calls_in_flight += 1
            if self._calls_in_flight == 1:
                self._busy_since = time.monotonic()

    def _count_call_done(self, _: Any) -> None:
        with self._lock:
            self._calls_in_flight -= 1
            if not self._calls_in_flight:
                self.seconds += time.monotonic() - self._busy_since


def wait_for_calls(
    reward_calls: Sequence[RewardCalls], poll: Callable[[], None] | None = None
) -> None:
    """Wait until every call is done or given up. `poll` is called meanwhile and may raise."""
    for runner in reward_calls:
        runner.close()
    blocked = False
    waiting = [(r, call, future, late) for r in reward_calls for call, future, late in r.calls]
    while waiting:
        wait([future for _, _, future, _ in waiting], CALL_POLL_S, return_when="FIRST_COMPLETED")
        if poll is not None:
            poll()
        now = time.monotonic()
        for runner, call, future, late in waiting:
            if runner.reward.is_async and now > late and not future.done():
                blocked = True
                _set_future_result(future, _blocked_loop_result(runner.reward, call))
        waiting = [item for item in waiting if not item[2].done()]
    if blocked:
        _RewardEventLoop.abandon()
    console.restore_streams()


def _set_future_result(
    future: "Future[CallResult | None]",
    result: CallResult | None = None,
    error: BaseException | None = None,
) -> None:
    """Give a future its result, unless it was given up before."""
    with contextlib.suppress(Exception):  # InvalidStateError: somebody was quicker
        future.set_exception(error) if error is not None else future.set_result(result)


def _copy_future_result(source: "Future[CallResult]", future: "Future[CallResult | None]") -> None:
    if not source.cancelled():
        error = source.exception()
        _set_future_result(future, None if error else source.result(), error)


# Synchronous rewards


def _call_in_thread(reward: Reward, call: RewardCall) -> CallResult:
    arguments, log = call.make_arguments()
    box: list[Any] = []

    def work() -> None:
        try:
            returned = reward.code(**arguments)
            if inspect.isawaitable(returned):  # a plain function that returns a coroutine
                returned = asyncio.run(_await_value(returned))
            box.append(returned)
        except BaseException as error:
            box.append(failure_of_error(error))

    thread = threading.Thread(target=work, daemon=True, name=f"reward {reward.name} call")
    thread.start()
    thread.join(reward.config.timeout_s)
    returned = box[0] if box else timeout_failure(reward, thread.ident)
    return to_call_result(reward, call.indices, returned, log)


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


# Asynchronous rewards


async def _call_async_with_retries(reward: Reward, call: RewardCall) -> CallResult:
    for _ in range(reward.config.retries + 1):
        outcome = await _call_on_event_loop(reward, call)
        if not outcome.failures:
            break
    return outcome


async def _call_on_event_loop(reward: Reward, call: RewardCall) -> CallResult:
    arguments, log = call.make_arguments()

    async def work() -> Any:
        try:
            return await reward.code(**arguments)
        except BaseException as error:  # SystemExit would end the loop's thread
            return failure_of_error(error)

    task = asyncio.ensure_future(work())
    # Not wait_for: it waits for a task that refuses to be cancelled.
    done, _ = await asyncio.wait({task}, timeout=reward.config.timeout_s)
    if not done:
        failure = timeout_failure(reward, None)
        task.cancel()
        return to_call_result(reward, call.indices, failure, log)
    return to_call_result(reward, call.indices, task.result(), log)


def _blocked_loop_result(reward: Reward, call: RewardCall) -> CallResult:
    """A call on a loop that no longer turns; the frames show who blocks it."""
    failure = timeout_failure(
        reward, _RewardEventLoop.thread.ident if _RewardEventLoop.thread else None
    )
    why = f"{failure.message}; the event loop is blocked (time.sleep in an async reward?)"
    return to_call_result(
        reward, call.indices, CallFailure("timeout", why, failure.frames), RewardCallLog(0)
    )


class _RewardEventLoop:
    """The one event loop of asynchronous rewards."""

    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None

    @classmethod
    def current_loop(cls) -> asyncio.AbstractEventLoop:
        if cls.loop is None or cls.thread is None or not cls.thread.is_alive():
            cls.loop = asyncio.new_event_loop()
            cls.loop.set_exception_handler(_handle_loop_exception)
            cls.thread = threading.Thread(
                target=cls._run_loop, args=(cls.loop,), daemon=True, name="async rewards"
            )
            cls.thread.start()
        return cls.loop

    @classmethod
    def abandon(cls) -> None:
        if cls.loop is not None:
            cls.loop.call_soon_threadsafe(cls.loop.stop)  # for when it is free again
        cls.loop = cls.thread = None

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # from a task of the user's
                loop.run_forever()
                break
        left = asyncio.all_tasks(loop)  # it was abandoned
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's own report, but nothing on tasks that timed out and still wait when we end."""
    if "was destroyed but it is pending" not in str(context.get("message")):
        loop.default_exception_handler(context)
