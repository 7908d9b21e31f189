"""Runs rewards in processes of their own: `reward.<name>.workers`.

A child holds one reward and answers one call after the other. It may be killed: code that never
releases Python's lock, `os._exit`, or a crash in a C library costs that call and nothing else. The
next call gets a new child. Messages are pickled and go over a socket that only parent and child
have; the code in the child is the user's own, as it is in a thread. Children end with the parent,
however it ends: the kernel signals them when the other end of a pipe that only it holds is closed.
"""

import atexit
import contextlib
import os
import pickle
import signal
import socket
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
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.message_socket import PeerGone, receive_pickled, send_pickled

LOG_ARGUMENTS = ("log_extra", "log_metric")  # methods of the log; the child makes a log itself
STACK_DUMP_WAIT_S = 0.3  # seconds that a child which is late gets to write its stack
PYTHON_PREFIX = "python:"  # the path of a callable that came from Python (api)
_all_workers: set["RewardWorker"] = set()


class RewardWorker:
    """A child process with one reward. Creating it starts the child without waiting for it."""

    def __init__(self, reward: Reward):
        self.socket, child_socket = socket.socketpair()
        child_pipe, self.life_pipe = os.pipe()  # the child's end sees when this process ends
        descriptors = (child_socket.fileno(), child_pipe)
        module = "rloo_cli.rewards.engine.process_worker"  # -u: what it prints shows at once
        command = child_process.python_command("-u", "-m", module, *map(str, descriptors))
        self.process = child_process.start_child(
            command,
            env=child_process.package_environment(),
            stdin=subprocess.DEVNULL,
            label=f"printed by reward {reward.name}",
            pass_fds=descriptors,
        )
        child_socket.close()
        os.close(child_pipe)
        self.stack_dump_fd: int | None = None  # file of the child's stack; None until it is ready
        _all_workers.add(self)
        with contextlib.suppress(OSError):  # it has ended already: the first call reports it
            send_pickled(self.socket, (os.getcwd(), *_worker_reward_spec(reward)))

    def request(self, message: object, timeout_s: float) -> CallResult:
        """The child's result of one call. Raises PeerGone, TimeoutError."""
        limit = time.monotonic() + timeout_s
        if self.stack_dump_fd is None:
            self.stack_dump_fd = int(self._receive_until(limit))
        self.socket.settimeout(max(0.01, limit - time.monotonic()))
        try:
            send_pickled(self.socket, message)
        except (ConnectionError, TimeoutError):
            raise PeerGone from None
        result: CallResult = self._receive_until(limit)
        return result

    def _receive_until(self, deadline: float) -> Any:
        self.socket.settimeout(max(0.01, deadline - time.monotonic()))
        return receive_pickled(self.socket)

    def current_stack(self) -> str:
        """The frames that the child is in now, even if it holds Python's lock; "" if unknown."""
        if self.stack_dump_fd is None:  # it still starts, and the signal would end it
            return ""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)  # to faulthandler in the child
            time.sleep(STACK_DUMP_WAIT_S)
            log = Path(f"/proc/{self.process.pid}/fd/{self.stack_dump_fd}")
            return log.read_text(errors="replace")[-4000:]
        return ""

    def kill(self) -> int:
        """Kill the child and whatever it started. Returns its exit status."""
        _all_workers.discard(self)
        code = child_process.stop_child(self.process)
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.life_pipe)
        return code


def start_reward_workers(rewards: Sequence[Reward]) -> None:
    """Start the workers of all rewards, so that the first step does not wait for them.

    Raises ConfigError for a function that another process could not import.
    """
    for reward in rewards:
        for _ in range(reward.config.workers - len(reward.idle_workers)):
            reward.idle_workers.append(RewardWorker(reward))


def call_in_worker(reward: Reward, call: RewardCall) -> CallResult:
    """Make one call in a worker, and return its result, even if its process ended in the call."""
    arguments, log = call.make_arguments()
    logs = [name for name in LOG_ARGUMENTS if name in arguments]
    left_out = {*LOG_ARGUMENTS, *reward.fixed_arguments}  # the child has these itself
    sent = {name: value for name, value in arguments.items() if name not in left_out}
    worker = _take_idle_worker(reward)
    try:
        result = worker.request((call.indices, sent, logs), reward.config.timeout_s)
    except TimeoutError:
        frames = worker.current_stack()
        worker.kill()
        why = f"no answer within timeout_s = {reward.config.timeout_s:g} s; its process is killed"
        return to_call_result(reward, call.indices, CallFailure("timeout", why, frames), log)
    except PeerGone:
        code = worker.kill()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"its worker process ended in the call, with {how} (a reward may not end it)"
        return to_call_result(reward, call.indices, CallFailure("exception", why), log)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # of an odd column
        worker.kill()
        return to_call_result(reward, call.indices, failure_of_error(error), log)
    reward.idle_workers.append(worker)
    return result


def _take_idle_worker(reward: Reward) -> RewardWorker:
    """An idle worker, or a new one. Several threads may pop from a list at once."""
    while True:
        try:
            worker: RewardWorker = reward.idle_workers.pop()
        except IndexError:
            return RewardWorker(reward)
        if worker.process.poll() is None or worker.stack_dump_fd is None:
            return worker
        worker.kill()  # it ended between two calls


def _worker_reward_spec(reward: Reward) -> tuple[str, str, JsonObject, str | None]:
    """The reward's name, type, config, and the import name of a callable given from Python."""
    config, path = reward.config, getattr(reward.config, "path", PYTHON_PREFIX)
    from_python = config.type == "function" and path.startswith(PYTHON_PREFIX)
    import_name = _importable_name(reward) if from_python else None
    return reward.name, config.type, config.model_dump(), import_name


def _importable_name(reward: Reward) -> str:
    """`module:name` of a callable that was given from Python."""
    where, name = getattr(reward.code, "__module__", ""), getattr(reward.code, "__qualname__", "")
    spec = f"{where}:{name}"
    with contextlib.suppress(Exception):
        if where != "__main__" and registry.load_code(spec) is reward.code:
            return spec
    what = f"reward {reward.name!r} cannot be sent to a worker process"
    why = f"{reward.location} is not a function at the top of a module that can be imported"
    fix = "put it in a file and name it by reward.NAME.path=file.py:name, or workers=0"
    raise ConfigError(Problem(what, f"reward.{reward.name}.workers", why, fix))


@atexit.register
def stop_reward_workers() -> None:
    """End every worker, all at once, waiting at most 5 s for each."""
    threads = [threading.Thread(target=worker.kill) for worker in list(_all_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
