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

from rloo_cli.generation.vllm import handshake, lora_slot
from rloo_cli.generation.vllm.deadlines import run_with_deadline
from rloo_cli.generation.vllm.discovery import (
    SERVER_CALL_TIMEOUT_S,
    SERVER_RESET_TIMEOUT_S,
    RolloutServer,
    ServerFinder,
    reset_server_state,
    transfer_hosts,
)
from rloo_cli.generation.vllm.engine import (
    EngineCompletion,
    EngineLost,
    EngineRefused,
    EngineRequest,
)
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.generation.vllm.transfer_send import (
    WeightSender,
    close_lost_sender,
    connect_weight_sender,
)
from rloo_cli.generation.vllm_server import LOOPBACK_HOSTS, ServerSection
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject

log = logging.getLogger(__name__)
DEFAULT_MAX_IN_FLIGHT = 1024  # completions under way on one engine: more than it decodes at once
ServerRequest = tuple[str, RolloutServer, str, Any]  # method, server, path, body


@dataclass(frozen=True)
class GenerateCall:
    """One request: which server, and the completions that it brings, by their places."""

    server_index: int
    request_indices: list[int]


class HttpEngine:
    """The `Engine` of backend vllm_server. `expected`: what every server must turn out to be."""

    def __init__(
        self,
        keys: ServerSection,
        folder: Path,
        expected: ExpectedServer,
        note: Callable[[str], None] = log.info,
    ):
        self.keys, self.expected = keys, expected
        self.http_client = HttpClient(keys.api_key_env)
        self.finder = ServerFinder(keys, folder, self.http_client, note)
        self.servers: list[RolloutServer] = []
        self.weight_sender: WeightSender | None = None  # that weights take to all servers together
        self.restarts = 0
        self.label = ""

    def connect(self) -> None:
        again = bool(self.servers)
        self.servers = self.finder.find_servers(again)
        for server in self.servers:
            server.transfer, server.has_group_route = self.expected.check(
                self.http_client, server.url, server.token
            )
            reset_server_state(self.http_client, server)
            answer = self.http_client.get(
                server.url, "/get_world_size", server.token, SERVER_CALL_TIMEOUT_S
            )
            server.num_workers = int(answer["world_size"])
        self.restarts += again

    def sync_weights(self, source: Any, label: str) -> str:
        if trigger_fault("sync.start") == "skip":
            return label
        self.label = "" if trigger_fault("sync.version") == "skip" else label
        limit = self.keys.sync_timeout_s
        self._post_all("/pause?mode=abort", SERVER_RESET_TIMEOUT_S)
        if self.weight_sender is None:
            self.weight_sender = self._connect_weight_sender(source)
        try:
            where = ", ".join(server.url for server in self.servers)
            run_with_deadline(limit, f"sending weights to {where}", self.weight_sender.send_weights)
        except EngineRefused:
            with contextlib.suppress(
                EngineLost
            ):  # an update that stays open keeps out the next one
                self._post_all("/finish_weight_update", SERVER_RESET_TIMEOUT_S, {})
            raise
        for server, reset in zip(
            self.servers, self._post_all("/reset_prefix_cache", SERVER_RESET_TIMEOUT_S), strict=True
        ):
            if isinstance(reset, dict) and reset.get("success") is False:
                what = f"{server.url} kept the prefix cache of old weights"
                raise GenerationError(Problem(what, why=f"it answered {reset}"))
        told = self.request_all(
            [("GET", s, "/weight_info", None) for s in self.servers], SERVER_CALL_TIMEOUT_S
        )
        self._post_all("/resume", SERVER_RESET_TIMEOUT_S)
        labels = {str(answer["weight_version"]) for answer in told}
        return labels.pop() if len(labels) == 1 else " and ".join(sorted(labels))

    def _connect_weight_sender(self, source: Any) -> WeightSender:
        """The one group of this trainer and every process of every server."""
        limit = self.keys.init_timeout_s
        kinds = {server.transfer for server in self.servers}
        if len(kinds) > 1:
            why = ", ".join(f"{s.url} by {s.transfer}" for s in self.servers)
            what = "the servers take weights in different ways"
            fix = "start all of them with one generation.server.transfer"
            raise GenerationError(Problem(what, "generation.server", why, fix))
        own, peers = transfer_addresses(self.servers, self.keys)
        workers = sum(server.num_workers for server in self.servers)
        return run_with_deadline(
            limit + 5,
            f"connecting with {', '.join(server.url for server in self.servers)} for weights",
            lambda: connect_weight_sender(
                kinds.pop(), HttpTransferClient(self, peers), source, own, peers[0], workers, limit
            ),
        )

    def _post_all(self, path: str, limit_s: float, body: Any = None) -> list[Any]:
        """POST the same to every server at once; their answers, in order. Raises Lost."""
        return self.request_all([("POST", server, path, body) for server in self.servers], limit_s)

    def request_all(self, server_requests: Sequence[ServerRequest], limit_s: float) -> list[Any]:
        """Requests that are under way together; their answers, in order. Raises Lost."""

        async def everything() -> list[Any]:
            waiting = [
                self.http_client.request(method, server.url, path, server.token, body, limit_s)
                for method, server, path, body in server_requests
            ]
            return list(await asyncio.gather(*waiting))

        return self.http_client.run(everything(), limit_s + 5)

    def generate(
        self,
        requests: Sequence[EngineRequest],
        on_completion: Callable[[int, EngineCompletion], None],
    ) -> None:
        most = self.keys.max_in_flight or DEFAULT_MAX_IN_FLIGHT * self.keys.data_parallel_size
        calls = self._split_calls(requests)
        gates = [InFlightLimit(most) for _ in self.servers]

        async def one(call: GenerateCall) -> None:
            async with gates[call.server_index].acquire(len(call.request_indices)):
                for _ in call.request_indices:
                    trigger_fault("gen.request")
                found = await self._send_call(call, requests)
            for place, completion in zip(call.request_indices, found, strict=True):
                on_completion(place, completion)

        async def everything() -> None:
            tasks = [asyncio.create_task(one(call)) for call in calls]
            try:
                await asyncio.gather(*tasks)
            finally:  # one failed: the others are closed, and the server aborts them
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        count = Counter(call.server_index for call in calls for _ in call.request_indices)
        rounds = -(-max(count.values(), default=0) // most)
        limit = rounds * self.keys.request_timeout_s + SERVER_CALL_TIMEOUT_S
        self.http_client.run(everything(), limit, interruptible=True)

    def _split_calls(self, requests: Sequence[EngineRequest]) -> list[GenerateCall]:
        """The requests that bring these completions: one for a whole group where the server has
        the route for that, else one each."""
        found = []
        for number, places in enumerate(group_by_prompt(requests)):
            server = number % len(self.servers)
            parts = [places] if self.servers[server].has_group_route else [[i] for i in places]
            found += [GenerateCall(server, part) for part in parts]
        return found

    async def _send_call(
        self, call: GenerateCall, requests: Sequence[EngineRequest]
    ) -> list[EngineCompletion]:
        server, limit = self.servers[call.server_index], self.keys.request_timeout_s
        chosen = [requests[i] for i in call.request_indices]
        body: JsonObject = {"token_ids": chosen[0].prompt_ids}
        path = handshake.GROUP_ROUTE if server.has_group_route else "/inference/v1/generate"
        if server.has_group_route:
            body |= {"sampling_params": [ask.params for ask in chosen]}
        else:
            body |= {"sampling_params": chosen[0].params}
            body |= (
                {"model": lora_slot.ADAPTER_NAME}
                if server.transfer == lora_slot.ADAPTER_TRANSFER
                else {}
            )
        said = await self.http_client.request(
            "POST", server.url, path, server.token, body, limit, keep_alive=True
        )
        if server.has_group_route:
            return parse_group_completions(said, server.url, len(chosen))
        return [parse_completion(said, server.url)]

    def is_healthy(self) -> bool:
        try:
            for server in self.servers:
                self.http_client.get(server.url, "/health", server.token, SERVER_CALL_TIMEOUT_S)
        except (EngineLost, GenerationError):
            return False
        return True

    def sleep(self) -> bool:
        return False  # a server has its own memory

    def discard_engine(self, reason: str) -> None:
        connected, self.weight_sender = self.weight_sender, None
        for server in self.servers:
            there = server.record
            if there is not None and there.by == "train" and there.is_alive():
                self.finder.abandoned_processes.add((there.pid, there.pid_started))
                child_process.kill_group_except(there.group)
        if connected is not None:
            close_lost_sender(connected)

    def close(self) -> None:
        connected, self.weight_sender = self.weight_sender, None
        if connected is not None:
            connected.shutdown()
        for server in self.servers if connected is not None else ():
            if server.record and server.record.is_alive() is False:
                continue
            with contextlib.suppress(EngineLost, GenerationError):
                self.http_client.post(
                    server.url, "/shutdown_weight_transfer_engine", server.token, None, 5
                )
        self.http_client.close()


class HttpTransferClient:
    """`link.Control` of all servers at once, over HTTP: one broadcast reaches them together.

    `peers`: the address that each server meets the trainer at.
    """

    def __init__(self, engine: HttpEngine, peers: Sequence[str]):
        self.engine, self.peers = engine, peers

    def _post(self, path: str, limit_s: float, bodies: Sequence[Any]) -> None:
        servers = self.engine.servers
        rows = zip(servers, bodies, strict=True)
        self.engine.request_all([("POST", server, path, body) for server, body in rows], limit_s)

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        """Each server's processes come after those of the servers before it."""
        bodies, first = [], int(init_info["rank_offset"])
        for server, peer in zip(self.engine.servers, self.peers, strict=True):
            own = {"own_host": peer} if "own_host" in init_info else {}
            bodies.append({"init_info": init_info | own | {"rank_offset": first}})
            first += server.num_workers
        self._post("/init_weight_transfer_engine", self.engine.keys.init_timeout_s, bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", SERVER_RESET_TIMEOUT_S, [None] * len(self.peers))

    def update_weights(self, update_info: Any) -> None:
        body = {"update_info": update_info}
        self._post("/update_weights", self.engine.keys.sync_timeout_s, [body] * len(self.peers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version or self.engine.label or None}
        self._post("/finish_weight_update", SERVER_RESET_TIMEOUT_S, [body] * len(self.peers))


class InFlightLimit:
    """At most `most` completions are under way on one server."""

    def __init__(self, limit: int):
        self.limit, self.semaphore, self.lock = limit, asyncio.Semaphore(limit), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def acquire(self, count: int) -> AsyncIterator[None]:
        """While inside, `count` of them are ours; a group larger than the gate has all of it."""
        taken = 0
        try:
            async with self.lock:  # two that have half of what they need would wait for ever
                while taken < min(count, self.limit):
                    await self.semaphore.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self.semaphore.release()


def group_by_prompt(requests: Sequence[EngineRequest]) -> list[list[int]]:
    """The places of siblings, group by group: they share a prompt, which a server reads once."""
    found: list[list[int]] = []
    for i, ask in enumerate(requests):
        if i and ask.prompt_ids is requests[i - 1].prompt_ids:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def transfer_addresses(
    servers: Sequence[RolloutServer], keys: ServerSection
) -> tuple[str, list[str]]:
    """The address that this trainer listens on for weights, and the one of each server there.

    Servers beside it and on other machines together all come to the address that others reach.
    """
    found = [transfer_hosts(server.url, keys) for server in servers]
    outside = [own for own, _ in found if own not in LOOPBACK_HOSTS]
    if not outside:
        return found[0][0], [peer for _, peer in found]
    return outside[0], [peer if own not in LOOPBACK_HOSTS else outside[0] for own, peer in found]


def parse_group_completions(response: Any, url: str, count: int) -> list[EngineCompletion]:
    """A group's JSON (`group_route`) as its Answers, in order. Raises as `answer`."""
    try:
        rows = response["completions"]
        if len(rows) != count:
            raise ValueError(f"{len(rows)} completions for {count}")
        found = [
            EngineCompletion(
                decode_numbers(row["ids"], "i"),
                decode_numbers(row["logp"], "f"),
                str(row["finish_reason"]),
                [str(version) for version in row["versions"]],
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(response)[:200]}"
        raise GenerationError(Problem(f"{url} answered in another form", why=why)) from None
    return [_check_finished(one, url) for one in found]


def decode_numbers(text: str, struct_code: str) -> list[Any]:
    """Numbers of 4 bytes (`kind` i or f) out of the base64 of their little-endian bytes."""
    return [value for (value,) in struct.iter_unpack(f"<{struct_code}", base64.b64decode(text))]


def parse_completion(response: Any, url: str) -> EngineCompletion:
    """A generate call's JSON as an Answer. Raises Lost where it was aborted, GenerationError."""
    try:
        choice = response["choices"][0]
        logp = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        spans = choice.get("weight_versions") or []
        versions = sorted({str(span["version"]) for span in spans})
        found = EngineCompletion(
            list(choice["token_ids"]), logp, str(choice["finish_reason"]), versions
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(response)[:200]}"
        raise GenerationError(Problem(f"{url} answered in another form", why=why)) from None
    return _check_finished(found, url)


def _check_finished(completion: EngineCompletion, url: str) -> EngineCompletion:
    """Raises Lost for a completion that was aborted."""
    if completion.finish_reason not in ("stop", "length"):
        raise EngineLost(f"{url}: a request ended with {completion.finish_reason}")
    return completion
