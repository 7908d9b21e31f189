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
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_cli.config import registry
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import Call, Failure, Outcome, judge, raised
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem

LENGTH = struct.Struct("!Q")
LOGS = ("log_extra", "log_metric")  # methods of a Log, which the child has one of its own of
LOOK_S = 0.3  # seconds a child that is late gets to say where it is
PYTHON = "python:"  # the path of a callable that came from Python (api)
_all: set["Worker"] = set()


class Gone(Exception):
    """The child ended."""


def send(to: socket.socket, thing: Any) -> None:
    """One pickled message."""
    body = pickle.dumps(thing)
    to.sendall(LENGTH.pack(len(body)) + body)


def receive(of: socket.socket) -> Any:
    """The next message. Raises Gone when the other side has closed, TimeoutError."""
    return pickle.loads(_bytes(of, LENGTH.unpack(_bytes(of, LENGTH.size))[0]))


def _bytes(of: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = of.recv(min(count, 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise Gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Worker:
    """One child with one reward, started but not waited for."""

    def __init__(self, reward: Reward):
        self.socket, theirs = socket.socketpair()
        life, self.life = os.pipe()  # its reading end is told when we are gone
        given = (theirs.fileno(), life)
        root = str(paths.PACKAGE.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            # -P: no file in the current folder can pass for a package; -u: what is printed shows.
            [
                sys.executable,
                "-uP",
                "-m",
                "rloo_cli.rewards.engine.process_worker",
                *map(str, given),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward prints is not for a panel
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=given,
            start_new_session=True,  # a Ctrl-C is ours to handle
        )
        theirs.close()
        os.close(life)
        self.log: int | None = None  # the child's file for `where_it_is`, once it is ready
        _all.add(self)
        with contextlib.suppress(OSError):  # it is gone already: the first call says so
            send(self.socket, (os.getcwd(), *_named(reward)))

    def ask(self, message: Any, seconds: float) -> Any:
        """Its answer to one call. Raises Gone, TimeoutError."""
        limit = time.monotonic() + seconds
        if self.log is None:
            self.log = int(self._wait(limit))
        self.socket.settimeout(max(0.01, limit - time.monotonic()))
        try:
            send(self.socket, message)
        except (ConnectionError, TimeoutError):
            raise Gone from None
        return self._wait(limit)

    def _wait(self, limit: float) -> Any:
        self.socket.settimeout(max(0.01, limit - time.monotonic()))
        return receive(self.socket)

    def where_it_is(self) -> str:
        """The frames of what it does now, from outside of Python's lock; "" if it cannot say."""
        if self.log is None:  # it still starts, and would not survive the question
            return ""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)  # faulthandler's, in the child
            time.sleep(LOOK_S)
            log = Path(f"/proc/{self.process.pid}/fd/{self.log}")
            return log.read_text(errors="replace")[-4000:]
        return ""

    def end(self) -> int:
        """Kill it and whatever it started; its exit status."""
        _all.discard(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.life)
        return code


def start(rewards: Sequence[Reward]) -> None:
    """Start every worker that rewards ask for, so that the first step does not wait for them.

    Raises ConfigError for a function that no other process could find again.
    """
    for reward in rewards:
        for _ in range(reward.config.workers - len(reward.idle)):
            reward.idle.append(Worker(reward))


def ask(reward: Reward, call: Call) -> Outcome:
    """Make one call in a worker: what came of it, whatever it did to its process."""
    arguments, log = call.make()
    logs = [name for name in LOGS if name in arguments]
    plain = {k: v for k, v in arguments.items() if k not in LOGS and k not in reward.fixed}
    worker = _idle(reward)
    try:
        told = worker.ask((call.rows, plain, logs), reward.config.timeout_s)
    except TimeoutError:
        frames = worker.where_it_is()
        worker.end()
        why = f"no answer within timeout_s = {reward.config.timeout_s:g} s; its process is killed"
        return judge(reward, call.rows, Failure("timeout", why, frames), log)
    except Gone:
        code = worker.end()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"its worker process ended in the call, with {how} (a reward may not end it)"
        return judge(reward, call.rows, Failure("exception", why), log)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a column of odd things
        worker.end()
        return judge(reward, call.rows, raised(error), log)
    reward.idle.append(worker)
    outcome: Outcome = told
    return outcome


def _idle(reward: Reward) -> Worker:
    """A worker that waits, or a new one. Lists are safe to pop from several threads."""
    while True:
        try:
            worker: Worker = reward.idle.pop()
        except IndexError:
            return Worker(reward)
        if worker.process.poll() is None or worker.log is None:
            return worker
        worker.end()  # it ended between two calls


def _named(reward: Reward) -> tuple[str, str, dict[str, Any], str | None]:
    """What a child makes the reward from again: name, type, config, and a callable's name."""
    config = reward.config
    named = config.type != "function" or not getattr(config, "path", PYTHON).startswith(PYTHON)
    code = None if named else _found_again(reward)
    return reward.name, config.type, config.model_dump(), code


def _found_again(reward: Reward) -> str:
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
def stop() -> None:
    """End every worker."""
    ended = [threading.Thread(target=worker.end) for worker in list(_all)]
    for thread in ended:
        thread.start()
    for thread in ended:
        thread.join(5.0)
