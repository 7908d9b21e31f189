"""Servers of environments: the one that a page shows, and one of OpenEnv's protocol."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web


@contextmanager
def program_started(
    program: Path, *words: str, python: str = sys.executable, **variables: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server in a process of its own: its text has PORT where its port is asked for, or `words`.

    -> its address, the process
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [python, "-P", str(program), *(word.replace("PORT", port) for word in words)]
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(int(port), process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, "the server has ended"
        time.sleep(0.05)
    raise AssertionError("the server does not listen")


class OddOpenenv:
    """An echo server of OpenEnv's protocol; `faults`: type of message -> what it does instead.

    `ping_s`: seconds between its pings, which want an answer within half of that.
    """

    def __init__(self, faults: dict[str, str] | None = None, ping_s: float | None = None):
        self.faults, self.ping_s = faults or {}, ping_s
        self.heard: list[dict[str, Any]] = []
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
        app.router.add_get("/ws", self._socket)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    def close(self) -> None:
        """End the server and its connections."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(heartbeat=self.ping_s)
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            self.heard.append(asked)
            fault = self.faults.get(asked["type"])
            if asked["type"] == "close" or fault == "closes":
                break
            await socket.send_str(fault or json.dumps(_echo(asked)))
        return socket


def _echo(asked: dict[str, Any]) -> dict[str, Any]:
    said = asked["data"].get("message", " Ready.")
    if not said:
        error = {"code": "EXECUTION_ERROR", "message": "an empty message has no echo"}
        return {"type": "error", "data": error}
    reward = 0.1 * len(said) if asked["type"] == "step" else 0.0
    found = {"observation": {"echoed_message": said}, "reward": reward, "done": said == "bye"}
    return {"type": "observation", "data": found}
