"""Where tools and environments run: worker processes, or threads with agent.workers=0.

A function's call takes any idle worker. An environment has its own worker, from `reset` to
the end of its episode. A worker that times out or exits is killed with all that it started.
"""

import json
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from rloo_cli.agents.common.tool_worker import ToolWorker
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.main_thread_calls import note_main_thread_calls
from rloo_cli.utils.worker_pool import Worker, WorkerGone, WorkerPool

MAX_ANSWER_BYTES = 64 << 20


class ToolGone(Exception):
    """The tool's process exited, or was killed; the text says why, for logs."""


class ToolCaller(Protocol):
    """Answers the messages of `ToolWorker`."""

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer. Raises ToolGone: the worker can answer no more."""

    def kill(self) -> None:
        """End it."""


class ToolProcess:
    """A worker process of tools."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer to one message."""
        try:
            answer = json.loads(self.worker.request(message, timeout_s, MAX_ANSWER_BYTES))
            if isinstance(answer, dict):
                return answer
            why = "unexpected response format from its process"
        except TimeoutError:
            why = f"no answer within {timeout_s:g} s (agent.max_tool_s); its process is killed"
        except (WorkerGone, ValueError):
            why = "its process exited during the call"
        self.kill()
        raise ToolGone(why)

    def kill(self) -> None:
        """Kill it and everything that it started."""
        self.worker.kill()


class ToolThread:
    """Answers in a thread of this process. A late thread is abandoned: it cannot be killed."""

    def __init__(self) -> None:
        self.worker = ToolWorker(seeds=False)  # tools must not touch the run's random state

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer to one message."""
        answers: SimpleQueue[tuple[JsonObject, list[str]]] = SimpleQueue()

        def work() -> None:
            with note_main_thread_calls() as noted:
                answer = self.worker.answer_object(message)
            answers.put((answer, noted))

        threading.Thread(target=work, daemon=True).start()
        try:
            answer, noted = answers.get(timeout=timeout_s)
        except Empty:
            raise ToolGone(f"no answer within {timeout_s:g} s (agent.max_tool_s)") from None
        if noted:
            what = f"a tool called {noted[0]}, which works only in the main thread"
            raise GenerationError(f"{what}; agent.workers=1 runs tools in processes")
        return answer

    def kill(self) -> None:
        """Do nothing."""


class ToolProcesses:
    """All tool processes of a run. `keep`: idle ones to keep; 0 = threads of this process."""

    def __init__(self, specs: Sequence[str], keep: int):
        self.keep = keep
        self.pool = WorkerPool(ToolWorker(list(specs)), "a tool", keep)

    def take_new(self) -> ToolCaller:
        """An unused process, for an environment. Raises GenerationError."""
        if not self.keep:
            return ToolThread()
        try:
            return ToolProcess(self.pool.take_new())
        except OSError as error:
            raise _not_started(error) from None

    def call_function(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer of any idle process. Raises ToolGone, GenerationError."""
        if not self.keep:
            return ToolThread().request(message, timeout_s)
        try:
            with self.pool.idle_worker() as worker:
                return ToolProcess(worker).request(message, timeout_s)
        except OSError as error:
            raise _not_started(error) from None

    def close(self) -> None:
        """End every process."""
        self.pool.close()


def _not_started(error: OSError) -> GenerationError:
    fix = "agent.workers=0 runs them in threads"
    return GenerationError(f"cannot start a tool process: {error}; {fix}")
