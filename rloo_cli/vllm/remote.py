"""Rollout servers as an engine: one or several, asked over HTTP, sent weights directly.

A server that the run's launcher started (`by: train`) is killed when it is lost, and the launcher
starts the next one; any other is only waited for. Calls that change a server are never repeated:
what is lost is connected to anew, which first asks the server for its state.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.errors import GenerationError, Problem
from rloo_cli.faults import fault
from rloo_cli.generation.vllm_server import LOOPBACK, Section
from rloo_cli.vllm import family, slot
from rloo_cli.vllm.engine import Answer, Ask, Lost, Refused
from rloo_cli.vllm.expected import Expected
from rloo_cli.vllm.link import Link, connect
from rloo_cli.vllm.servers import CALL_S, CLEAR_S, Finder, Server, hosts, undo
from rloo_cli.vllm.waiting import within
from rloo_cli.vllm.wire import Wire

log = logging.getLogger(__name__)
IN_FLIGHT = 1024  # completions under way on one engine: more than it decodes at once
Request = tuple[str, Server, str, Any]  # method, server, path, body


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
        self.wire = Wire(keys.api_key_env)
        self.finder = Finder(keys, folder, self.wire, note)
        self.servers: list[Server] = []
        self.link: Link | None = None  # that weights take to all servers together
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
        limit = self.keys.sync_timeout_s
        self._post_all("/pause?mode=abort", CLEAR_S)
        if self.link is None:
            self.link = self._connected(source)
        try:
            where = ", ".join(server.url for server in self.servers)
            within(limit, f"sending weights to {where}", self.link.send_weights)
        except Refused:
            with contextlib.suppress(Lost):  # an update that stays open keeps out the next one
                self._post_all("/finish_weight_update", CLEAR_S, {})
            raise
        for server, reset in zip(
            self.servers, self._post_all("/reset_prefix_cache", CLEAR_S), strict=True
        ):
            if isinstance(reset, dict) and reset.get("success") is False:
                what = f"{server.url} kept the prefix cache of old weights"
                raise GenerationError(Problem(what, why=f"it answered {reset}"))
        told = self.ask_all([("GET", s, "/weight_info", None) for s in self.servers], CALL_S)
        self._post_all("/resume", CLEAR_S)
        labels = {str(answer["weight_version"]) for answer in told}
        return labels.pop() if len(labels) == 1 else " and ".join(sorted(labels))

    def _connected(self, source: Any) -> Link:
        """The one group of this trainer and every process of every server."""
        limit = self.keys.init_timeout_s
        kinds = {server.transfer for server in self.servers}
        if len(kinds) > 1:
            why = ", ".join(f"{s.url} by {s.transfer}" for s in self.servers)
            what = "the servers take weights in different ways"
            fix = "start all of them with one generation.server.transfer"
            raise GenerationError(Problem(what, "generation.server", why, fix))
        own, peers = meeting(self.servers, self.keys)
        workers = sum(server.workers for server in self.servers)
        return within(
            limit + 5,
            f"connecting with {', '.join(server.url for server in self.servers)} for weights",
            lambda: connect(
                kinds.pop(), HttpControl(self, peers), source, own, peers[0], workers, limit
            ),
        )

    def _post_all(self, path: str, limit_s: float, body: Any = None) -> list[Any]:
        """POST the same to every server at once; their answers, in order. Raises Lost."""
        return self.ask_all([("POST", server, path, body) for server in self.servers], limit_s)

    def ask_all(self, asked: Sequence[Request], limit_s: float) -> list[Any]:
        """Requests that are under way together; their answers, in order. Raises Lost."""

        async def everything() -> list[Any]:
            waiting = [
                self.wire.ask(method, server.url, path, server.token, body, limit_s)
                for method, server, path, body in asked
            ]
            return list(await asyncio.gather(*waiting))

        return self.wire.run(everything(), limit_s + 5)

    def complete(self, asks: Sequence[Ask], done: Callable[[int, Answer], None]) -> None:
        chosen = dealt(asks, len(self.servers))
        most = self.keys.max_in_flight or IN_FLIGHT * self.keys.data_parallel_size
        gates = [asyncio.Semaphore(most) for _ in self.servers]

        async def one(i: int, ask: Ask) -> None:
            server = self.servers[chosen[i]]
            body = {"token_ids": ask.prompt_ids, "sampling_params": ask.params}
            body |= {"model": slot.NAME} if server.transfer == slot.KIND else {}
            path, limit = "/inference/v1/generate", self.keys.request_timeout_s
            async with gates[chosen[i]]:
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

        busiest = max(Counter(chosen).values(), default=0)
        limit = -(-busiest // most) * self.keys.request_timeout_s + CALL_S
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
        if self.link is not None:
            self.link.shutdown()
            self.link = None
        for server in self.servers:
            there = server.found
            if there is not None and there.by == "train" and there.alive():
                self.finder.gone.add((there.pid, there.pid_started))
                family.kill(there.group)

    def close(self) -> None:
        connected, self.link = self.link, None
        if connected is not None:
            connected.shutdown()
        for server in self.servers if connected is not None else ():
            if server.found and server.found.alive() is False:
                continue
            with contextlib.suppress(Lost, GenerationError):
                self.wire.post(
                    server.url, "/shutdown_weight_transfer_engine", server.token, None, 5
                )
        self.wire.close()


class HttpControl:
    """`link.Control` of all servers at once, over HTTP: one broadcast reaches them together.

    `peers`: the address that each server meets the trainer at.
    """

    def __init__(self, engine: OverHttp, peers: Sequence[str]):
        self.engine, self.peers = engine, peers

    def _post(self, path: str, limit_s: float, bodies: Sequence[Any]) -> None:
        servers = self.engine.servers
        rows = zip(servers, bodies, strict=True)
        self.engine.ask_all([("POST", server, path, body) for server, body in rows], limit_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's processes come after those of the servers before it."""
        bodies, first = [], int(init_info["rank_offset"])
        for server, peer in zip(self.engine.servers, self.peers, strict=True):
            own = {"own_host": peer} if "own_host" in init_info else {}
            bodies.append({"init_info": init_info | own | {"rank_offset": first}})
            first += server.workers
        self._post("/init_weight_transfer_engine", self.engine.keys.init_timeout_s, bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", CLEAR_S, [None] * len(self.peers))

    def update_weights(self, update_info: Any) -> None:
        body = {"update_info": update_info}
        self._post("/update_weights", self.engine.keys.sync_timeout_s, [body] * len(self.peers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version or self.engine.label or None}
        self._post("/finish_weight_update", CLEAR_S, [body] * len(self.peers))


def dealt(asks: Sequence[Ask], servers: int) -> list[int]:
    """The server of each completion, by its number: groups go round, siblings stay together,
    for their server then reads their prompt once."""
    found, group = [], -1
    for i, ask in enumerate(asks):
        group += i == 0 or ask.prompt_ids is not asks[i - 1].prompt_ids
        found.append(group % servers)
    return found


def meeting(servers: Sequence[Server], keys: Section) -> tuple[str, list[str]]:
    """The address that this trainer listens on for weights, and the one of each server there.

    Servers beside it and on other machines together all come to the address that others reach.
    """
    found = [hosts(server.url, keys) for server in servers]
    outside = [own for own, _ in found if own not in LOOPBACK]
    if not outside:
        return found[0][0], [peer for _, peer in found]
    return outside[0], [peer if own not in LOOPBACK else outside[0] for own, peer in found]


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
