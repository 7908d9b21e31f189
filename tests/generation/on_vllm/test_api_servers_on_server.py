"""One API server of two in a real rollout server, and what it does to the requests of the other."""

import asyncio
import http.client
import importlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import vllm_cases
from vllm_cases import Real

from rloo_cli.generation.vllm import auth, server_file
from rloo_cli.utils import child_process

pytestmark = pytest.mark.vllm


class Line:
    """A connection that stays with the API process that took it."""

    def __init__(self, there: Real):
        address = urlsplit(there.url)
        self.token, host = there.token, str(address.hostname)
        self.http = http.client.HTTPConnection(host, address.port, timeout=120)

    def ask(self, method: str, path: str, body: Any = None, token: bool = True) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"} if token else {}
        data = None if body is None else json.dumps(body)
        self.http.request(method, path, data, headers | {"Content-Type": "application/json"})
        answer = self.http.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    def taken_by(self, group: int) -> int:
        """The process that has the other end."""
        port = self.http.sock.getsockname()[1]
        (pid,) = [
            each.pid
            for each in psutil.net_connections("tcp")
            # One that an earlier client of this port has left behind waits beside it.
            if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        ]
        assert pid in child_process.group_processes(group)
        return pid


@pytest.fixture
def lines(server: Real, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Line]]:
    """A connection to each API server; the second may still be starting."""
    monkeypatch.setenv("RLOO_SERVER_TOKEN", server.token)
    got = server_file.running_server(server.folder)
    assert got is not None
    found: dict[int, Line] = {}
    opened: list[Line] = []
    end = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        opened.append(Line(server))
        assert opened[-1].ask("GET", "/health")[0] == 200
        found.setdefault(opened[-1].taken_by(got.group), opened[-1])
    assert len(found) == 2 and got.pid not in found
    yield list(found.values())
    opened[0].ask("POST", "/resume")
    for line in opened:
        line.http.close()


def drawing(line: Line, answers: list[tuple[int, Any]]) -> threading.Thread:
    """Ask for one completion by this connection, on a thread."""
    params = {"max_tokens": 4, "logprobs": 0, "seed": 1, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": [params]}
    thread = threading.Thread(
        target=lambda: answers.append(line.ask("POST", "/rloo/generate", body)), daemon=True
    )
    thread.start()
    return thread


def test_the_guard_stands_in_each(lines: list[Line]) -> None:
    for line in lines:
        for path in ("/weight_info", "/rloo", "/v1/models", "/metrics", "/is_paused"):
            assert line.ask("GET", path, token=False)[0] == 401
        for path in ("/rloo/generate", "/pause", "/finish_weight_update"):
            assert line.ask("POST", path, {}, token=False)[0] == 401
        assert line.ask("POST", "/collective_rpc", {})[0] == 403
        assert line.ask("GET", "/rloo")[1]["routes"] == ["/rloo/generate"]


def lifespan_of(app: Any) -> list[str]:
    """What an application answers to its start and its end."""
    asked, answers = iter(("lifespan.startup", "lifespan.shutdown")), []

    async def receive() -> dict[str, str]:
        return {"type": next(asked)}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message["type"])

    asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))
    return answers


def test_an_application_does_not_start_where_something_stands_before_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(auth.TOKEN_VARIABLE, "t" * 16)
    guard = importlib.import_module("rloo_cli.generation.vllm.group_route").ServerGuard
    make = importlib.import_module("fastapi").FastAPI
    alone, behind = make(), make()
    alone.add_middleware(guard)
    behind.add_middleware(guard)
    behind.add_middleware(importlib.import_module("starlette.middleware.gzip").GZipMiddleware)
    assert lifespan_of(alone) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert "/rloo/generate" in {route.path for route in alone.routes}
    assert lifespan_of(behind) == ["lifespan.startup.failed"]


def test_a_pause_and_an_update_by_one_hold_for_the_requests_of_the_other(
    lines: list[Line], server: Real, tmp_path: Path
) -> None:
    asked, other = lines
    client = vllm_cases.engine(vllm_cases.config(server.url, sync_timeout_s=120.0), tmp_path)
    try:
        client.connect()
        client.sync_weights(vllm_cases.weights(), "run:1")
        assert client.weight_sender is not None
        assert asked.ask("POST", "/pause?mode=abort")[0] == 200
        assert other.ask("GET", "/is_paused") == (200, {"is_paused": True})
        answers: list[tuple[int, Any]] = []
        first, end = drawing(other, answers), time.monotonic() + 60
        time.sleep(0.3)  # it waits in the engine
        assert answers == []
        while first.is_alive() and time.monotonic() < end:  # until it is there at last
            assert asked.ask("POST", "/pause?mode=abort")[0] == 200
            first.join(0.2)
        assert [a["finish_reason"] for a in answers.pop()[1]["completions"]] == ["abort"]
        second = drawing(other, answers)
        time.sleep(0.3)
        client.label = "run:2"
        client.weight_sender.send_weights()
        assert answers == []
        assert asked.ask("POST", "/resume")[0] == 200
        end = time.monotonic() + 60
        while second.is_alive() and time.monotonic() < end:
            # An idle connection is closed after 5 s.
            assert asked.ask("GET", "/health")[0] == 200
            second.join(1)
        assert answers[0][1]["completions"][0]["versions"] == ["run:2"]
        for line in lines:
            assert line.ask("GET", "/weight_info") == (200, {"weight_version": "run:2"})
    finally:
        with suppress(Exception):
            asked.ask("POST", "/resume")
        client.close()
