"""Makes calls of rewards in worker processes: `reward.<name>.workers`.

A worker has one reward and answers one call after the other. It may be killed: code that never
releases Python's lock, `os._exit`, or a crash in a C library costs only that call. The
worker runs the user's own code, as a thread would, so its answers may be pickled.
"""

import contextlib
import pickle
import threading
from collections.abc import Sequence

from rloo_cli.config import registry
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import (
    CallFailure,
    CallResult,
    RewardCall,
    failure_of_error,
    to_call_result,
)
from rloo_cli.rewards.engine.worker import LOG_ARGUMENTS, RewardWorkerCode
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.worker_pool import WorkerGone, WorkerPool

PYTHON_PREFIX = "python:"  # the path of a callable that came from Python (api)


def start_reward_workers(rewards: Sequence[Reward]) -> None:
    """Start the workers of all rewards, so that the first step does not wait for them.

    Raises ConfigError for a function that another process cannot import.
    """
    for reward in rewards:
        if reward.config.workers and not reward.pools:
            start = reward_worker_pool(reward).start_idle
            threading.Thread(target=start, daemon=True, name=f"workers of {reward.name}").start()


def reward_worker_pool(reward: Reward) -> WorkerPool:
    """The reward's pool, made at the first call. Raises ConfigError."""
    if not reward.pools:
        code, name = _worker_code(reward), f"reward {reward.name}"
        reward.pools.append(WorkerPool(code, name, reward.config.workers))
    return reward.pools[0]


def call_in_worker(reward: Reward, call: RewardCall) -> CallResult:
    """Make one call in a worker, and return its result, even if its process exits during it."""
    arguments, log = call.make_arguments()
    logs = [name for name in LOG_ARGUMENTS if name in arguments]
    left_out = {*LOG_ARGUMENTS, *reward.fixed_arguments}  # the worker has these itself
    sent = {name: value for name, value in arguments.items() if name not in left_out}
    try:
        with reward_worker_pool(reward).idle_worker() as worker:
            try:
                answer = worker.request((call.indices, sent, logs), reward.config.timeout_s)
            except TimeoutError:
                frames = worker.current_stack()
                why = f"no answer within timeout_s = {reward.config.timeout_s:g} s"
                failure = CallFailure("timeout", f"{why}; its process is killed", frames)
            else:
                result: CallResult = pickle.loads(answer)
                return result
    except WorkerGone as gone:
        why = f"its worker process exited during the call, with {gone} (a reward must not end it)"
        failure = CallFailure("exception", why)
    except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:  # an odd column
        failure = failure_of_error(error)
    return to_call_result(reward, call.indices, failure, log)


def _worker_code(reward: Reward) -> RewardWorkerCode:
    config, path = reward.config, getattr(reward.config, "path", PYTHON_PREFIX)
    from_python = config.type == "function" and path.startswith(PYTHON_PREFIX)
    import_name = _importable_name(reward) if from_python else None
    return RewardWorkerCode(reward.name, config.type, config.model_dump(), import_name)


def _importable_name(reward: Reward) -> str:
    """`module:name` of a callable that was given from Python."""
    where, name = getattr(reward.code, "__module__", ""), getattr(reward.code, "__qualname__", "")
    spec = f"{where}:{name}"
    with contextlib.suppress(Exception):
        if where != "__main__" and registry.load_code(spec) is reward.code:
            return spec
    what = f"reward {reward.name!r} cannot be sent to a worker process"
    why = f"{reward.location} is not a top-level function of an importable module"
    fix = "put it in a file and name it by reward.NAME.path=file.py:name, or workers=0"
    refuse(f"reward.{reward.name}.workers", what, fix, why)
