"""The run's side of tool processes: they are forked when one is needed, have deadlines, are killed.

A function's call takes any process that is idle. An environment has one of its own, from `reset` to
the end of its episode. A process that is late or gone is killed with everything that it started.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from rloo_cli.agents.processes.worker import ToolWorker
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.main_thread_calls import note_main_thread_calls
from rloo_cli.utils.message_socket import PeerGone, receive_json, send_pickled

MAX_ANSWER_BYTES = 64 << 20
FORK_TIMEOUT_S = 60.0  # the first fork waits until the user's code is imported
IDLE_WAIT_S = 0.1  # for another call to end, before one process more is forked
_pools: "weakref.WeakSet[ToolPool]" = weakref.WeakSet()


class ToolGone(Exception):
    """The process ended, or was killed; its text says why, in words for a log."""


class ToolCaller(Protocol):
    """Something that answers messages (`worker.ToolWorker`)."""

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer. Raises ToolGone: nothing can be asked any more."""

    def kill(self) -> None:
        """End it."""


class ToolProcess:
    """A process that the nursery forked."""

    def __init__(self, connection: socket.socket, pid: int, kill_pid: Callable[[int], None]):
        self.connection, self.pid, self.kill_pid = connection, pid, kill_pid

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer to one message."""
        try:
            self.connection.settimeout(timeout_s)
            send_pickled(self.connection, message)
            answer = receive_json(self.connection, MAX_ANSWER_BYTES)
            if isinstance(answer, dict):
                return answer
            why = "its process answered in another form"
        except TimeoutError:
            why = f"no answer within {timeout_s:g} s (agent.max_tool_s); its process is killed"
        except (PeerGone, OSError):
            why = "its process ended in the call"
        self.kill()
        raise ToolGone(why)

    def kill(self) -> None:
        """Kill it and whatever it started."""
        self.connection.close()
        self.kill_pid(self.pid)


class ToolThread:
    """Answers in a thread of this process. One that is late is left behind: nothing can end it."""

    def __init__(self) -> None:
        self.worker = ToolWorker(seeds=False)  # the run's own random state is not a tool's

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer to one message."""
        answers: SimpleQueue[tuple[JsonObject, list[str]]] = SimpleQueue()

        def work() -> None:
            with note_main_thread_calls() as noted:
                answer = self.worker.answer(message)
            answers.put((answer, noted))

        threading.Thread(target=work, daemon=True).start()
        try:
            answer, noted = answers.get(timeout=timeout_s)
        except Empty:
            raise ToolGone(f"no answer within {timeout_s:g} s (agent.max_tool_s)") from None
        if noted:
            what = f"a tool called {noted[0]}, which works in a main thread only"
            why = "agent.workers=0 runs tools in threads of the run's process"
            raise GenerationError(Problem(what, "agent.workers", why, "agent.workers=1"))
        return answer

    def kill(self) -> None:
        """Do nothing."""


class Nursery:
    """The process that forks; it ends with this one."""

    def __init__(self, specs: Sequence[str]):
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start, its_start = socket.socketpair()
        its_pipe, self.life_pipe = os.pipe()
        descriptors = (control.fileno(), its_start.fileno(), its_pipe)
        module = "rloo_cli.agents.processes.nursery"
        command = child_process.python_command("-u", "-m", module, *map(str, descriptors))
        self.process = child_process.start_child(
            command,
            env=child_process.package_environment(),
            stdin=subprocess.DEVNULL,
            label="printed by a tool",
            pass_fds=descriptors,
        )
        control.close()
        its_start.close()
        os.close(its_pipe)
        self.control.settimeout(FORK_TIMEOUT_S)
        with contextlib.suppress(OSError):  # it has ended already: the first fork says so
            send_pickled(start, (os.getcwd(), list(specs)))
        start.close()

    def fork(self) -> ToolProcess:
        """A new process. Raises OSError."""
        ours, its = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"fork"], [its.fileno()])
            pid = self.control.recv(64)
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        if not pid:
            ours.close()
            raise ConnectionError("the process that forks has ended")
        return ToolProcess(ours, int(pid), self.kill_pid)

    def kill_pid(self, pid: int) -> None:
        """Have a fork killed, if it still runs."""
        with contextlib.suppress(OSError):
            self.control.send(f"kill {pid}".encode())

    def close(self) -> None:
        """End it, and with it all that it forked."""
        self.control.close()
        child_process.stop_child(self.process)
        with contextlib.suppress(OSError):
            os.close(self.life_pipe)


class ToolPool:
    """All tool processes of a run. `keep`: idle ones that are kept; 0 = threads of this process."""

    def __init__(self, specs: Sequence[str], keep: int):
        self.specs, self.keep = list(specs), keep
        self.nursery: Nursery | None = None
        self.idle: list[ToolCaller] = []
        self.running = 0
        self.changed = threading.Condition()
        self.fork_lock = threading.Lock()
        _pools.add(self)

    def take_new(self) -> ToolCaller:
        """A process that nobody used, for an environment. Raises GenerationError."""
        if not self.keep:
            return ToolThread()
        with self.fork_lock:
            for _ in range(2):  # a tool may have killed the process that forks
                try:
                    self.nursery = self.nursery or Nursery(self.specs)
                    return self.nursery.fork()
                except (OSError, ValueError) as error:
                    failure = error
                    if self.nursery is not None:
                        self.nursery.close()
                    self.nursery = None
        what, why = "no process for a tool could be started", str(failure)
        raise GenerationError(Problem(what, "agent.workers", why, "agent.workers=0 for threads"))

    def take_idle(self) -> ToolCaller:
        """A process for one call of a function; one more than `keep` where those are slow."""
        limit = time.monotonic() + IDLE_WAIT_S
        with self.changed:
            while not self.idle and self.running >= self.keep > 0:
                left = limit - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    break
            self.running += 1
            if self.idle:
                return self.idle.pop()
        try:
            return self.take_new()
        except BaseException:
            self._count_down()
            raise

    def give_back(self, caller: ToolCaller | None) -> None:
        """Return what `take_idle` gave; None where it is gone."""
        kept = caller is not None and bool(self.keep) and len(self.idle) < self.keep
        if kept and caller is not None:
            self.idle.append(caller)
        elif caller is not None:
            caller.kill()
        self._count_down()

    def _count_down(self) -> None:
        with self.changed:
            self.running -= 1
            self.changed.notify()

    def close(self) -> None:
        """End every process."""
        self.idle.clear()
        with self.fork_lock:
            if self.nursery is not None:
                self.nursery.close()
            self.nursery = None


@atexit.register
def close_tool_pools() -> None:
    """End the tool processes of every pool."""
    for pool in list(_pools):
        pool.close()
