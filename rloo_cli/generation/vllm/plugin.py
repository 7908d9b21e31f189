"""What vLLM runs in each of its processes, because pyproject.toml names it as a plug-in.

It registers our weight receivers, ends each process of our rollout server with its parent,
keeps a requested server shutdown from logging a traceback, and lets the processes of
an engine without a GPU sleep while they wait.
"""

import importlib
import inspect
import logging
import os
from typing import Any

from rloo_cli.generation.vllm import engine_images
from rloo_cli.utils import child_process

RECEIVERS = {
    "rloo_gloo": "Gloo", "rloo_nccl": "Nccl", "rloo_ipc": "Ipc", "rloo_adapter": "Adapter",
}  # fmt: skip
# zmq may lose a wake-up sent within about 1 ms of the one before: a reader spins longer.
QUEUE_SPIN_S = 0.01
RECHECK_MS = 250  # a sleeping reader looks for messages this often, in case a wake-up was lost

# The module that logs a server's shutdown, and the one that logs the loss of its engine.
LOGGERS = ("vllm.entrypoints.launchers.launcher", "vllm.v1.engine.async_llm")


class OrderlyEnd(logging.Filter):
    """Drops vLLM's error about a lost engine: at a server's shutdown the engine ends first."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = False

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if message.startswith("[shutdown] API server"):
            self.ending = True
        return not (self.ending and message.startswith("AsyncLLM output_handler failed"))


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
    engine_images.use_pil_processors()
    engine_images.take_flat_towers()
    if current_platform.is_cpu():
        sleep_between_messages()


def sleep_between_messages() -> None:
    """Let an engine process that waits for a message sleep after QUEUE_SPIN_S seconds.

    Without a GPU vLLM's worker is a separate process, and both sides of its queue spin for a
    second after each message: with fewer cores than spinning processes, a process with work
    to do waits for them (`bench/rollout.py --servers 2`).
    """
    queue: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    spins = getattr(queue, "SpinCondition", None)
    if spins is None or not hasattr(queue, "SHM_READER_RECHECK_INTERVAL_MS"):
        return  # an older vLLM, where a sleeping process might miss its message
    if list(inspect.signature(spins.__init__).parameters)[-1] == "busy_loop_s":
        spins.__init__.__defaults__ = (QUEUE_SPIN_S,)
        queue.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
