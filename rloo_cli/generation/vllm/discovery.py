"""Finds the rollout servers of a run, and resets the state that an earlier trainer left.

They are named by `base_url`, or one is found by the run's server.json: that of `rloo vllm-serve`,
or the one that the run's own launcher started.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rloo_cli.generation.vllm import server_file
from rloo_cli.generation.vllm.deadlines import poll_until_ready
from rloo_cli.generation.vllm.engine import EngineLost, EngineRefused
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.generation.vllm_server import LOOPBACK_HOSTS, WILDCARD_HOSTS, ServerSection
from rloo_cli.utils.errors import GenerationError, refuse

SERVER_CALL_TIMEOUT_S = 30.0  # a cheap request
SERVER_RESET_TIMEOUT_S = 60.0  # emptying a cache, aborting requests


@dataclass
class RolloutServer:
    """One server."""

    url: str
    token: str = field(repr=False)
    transfer: str = "gloo"
    record: server_file.ServerRecord | None = None  # its server.json, if it has one
    num_workers: int = 0
    has_group_route: bool = False  # it has the route for the completions of a whole group


class ServerFinder:
    """Finds the servers of a run, and waits for them. `note` prints a line."""

    def __init__(
        self,
        keys: ServerSection,
        folder: Path,
        http_client: HttpClient,
        note: Callable[[str], None],
    ):
        self.keys, self.folder, self.http_client, self.note = keys, folder, http_client, note
        self.abandoned_processes: set[tuple[int, str]] = set()  # our servers that were given up

    def find_servers(self, reconnecting: bool) -> list[RolloutServer]:
        """All servers, once they answer. `reconnecting`: they were lost. Raises GenerationError."""
        urls = self.keys.base_url
        if urls is None:
            return [
                self._wait_for_run_server(n, reconnecting)
                for n in range(1, max(1, self.keys.num_nodes) + 1)
            ]
        given = [urls] if isinstance(urls, str) else urls
        called = [address_to_call(url, self.note) for url in given]
        secret = os.environ.get(self.keys.api_key_env, "")
        limit = self.keys.reconnect_timeout_s if reconnecting else self.keys.ready_timeout_s
        for url in called:
            self.http_client.get_when_ready(url, "/health", secret, limit)
        return [RolloutServer(url, secret) for url in called]

    def _wait_for_run_server(self, number: int, reconnecting: bool) -> RolloutServer:
        """The server of the run's own server.json (of its n-th node), once it answers."""
        last = server_file.read_server_file(self.folder, number)
        external = last is not None and last.by != "train" and not last.failed

        def found() -> RolloutServer | None:
            there = server_file.read_server_file(self.folder, number)
            if self.keys.num_nodes and there is not None and there.is_stale():
                return None  # left by an earlier job
            if there is not None and there.failed:
                what = "the rollout server cannot start"
                fix = "fix that, then restart the server, or the run that starts it"
                refuse(there.log, what, fix, there.failed, error=GenerationError)
            if (
                there is None
                or (there.pid, there.pid_started) in self.abandoned_processes
                or not _may_be_running(there)
            ):
                return None
            server = RolloutServer(there.url, there.token, there.transfer, there)
            with contextlib.suppress(EngineLost):
                self.http_client.get(there.url, "/health", there.token, 5)
                return server
            return None

        key, asked = "ready_timeout_s", self.keys.ready_timeout_s
        limit = self._run_server_timeout_s()
        if reconnecting and external:
            key, asked = "reconnect_timeout_s", self.keys.reconnect_timeout_s
            limit = asked
        try:
            return poll_until_ready(
                limit, f"a server in {server_file.server_file_path(self.folder, number)}", found
            )
        except EngineLost as lost:  # the limit is used up: no second wait
            what, where = "no rollout server answers", f"generation.server.{key}"
            longer = f"{where}={2 * asked:g}"
            fix = f"check that it runs (its log is in logs/server), or {longer}"
            refuse(where, what, fix, str(lost), error=GenerationError)

    def _run_server_timeout_s(self) -> float:
        """The launcher limits each start, and records in server.json when it gives up."""
        if self.keys.num_nodes:  # it is not restarted
            return self.keys.ready_timeout_s + 60
        return self.keys.ready_timeout_s * (self.keys.max_restarts + 1) + 60


def address_to_call(url: str, note: Callable[[str], None]) -> str:
    """An address to listen on (0.0.0.0) cannot be called: it means this machine."""
    parts = urlsplit(url)
    if (parts.hostname or "") not in WILDCARD_HOSTS:
        return url.rstrip("/")
    port = f":{parts.port}" if parts.port else ""
    called = parts._replace(netloc=f"127.0.0.1{port}").geturl().rstrip("/")
    note(f"{url} is an address to listen on, not to connect to: using {called}")
    return called


def reset_server_state(http_client: HttpClient, server: RolloutServer) -> None:
    """Reset what an earlier trainer may have left: a pause, an open update, a connection."""
    post = http_client.post
    for _ in range(2):  # the first may only report missing weights
        with contextlib.suppress(EngineRefused):  # no update is open: no route reports it
            post(server.url, "/finish_weight_update", server.token, {}, SERVER_RESET_TIMEOUT_S)
    if http_client.get(server.url, "/is_paused", server.token, SERVER_CALL_TIMEOUT_S)["is_paused"]:
        post(server.url, "/resume", server.token, None, SERVER_RESET_TIMEOUT_S)
    with contextlib.suppress(EngineRefused):
        post(
            server.url,
            "/shutdown_weight_transfer_engine",
            server.token,
            None,
            SERVER_RESET_TIMEOUT_S,
        )


def _may_be_running(record: server_file.ServerRecord) -> bool:
    return record.is_alive() is not False


def transfer_hosts(url: str, keys: ServerSection) -> tuple[str, str]:
    """Addresses where trainer and server meet to send weights: loopback on the server's machine.

    For a server on another machine this one listens on `host`, or on the address from which it
    reaches the server. Raises GenerationError if that is not allowed.
    """
    there = urlsplit(url).hostname or LOOPBACK_HOSTS[0]
    if there in LOOPBACK_HOSTS:
        return "127.0.0.1", "127.0.0.1"
    if not keys.allow_remote:
        refuse(
            "generation.server.allow_remote",
            f"syncing weights to {url} would leave this machine",
            "generation.server.allow_remote=true",
            "the trainer would listen on an address that other machines can reach",
            error=GenerationError,
        )
    if keys.host not in LOOPBACK_HOSTS:
        return keys.host, there
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((there, 9))  # nothing is sent: it only chooses the interface
        return s.getsockname()[0], there
