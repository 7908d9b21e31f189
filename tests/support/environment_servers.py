"""Servers of environments: the one that a page shows, and one that misbehaves as a test says."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiohttp import web

from rloo_cli.utils.paths import PACKAGE

PAGE = PACKAGE.parent / "docs" / "agents_elsewhere.md"
PARAMETERS = {"type": "object", "properties": {"by": {"type": "integer", "description": "How."}}}
ADD = {"name": "add", "description": "Adds.", "parameters": PARAMETERS | {"required": ["by"]}}
TOOLS = {"tools": [{"type": "function", "function": ADD}]}


def page_server(folder: Path) -> Path:
    """The server that the page shows, as a file."""
    block = re.search(r"```python\n(# counter_server\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    path = folder / "counter_server.py"
    path.write_text(block[1])
    return path


@contextmanager
def page_server_started(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The page's server, in a process of its own. -> (its address, the process)"""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = page_server(folder).read_text()
    assert text.count("8080") == 1
    path = folder / "started_server.py"
    path.write_text(text.replace("8080", str(port)))
    process = subprocess.Popen([sys.executable, str(path)], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Until something listens there, or the process has ended."""
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, "the server has ended"
        time.sleep(0.05)
    raise AssertionError("the server does not listen")


class OddServer:
    """A counter behind our protocol, which does what `faults` says of a path: path -> fault.

    Sessions whose row has `bad` meet the fault; the others are answered as they should be.
    """

    def __init__(self, faults: dict[str, str] | None = None, tools: Any = TOOLS):
        self.faults, self.tools = faults or {}, tools
        self.counts: dict[str, int] = {}
        self.bad: set[str] = set()
        self.asked: list[tuple[str, Any, str | None]] = []  # path, body, Authorization
        handler = type("Bound", (_Handler,), {"server_of": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.released = threading.Event()  # ends what hangs
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, body: Any) -> Any:
        session = body["session"]
        if path == "/reset":
            self.counts[session] = 0
        if path == "/step":
            self.counts[session] += body["arguments"]["by"]
            return {"session": session, "text": f"counted {self.counts[session]}", "reward": 0.5}
        return {"session": session, "reward": 1.0 if path == "/close" else None}


class _Handler(BaseHTTPRequestHandler):
    server_of: OddServer

    def do_GET(self) -> None:
        self.server_of.asked.append((self.path, None, self.headers.get("Authorization")))
        self._send(200, json.dumps(self.server_of.tools))

    def do_POST(self) -> None:
        odd = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        odd.asked.append((self.path, body, self.headers.get("Authorization")))
        session = body.get("session", "")
        if body.get("row", {}).get("bad"):
            odd.bad.add(session)
        fault = odd.faults.get(self.path) if session in odd.bad else None
        if fault is None:
            self._send(200, json.dumps(odd.answer(self.path, body)))
            return
        getattr(self, f"_{fault}")(session)

    def _never_answers(self, session: str) -> None:
        self.server_of.released.wait(30)

    def _trickles(self, session: str) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while not self.server_of.released.wait(0.1):
                self.wfile.write(b" ")
                self.wfile.flush()

    def _garbage(self, session: str) -> None:
        self._send(200, '{"session": "' + session + '", ')

    def _list(self, session: str) -> None:
        self._send(200, "[1, 2]")

    def _deep(self, session: str) -> None:
        self._send(200, "[" * 100_000)

    def _huge(self, session: str) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for _ in range(64):
                self.wfile.write(b" " * (1 << 20))

    def _status(self, session: str) -> None:
        self._send(500, json.dumps({"error": "out of worlds"}))

    def _redirect(self, session: str) -> None:
        self.send_response(307)
        self.send_header("Location", f"{self.server_of.url}/elsewhere")
        self.end_headers()

    def _dies(self, session: str) -> None:
        self.connection.close()

    def _other_session(self, session: str) -> None:
        self._send(200, json.dumps({"session": "another", "text": "not yours"}))

    def _no_text(self, session: str) -> None:
        self._send(200, json.dumps({"session": session}))

    def _nan(self, session: str) -> None:
        self._send(200, '{"session": "' + session + '", "text": "", "reward": NaN}')

    def _error(self, session: str) -> None:
        self._send(200, json.dumps({"session": session, "error": "no page"}))

    def _flood(self, session: str) -> None:
        self._send(200, json.dumps({"session": session, "text": "x" * 1_000_000}))

    def _surrogate(self, session: str) -> None:
        self._send(200, '{"session": "' + session + '", "text": "odd \\ud800 text"}')

    def _structure(self, session: str) -> None:
        self._send(200, json.dumps({"session": session, "text": {"seen": [1, None]}}))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None: ...


class OddOpenenv:
    """A server of OpenEnv's protocol, which echoes; `faults`: type of message -> fault.

    `form`: plain or tools, as scripts/openenv/echo_server.py has them.
    """

    def __init__(
        self, form: str = "plain", faults: dict[str, str] | None = None,
        ping_s: float | None = None,
    ):  # fmt: skip
        self.form, self.faults = form, faults or {}
        self.ping_s = ping_s  # between pings, which want an answer within half of that
        self.heard: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.sessions = self.most = 0
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(20)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        started.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_post("/mcp", self._mcp)
        app.router.add_get("/ws", self._socket)
        app.router.add_get("/elsewhere", self._socket)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def _schema(self, request: web.Request) -> web.Response:
        fields: dict[str, Any] = {"metadata": {"type": "object"}}
        if self.form == "plain":
            fields["message"] = {"type": "string", "description": "Message to echo back"}
        else:
            fields |= {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}}
            fields |= {"arguments": {"type": "object"}}
        required = ["message"] if self.form == "plain" else ["tool_name"]
        action = {"type": "object", "properties": fields, "required": required}
        return web.json_response({"action": action, "observation": {}, "state": {}})

    async def _mcp(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["method"] == "tools/list"
        schema = {"type": "object", "properties": {"message": {"type": "string"}}}
        schema |= {"required": ["message"]}
        tool = {"name": "echo_message", "description": "Echoes.", "inputSchema": schema}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": {"tools": [tool]}})

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        self.paths.append(request.path)
        if self.faults.get("connect") == "redirect" and request.path == "/ws":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        if self.faults.get("connect") == "status":
            raise web.HTTPForbidden(text="not you")
        socket = web.WebSocketResponse(heartbeat=self.ping_s)
        await socket.prepare(request)
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        try:
            if self.faults.get("connect") == "full":
                await socket.send_json(_ws_error("CAPACITY_REACHED", "at capacity"))
            else:
                await self._converse(socket)
        finally:
            self.sessions -= 1
        return socket

    async def _converse(self, socket: web.WebSocketResponse) -> None:
        steps = 0
        async for message in socket:
            asked = json.loads(message.data)
            self.heard.append(asked)
            if asked["type"] == "close":
                return
            steps += asked["type"] == "step" and self.form == "plain"
            fault = self.faults.get(asked["type"])
            if fault == "dies":
                assert socket._req is not None and socket._req.transport is not None
                socket._req.transport.abort()
                return
            if fault == "never_answers":
                await asyncio.sleep(30)
            await socket.send_str(FAULTS[fault] if fault else self._answer(asked, steps))

    def _answer(self, asked: dict[str, Any], steps: int) -> str:
        data = asked.get("data", {})
        if asked["type"] == "state":
            return json.dumps({"type": "state", "data": {"episode_id": "e", "step_count": steps}})
        if asked["type"] == "reset":
            observation = {"echoed_message": " Ready."} if self.form == "plain" else {}
            return _ws_observation(observation, 0.0)
        if self.form == "plain":
            said = data["message"]
            if not said:
                return json.dumps(_ws_error("EXECUTION_ERROR", "an empty message has no echo"))
            return _ws_observation({"echoed_message": said, "message_length": len(said)}, len(said))
        said = data["arguments"]["message"]
        result = {"content": [{"type": "text", "text": said}], "data": said}
        error = None if said else {"error_type": "execution_error", "message": "no echo"}
        observation = {"tool_name": data["tool_name"], "result": result, "error": error}
        return _ws_observation(observation, None)


def _ws_observation(observation: Any, reward: float | None) -> str:
    data = {"observation": observation, "reward": reward, "done": False}
    return json.dumps({"type": "observation", "data": data})


def _ws_error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


FAULTS = {
    "garbage": "{", "list": "[]", "no_data": '{"type": "observation"}',
    "huge": json.dumps({"type": "x" * (17 << 20), "data": {}}),
    "other_type": json.dumps({"type": "state", "data": {}}),
    "nan": '{"type": "observation", "data": {"observation": {"echoed_message": ""},'
    ' "reward": Infinity}}',
    "session_error": json.dumps(_ws_error("SESSION_ERROR", "it is gone")),
    "done": json.dumps({"type": "observation", "data": {"observation": {"echoed_message": "bye"},
                        "reward": 2.0, "done": True}}),
}  # fmt: skip
