"""What vLLM runs in each of its processes, because pyproject.toml names it as a plug-in.

It registers our receivers of weights by name, sees to it that no process of a server of ours
outlives the one that started it, that a server which ends as it was asked to logs no traceback, and
lets the processes of an engine without a GPU sleep.
"""

import importlib
import inspect
import logging
import os
from typing import Any

from rloo_cli.utils import child_process

RECEIVERS = {
    "rloo_gloo": "Gloo", "rloo_nccl": "Nccl", "rloo_ipc": "Ipc", "rloo_adapter": "Adapter",
}  # fmt: skip
# zmq may drop a wake-up that is sent within about 1 ms of the one before: a reader spins longer.
QUEUE_SPIN_S = 0.01
RECHECK_MS = 250  # a reader that sleeps looks by itself as often, should a wake-up be lost

# Of the modules that say that a server ends, and of the one that says what it then takes for lost.
LOGGERS = ("vllm.entrypoints.launchers.launcher", "vllm.v1.engine.async_llm")


class OrderlyEnd(logging.Filter):
    """Where a server ends as it was asked to, vLLM takes its engine, which is quicker, for lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = False

    def filter(self, record: logging.LogRecord) -> bool:
        said = str(record.msg)
        if said.startswith("[shutdown] API server"):
            self.ending = True
        return not (self.ending and said.startswith("AsyncLLM output_handler failed"))


ORDERLY_END = OrderlyEnd()


def register() -> None:
    """The entry point of the group `vllm.general_plugins`; it may be called more than once."""
    if os.environ.get("RLOO_SERVER"):
        child_process.die_with_parent()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(ORDERLY_END)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.platforms import current_platform

    for name, kind in RECEIVERS.items():
        if name not in Factory._registry:
            Factory.register_engine(name, f"rloo_cli.generation.vllm.receive.{kind.lower()}", kind)
    if current_platform.is_cpu():
        sleep_between_messages()


def sleep_between_messages() -> None:
    """Let a process of an engine that waits for a message sleep after `SPIN_S`.

    Without a GPU vLLM's worker is a process of its own, and both sides of its queue spin for a
    second after each message: where there are fewer cores than spinning processes, whoever has
    something to do waits for them (`bench/rollout.py --servers 2`).
    """
    queue: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    spins = getattr(queue, "SpinCondition", None)
    if spins is None or not hasattr(queue, "SHM_READER_RECHECK_INTERVAL_MS"):
        return  # an older one, whose sleeper might miss its message
    if list(inspect.signature(spins.__init__).parameters)[-1] == "busy_loop_s":
        spins.__init__.__defaults__ = (QUEUE_SPIN_S,)
        queue.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
