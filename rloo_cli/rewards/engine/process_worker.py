"""The child process of a reward with `workers`: it answers one call after the other.

Argument 1 is the socket to the parent; argument 2 is a pipe that closes when the parent ends.
"""

import asyncio
import faulthandler
import inspect
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable
from typing import cast

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardConfig
from rloo_cli.rewards.engine.arguments import RewardCallLog, copy_fixed_arguments
from rloo_cli.rewards.engine.build import Reward, build_reward, reward_from_callable
from rloo_cli.rewards.engine.results import (
    CallFailure,
    CallResult,
    failure_of_error,
    to_call_result,
)
from rloo_cli.utils.child_process import end_with_pipe
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.message_socket import PeerGone, receive_pickled, send_pickled


def _build_worker_reward(
    name: str, reward_type: str, config_values: JsonObject, import_name: str | None
) -> Reward:
    config_class = cast("type[RewardConfig]", registry.config_class("rewards", reward_type))
    config = config_class.model_validate(config_values)
    if import_name is None:
        return build_reward(name, config)
    return reward_from_callable(name, registry.load_code(import_name), config)


def _call_reward(
    reward: Reward, indices: list[int], arguments: dict[str, object], log_arguments: list[str]
) -> CallResult:
    log = RewardCallLog(len(indices))
    arguments |= {"log_extra": log.log_extra} if "log_extra" in log_arguments else {}
    arguments |= {"log_metric": log.log_metric} if "log_metric" in log_arguments else {}
    returned: object
    try:
        returned = reward.code(**arguments, **copy_fixed_arguments(reward.fixed_arguments))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await_result(returned))
    except BaseException as error:
        returned = failure_of_error(error)
    outcome = to_call_result(reward, indices, returned, log)
    try:
        pickle.dumps(outcome)
    except Exception as error:  # it passed an object to log_extra that cannot be pickled
        return to_call_result(reward, indices, failure_of_error(error), RewardCallLog(0))
    return outcome


async def _await_result(awaitable: Awaitable[object]) -> object:
    return await awaitable


def main() -> None:
    """Answer calls until the parent closes the socket."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    end_with_pipe(int(sys.argv[2]))
    log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this process)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)
    try:
        folder, *build_arguments = receive_pickled(parent)
        os.chdir(folder)
        reward: Reward | None = None
        failure: CallFailure | None = None
        try:
            reward = _build_worker_reward(*build_arguments)
        except BaseException as error:
            failure = failure_of_error(error)
        send_pickled(parent, log.fileno())
        while True:
            indices, arguments, log_arguments = receive_pickled(parent)
            if reward is None:
                assert failure is not None
                failures = dict.fromkeys(range(len(indices)), failure)
                send_pickled(parent, CallResult(indices, [None] * len(indices), failures))
            else:
                send_pickled(parent, _call_reward(reward, indices, arguments, log_arguments))
    except (PeerGone, BrokenPipeError):
        pass


if __name__ == "__main__":
    main()
