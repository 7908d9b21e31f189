"""An engine on the trainer's own device, in a child process that listens on no port.

The order around an update is: wake the weights, send them, wake the KV cache, reset the prefix
cache. A cache that is not reset answers from the keys and values of old weights, with no error.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.generation.vllm import lora_slot
from rloo_cli.generation.vllm.child_pipe import (
    PIPE_CALL_TIMEOUT_S,
    ChildPipe,
    exception_line,
    last_log_lines,
)
from rloo_cli.generation.vllm.deadlines import run_with_deadline
from rloo_cli.generation.vllm.engine import (
    EngineCompletion,
    EngineLost,
    EngineRefused,
    EngineRequest,
)
from rloo_cli.generation.vllm.transfer_send import (
    WeightSender,
    close_lost_sender,
    connect_weight_sender,
)
from rloo_cli.generation.vllm.weights import WeightSource
from rloo_cli.generation.vllm_colocate import ColocateSection
from rloo_cli.utils.device_waits import release_cached_memory
from rloo_cli.utils.errors import GenerationError, Problem, Stopped
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject

TRANSFER_HOST = "127.0.0.1"


class ColocatedEngine:
    """The `InferenceEngine` of backend vllm_colocate.

    `arguments`: of vllm.LLM; `environment`: the child's; `log`: the file of its output; `transfer`:
    gloo or ipc.
    """

    def __init__(
        self,
        keys: ColocateSection,
        arguments: JsonObject,
        environment: dict[str, str],
        log: Path,
        transfer: str,
    ):
        self.keys, self.arguments, self.log = keys, arguments, log
        self.environment, self.transfer = environment, transfer
        self.pipe: ChildPipe | None = None
        self.weight_sender: WeightSender | None = None
        self.asleep = ""
        self.restarts = -1
        self.num_workers = 1
        self.label = ""
        self.loss = ""  # why the last engine was discarded
        self.was_ready = False  # whether any engine ever was ready

    def connect(self) -> None:
        reason = self.loss
        self.discard_engine("started anew")
        if self.restarts >= self.keys.max_restarts:
            what = f"the engine was lost {self.restarts + 1} times"
            fix = "generation.colocate.max_restarts=N allows more"
            raise GenerationError(self._problem(what, reason, fix))
        self.restarts += 1
        release_cached_memory()
        if self.restarts:
            time.sleep(2.0 ** (self.restarts - 1))  # whatever killed it may need a moment to pass
        self.pipe = ChildPipe(self.environment, self.log)
        self.pipe.send(("start", self.arguments))
        try:
            self.num_workers = self.pipe.wait_for_result(
                self.keys.ready_timeout_s, "loading the engine", True
            )
        except EngineRefused as error:
            if self.was_ready:  # whatever holds the GPU's memory may soon release it
                raise
            what, fix = "the engine cannot start", "change what it names; the log has the rest"
            raise GenerationError(self._problem(what, str(error), fix)) from error
        self.was_ready, self.asleep = True, ""

    def _problem(self, what: str, reason: str, fix: str) -> Problem:
        """A problem of the engine: the reason, and the end of its log."""
        why = "\n".join(filter(None, [reason, last_log_lines(self.log)]))
        return Problem(what, str(self.log), why, fix)

    def sync_weights(self, source: WeightSource, label: str) -> str:
        if trigger_fault("sync.start") == "skip":
            return label
        self.label = "" if trigger_fault("sync.version") == "skip" else label
        if self.asleep == "weights":
            release_cached_memory()  # vLLM maps memory again, and cannot map what torch caches
            self.call("wake", "weights")
        limit = self.keys.sync_timeout_s
        if self.weight_sender is None:
            self.weight_sender = run_with_deadline(
                limit,
                "connecting with the engine for weights",
                lambda: connect_weight_sender(
                    self.transfer,
                    self,
                    source,
                    TRANSFER_HOST,
                    TRANSFER_HOST,
                    self.num_workers,
                    limit,
                ),
            )
        try:
            run_with_deadline(
                limit, "sending weights to the engine", self.weight_sender.send_weights
            )
        except EngineRefused:
            with contextlib.suppress(EngineLost):  # an open update blocks the next one
                self.call("finish_weight_update", None)
            raise
        self._wake_cache()
        if not self.call("reset_prefix_cache"):
            raise GenerationError("the engine kept the prefix cache of old weights")
        return str(self.call("version"))

    def _wake_cache(self) -> None:
        if self.asleep:
            release_cached_memory()
            self.call("wake", "kv")
            self.asleep = ""

    def generate(
        self,
        requests: Sequence[EngineRequest],
        on_completion: Callable[[int, EngineCompletion], None],
    ) -> None:
        trigger_fault("gen.request")
        self._wake_cache()
        pipe = self._running_pipe()
        pipe.send(("complete", list(requests)))
        while True:
            try:
                message = pipe.receive(self.keys.request_timeout_s, "drawing", interruptible=True)
            except Stopped:
                pipe.send(("abort",))
                while pipe.receive(PIPE_CALL_TIMEOUT_S, "aborting")[0] != "end":
                    pass
                raise
            if message[0] == "done":
                on_completion(message[1], message[2])
            elif message[0] == "end":
                return
            elif message[0] == "error":
                raise EngineRefused(exception_line(message[1]))

    def is_healthy(self) -> bool:
        try:
            self.call("version")
        except EngineLost:
            return False
        return True

    def sleep(self) -> bool:
        if self.keys.sleep != "none" and not self.asleep:
            self.call("sleep", self.keys.sleep)
            self.asleep = self.keys.sleep
        return self.asleep == "weights"

    def discard_engine(self, reason: str) -> None:
        connected, self.weight_sender, self.loss = self.weight_sender, None, reason
        if self.pipe is not None:
            self.pipe.kill()
            self.pipe = None
        if connected is not None:
            close_lost_sender(connected)

    def close(self) -> None:
        if self.weight_sender is not None:
            self.weight_sender.shutdown()  # the run ends: nothing needs the GPU after this
            self.weight_sender = None
        self.discard_engine("the run ends")
        if lora_slot.ADAPTER_FOLDER_VARIABLE in self.environment:
            shutil.rmtree(self.environment[lora_slot.ADAPTER_FOLDER_VARIABLE], ignore_errors=True)

    # The engine's side of a weight update (weights.TransferClient).

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: JsonObject) -> None:
        self.call("update_weights", update_info, limit_s=self.keys.sync_timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version or self.label or None)

    def call(self, name: str, *args: Any, limit_s: float = PIPE_CALL_TIMEOUT_S) -> Any:
        """Call one of `ChildEngineCalls`' methods. Raises EngineLost."""
        return self._running_pipe().call(name, *args, limit_s=limit_s)

    def _running_pipe(self) -> ChildPipe:
        if self.pipe is None:
            raise EngineLost("the engine is not running")
        return self.pipe
