"""Rollout servers as an engine: one or several, asked over HTTP, sent weights directly.

A server that the run's launcher started (`by: train`) is killed when it is lost, and the launcher
starts the next one; any other is only waited for. Calls that change a server are never repeated:
what is lost is connected to anew, which first asks the server for its state.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.errors import GenerationError, Problem
from rloo_cli.faults import fault
from rloo_cli.generation.vllm_server import Section
from rloo_cli.vllm import family, slot
from rloo_cli.vllm.engine import Answer, Ask, Lost, Refused
from rloo_cli.vllm.expected import Expected
from rloo_cli.vllm.link import connect
from rloo_cli.vllm.servers import CALL_S, CLEAR_S, Finder, Server, hosts, undo
from rloo_cli.vllm.waiting import within
from rloo_cli.vllm.wire import Wire

log = logging.getLogger(__name__)


class OverHttp:
    """The `Engine` of backend vllm_server. `expected`: what every server must turn out to be."""

    def __init__(
        self,
        keys: Section,
        folder: Path,
        expected: Expected,
        note: Callable[[str], None] = log.info,
    ):
        self.keys, self.expected = keys, expected
        self.wire = Wire(keys.max_in_flight, keys.api_key_env)
        self.finder = Finder(keys, folder, self.wire, note)
        self.servers: list[Server] = []
        self.restarts = 0
        self.label = ""

    def connect(self) -> None:
        again = bool(self.servers)
        self.servers = self.finder.find(again)
        for server in self.servers:
            server.transfer = self.expected.check(self.wire, server.url, server.token)
            undo(self.wire, server)
            answer = self.wire.get(server.url, "/get_world_size", server.token, CALL_S)
            server.workers = int(answer["world_size"])
        self.restarts += again

    def sync(self, source: Any, label: str) -> str:
        if fault("sync.start") == "skip":
            return label
        self.label = "" if fault("sync.version") == "skip" else label
        labels = {self._sync(server, source) for server in self.servers}
        return labels.pop() if len(labels) == 1 else " and ".join(sorted(labels))

    def _sync(self, server: Server, source: Any) -> str:
        url, token, keys = server.url, server.token, self.keys
        self.wire.post(url, "/pause?mode=abort", token, None, CLEAR_S)
        if server.link is None:
            host, peer = hosts(url, keys)
            server.link = within(
                keys.init_timeout_s + 5,
                f"connecting with {url} for weights",
                lambda: connect(
                    server.transfer, HttpControl(self, server), source, host, peer,
                    server.workers, keys.init_timeout_s,
                ),
            )  # fmt: skip
        try:
            within(keys.sync_timeout_s, f"sending weights to {url}", server.link.send_weights)
        except Refused:
            with contextlib.suppress(Lost):  # an update that stays open keeps out the next one
                self.wire.post(url, "/finish_weight_update", token, {}, CLEAR_S)
            raise
        reset = self.wire.post(url, "/reset_prefix_cache", token, None, CLEAR_S)
        if isinstance(reset, dict) and reset.get("success") is False:
            raise GenerationError(
                Problem(f"{url} kept the prefix cache of old weights", why=f"it answered {reset}")
            )
        version = str(self.wire.get(url, "/weight_info", token, CALL_S)["weight_version"])
        self.wire.post(url, "/resume", token, None, CLEAR_S)
        return version

    def complete(self, asks: Sequence[Ask], done: Callable[[int, Answer], None]) -> None:
        async def one(i: int, ask: Ask) -> None:
            # Siblings meet on one server, which reads their prompt once.
            server = self.servers[i * len(self.servers) // len(asks)]
            body = {"token_ids": ask.prompt_ids, "sampling_params": ask.params}
            body |= {"model": slot.NAME} if server.transfer == slot.KIND else {}
            path, limit = "/inference/v1/generate", self.keys.request_timeout_s
            async with gate:
                fault("gen.request")
                said = await self.wire.ask("POST", server.url, path, server.token, body, limit)
            done(i, answer(said, server.url))

        async def everything() -> None:
            tasks = [asyncio.create_task(one(i, ask)) for i, ask in enumerate(asks)]
            try:
                await asyncio.gather(*tasks)
            finally:  # one failed: the others are closed, and the server aborts them
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        gate = asyncio.Semaphore(self.keys.max_in_flight)
        rounds = -(-len(asks) // self.keys.max_in_flight)
        limit = rounds * self.keys.request_timeout_s + CALL_S
        self.wire.run(everything(), limit, interruptible=True)

    def well(self) -> bool:
        try:
            for server in self.servers:
                self.wire.get(server.url, "/health", server.token, CALL_S)
        except (Lost, GenerationError):
            return False
        return True

    def rest(self) -> bool:
        return False  # a server has its own memory

    def give_up(self, why: str) -> None:
        for server in self.servers:
            if server.link is not None:
                server.link.shutdown()
                server.link = None
            there = server.found
            if there is not None and there.by == "train" and there.alive():
                self.finder.gone.add((there.pid, there.pid_started))
                family.kill(there.group)

    def close(self) -> None:
        for server in self.servers:
            if server.link is None or (server.found and server.found.alive() is False):
                continue
            server.link.shutdown()
            server.link = None
            with contextlib.suppress(Lost, GenerationError):
                self.wire.post(
                    server.url, "/shutdown_weight_transfer_engine", server.token, None, 5
                )
        self.wire.close()


class HttpControl:
    """`link.Control` over HTTP."""

    def __init__(self, engine: OverHttp, server: Server):
        self.engine, self.server = engine, server

    def _post(self, path: str, body: Any, limit_s: float) -> None:
        self.engine.wire.post(self.server.url, path, self.server.token, body, limit_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        limit = self.engine.keys.init_timeout_s
        self._post("/init_weight_transfer_engine", {"init_info": init_info}, limit)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None, CLEAR_S)

    def update_weights(self, update_info: Any) -> None:
        limit = self.engine.keys.sync_timeout_s
        self._post("/update_weights", {"update_info": update_info}, limit)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        label = weight_version or self.engine.label or None
        self._post("/finish_weight_update", {"weight_version": label}, CLEAR_S)


def answer(said: Any, url: str) -> Answer:
    """A generate call's JSON as an Answer. Raises Lost where it was aborted, GenerationError."""
    try:
        choice = said["choices"][0]
        logp = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        spans = choice.get("weight_versions") or []
        versions = sorted({str(span["version"]) for span in spans})
        found = Answer(list(choice["token_ids"]), logp, str(choice["finish_reason"]), versions)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(said)[:200]}"
        raise GenerationError(Problem(f"{url} answered in another form", why=why)) from None
    if found.finish_reason not in ("stop", "length"):
        raise Lost(f"{url}: a request ended with {found.finish_reason}")
    return found
