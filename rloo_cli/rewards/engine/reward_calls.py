"""Calls rewards, each with a time limit, so that none can end or block the process.

A `RewardCalls` makes one reward's calls of one step, from the moment they are submitted. A
synchronous reward has its own thread that makes its calls one after the other, each in a
daemon thread that is abandoned when `timeout_s` is over; with `workers` it has that many
threads, each with a child process that is killed then (worker_calls.py). Asynchronous rewards
share one event loop in one daemon thread, which lives on between steps (so a client stays
usable) and is replaced when one of them blocks it. Whatever a reward raises, even sys.exit(), is
a CallFailure. Without `workers`, code that holds Python's lock for ever (one endless C call)
cannot be timed out from here.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from rloo_cli.rewards.engine.arguments import RewardCallLog
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import (
    CallFailure,
    CallResult,
    RewardCall,
    failure_of_error,
    timeout_failure,
    to_call_result,
)
from rloo_cli.rewards.engine.worker_calls import call_in_worker
from rloo_cli.utils import console
from rloo_cli.utils.errors import Problem, RewardError
from rloo_cli.utils.exit_guard import refuse_os_exit
from rloo_cli.utils.main_thread_calls import note_main_thread_calls

CALL_POLL_S = 0.1  # seconds between two calls of `poll`
EVENT_LOOP_GRACE_S = 1.0  # seconds an event loop may be late before it counts as blocked
CallFuture = Future[CallResult | None]  # None: not called, as the step had failed


class RewardCalls:
    """One reward's calls of one step, which has `num_completions` completions.

    A synchronous reward makes no further calls once its failures decide the step: then there
    are fewer results than calls. `seconds`: how long it had a call to make or to wait for.
    """

    def __init__(self, reward: Reward, num_completions: int):
        refuse_os_exit()
        self.reward, self.num_completions = reward, num_completions
        self.calls: list[tuple[RewardCall, CallFuture, float]] = []  # with the call's deadline
        self.pending_calls: queue.SimpleQueue[tuple[RewardCall, CallFuture] | None]
        self.pending_calls = queue.SimpleQueue()
        self.num_threads = 0
        self.num_failed = 0
        self.step_failed = False  # this reward's failures already decide that the step fails
        self.seconds = 0.0
        self._calls_in_flight, self._busy_since, self._lock = 0, 0.0, threading.Lock()

    def submit(self, call: RewardCall) -> None:
        """Make this call as soon as a thread is free."""
        future: CallFuture = Future()
        limit = self.reward.config.timeout_s * (self.reward.config.retries + 1) + EVENT_LOOP_GRACE_S
        self.calls.append((call, future, time.monotonic() + limit))
        self._count_call_started()
        future.add_done_callback(self._count_call_done)
        if self.reward.is_async:
            coroutine = _call_async_with_retries(self.reward, call)
            task = asyncio.run_coroutine_threadsafe(coroutine, _RewardEventLoop.current_loop())
            task.add_done_callback(lambda done: _copy_future_result(done, future))
            return
        self.pending_calls.put((call, future))
        if self.num_threads < max(1, self.reward.config.workers):
            name = f"reward {self.reward.name}"
            threading.Thread(target=self._make_calls, daemon=True, name=name).start()
            self.num_threads += 1

    def close(self) -> None:
        """Accept no more calls; waiting ones are made unless the step has failed."""
        for _ in range(self.num_threads):
            self.pending_calls.put(None)

    def abandon(self) -> None:
        """Drop the calls that have not started, and do not wait for the running ones."""
        self.step_failed = True
        self.close()

    def call_results(self) -> list[CallResult]:
        """The results of the calls that were made; all of them must be done."""
        results = [future.result() for _, future, _ in self.calls]
        return [result for result in results if result is not None]

    def _make_calls(self) -> None:
        while (item := self.pending_calls.get()) is not None:
            call, future = item
            try:
                result = None if self.step_failed else self._call_with_retries(call)
            except BaseException as error:  # a bug of ours: shown by result()
                _set_future_result(future, error=error)
            else:
                _set_future_result(future, result)

    def _call_with_retries(self, call: RewardCall) -> CallResult:
        config = self.reward.config
        for _ in range(config.retries + 1):
            make_call = call_in_worker if config.workers else _call_in_thread
            result = make_call(self.reward, call)
            if not result.failures:
                break
        with self._lock:
            self.num_failed += len(result.failures)
            too_many = self.num_failed > config.max_error_rate * self.num_completions
            if self.num_failed and (config.on_error == "raise" or too_many):
                self.step_failed = True  # do not wait until all other completions time out as well
        return result

    def _count_call_started(self) -> None:
        with self._lock:
            self._calls_in_flight += 1
            if self._calls_in_flight == 1:
                self._busy_since = time.monotonic()

    def _count_call_done(self, _: CallFuture) -> None:
        with self._lock:
            self._calls_in_flight -= 1
            if not self._calls_in_flight:
                self.seconds += time.monotonic() - self._busy_since


def wait_for_calls(
    reward_calls: Sequence[RewardCalls], poll: Callable[[], None] | None = None
) -> None:
    """Wait until every call is done or given up. `poll` is called meanwhile and may raise."""
    for calls in reward_calls:
        calls.close()
    blocked = False
    waiting = [(c.reward, *entry) for c in reward_calls for entry in c.calls]
    while waiting:
        wait([future for _, _, future, _ in waiting], CALL_POLL_S, return_when="FIRST_COMPLETED")
        if poll is not None:
            poll()
        now = time.monotonic()
        for reward, call, future, deadline in waiting:
            if reward.is_async and now > deadline and not future.done():
                blocked = True
                _set_future_result(future, _blocked_loop_result(reward, call))
        waiting = [item for item in waiting if not item[2].done()]
    if blocked:
        _RewardEventLoop.abandon()
    console.restore_streams()


def _set_future_result(
    future: CallFuture, result: CallResult | None = None, error: BaseException | None = None
) -> None:
    """Set a future's result or error, unless it was given up before."""
    with contextlib.suppress(Exception):  # InvalidStateError: it has a result already
        future.set_exception(error) if error is not None else future.set_result(result)


def _copy_future_result(source: Future[CallResult], future: CallFuture) -> None:
    if not source.cancelled():
        error = source.exception()
        _set_future_result(future, None if error else source.result(), error)


# Synchronous rewards


def _call_in_thread(reward: Reward, call: RewardCall) -> CallResult:
    arguments, log = call.make_arguments()
    box: list[object] = []

    def work() -> None:
        with note_main_thread_calls() as noted:
            try:
                returned = reward.code(**arguments)
                if inspect.isawaitable(returned):  # a plain function that returns a coroutine
                    returned = asyncio.run(_await_value(returned))
            except BaseException as error:
                returned = failure_of_error(error)
        box.append(_main_thread_error(reward, noted) if noted else returned)

    thread = threading.Thread(target=work, daemon=True, name=f"reward {reward.name} call")
    thread.start()
    thread.join(reward.config.timeout_s)
    returned = box[0] if box else timeout_failure(reward, thread.ident)
    if isinstance(returned, RewardError):
        raise returned
    return to_call_result(reward, call.indices, returned, log)


def _main_thread_error(reward: Reward, noted: Sequence[str]) -> RewardError:
    """The error of a reward that called main-thread functions; no `on_error` covers it."""
    key = f"reward.{reward.name}.workers"
    what = f"reward {reward.name!r} called {noted[0]}, which works only in the main thread"
    why = "its calls run in a thread of the run's process; the scores of such a call may be wrong"
    return RewardError(Problem(what, key, why, f"{key}=1 runs it in a separate process"))


async def _await_value(awaitable: Awaitable[object]) -> object:
    return await awaitable


# Asynchronous rewards


async def _call_async_with_retries(reward: Reward, call: RewardCall) -> CallResult:
    for _ in range(reward.config.retries + 1):
        result = await _call_on_event_loop(reward, call)
        if not result.failures:
            break
    return result


async def _call_on_event_loop(reward: Reward, call: RewardCall) -> CallResult:
    arguments, log = call.make_arguments()

    async def work() -> object:
        with note_main_thread_calls() as noted:
            try:
                returned = await reward.code(**arguments)
            except BaseException as error:  # SystemExit would end the loop's thread
                returned = failure_of_error(error)
        return _main_thread_error(reward, noted) if noted else returned

    task = asyncio.ensure_future(work())
    # Not wait_for: it waits for a task that refuses to be cancelled.
    done, _ = await asyncio.wait({task}, timeout=reward.config.timeout_s)
    if not done:
        failure = timeout_failure(reward, None)
        task.cancel()
        return to_call_result(reward, call.indices, failure, log)
    if isinstance(error := task.result(), RewardError):
        raise error
    return to_call_result(reward, call.indices, task.result(), log)


def _blocked_loop_result(reward: Reward, call: RewardCall) -> CallResult:
    """The failure of a call on a loop that is blocked; its frames show which code blocks it."""
    thread = _RewardEventLoop.thread
    timeout = timeout_failure(reward, thread.ident if thread else None)
    why = f"{timeout.message}; the event loop is blocked (time.sleep in an async reward?)"
    failure = CallFailure("timeout", why, timeout.frames)
    return to_call_result(reward, call.indices, failure, RewardCallLog(0))


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
            cls.loop.call_soon_threadsafe(cls.loop.stop)  # once it is free again
        cls.loop = cls.thread = None

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # from a user's task
                loop.run_forever()
                break
        tasks = asyncio.all_tasks(loop)  # the loop was abandoned
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    """Report as asyncio does, except tasks that timed out and still wait when the run ends."""
    if "was destroyed but it is pending" not in str(context.get("message")):
        loop.default_exception_handler(dict(context))
