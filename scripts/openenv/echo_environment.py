"""The environment of echo_server.py as a class of agent=class: a client of its WebSocket.

    rloo train +recipe=openenv_echo      (OPENENV_URL: where the server is, if not on this machine)

The protocol is openenv-core 0.3's: messages of a `type` (reset, step, close) with `data`, answered
by `observation` or `error`. A thread reads the WebSocket at all times, so that the server's pings
are answered while the policy samples. For another environment of OpenEnv write a class like this
one, whose tools send the fields of its actions.
"""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine
from typing import Any

import aiohttp

URL = "http://127.0.0.1:8000"
ANSWER_S = 25.0  # less than agent.max_tool_s, after which the process is killed
TOLD_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # of a step; the session lives on


class EchoEnvironment:
    """One session of the server. Each message is worth a tenth of its characters."""

    def __init__(self) -> None:
        self.steps, self.done = 0, False
        self._reward, self._lost = 0.0, ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def reset(self, seed: int) -> str:
        """Opens a session. The row's columns can be sent, too, if an environment takes them."""
        self._run(self._open(os.environ.get("OPENENV_URL", URL).rstrip("/") + "/ws"))
        return self._observe("reset", {"seed": seed % 2**31})["echoed_message"]

    def step(self, message: str) -> str:
        """Sends a message, which comes back.

        Args:
            message: Message to echo back
        """
        observation = self._observe("step", {"message": message})
        self.steps += 1
        return observation["echoed_message"]

    def get_reward(self) -> float:
        """Closes the session. -> the sum of the rewards. Raises where the session was lost."""
        if self._lost:
            raise ConnectionError(self._lost)
        self._run(self._close())
        return self._reward

    def _observe(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        match self._run(self._ask({"type": kind, "data": data})):
            case {"type": "observation", "data": {"observation": dict(observation), **rest}}:
                self._reward += rest.get("reward") or 0.0
                self.done = rest.get("done") is True
                return observation
            case {"type": "error", "data": {"code": code, "message": message}} if (
                code in TOLD_ERRORS
            ):
                raise ValueError(message)  # reported to the model
            case other:
                self._lost = f"not an observation: {other!r:.300}"
                raise ConnectionError(self._lost)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)
        except Exception as error:  # nothing is known of the session any more
            self._lost = self._lost or f"{type(error).__name__}: {error}"
            raise

    async def _open(self, url: str) -> None:
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(url)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            self._answers.put_nowait(message.data)
        self._answers.put_nowait(json.dumps(f"closed with code {self._socket.close_code}"))

    async def _ask(self, message: dict[str, Any]) -> Any:
        await self._socket.send_json(message)
        return json.loads(await self._answers.get())

    async def _close(self) -> None:
        await self._socket.send_json({"type": "close"})
        await self._session.close()
