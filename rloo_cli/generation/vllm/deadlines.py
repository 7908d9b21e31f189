"""Waits for another process: every wait has a name and a limit, and checks for signals."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.utils import signals
from rloo_cli.utils.device_waits import current_gpu, use_gpu

T = TypeVar("T")
DEADLINE_POLL_S = 0.1


def run_with_deadline(limit_s: float, what: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread for at most `limit_s` seconds, then raise EngineLost. Raises Stopped.

    A thread that is stuck is then abandoned: it does not keep the process alive.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    gpu = current_gpu()

    def run() -> None:
        try:
            use_gpu(gpu)  # a new thread starts with GPU 0, whichever rank this is
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name=what)
    thread.start()
    end = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < end:
        signals.raise_if_stopped()
        thread.join(DEADLINE_POLL_S)
    if failed:
        raise failed[0]
    if not found:
        raise EngineLost(f"{what}: not finished after {limit_s:g} s")
    return found[0]


def poll_until_ready(
    limit_s: float, what: str, poll: Callable[[], T | None], every_s: float = 0.25
) -> T:
    """Call `poll` until it returns something. Raises EngineLost at the limit, Stopped."""
    end = time.monotonic() + limit_s
    while (value := poll()) is None:
        signals.raise_if_stopped()
        if time.monotonic() > end:
            raise EngineLost(f"{what}: not within {limit_s:g} s")
        time.sleep(every_s)
    return value


class BackgroundCall:
    """A call on its own thread, which never keeps the process alive."""

    def __init__(self, work: Any):
        self.error: BaseException | None = None
        self.gpu = current_gpu()
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Any) -> None:
        try:
            use_gpu(self.gpu)
            work()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        """Wait for the call; raises what it raised."""
        self.thread.join()
        if self.error is not None:
            raise self.error
