"""The child process of `workers`: one reward, called as often as it is asked to.

Argument 1 is the socket to the parent, argument 2 a pipe that ends with it.
"""

import asyncio
import faulthandler
import fcntl
import inspect
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
from typing import Any

from rloo_cli.config import registry
from rloo_cli.rewards.engine.arguments import Log
from rloo_cli.rewards.engine.build import Reward, build, from_callable
from rloo_cli.rewards.engine.process_pool import Gone, receive, send
from rloo_cli.rewards.engine.results import Failure, Outcome, judge, raised


def _end_with_parent(pipe: int) -> None:
    """The kernel ends this process, whatever it does, when the other end of `pipe` is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    look = select.poll()
    look.register(pipe, select.POLLHUP)
    if look.poll(0):  # it was closed before we asked
        os._exit(1)


def _reward(name: str, kind: str, values: dict[str, Any], code: str | None) -> Reward:
    config = registry.config_class("rewards", kind).model_validate(values)
    if code is None:
        return build(name, config)
    return from_callable(name, registry.load_code(code), config)


def _call(reward: Reward, rows: list[int], given: dict[str, Any], logs: list[str]) -> Outcome:
    log = Log(len(rows))
    given |= {"log_extra": log.extra} if "log_extra" in logs else {}
    given |= {"log_metric": log.metric} if "log_metric" in logs else {}
    returned: Any
    try:
        returned = reward.code(**given, **reward.fixed)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await(returned))
    except BaseException as error:
        returned = raised(error)
    outcome = judge(reward, rows, returned, log)
    try:
        pickle.dumps(outcome)
    except Exception as error:  # what it gave log_extra is not plain
        return judge(reward, rows, raised(error), Log(0))
    return outcome


async def _await(awaitable: Any) -> Any:
    return await awaitable


def main() -> None:
    """Answer calls until the parent closes the socket."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    _end_with_parent(int(sys.argv[2]))
    log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this process)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)
    try:
        folder, *named = receive(parent)
        os.chdir(folder)
        reward: Reward | None = None
        failure: Failure | None = None
        try:
            reward = _reward(*named)
        except BaseException as error:
            failure = raised(error)
        send(parent, log.fileno())
        while True:
            rows, given, logs = receive(parent)
            if reward is None:
                assert failure is not None
                failures = dict.fromkeys(range(len(rows)), failure)
                send(parent, Outcome(rows, [None] * len(rows), failures))
            else:
                send(parent, _call(reward, rows, given, logs))
    except (Gone, BrokenPipeError):
        pass


if __name__ == "__main__":
    main()
