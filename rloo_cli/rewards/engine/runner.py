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

from rloo_cli.rewards.engine.arguments import Log
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.process_pool import ask
from rloo_cli.rewards.engine.results import Call, Failure, Outcome, judge, raised, timeout
from rloo_cli.utils import console
from rloo_cli.utils.exit_guard import refuse_exits

TICK = 0.1  # seconds between two looks at `poll`
GRACE = 1.0  # seconds an event loop may be late before it counts as blocked


class Runner:
    """One reward's calls of one step. `rows`: those of the step.

    A synchronous reward whose failures already decide the step makes no further calls: then there
    are fewer outcomes than calls. `seconds`: how long it had a call to make or to wait for.
    """

    def __init__(self, reward: Reward, rows: int):
        refuse_exits()
        self.reward, self.rows = reward, rows
        self.calls: list[tuple[Call, Future[Outcome | None], float]] = []  # with its deadline
        self.queue: queue.SimpleQueue[tuple[Call, Future[Outcome | None]] | None]
        self.queue = queue.SimpleQueue()
        self.threads = 0
        self.failed = 0
        self.lost = False  # the step, by this reward's failures
        self.seconds = 0.0
        self._busy, self._since, self._lock = 0, 0.0, threading.Lock()

    def submit(self, call: Call) -> None:
        """Make this call as soon as there is a place for it."""
        future: Future[Outcome | None] = Future()
        limit = self.reward.config.timeout_s * (self.reward.config.retries + 1) + GRACE
        self.calls.append((call, future, time.monotonic() + limit))
        self._began()
        future.add_done_callback(self._ended)
        if self.reward.is_async:
            done = asyncio.run_coroutine_threadsafe(_retried(self.reward, call), _Loop.current())
            done.add_done_callback(lambda told: _pass_on(told, future))
            return
        self.queue.put((call, future))
        if self.threads < max(1, self.reward.config.workers):
            name = f"reward {self.reward.name}"
            threading.Thread(target=self._work, daemon=True, name=name).start()
            self.threads += 1

    def end(self) -> None:
        """No more calls will come; those that wait are made unless the step is lost."""
        for _ in range(self.threads):
            self.queue.put(None)

    def abandon(self) -> None:
        """What has not begun is not done, and what runs is left to itself."""
        self.lost = True
        self.end()

    def outcomes(self) -> list[Outcome]:
        """What came of the calls that were made, all of them done."""
        return [made for _, future, _ in self.calls if (made := future.result()) is not None]

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            call, future = item
            try:
                told = None if self.lost else self._call(call)
            except BaseException as error:  # a bug of ours: shown by result()
                _settle(future, error=error)
            else:
                _settle(future, told)

    def _call(self, call: Call) -> Outcome:
        config = self.reward.config
        for _ in range(config.retries + 1):
            outcome = ask(self.reward, call) if config.workers else _in_a_thread(self.reward, call)
            if not outcome.failures:
                break
        with self._lock:
            self.failed += len(outcome.failures)
            raises = config.on_error == "raise"
            if self.failed and (raises or self.failed > config.max_error_rate * self.rows):
                self.lost = True  # do not wait for every other row to time out as well
        return outcome

    def _began(self) -> None:
        with self._lock:
            self._busy += 1
            if self._busy == 1:
                self._since = time.monotonic()

    def _ended(self, _: Any) -> None:
        with self._lock:
            self._busy -= 1
            if not self._busy:
                self.seconds += time.monotonic() - self._since


def finish(runners: Sequence[Runner], poll: Callable[[], None] | None = None) -> None:
    """Wait until every call is done or given up. `poll` is called meanwhile and may raise."""
    for runner in runners:
        runner.end()
    blocked = False
    waiting = [(r, call, future, late) for r in runners for call, future, late in r.calls]
    while waiting:
        wait([future for _, _, future, _ in waiting], TICK, return_when="FIRST_COMPLETED")
        if poll is not None:
            poll()
        now = time.monotonic()
        for runner, call, future, late in waiting:
            if runner.reward.is_async and now > late and not future.done():
                blocked = True
                _settle(future, _stuck(runner.reward, call))
        waiting = [item for item in waiting if not item[2].done()]
    if blocked:
        _Loop.abandon()
    console.restore_streams()


def _settle(
    future: "Future[Outcome | None]",
    told: Outcome | None = None,
    error: BaseException | None = None,
) -> None:
    """Give a future its result, unless it was given up before."""
    with contextlib.suppress(Exception):  # InvalidStateError: somebody was quicker
        future.set_exception(error) if error is not None else future.set_result(told)


def _pass_on(told: "Future[Outcome]", future: "Future[Outcome | None]") -> None:
    if not told.cancelled():
        error = told.exception()
        _settle(future, None if error else told.result(), error)


# Synchronous rewards


def _in_a_thread(reward: Reward, call: Call) -> Outcome:
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
    return judge(reward, call.rows, returned, log)


async def _await(awaitable: Any) -> Any:
    return await awaitable


# Asynchronous rewards


async def _retried(reward: Reward, call: Call) -> Outcome:
    for _ in range(reward.config.retries + 1):
        outcome = await _on_the_loop(reward, call)
        if not outcome.failures:
            break
    return outcome


async def _on_the_loop(reward: Reward, call: Call) -> Outcome:
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
        return judge(reward, call.rows, failure, log)
    return judge(reward, call.rows, task.result(), log)


def _stuck(reward: Reward, call: Call) -> Outcome:
    """A call on a loop that no longer turns; the frames show who blocks it."""
    failure = timeout(reward, _Loop.thread.ident if _Loop.thread else None)
    why = f"{failure.message}; the event loop is blocked (time.sleep in an async reward?)"
    return judge(reward, call.rows, Failure("timeout", why, failure.frames), Log(0))


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
