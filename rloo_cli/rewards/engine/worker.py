"""Builds a reward in a worker process, and answers one call after another."""

import asyncio
import inspect
import pickle
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
from rloo_cli.utils.files import JsonObject

LOG_ARGUMENTS = ("log_extra", "log_metric")  # methods of the log; the worker has its own log


class RewardWorkerCode:
    """The reward of a worker. `import_name`: of a callable that was given from Python."""

    def __init__(self, name: str, reward_type: str, values: JsonObject, import_name: str | None):
        self.name, self.reward_type, self.values = name, reward_type, values
        self.import_name = import_name
        self.reward: Reward | None = None
        self.failure: CallFailure | None = None  # why it could not be built

    def prepare(self) -> None:
        """Import no user code: it may start threads, which a fork loses."""

    def start(self) -> None:
        """Build the reward, and keep an error for the first call."""
        try:
            self.reward = self._build_reward()
        except BaseException as error:
            self.failure = failure_of_error(error)

    def answer(self, message: tuple[list[int], dict[str, object], list[str]]) -> bytes:
        """The pickled CallResult of a call's indices, arguments and arguments of its log."""
        indices, arguments, log_arguments = message
        if self.reward is None:
            assert self.failure is not None
            failures = dict.fromkeys(range(len(indices)), self.failure)
            return pickle.dumps(CallResult(indices, [None] * len(indices), failures))
        result = _call_reward(self.reward, indices, arguments, log_arguments)
        try:
            return pickle.dumps(result)
        except Exception as error:  # log_extra got an object that cannot be pickled
            failure = failure_of_error(error)
            return pickle.dumps(to_call_result(self.reward, indices, failure, RewardCallLog(0)))

    def _build_reward(self) -> Reward:
        config_class = cast(
            "type[RewardConfig]", registry.config_class("rewards", self.reward_type)
        )
        config = config_class.model_validate(self.values)
        if self.import_name is None:
            return build_reward(self.name, config)
        return reward_from_callable(self.name, registry.load_code(self.import_name), config)


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
    return to_call_result(reward, indices, returned, log)


async def _await_result(awaitable: Awaitable[object]) -> object:
    return await awaitable
