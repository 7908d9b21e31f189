"""JSON over HTTP: one request with a deadline, and an event loop on a thread of its own.

The clients of rollout servers and of served rewards stand on it; they decide what an answer means
and what is asked again. Proxies of the environment are not used but where one is passed, and no
redirect is followed: a key goes to the address of the config and nowhere else.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0  # for the other side of a WebSocket to say farewell
POLL_S = 0.1  # seconds between two calls of `poll`
FailureReason = Literal[
    "address", "certificate", "connection", "timeout", "closed", "broken", "answer"
]


class RequestFailed(Exception):
    """A request had no answer. `reason` says why:

    address (it is not a URL), certificate, connection (none was made), timeout, closed (by the
    server before it answered), broken (the network's error), answer (it ended in the middle).
    """

    def __init__(self, reason: FailureReason, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class HttpAnswer:
    """What a server answered."""

    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def is_html(self) -> bool:
        """Whether it is a page for people, as a wrong address gives it."""
        return self.text.lstrip()[:15].lower().startswith(("<!doctype", "<html"))

    def error_message(self) -> str:
        """What an error's JSON says, or the answer's text."""
        with suppress(ValueError, AttributeError):
            body = json.loads(self.text)
            error = body.get("error", body.get("detail", body.get("message", body)))
            return str(error.get("message", error) if isinstance(error, dict) else error)
        return self.text


def open_session(
    max_connections: int, keepalive_s: float | None = None, keep_alive: bool = True
) -> "aiohttp.ClientSession":
    """Open a session; call it on the loop that uses it. 0 connections: no limit."""
    import aiohttp  # lazy: rewards that ask no service do not need it

    connector = (
        aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_s or 15.0)
        if keep_alive
        else aiohttp.TCPConnector(limit=max_connections, force_close=True)
    )
    timeout = aiohttp.ClientTimeout(total=None)
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)  # a WebSocket would follow it
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False, trace_configs=[trace]
    )


async def _refuse_redirect(session: object, context: object, parameters: Any) -> None:
    target = parameters.response.headers.get("Location", "another address")
    what = f"{parameters.url} redirects to {target!r:.200}, which is not followed"
    raise RequestFailed("address", what)


async def send_json(
    session: "aiohttp.ClientSession",
    method: str,
    url: str,
    body: object,
    key: str,
    timeout_s: float,
    proxy: str | None = None,
    max_bytes: int | None = None,
) -> HttpAnswer:
    """Send one request, with `body` as JSON and `key` as bearer token ("" for none).

    `max_bytes`: of the answer; None = any number. Raises RequestFailed; an answer of any status is
    returned.
    """
    import aiohttp  # lazy: rewards that ask no service do not need it

    with _named_failures(url, timeout_s):
        async with session.request(
            method,
            url,
            json=body,
            headers=_token_header(key),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_connect_limit(timeout_s)),
            allow_redirects=False,
            proxy=proxy,
        ) as response:
            text = await _read_text(response, max_bytes)
            if response.status != 200:
                response.close()  # and with it the connection: servers hang up after an error
            return HttpAnswer(response.status, text, response.headers)


class TextSocket:
    """A WebSocket whose messages are answered one by one.

    It reads at all times, since that is how a server's pings are answered: most servers close a
    connection that leaves one without an answer for 20 seconds, and a turn may take longer.
    """

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse", url: str):
        self.socket, self.url = socket, url
        self.heard: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            message = await self.socket.receive()
            self.heard.put_nowait(message)
            if self.socket.closed:
                return

    async def exchange_text(self, text: str, timeout_s: float, limit_s: float) -> str:
        """Send a message, and return the one that answers it. Raises RequestFailed.

        `limit_s` is what an error says: the time for all, of which `timeout_s` is left.
        """
        import aiohttp  # lazy: rewards that ask no service do not need it

        with _named_failures(self.url, limit_s):
            async with asyncio.timeout(timeout_s):
                if not self.socket.closed:
                    await self.socket.send_str(text)
                message = await self.heard.get()
        if message.type is aiohttp.WSMsgType.TEXT:
            return str(message.data)
        if self.socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            raise RequestFailed("answer", f"{self.url}: it answered with too long a message")
        why = f"{self.url}: the connection was closed ({self.socket.close_code})"
        raise RequestFailed("closed", why)

    async def close(self, last_text: str) -> None:
        """Send a last message, and close the connection."""
        with suppress(OSError):
            await self.socket.send_str(last_text)
        self.reader.cancel()
        with suppress(OSError):
            await self.socket.close()


async def open_websocket(
    session: "aiohttp.ClientSession", url: str, key: str, timeout_s: float, max_bytes: int
) -> TextSocket:
    """Open a WebSocket, with `key` as bearer token. Raises RequestFailed.

    `max_bytes`: of a message; a longer one ends the connection.
    """
    import aiohttp  # lazy: rewards that ask no service do not need it

    with _named_failures(url, timeout_s):
        async with asyncio.timeout(timeout_s):
            socket = await session.ws_connect(
                url,
                headers=_token_header(key),
                max_msg_size=max_bytes,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
            )
    return TextSocket(socket, url)


def _token_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _connect_limit(timeout_s: float) -> float:
    return min(timeout_s, CONNECT_TIMEOUT_S)


@contextmanager
def _named_failures(url: str, timeout_s: float) -> Iterator[None]:
    """What aiohttp raises, as a RequestFailed that says why."""
    import aiohttp  # lazy: rewards that ask no service do not need it

    connect_s = _connect_limit(timeout_s)
    try:
        yield
    except aiohttp.InvalidURL:
        raise RequestFailed("address", f"{url} is not an address") from None
    except aiohttp.ConnectionTimeoutError:
        message = f"{url}: no connection within {round(connect_s, 2):g} s"
        raise RequestFailed("connection", message) from None
    except TimeoutError:
        raise RequestFailed(
            "timeout", f"{url}: no answer within {round(timeout_s, 2):g} s"
        ) from None
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
        raise RequestFailed("certificate", f"{url}: {error}") from None
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed("connection", f"{url}: no connection: {error.os_error}") from None
    except aiohttp.ServerDisconnectedError as error:
        raise RequestFailed("closed", f"{url}: the connection broke: {error}") from None
    except OSError as error:
        message = f"{url}: the connection broke: {str(error) or type(error).__name__}"
        raise RequestFailed("broken", message) from None
    except aiohttp.ClientError as error:
        raise RequestFailed("answer", f"{url}: {str(error) or type(error).__name__}") from None


async def _read_text(response: "aiohttp.ClientResponse", max_bytes: int | None) -> str:
    """The body, read piece by piece where it has a limit. Raises RequestFailed."""
    if max_bytes is None:
        return await response.text(errors="replace")
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            response.close()
            raise RequestFailed("answer", f"{response.url}: it answered over {max_bytes} bytes")
    return b"".join(pieces).decode("utf-8", errors="replace")


class EventLoopThread:
    """An event loop on a thread, for callers that are not coroutines themselves."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name=name)
        self.thread.start()

    def run(
        self,
        work: Coroutine[object, object, T],
        timeout_s: float | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> T:
        """Do `work` on the loop and wait for it. `poll` is called meanwhile.

        When `poll` raises or the time is over, the work is cancelled, which closes its requests,
        so that servers abort them. Raises what `work` and `poll` raise, and RequestFailed.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(POLL_S)
                except TimeoutError:
                    if future.done():  # in this very moment; or it is the work's own TimeoutError
                        return future.result()
                poll()
                if end is not None and time.monotonic() > end:
                    raise RequestFailed("timeout", f"no answer within {timeout_s:g} s")
        finally:
            future.cancel()

    def close(self, last_work: Coroutine[object, object, None] | None = None) -> None:
        """Do `last_work`, end what was cancelled, and end the thread."""
        if not self.loop.is_running():
            if last_work is not None:
                last_work.close()  # Python warns of one that is never awaited
            return
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(_end_tasks(last_work), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()


async def _end_tasks(last_work: Coroutine[object, object, None] | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if last_work is not None:
        await last_work
    await asyncio.get_running_loop().shutdown_asyncgens()
