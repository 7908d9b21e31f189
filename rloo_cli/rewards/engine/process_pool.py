"""Rewards in processes of their own: `reward.<name>.workers`.

A child holds one reward and answers one call after the other. It may be killed: code that never
lets Python's lock go, `os._exit`, a crash in a C library cost that call and nothing else. The
next call gets a new child. What goes to and fro is pickled, over a socket that only the two have;
the code in the child is the user's own, as it is in a thread. Children end with us, however we
end: the kernel signals them when the other end of a pipe that only we hold is gone.
"""

import atexit
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_cli.config import registry
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import (
    CallFailure,
    CallResult,
    RewardCall,
    failure_of_error,
    to_call_result,
)
from rloo_cli.utils.child_process import (
    package_environment,
    python_command,
    start_child,
    stop_child,
)
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

LENGTH_HEADER = struct.Struct("!Q")
LOG_ARGUMENTS = (
    "log_extra",
    "log_metric",
)  # methods of a Log, which the child has one of its own of
STACK_DUMP_WAIT_S = 0.3  # seconds a child that is late gets to say where it is
PYTHON_PREFIX = "python:"  # the path of a callable that came from Python (api)
_all_workers: set["RewardWorker"] = set()


class WorkerGone(Exception):
    """The child ended."""


def send_pickled(connection: socket.socket, message: Any) -> None:
    """One pickled message."""
    body = pickle.dumps(message)
    connection.sendall(LENGTH_HEADER.pack(len(body)) + body)


def receive_pickled(connection: socket.socket) -> Any:
    """The next message. Raises Gone when the other side has closed, TimeoutError."""
    return pickle.loads(
        _receive_bytes(
            connection, LENGTH_HEADER.unpack(_receive_bytes(connection, LENGTH_HEADER.size))[0]
        )
    )


def _receive_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        try:
            part = connection.recv(min(num_bytes, 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise WorkerGone
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


class RewardWorker:
    """One child with one reward, started but not waited for."""

    def __init__(self, reward: Reward):
        self.socket, theirs = socket.socketpair()
        life, self.life_pipe = os.pipe()  # its reading end is told when we are gone
        given = (theirs.fileno(), life)
        worker = "rloo_cli.rewards.engine.process_worker"
        self.process = start_child(
            python_command("-u", "-m", worker, *map(str, given)),  # -u: what is printed shows
            env=package_environment(),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward prints is not for a panel
            pass_fds=given,
        )
        theirs.close()
        os.close(life)
        self.stack_dump_fd: int | None = (
            None  # the child's file for `where_it_is`, once it is ready
        )
        _all_workers.add(self)
        with contextlib.suppress(OSError):  # it is gone already: the first call says so
            send_pickled(self.socket, (os.getcwd(), *_worker_reward_spec(reward)))

    def request(self, message: Any, timeout_s: float) -> Any:
        """Its answer to one call. Raises Gone, TimeoutError."""
        limit = time.monotonic() + timeout_s
        if self.stack_dump_fd is None:
            self.stack_dump_fd = int(self._receive_until(limit))
        self.socket.settimeout(max(0.01, limit - time.monotonic()))
        try:
            send_pickled(self.socket, message)
        except (ConnectionError, TimeoutError):
            raise WorkerGone from None
        return self._receive_until(limit)

    def _receive_until(self, deadline: float) -> Any:
        self.socket.settimeout(max(0.01, deadline - time.monotonic()))
        return receive_pickled(self.socket)

    def current_stack(self) -> str:
        """The frames of what it does now, from outside of Python's lock; "" if it cannot say."""
        if self.stack_dump_fd is None:  # it still starts, and would not survive the question
            return ""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)  # faulthandler's, in the child
            time.sleep(STACK_DUMP_WAIT_S)
            log = Path(f"/proc/{self.process.pid}/fd/{self.stack_dump_fd}")
            return log.read_text(errors="replace")[-4000:]
        return ""

    def kill(self) -> int:
        """Kill it and whatever it started; its exit status."""
        _all_workers.discard(self)
        code = stop_child(self.process)
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.life_pipe)
        return code


def start_reward_workers(rewards: Sequence[Reward]) -> None:
    """Start every worker that rewards ask for, so that the first step does not wait for them.

    Raises ConfigError for a function that no other process could find again.
    """
    for reward in rewards:
        for _ in range(reward.config.workers - len(reward.idle_workers)):
            reward.idle_workers.append(RewardWorker(reward))


def call_in_worker(reward: Reward, call: RewardCall) -> CallResult:
    """Make one call in a worker: what came of it, whatever it did to its process."""
    arguments, log = call.make_arguments()
    logs = [name for name in LOG_ARGUMENTS if name in arguments]
    plain = {
        k: v
        for k, v in arguments.items()
        if k not in LOG_ARGUMENTS and k not in reward.fixed_arguments
    }
    worker = _take_idle_worker(reward)
    try:
        told = worker.request((call.indices, plain, logs), reward.config.timeout_s)
    except TimeoutError:
        frames = worker.current_stack()
        worker.kill()
        why = f"no answer within timeout_s = {reward.config.timeout_s:g} s; its process is killed"
        return to_call_result(reward, call.indices, CallFailure("timeout", why, frames), log)
    except WorkerGone:
        code = worker.kill()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"its worker process ended in the call, with {how} (a reward may not end it)"
        return to_call_result(reward, call.indices, CallFailure("exception", why), log)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a column of odd things
        worker.kill()
        return to_call_result(reward, call.indices, failure_of_error(error), log)
    reward.idle_workers.append(worker)
    outcome: CallResult = told
    return outcome


def _take_idle_worker(reward: Reward) -> RewardWorker:
    """A worker that waits, or a new one. Lists are safe to pop from several threads."""
    while True:
        try:
            worker: RewardWorker = reward.idle_workers.pop()
        except IndexError:
            return RewardWorker(reward)
        if worker.process.poll() is None or worker.stack_dump_fd is None:
            return worker
        worker.kill()  # it ended between two calls


def _worker_reward_spec(reward: Reward) -> tuple[str, str, JsonObject, str | None]:
    """What a child makes the reward from again: name, type, config, and a callable's name."""
    config = reward.config
    named = config.type != "function" or not getattr(config, "path", PYTHON_PREFIX).startswith(
        PYTHON_PREFIX
    )
    code = None if named else _importable_name(reward)
    return reward.name, config.type, config.model_dump(), code


def _importable_name(reward: Reward) -> str:
    """`module:name` of a callable that was given from Python."""
    where, name = getattr(reward.code, "__module__", ""), getattr(reward.code, "__qualname__", "")
    spec = f"{where}:{name}"
    with contextlib.suppress(Exception):
        if where != "__main__" and registry.load_code(spec) is reward.code:
            return spec
    raise ConfigError(
        Problem(
            f"reward {reward.name!r} cannot be sent to a worker process",
            f"reward.{reward.name}.workers",
            f"{reward.location} is no function at the top of a module that can be imported",
            "put it in a file and name it by reward.NAME.path=file.py:name, or workers=0",
        )
    )


@atexit.register
def stop_reward_workers() -> None:
    """End every worker."""
    ended = [threading.Thread(target=worker.kill) for worker in list(_all_workers)]
    for thread in ended:
        thread.start()
    for thread in ended:
        thread.join(5.0)
