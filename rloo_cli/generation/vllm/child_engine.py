"""An engine on the trainer's own device, in a child process that listens nowhere.

Order around an update: wake the weights, send, wake the KV cache, forget cached prompts. A cache
that is not reset answers from the keys and values of old weights, with no error.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.generation.vllm import lora_slot
from rloo_cli.generation.vllm.child_pipe import CALL_S, Pipe, last_line, last_lines
from rloo_cli.generation.vllm.deadlines import within
from rloo_cli.generation.vllm.engine import Answer, Ask, Lost, Refused
from rloo_cli.generation.vllm.transfer_send import Link, connect, leave_lost
from rloo_cli.generation.vllm_colocate import Section
from rloo_cli.utils.device_waits import release_cached_memory
from rloo_cli.utils.errors import GenerationError, Problem, Stopped
from rloo_cli.utils.fault_injection import fault

HOST = "127.0.0.1"


class InAChild:
    """The `Engine` of backend vllm_colocate. `arguments`: of vllm.LLM; `environment`: the child's;
    `log`: where its output goes; `transfer`: gloo or ipc."""

    def __init__(
        self,
        keys: Section,
        arguments: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        transfer: str,
    ):
        self.keys, self.arguments, self.log = keys, arguments, log
        self.environment, self.transfer = environment, transfer
        self.pipe: Pipe | None = None
        self.link: Link | None = None
        self.asleep = ""
        self.restarts = -1
        self.workers = 1
        self.label = ""

    def connect(self) -> None:
        self.give_up("started anew")
        if self.restarts >= self.keys.max_restarts:
            raise GenerationError(
                Problem(
                    f"the engine was lost {self.restarts + 1} times",
                    str(self.log),
                    last_lines(self.log),
                    "generation.colocate.max_restarts=N allows more",
                )
            )
        self.restarts += 1
        release_cached_memory()
        if self.restarts:
            time.sleep(2.0 ** (self.restarts - 1))  # what killed it may take a moment to pass
        self.pipe = Pipe(self.environment, self.log)
        self.pipe.send(("start", self.arguments))
        self.workers = self.pipe.answer(self.keys.ready_timeout_s, "loading the engine", True)
        self.asleep = ""

    def sync(self, source: Any, label: str) -> str:
        if fault("sync.start") == "skip":
            return label
        self.label = "" if fault("sync.version") == "skip" else label
        if self.asleep == "weights":
            release_cached_memory()  # vLLM maps its memory anew, and cannot map what torch keeps
            self.call("wake", "weights")
        limit = self.keys.sync_timeout_s
        if self.link is None:
            self.link = within(
                limit, "connecting with the engine for weights",
                lambda: connect(self.transfer, self, source, HOST, HOST, self.workers, limit),
            )  # fmt: skip
        try:
            within(limit, "sending weights to the engine", self.link.send_weights)
        except Refused:
            with contextlib.suppress(Lost):  # an update that stays open keeps out the next one
                self.call("finish_weight_update", None)
            raise
        self._wake_cache()
        if not self.call("reset_prefix_cache"):
            raise GenerationError(Problem("the engine kept the prefix cache of old weights"))
        return str(self.call("version"))

    def _wake_cache(self) -> None:
        if self.asleep:
            release_cached_memory()
            self.call("wake", "kv")
            self.asleep = ""

    def complete(self, asks: Sequence[Ask], done: Callable[[int, Answer], None]) -> None:
        fault("gen.request")
        self._wake_cache()
        pipe = self._there()
        pipe.send(("complete", list(asks)))
        while True:
            try:
                message = pipe.receive(self.keys.request_timeout_s, "drawing", listen=True)
            except Stopped:
                pipe.send(("abort",))
                while pipe.receive(CALL_S, "aborting")[0] != "end":
                    pass
                raise
            if message[0] == "done":
                done(message[1], message[2])
            elif message[0] == "end":
                return
            elif message[0] == "error":
                raise Refused(last_line(message[1]))

    def well(self) -> bool:
        try:
            self.call("version")
        except Lost:
            return False
        return True

    def rest(self) -> bool:
        if self.keys.sleep != "none" and not self.asleep:
            self.call("sleep", self.keys.sleep)
            self.asleep = self.keys.sleep
        return self.asleep == "weights"

    def give_up(self, why: str) -> None:
        connected, self.link = self.link, None
        if self.pipe is not None:
            self.pipe.end()
            self.pipe = None
        if connected is not None:
            leave_lost(connected)

    def close(self) -> None:
        if self.link is not None:
            self.link.shutdown()  # nothing is lost, and nothing needs the GPU after this
            self.link = None
        self.give_up("the run ends")
        if lora_slot.VARIABLE in self.environment:
            shutil.rmtree(self.environment[lora_slot.VARIABLE], ignore_errors=True)

    # What an engine does about weights (link.Control).

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info, limit_s=self.keys.sync_timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version or self.label or None)

    def call(self, name: str, *args: Any, limit_s: float = CALL_S) -> Any:
        """One of `child.Engine`'s methods. Raises Lost."""
        return self._there().call(name, *args, limit_s=limit_s)

    def _there(self) -> Pipe:
        if self.pipe is None:
            raise Lost("the engine is not running")
        return self.pipe
