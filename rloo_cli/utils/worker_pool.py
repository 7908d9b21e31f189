"""Worker processes that can be killed at any time: for rewards, tools, environments, mathematics.

A pool has one process that forks its workers (worker_process.py), started with the first of them. A
worker answers one message after the other. Its code may block Python's lock, crash, exit or fork:
that fails the call, and the next one gets another worker. Workers end with the run, however it
ends. Their output goes to stderr and the log, labelled.

Messages to a worker are pickled. Its answers are bytes: the caller decides how far to trust them.
"""

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from rloo_cli.utils import child_process
from rloo_cli.utils.message_socket import MessageSocket, PeerGone

START_TIMEOUT_S = 60.0  # the first fork waits for the import of the pool's code
CLOSE_TIMEOUT_S = 2.0  # for the process that forks to kill its workers
IDLE_WAIT_S = 0.1  # wait for another call before forking one more worker
STACK_DUMP_WAIT_S = 0.3  # time for a worker to write its stack
MAX_STACK_CHARACTERS = 4000
_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


class WorkerCode(Protocol):
    """The code of a pool's workers. It is pickled, so its class must be at the top of a module."""

    def prepare(self) -> None:
        """Import shared modules once, in the forking process: no threads."""

    def start(self) -> None:
        """Called in each worker before its first message."""

    def answer(self, message: Any) -> bytes:
        """The answer to a message. An exception ends the worker."""


class WorkerGone(Exception):
    """The worker exited, or sent an invalid answer. Its text says how it ended.

    `exit_code`: negative for a signal; None if unknown.
    """

    def __init__(self, exit_code: int | None):
        self.exit_code = exit_code
        if exit_code is None:
            super().__init__("an unknown exit code")
        else:
            how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
            super().__init__(how)


class Worker:
    """A forked process. `stack`: the file for its stack."""

    def __init__(self, starter: "_Starter", messages: MessageSocket, pid: int, stack: IO[bytes]):
        self.starter, self.messages, self.pid, self.stack = starter, messages, pid, stack
        self.is_gone = False
        self.is_in_call = False  # a message is unanswered

    def request(self, message: object, timeout_s: float, max_bytes: int | None = None) -> bytes:
        """The answer to one message, of at most `max_bytes`.

        Raises WorkerGone; TimeoutError, after which it must be killed; and pickling errors for a
        message that cannot be sent, which leave the worker unchanged.
        """
        deadline = time.monotonic() + timeout_s
        body = pickle.dumps(message)
        self.is_in_call = True
        try:
            self.messages.send(body, deadline)
            answer = self.messages.receive(deadline, max_bytes)
        except PeerGone:
            self._close()
            raise WorkerGone(self.starter.end_worker(self.pid)) from None
        self.is_in_call = False
        return answer

    def current_stack(self) -> str:
        """Its current frames, even if it holds Python's lock; "" if unknown."""
        self.starter.send_packet(f"stack {self.pid}")  # a signal to faulthandler
        time.sleep(STACK_DUMP_WAIT_S)
        self.stack.seek(0)
        return self.stack.read().decode(errors="replace")[-MAX_STACK_CHARACTERS:]

    def kill(self) -> None:
        """Kill it and everything it started, if it is still running."""
        if not self.is_gone:
            self._close()
            self.starter.send_packet(f"kill {self.pid}")

    def _close(self) -> None:
        self.is_gone = True
        self.messages.close()
        self.stack.close()


class _Starter:
    """The process that forks the workers of a pool; it ends with this one."""

    def __init__(self, code: WorkerCode, name: str, log: Path | None):
        self.lock = threading.Lock()  # between a packet and its answer
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start, its_start = MessageSocket.pair()
        its_pipe, self.life_pipe = os.pipe()
        descriptors = (control.fileno(), its_start.fileno(), its_pipe)
        module = "rloo_cli.utils.worker_process"  # -u: what a worker prints shows at once
        self.process = child_process.start_child(
            child_process.python_command("-u", "-m", module, *map(str, descriptors), name),
            env=child_process.package_environment(),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            log=log,
            label="" if log else f"printed by {name}",
        )
        control.close()
        its_start.close()
        os.close(its_pipe)
        self.control.settimeout(START_TIMEOUT_S)
        with start, contextlib.suppress(PeerGone):  # already ended: the first fork reports it
            start.send_pickled((os.getcwd(), code))

    def fork(self) -> Worker:
        """A new worker. Raises OSError."""
        messages, its_socket = MessageSocket.pair()
        stack = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (as long as the worker)
        try:
            with its_socket, self.lock:
                descriptors = [its_socket.fileno(), stack.fileno()]
                socket.send_fds(self.control, [b"fork"], descriptors)
                pid = self.control.recv(64)
            if not pid:
                raise ConnectionError("the process that forks has ended")
        except OSError:
            messages.close()
            stack.close()
            raise
        return Worker(self, messages, int(pid), stack)

    def end_worker(self, pid: int) -> int | None:
        """Kill a worker. -> its own exit code, or that of the kill"""
        try:
            with self.lock:
                self.control.send(f"end {pid}".encode())
                return int(self.control.recv(64))
        except (OSError, ValueError):
            return None

    def send_packet(self, packet: str) -> None:
        """Send a packet without an answer."""
        with contextlib.suppress(OSError):
            self.control.send(packet.encode())

    def close(self) -> None:
        """End it and its workers."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_TIMEOUT_S)
        child_process.stop_child(self.process)
        with contextlib.suppress(OSError):
            os.close(self.life_pipe)


class WorkerPool:
    """The workers of one kind. `keep`: number of idle workers to keep.

    `name`: the owner, such as `a tool`, for the workers' output and for `ps`. `log`: a file for
    their output, instead of stderr and the run's log.
    """

    def __init__(self, code: WorkerCode, name: str, keep: int, log: Path | None = None):
        self.code, self.name, self.keep, self.log = code, name, keep, log
        self.starter: _Starter | None = None
        self.idle: list[Worker] = []
        self.num_running = 0
        self.changed = threading.Condition()
        self.start_lock = threading.Lock()
        _pools.add(self)

    def take_new(self) -> Worker:
        """A fresh worker, which the caller kills. Raises OSError."""
        with self.start_lock:
            try:
                return self._fork()
            except OSError:  # a worker may have killed the forking process
                self._close_starter()
                return self._fork()

    def _fork(self) -> Worker:
        self.starter = self.starter or _Starter(self.code, self.name, self.log)
        return self.starter.fork()

    def start_idle(self) -> None:
        """Start the kept workers in advance, so that the first calls do not wait."""
        for _ in range(self.keep - len(self.idle)):  # concurrent calls may take some
            self.idle.append(self.take_new())

    @contextlib.contextmanager
    def idle_worker(self) -> Iterator[Worker]:
        """A worker for one call, idle or new, kept if it answers. Raises OSError."""
        worker = self._take_idle()
        try:
            yield worker
        finally:
            self._give_back(worker)

    def _take_idle(self) -> Worker:
        """An idle worker or a new one.

        If `keep` workers are busy, it waits briefly for one, then starts one more.
        """
        limit = time.monotonic() + IDLE_WAIT_S
        with self.changed:
            while not self.idle and self.num_running >= self.keep:
                left = limit - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    break
            self.num_running += 1
            while self.idle:
                worker = self.idle.pop()
                if not worker.messages.has_input():
                    return worker
                worker.kill()  # it exited between two calls
        try:
            return self.take_new()
        except BaseException:
            self._give_back(None)
            raise

    def _give_back(self, worker: Worker | None) -> None:
        with self.changed:
            self.num_running -= 1
            self.changed.notify()
            is_usable = worker is not None and not worker.is_gone and not worker.is_in_call
            if worker is not None and is_usable and len(self.idle) < self.keep:
                self.idle.append(worker)
                return
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End every worker."""
        self.idle.clear()
        with self.start_lock:
            self._close_starter()

    def _close_starter(self) -> None:
        if self.starter is not None:
            self.starter.close()
        self.starter = None


@atexit.register
def close_worker_pools() -> None:
    """End the workers of every pool, of all pools at once."""
    threads = [threading.Thread(target=pool.close) for pool in list(_pools)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_TIMEOUT_S)
