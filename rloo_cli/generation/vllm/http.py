"""HTTP to rollout servers: many requests in flight on a thread of their own, each with a deadline.

What a server says decides what an error is: a closed connection or a 5xx is `Lost`; a 401, a 404 or
a page of HTML is a server that is not what the config says, and final. Proxies of the environment
are not used: tokens go to the server and nowhere else.
"""

import asyncio
import json
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from rloo_cli.generation.vllm.engine import Lost, Refused
from rloo_cli.utils import signals
from rloo_cli.utils.errors import GenerationError, Problem

T = TypeVar("T")
IDLE_S = 2.0
SHOWN = 300  # characters of an answer in an error


class Wire:
    """One event loop and its open connections. `variable`: the environment variable that has the
    servers' token, for errors."""

    def __init__(self, variable: str = "RLOO_SERVER_TOKEN"):
        self.variable = variable
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="http")
        self.thread.start()
        # Servers hang up after an error of 500, and on connections that were idle for 5 s: the next
        # request on one would look like a server that died. Only completions keep theirs.
        self.kept = self.run(self._open(keepalive_timeout=IDLE_S), 30)
        self.fresh = self.run(self._open(force_close=True), 30)

    async def _open(self, **given: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **given),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    def run(self, work: Coroutine[Any, Any, T], limit_s: float, interruptible: bool = False) -> T:
        """Do `work` on the loop and wait for it. `interruptible`: a signal ends the wait (Stopped)
        and cancels the work, which closes its requests, so that the server aborts them."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        end = time.monotonic() + limit_s
        try:
            while True:
                try:
                    return future.result(0.1)
                except TimeoutError:
                    if future.done():  # in this very moment; or the work's own TimeoutError
                        return future.result()
                if interruptible:
                    signals.check()
                if time.monotonic() > end:
                    raise Lost(f"no answer within {limit_s:g} s")
        finally:
            future.cancel()

    def get(self, url: str, path: str, token: str, limit_s: float) -> Any:
        """GET; the JSON of the answer. Raises Lost, GenerationError."""
        return self.run(self.ask("GET", url, path, token, None, limit_s), limit_s + 5)

    def post(self, url: str, path: str, token: str, body: Any, limit_s: float) -> Any:
        """POST JSON; the JSON of the answer. Never repeated. Raises Lost, GenerationError."""
        return self.run(self.ask("POST", url, path, token, body, limit_s), limit_s + 5)

    async def ask(
        self, method: str, url: str, path: str, token: str, body: Any, limit_s: float,
        keep: bool = False,
    ) -> Any:  # fmt: skip
        """One request, on the loop. `keep`: on a connection that others used before, and will; it
        is asked once more where the server has hung up on that meanwhile, so only what may be.

        Raises Lost, GenerationError.
        """
        where = url.rstrip("/") + path
        try:
            async with (self.kept if keep else self.fresh).request(
                method,
                where,
                json=body,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=min(limit_s, 10)),
                allow_redirects=False,
            ) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    response.close()  # and with it the connection
                return read(where, response.status, text, self.variable)
        except aiohttp.ConnectionTimeoutError:
            raise Lost(f"{where}: no connection within {min(limit_s, 10):g} s") from None
        except TimeoutError:
            raise Lost(f"{where}: no answer within {limit_s:g} s") from None
        except aiohttp.ServerDisconnectedError as error:
            if keep:
                return await self.ask(method, url, path, token, body, limit_s)
            raise Lost(f"{where}: {error}") from None
        except aiohttp.InvalidURL:
            raise GenerationError(not_a_server(where, "this is no address")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{where}: {str(error) or type(error).__name__}") from None

    def close(self) -> None:
        """Close every connection and end the thread."""
        if self.loop.is_running():
            for session in (self.kept, self.fresh):
                asyncio.run_coroutine_threadsafe(session.close(), self.loop)
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.1, self.loop.stop)
            self.thread.join(5)
            if not self.thread.is_alive():
                self.loop.close()


def read(where: str, status: int, text: str, variable: str) -> Any:
    """The JSON of an answer. Raises Lost (the server is going), GenerationError (it is another)."""
    if status == 200:
        try:
            return json.loads(text or "null")
        except ValueError:
            raise GenerationError(not_a_server(where, f"it answered {text[:80]!r}")) from None
    said = _message(text)
    if status in (401, 403):
        raise GenerationError(
            Problem(
                f"{status} from {where}: the server wants another token",
                "generation.server",
                said,
                f"set {variable} (generation.server.api_key_env) to the token in the server's"
                " server.json",
            )
        )
    if status in (404, 405) or status < 400:
        raise GenerationError(not_a_server(where, f"it answered {status} {said}"))
    if status >= 500:
        raise Refused(f"{where}: {status} {said}")
    raise GenerationError(Problem(f"{where} refused a request", "generation", f"{status} {said}"))


def not_a_server(where: str, why: str) -> Problem:
    return Problem(
        f"{where} is no rollout server",
        "generation.server.base_url",
        f"expected vLLM's API with its reinforcement-learning routes; {why}",
        "rloo vllm-serve starts one",
    )


def _message(text: str) -> str:
    """What an error's JSON says, or the beginning of its text."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        said = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        said = text
    return str(said)[:SHOWN]
