"""Rollout servers as an inference engine: one or several, over HTTP, with weights sent directly.

A server that the run's launcher started (`by: train`) is killed when it is lost, and the launcher
starts the next one; any other is only waited for. Calls that change a server are never repeated:
after a loss the engine reconnects, which first reads the server's state.
"""

import asyncio
import base64
import contextlib
import logging
import struct
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

from rloo_cli.data.sampling_mask import ID_TYPE, SamplingMask
from rloo_cli.generation.vllm import handshake, lora_slot, required_parts
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
    OnCompletion,
)
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.generation.vllm.transfer_send import (
    WeightSender,
    close_lost_sender,
    connect_weight_sender,
)
from rloo_cli.generation.vllm.weights import WeightSource
from rloo_cli.generation.vllm_server import LOOPBACK_HOSTS, ServerSection
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject

log = logging.getLogger(__name__)
INTERRUPT_POLL_S = 0.02  # between checks for an interruption
INTERRUPT_ANSWER_S = 0.5  # seconds for a paused server to return partial completions
DEFAULT_MAX_IN_FLIGHT = 1024  # completions in flight on one engine: more than it decodes at once
ServerRequest = tuple[str, RolloutServer, str, object]  # method, server, path, body


@dataclass(frozen=True)
class GenerateCall:
    """One HTTP request: its server, and the indices of the completions that it samples."""

    server_index: int
    request_indices: list[int]


class HttpEngine:
    """The `InferenceEngine` of backend vllm_server. `expected`: what every server must have."""

    def __init__(
        self, keys: ServerSection, folder: Path, expected: ExpectedServer,
        note: Callable[[str], None] = log.info,
    ):  # fmt: skip
        self.keys, self.expected = keys, expected
        self.http_client = HttpClient(keys.api_key_env)
        self.finder = ServerFinder(keys, folder, self.http_client, note)
        self.servers: list[RolloutServer] = []
        self.weight_sender: WeightSender | None = None  # one for all servers together
        self.restarts = 0
        self.label = ""

    def connect(self) -> None:
        reconnecting, client = bool(self.servers), self.http_client
        self.servers, warned = self.finder.find_servers(reconnecting), set[str]()
        for server in self.servers:
            url, token = server.url, server.token
            checked = self.expected.check(client, url, token)
            server.transfer, server.has_group_route, devices, warning = checked
            if warning and warning not in warned and not reconnecting:
                self.finder.note(f"warning: {url}: {warning}")
            warned.add(warning)
            if devices and not reconnecting:
                ours = ", ".join(self.expected.trainer_gpus) or "none"
                self.finder.note(f"{url} uses GPU {', '.join(devices)}; the trainer uses {ours}")
            reset_server_state(client, server)
            answer = client.get(url, "/get_world_size", token, SERVER_CALL_TIMEOUT_S)
            server.num_workers = int(answer["world_size"])
        self.restarts += reconnecting

    def sync_weights(self, source: WeightSource, label: str) -> str:
        if trigger_fault("sync.start") == "skip":
            return label
        self.label = "" if trigger_fault("sync.version") == "skip" else label
        limit = self.keys.sync_timeout_s
        self._post_all("/pause?mode=abort", SERVER_RESET_TIMEOUT_S)
        if self.weight_sender is None:
            self.weight_sender = self._connect_weight_sender(source)
        try:
            what = f"sending weights to {self._urls()}"
            run_with_deadline(limit, what, self.weight_sender.send_weights)
        except EngineRefused:
            with contextlib.suppress(EngineLost):  # an open update blocks the next one
                self._post_all("/finish_weight_update", SERVER_RESET_TIMEOUT_S, {})
            raise
        resets = self._post_all("/reset_prefix_cache", SERVER_RESET_TIMEOUT_S)
        for server, reset in zip(self.servers, resets, strict=True):
            if isinstance(reset, dict) and reset.get("success") is False:
                what = f"{server.url} kept the prefix cache of old weights: it answered {reset}"
                raise GenerationError(f"{what}; stop its other users, then resume=auto")
        questions = [("GET", server, "/weight_info", None) for server in self.servers]
        answers = cast(list[JsonObject], self.request_all(questions, SERVER_CALL_TIMEOUT_S))
        self._post_all("/resume", SERVER_RESET_TIMEOUT_S)
        labels = {str(answer["weight_version"]) for answer in answers}
        return labels.pop() if len(labels) == 1 else " and ".join(sorted(labels))

    def _urls(self) -> str:
        return ", ".join(server.url for server in self.servers)

    def _connect_weight_sender(self, source: WeightSource) -> WeightSender:
        """Connect this trainer with every worker of every server."""
        limit = self.keys.init_timeout_s
        transfers = {server.transfer for server in self.servers}
        if len(transfers) > 1:
            why = ", ".join(f"{s.url} by {s.transfer}" for s in self.servers)
            what = f"the servers use different weight transfers: {why}"
            raise GenerationError(f"{what}; start all with the same generation.server.transfer")
        host, peers = transfer_addresses(self.servers, self.keys)
        connect = partial(
            connect_weight_sender, transfers.pop(), HttpTransferClient(self, peers), source, host,
            peers[0], sum(server.num_workers for server in self.servers), limit,
        )  # fmt: skip
        return run_with_deadline(limit + 5, f"connecting with {self._urls()} for weights", connect)

    def _post_all(self, path: str, limit_s: float, body: object = None) -> list[object]:
        """POST the same to every server at once. -> their answers, in order. Raises EngineLost."""
        return self.request_all([("POST", server, path, body) for server in self.servers], limit_s)

    def request_all(self, server_requests: Sequence[ServerRequest], limit_s: float) -> list[object]:
        """Send requests together. -> the JSON of their answers, in order. Raises EngineLost."""

        async def everything() -> list[object]:
            waiting = [
                self.http_client.request(method, server.url, path, server.token, body, limit_s)
                for method, server, path, body in server_requests
            ]
            return list(await asyncio.gather(*waiting))

        return self.http_client.run(everything(), limit_s + 5)

    def generate(self, requests: Sequence[EngineRequest], on_completion: OnCompletion) -> None:
        self._generate_all(requests, on_completion, None)

    def generate_until(
        self, requests: Sequence[EngineRequest], on_completion: OnCompletion, interrupted: Event
    ) -> None:
        self._generate_all(requests, on_completion, interrupted)

    def _generate_all(
        self,
        requests: Sequence[EngineRequest],
        on_completion: OnCompletion,
        interrupted: Event | None,
    ) -> None:
        capacity = self.keys.max_in_flight or DEFAULT_MAX_IN_FLIGHT * self.keys.data_parallel_size
        calls = self._split_calls(requests)
        gates = [InFlightLimit(capacity) for _ in self.servers]

        async def one(call: GenerateCall) -> None:
            async with gates[call.server_index].acquire(len(call.request_indices)):
                if interrupted is not None and interrupted.is_set():
                    return
                for _ in call.request_indices:
                    trigger_fault("gen.request")
                completions = await self._send_call(call, requests, interrupted is not None)
            for index, completion in zip(call.request_indices, completions, strict=True):
                on_completion(index, completion)

        async def everything() -> None:
            tasks = [asyncio.create_task(one(call)) for call in calls]
            try:
                if interrupted is None:
                    await asyncio.gather(*tasks)
                else:
                    await self._gather_until(tasks, interrupted)
            finally:  # one failed: the others are closed, and the server aborts them
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        count = Counter(call.server_index for call in calls for _ in call.request_indices)
        rounds = -(-max(count.values(), default=0) // capacity)
        limit = rounds * self.keys.request_timeout_s + SERVER_CALL_TIMEOUT_S
        # An interruptible call does not run on the trainer's thread, which handles signals.
        self.http_client.run(everything(), limit, interruptible=interrupted is None)

    async def _gather_until(self, tasks: list["asyncio.Task[None]"], interrupted: Event) -> None:
        """Wait for the tasks; if interrupted, let the servers return partial completions."""
        open_tasks = set(tasks)
        while open_tasks and not interrupted.is_set():
            done, open_tasks = await asyncio.wait(
                open_tasks, timeout=INTERRUPT_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
        while open_tasks:
            await self._post_all_async("/pause?mode=abort")
            # A request that arrives after the pause is not answered: it starts when the pause ends,
            # and the next pause ends it.
            done, open_tasks = await asyncio.wait(open_tasks, timeout=INTERRUPT_ANSWER_S)
            await self._post_all_async("/resume")
            for task in done:
                task.result()

    async def _post_all_async(self, path: str) -> None:
        """POST to every server at once, on the loop."""
        calls = (
            self.http_client.request("POST", s.url, path, s.token, None, SERVER_RESET_TIMEOUT_S)
            for s in self.servers
        )
        await asyncio.gather(*calls)

    def _split_calls(self, requests: Sequence[EngineRequest]) -> list[GenerateCall]:
        """One call for a whole group if the server has the route for that, else one per request."""
        calls = []
        for number, group in enumerate(group_by_prompt(requests)):
            server = number % len(self.servers)
            parts = [group] if self.servers[server].has_group_route else [[i] for i in group]
            calls += [GenerateCall(server, part) for part in parts]
        return calls

    async def _send_call(
        self, call: GenerateCall, requests: Sequence[EngineRequest], may_be_cut: bool = False
    ) -> list[EngineCompletion]:
        """`may_be_cut`: aborted completions are answers, too."""
        server, limit = self.servers[call.server_index], self.keys.request_timeout_s
        chosen = [requests[i] for i in call.request_indices]
        body: JsonObject = {"token_ids": chosen[0].prompt_ids}
        if server.has_group_route:
            path = handshake.GROUP_ROUTE
            body["sampling_params"] = [ask.params for ask in chosen]
            if chosen[0].images is not None:
                body["images"] = chosen[0].images
        elif chosen[0].images is not None:
            what = f"{server.url} does not accept images; only rloo vllm-serve does"
            raise GenerationError(f"{what}: {handshake.SAME_CONFIG}")
        else:
            path = required_parts.GENERATE_ROUTE
            body["sampling_params"] = chosen[0].params
            if server.transfer == lora_slot.ADAPTER_TRANSFER:
                body["model"] = lora_slot.ADAPTER_NAME
        answer = await self.http_client.request(
            "POST", server.url, path, server.token, body, limit, keep_alive=True
        )
        if server.has_group_route:
            return parse_group_completions(answer, server.url, len(chosen), may_be_cut)
        return [parse_completion(answer, server.url, may_be_cut)]

    def is_healthy(self) -> bool:
        try:
            for server in self.servers:
                self.http_client.get(server.url, "/health", server.token, SERVER_CALL_TIMEOUT_S)
        except (EngineLost, GenerationError):
            return False
        return True

    def sleep(self) -> bool:
        return False  # it does not share the trainer's memory

    def discard_engine(self, reason: str) -> None:
        connected, self.weight_sender = self.weight_sender, None
        for server in self.servers:
            record = server.record
            if record is not None and record.by == "train" and record.is_alive():
                self.finder.abandoned_processes.add((record.pid, record.pid_started))
                child_process.kill_group_except(record.group)
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
                path = "/shutdown_weight_transfer_engine"
                self.http_client.post(server.url, path, server.token, None, 5)
        self.http_client.close()


class HttpTransferClient:
    """The `TransferClient` of all servers together, over HTTP: one broadcast reaches them all.

    `peers`: the address at which each server meets the trainer.
    """

    def __init__(self, engine: HttpEngine, peers: Sequence[str]):
        self.engine, self.peers = engine, peers

    def _post(self, path: str, limit_s: float, bodies: Sequence[object]) -> None:
        pairs = zip(self.engine.servers, bodies, strict=True)
        self.engine.request_all([("POST", server, path, body) for server, body in pairs], limit_s)

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        """Each server's ranks follow those of the servers before it."""
        bodies, first = [], int(init_info["rank_offset"])
        for server, peer in zip(self.engine.servers, self.peers, strict=True):
            host = {"own_host": peer} if "own_host" in init_info else {}
            bodies.append({"init_info": init_info | host | {"rank_offset": first}})
            first += server.num_workers
        self._post("/init_weight_transfer_engine", self.engine.keys.init_timeout_s, bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", SERVER_RESET_TIMEOUT_S, [None] * len(self.peers))

    def update_weights(self, update_info: JsonObject) -> None:
        body = {"update_info": update_info}
        self._post("/update_weights", self.engine.keys.sync_timeout_s, [body] * len(self.peers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version or self.engine.label or None}
        self._post("/finish_weight_update", SERVER_RESET_TIMEOUT_S, [body] * len(self.peers))


class InFlightLimit:
    """Limits the completions that are in flight on one server."""

    def __init__(self, limit: int):
        self.limit, self.semaphore, self.lock = limit, asyncio.Semaphore(limit), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def acquire(self, count: int) -> AsyncIterator[None]:
        """Hold `count` of them inside; a group above the limit takes the whole limit."""
        taken = 0
        try:
            async with self.lock:  # two callers with half each would deadlock
                while taken < min(count, self.limit):
                    await self.semaphore.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self.semaphore.release()


def group_by_prompt(requests: Sequence[EngineRequest]) -> list[list[int]]:
    """The indices of requests, group by group: siblings share a prompt, which is sent once."""
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
    """The address on which this trainer listens for weights, and each server's address for it.

    Local and remote servers all use the address that other machines can reach.
    """
    pairs = [transfer_hosts(server.url, keys) for server in servers]
    outside = [host for host, _ in pairs if host not in LOOPBACK_HOSTS]
    if not outside:
        return pairs[0][0], [peer for _, peer in pairs]
    return outside[0], [peer if host not in LOOPBACK_HOSTS else outside[0] for host, peer in pairs]


def parse_group_completions(
    response: JsonObject, url: str, count: int, may_be_cut: bool = False
) -> list[EngineCompletion]:
    """A group's JSON (`group_route`) as completions, in order. Raises as `parse_completion`."""
    try:
        items = response["completions"]
        if len(items) != count:
            raise ValueError(f"{len(items)} completions for {count}")
        completions = [
            EngineCompletion(
                decode_numbers(item["ids"], "i"),
                decode_numbers(item["logp"], "f"),
                str(item["finish_reason"]),
                [str(version) for version in item["versions"]],
                _packed_mask(item),
            )
            for item in items
        ]
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(response)[:200]}"
        raise _format_error(url, why) from None
    return completions if may_be_cut else [_check_finished(c, url) for c in completions]


def _format_error(url: str, why: str) -> GenerationError:
    fix = f"start it with the rloo and vLLM of this run: {handshake.SAME_CONFIG}"
    return GenerationError(f"{url}: unexpected response format: {why}; {fix}")


def _packed_mask(item: JsonObject) -> SamplingMask | None:
    """The sampling mask of a group's completion; None if the server sends none."""
    if "mask_ids" not in item:
        return None
    parts = (decode_numbers(item[name], "i") for name in ("mask_ids", "mask_counts"))
    return SamplingMask(*(array(ID_TYPE, part) for part in parts))


def decode_numbers(text: str, struct_code: str) -> list[Any]:
    """Numbers of 4 bytes (`struct_code` i or f) from the base64 of their little-endian bytes.

    Raises ValueError for other bytes.
    """
    data = base64.b64decode(text)
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes is not a multiple of 4")
    return [value for (value,) in struct.iter_unpack(f"<{struct_code}", data)]


def parse_completion(response: JsonObject, url: str, may_be_cut: bool = False) -> EngineCompletion:
    """A completion's JSON. Raises EngineLost if it was aborted and may not be `may_be_cut`,
    GenerationError."""
    try:
        choice = response["choices"][0]
        logprobs = choice["logprobs"] if choice["token_ids"] else {"content": []}
        logp = [float(entry["logprob"]) for entry in logprobs["content"]]
        spans = choice.get("weight_versions") or []
        versions = sorted({str(span["version"]) for span in spans})
        reason = str(choice["finish_reason"])
        kept = choice.get("sampling_mask")
        mask = None if kept is None else SamplingMask.from_lists(kept)
        ids = _checked_ids(choice["token_ids"])
        completion = EngineCompletion(ids, logp, reason, versions, mask)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}, in {str(response)[:200]}"
        raise _format_error(url, why) from None
    return completion if may_be_cut else _check_finished(completion, url)


def _checked_ids(given: list[object]) -> list[int]:
    """The ids themselves. Raises ValueError if any of them is not a valid token id."""
    for token in given:
        if type(token) is not int or not 0 <= token < 2**31:
            raise ValueError(f"{token!r} is not a valid token id")
    return cast(list[int], list(given))


def _check_finished(completion: EngineCompletion, url: str) -> EngineCompletion:
    """The completion itself. Raises EngineLost if it was aborted."""
    if completion.finish_reason not in ("stop", "length"):
        raise EngineLost(f"{url}: a request ended with {completion.finish_reason}")
    return completion
