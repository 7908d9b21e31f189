"""Rollout servers as an engine: one or several, asked over HTTP, sent weights directly.

A server that the run's launcher started (`by: train`) is killed when it is lost, and the launcher
starts the next one; any other is only waited for. Calls that change a server are never repeated:
what is lost is connected to anew, which first asks the server for its state.
"""

import asyncio
import base64
import contextlib
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.generation.vllm import handshake, lora_slot, process_group
from rloo_cli.generation.vllm.deadlines import within
from rloo_cli.generation.vllm.discovery import CALL_S, CLEAR_S, Finder, Server, hosts, undo
from rloo_cli.generation.vllm.engine import Answer, Ask, Lost, Refused
from rloo_cli.generation.vllm.handshake import Expected
from rloo_cli.generation.vllm.http import Wire
from rloo_cli.generation.vllm.transfer_send import Link, connect, leave_lost
from rloo_cli.generation.vllm_server import LOOPBACK, Section
from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.fault_injection import fault

log = logging.getLogger(__name__)
IN_FLIGHT = 1024  # completions under way on one engine: more than it decodes at once
Request = tuple[str, Server, str, Any]  # method, server, path, body


@dataclass(frozen=True)
class Call:
    """One request: which server, and the completions that it brings, by their places."""

    server: int
    places: list[int]


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
            server.transfer, server.groups = self.expected.check(
                self.wire, server.url, server.token
            )
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
        most = self.keys.max_in_flight or IN_FLIGHT * self.keys.data_parallel_size
        calls = self._calls(asks)
        gates = [Gate(most) for _ in self.servers]

        async def one(call: Call) -> None:
            async with gates[call.server].room(len(call.places)):
                for _ in call.places:
                    fault("gen.request")
                found = await self._ask(call, asks)
            for place, completion in zip(call.places, found, strict=True):
                done(place, completion)

        async def everything() -> None:
            tasks = [asyncio.create_task(one(call)) for call in calls]
            try:
                await asyncio.gather(*tasks)
            finally:  # one failed: the others are closed, and the server aborts them
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        count = Counter(call.server for call in calls for _ in call.places)
        rounds = -(-max(count.values(), default=0) // most)
        limit = rounds * self.keys.request_timeout_s + CALL_S
        self.wire.run(everything(), limit, interruptible=True)

    def _calls(self, asks: Sequence[Ask]) -> list[Call]:
        """The requests that bring these completions: one for a whole group where the server has
        the route for that, else one each."""
        found = []
        for number, places in enumerate(grouped(asks)):
            server = number % len(self.servers)
            parts = [places] if self.servers[server].groups else [[i] for i in places]
            found += [Call(server, part) for part in parts]
        return found

    async def _ask(self, call: Call, asks: Sequence[Ask]) -> list[Answer]:
        server, limit = self.servers[call.server], self.keys.request_timeout_s
        chosen = [asks[i] for i in call.places]
        body: dict[str, Any] = {"token_ids": chosen[0].prompt_ids}
        path = handshake.GROUP if server.groups else "/inference/v1/generate"
        if server.groups:
            body |= {"sampling_params": [ask.params for ask in chosen]}
        else:
            body |= {"sampling_params": chosen[0].params}
            body |= {"model": lora_slot.NAME} if server.transfer == lora_slot.KIND else {}
        said = await self.wire.ask("POST", server.url, path, server.token, body, limit, keep=True)
        if server.groups:
            return group_answers(said, server.url, len(chosen))
        return [answer(said, server.url)]

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
        connected, self.link = self.link, None
        for server in self.servers:
            there = server.found
            if there is not None and there.by == "train" and there.alive():
                self.finder.gone.add((there.pid, there.pid_started))
                process_group.kill(there.group)
        if connected is not None:
            leave_lost(connected)

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


class Gate:
    """At most `most` completions are under way on one server."""

    def __init__(self, most: int):
        self.most, self.free, self.turn = most, asyncio.Semaphore(most), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def room(self, count: int) -> AsyncIterator[None]:
        """While inside, `count` of them are ours; a group larger than the gate has all of it."""
        taken = 0
        try:
            async with self.turn:  # two that have half of what they need would wait for ever
                while taken < min(count, self.most):
                    await self.free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self.free.release()


def grouped(asks: Sequence[Ask]) -> list[list[int]]:
    """The places of siblings, group by group: they share a prompt, which a server reads once."""
    found: list[list[int]] = []
    for i, ask in enumerate(asks):
        if i and ask.prompt_ids is asks[i - 1].prompt_ids:
            found[-1].append(i)
        else:
            found.append([i])
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


def group_answers(said: Any, url: str, count: int) -> list[Answer]:
    """A group's JSON (`group_route`) as its Answers, in order. Raises as `answer`."""
    try:
        rows = said["completions"]
        if len(rows) != count:
            raise ValueError(f"{len(rows)} completions for {count}")
        found = [
            Answer(
                unpacked(row["ids"], "i"), unpacked(row["logp"], "f"), str(row["finish_reason"]),
                [str(version) for version in row["versions"]],
            )
            for row in rows
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(said)[:200]}"
        raise GenerationError(Problem(f"{url} answered in another form", why=why)) from None
    return [_ended(one, url) for one in found]


def unpacked(text: str, kind: str) -> list[Any]:
    """Numbers of 4 bytes (`kind` i or f) out of the base64 of their little-endian bytes."""
    return [value for (value,) in struct.iter_unpack(f"<{kind}", base64.b64decode(text))]


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
    return _ended(found, url)


def _ended(found: Answer, url: str) -> Answer:
    """Raises Lost for a completion that was aborted."""
    if found.finish_reason not in ("stop", "length"):
        raise Lost(f"{url}: a request ended with {found.finish_reason}")
    return found
