"""Rollout servers as an engine: one or several, found by address or by the run's server.json.

A server that the run's launcher started (`by: train`) is killed when it is lost, and the launcher
starts the next one; any other is only waited for. Calls that change a server are never repeated:
what is lost is connected to anew, which first asks the server for its state.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rloo_cli import server_file
from rloo_cli.errors import GenerationError, Problem
from rloo_cli.faults import fault
from rloo_cli.generation.vllm_server import EVERYWHERE, Section
from rloo_cli.vllm.engine import Answer, Ask, Lost, Refused
from rloo_cli.vllm.expected import Expected
from rloo_cli.vllm.link import Link, connect
from rloo_cli.vllm.waiting import until, within
from rloo_cli.vllm.wire import Wire

log = logging.getLogger(__name__)
CALL_S = 30.0  # a question that needs no work
CLEAR_S = 60.0  # emptying a cache, aborting what is under way


@dataclass
class Server:
    """One server, and the connection that weights take to it."""

    url: str
    token: str = field(repr=False)
    transfer: str = "gloo"
    found: server_file.Server | None = None  # what its server.json said, if it has one
    workers: int = 0
    link: Link | None = None


class OverHttp:
    """The `Engine` of backend vllm_server. `expected`: what every server must turn out to be."""

    def __init__(
        self,
        keys: Section,
        folder: Path,
        expected: Expected,
        note: Callable[[str], None] = log.info,
    ):
        self.keys, self.folder, self.expected, self.note = keys, folder, expected, note
        self.wire = Wire(keys.max_in_flight, keys.api_key_env)
        self.servers: list[Server] = []
        self.gone: set[tuple[int, str]] = set()  # servers of ours that were given up
        self.restarts = 0
        self.label = ""

    def connect(self) -> None:
        again = bool(self.servers)
        urls = self.keys.base_url
        if urls is None:
            self.servers = [self._own(again)]
        else:
            given = [urls] if isinstance(urls, str) else urls
            secret = os.environ.get(self.keys.api_key_env, "")
            limit = self.keys.reconnect_timeout_s if again else self.keys.ready_timeout_s
            self.servers = [self._answering(self._reachable(url), secret, limit) for url in given]
        for server in self.servers:
            server.transfer = self.expected.check(self.wire, server.url, server.token)
            self._undo(server)
            answer = self.wire.get(server.url, "/get_world_size", server.token, CALL_S)
            server.workers = int(answer["world_size"])
        self.restarts += again

    def _own(self, again: bool) -> Server:
        """The server of the run's own server.json, once it answers."""
        last = server_file.read(self.folder)
        external = last is not None and last.by != "train" and not last.failed

        def found() -> Server | None:
            there = server_file.read(self.folder)
            if there is not None and there.failed:
                raise GenerationError(
                    Problem("the rollout server cannot be had", there.log, there.failed)
                )
            if there is None or (there.pid, there.pid_started) in self.gone or not _up(there):
                return None
            server = Server(there.url, there.token, there.transfer, there)
            with contextlib.suppress(Lost):
                self.wire.get(there.url, "/health", there.token, 5)
                return server
            return None

        limit = self.keys.reconnect_timeout_s if again and external else self._patience()
        try:
            return until(limit, f"a server in {self.folder / server_file.NAME}", found)
        except Lost as lost:  # the whole patience is used up: no second wait
            raise GenerationError(Problem("no rollout server answers", "", str(lost))) from None

    def _patience(self) -> float:
        """The launcher keeps each start's deadline, and says in server.json when it gives up."""
        return self.keys.ready_timeout_s * (self.keys.max_restarts + 1) + 60

    def _answering(self, url: str, token: str, limit_s: float) -> Server:
        said = ""

        def found() -> Server | None:
            nonlocal said
            try:
                self.wire.get(url, "/health", token, 5)
            except Lost as lost:
                said = str(lost)
                return None
            return Server(url, token)

        try:
            return until(limit_s, f"{url}/health", found)
        except Lost:  # the whole patience is used up: no second wait
            what, where = f"no server answers at {url}", "generation.server.base_url"
            why = f"expected an answer within {limit_s:g} s; {said}"
            raise GenerationError(Problem(what, where, why, "rloo vllm-serve starts one")) from None

    def _reachable(self, url: str) -> str:
        """An address to listen on is none to call: it stands for this machine."""
        parts = urlsplit(url)
        if (parts.hostname or "") not in EVERYWHERE:
            return url.rstrip("/")
        port = f":{parts.port}" if parts.port else ""
        called = parts._replace(netloc=f"127.0.0.1{port}").geturl().rstrip("/")
        self.note(f"{url} is an address to listen on, none to call: {called} is asked")
        return called

    def _undo(self, server: Server) -> None:
        """What a trainer that vanished may have left: a pause, an open update, its connection."""
        post = self.wire.post
        for _ in range(2):  # the first may only tell that weights are missing
            with contextlib.suppress(Refused):  # no update is open: no route tells
                post(server.url, "/finish_weight_update", server.token, {}, CLEAR_S)
        if self.wire.get(server.url, "/is_paused", server.token, CALL_S)["is_paused"]:
            post(server.url, "/resume", server.token, None, CLEAR_S)
        with contextlib.suppress(Refused):
            post(server.url, "/shutdown_weight_transfer_engine", server.token, None, CLEAR_S)

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
            host, peer = _hosts(url, keys.host)
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

    def rest(self) -> None:
        """A server has its own memory."""

    def give_up(self, why: str) -> None:
        for server in self.servers:
            if server.link is not None:
                server.link.shutdown()
                server.link = None
            there = server.found
            if there is not None and there.by == "train" and there.alive():
                self.gone.add((there.pid, there.pid_started))
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(there.group, signal.SIGKILL)

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


def _up(there: server_file.Server) -> bool:
    return there.alive() is not False


def _hosts(url: str, ours: str) -> tuple[str, str]:
    """Addresses that trainer and server meet at for weights: loopback where the server is."""
    there = urlsplit(url).hostname or "127.0.0.1"
    if there in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1", "127.0.0.1"
    return ours, there
