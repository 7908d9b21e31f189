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

from rloo_cli.generation.vllm.engine import EngineLost, EngineRefused
from rloo_cli.utils import signals
from rloo_cli.utils.errors import GenerationError, Problem

T = TypeVar("T")
KEEPALIVE_S = 2.0
MAX_ERROR_CHARACTERS = 300  # characters of an answer in an error


class HttpClient:
    """One event loop and its open connections. `variable`: the environment variable that has the
    servers' token, for errors."""

    def __init__(self, token_variable: str = "RLOO_SERVER_TOKEN"):
        self.token_variable = token_variable
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="http")
        self.thread.start()
        # Servers hang up after an error of 500, and on connections that were idle for 5 s: the next
        # request on one would look like a server that died. Only completions keep theirs.
        self.keepalive_session = self.run(self._open_session(keepalive_timeout=KEEPALIVE_S), 30)
        self.fresh_session = self.run(self._open_session(force_close=True), 30)

    async def _open_session(self, **connector_options: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **connector_options),
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
                    signals.raise_if_stopped()
                if time.monotonic() > end:
                    raise EngineLost(f"no answer within {limit_s:g} s")
        finally:
            future.cancel()

    def get(self, url: str, path: str, token: str, limit_s: float) -> Any:
        """GET; the JSON of the answer. Raises Lost, GenerationError."""
        return self.run(self.request("GET", url, path, token, None, limit_s), limit_s + 5)

    def post(self, url: str, path: str, token: str, body: Any, limit_s: float) -> Any:
        """POST JSON; the JSON of the answer. Never repeated. Raises Lost, GenerationError."""
        return self.run(self.request("POST", url, path, token, body, limit_s), limit_s + 5)

    async def request(
        self, method: str, url: str, path: str, token: str, body: Any, limit_s: float,
        keep_alive: bool = False,
    ) -> Any:  # fmt: skip
        """One request, on the loop. `keep`: on a connection that others used before, and will; it
        is asked once more where the server has hung up on that meanwhile, so only what may be.

        Raises Lost, GenerationError.
        """
        where = url.rstrip("/") + path
        try:
            async with (self.keepalive_session if keep_alive else self.fresh_session).request(
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
                return parse_response(where, response.status, text, self.token_variable)
        except aiohttp.ConnectionTimeoutError:
            raise EngineLost(f"{where}: no connection within {min(limit_s, 10):g} s") from None
        except TimeoutError:
            raise EngineLost(f"{where}: no answer within {limit_s:g} s") from None
        except aiohttp.ServerDisconnectedError as error:
            if keep_alive:
                return await self.request(method, url, path, token, body, limit_s)
            raise EngineLost(f"{where}: {error}") from None
        except aiohttp.InvalidURL:
            raise GenerationError(not_a_server_problem(where, "this is no address")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{where}: {str(error) or type(error).__name__}") from None

    def close(self) -> None:
        """Close every connection and end the thread."""
        if self.loop.is_running():
            for session in (self.keepalive_session, self.fresh_session):
                asyncio.run_coroutine_threadsafe(session.close(), self.loop)
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.1, self.loop.stop)
            self.thread.join(5)
            if not self.thread.is_alive():
                self.loop.close()


def parse_response(url: str, status: int, text: str, token_variable: str) -> Any:
    """The JSON of an answer. Raises Lost (the server is going), GenerationError (it is another)."""
    if status == 200:
        try:
            return json.loads(text or "null")
        except ValueError:
            raise GenerationError(not_a_server_problem(url, f"it answered {text[:80]!r}")) from None
    said = _error_message(text)
    if status in (401, 403):
        raise GenerationError(
            Problem(
                f"{status} from {url}: the server wants another token",
                "generation.server",
                said,
                f"set {token_variable} (generation.server.api_key_env) to the token in the server's"
                " server.json",
            )
        )
    if status in (404, 405) or status < 400:
        raise GenerationError(not_a_server_problem(url, f"it answered {status} {said}"))
    if status >= 500:
        raise EngineRefused(f"{url}: {status} {said}")
    raise GenerationError(Problem(f"{url} refused a request", "generation", f"{status} {said}"))


def not_a_server_problem(url: str, why: str) -> Problem:
    return Problem(
        f"{url} is no rollout server",
        "generation.server.base_url",
        f"expected vLLM's API with its reinforcement-learning routes; {why}",
        "rloo vllm-serve starts one",
    )


def _error_message(text: str) -> str:
    """What an error's JSON says, or the beginning of its text."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        said = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        said = text
    return str(said)[:MAX_ERROR_CHARACTERS]
