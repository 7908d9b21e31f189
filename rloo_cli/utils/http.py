"""The HTTP client: requests with limits, retries, an event loop on a thread.

Clients of rollout servers, teachers, rewards, judges and images are built on it; they interpret the
answers. No proxy from the environment is used unless one is passed, and no redirect is followed: a
token only goes to the address in the config.
"""

import asyncio
import email.utils
import itertools
import json
import math
import random
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
POLL_S = 0.1  # seconds between two calls of `poll`
MAX_TRIES = 5
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 20.0  # pauses between retries, which double
# A separate random generator: a pause must not change the training's random state.
_jitter_rng = random.Random()
FailureReason = Literal[
    "address", "certificate", "connection", "timeout", "closed", "broken", "answer"
]
RETRY_REASONS: frozenset[FailureReason] = frozenset({"connection", "timeout", "closed", "broken"})
RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class RequestFailed(Exception):
    """A request failed: `why` as text, `tries` so far, and `reason`:

    address (not a URL), certificate, connection (could not connect), timeout, closed (by the server
    before it answered), broken (network error), answer (too long, or truncated).
    server before it answered), broken (the network's error), answer (too long, or cut).
    """

    def __init__(self, reason: FailureReason, why: str, url: str = ""):
        super().__init__(f"{url}: {why}" if url else why)
        self.reason, self.why, self.tries = reason, why, 1


@dataclass(frozen=True)
class HttpAnswer:
    """A server's answer."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    tries: int = 1  # attempts

    @cached_property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode("utf-8", errors="replace")

    @property
    def is_html(self) -> bool:
        """Whether it is an HTML page, as from a wrong address."""
        return self.text.lstrip()[:15].lower().startswith(("<!doctype", "<html"))

    def error_message(self) -> str:
        """The message in an error's JSON, or the answer's text."""
        with suppress(ValueError, AttributeError):
            body = json.loads(self.text)
            error = body.get("error", body.get("detail", body.get("message", body)))
            return str(error.get("message", error) if isinstance(error, dict) else error)
        return self.text


def open_session(
    max_connections: int = 0,
    keepalive_s: float = 15.0,
    decompress: bool = True,
    headers: Mapping[str, str] | None = None,
) -> "aiohttp.ClientSession":
    """Open a session; call it on the loop that uses it.

    `max_connections`: 0 = no limit. `keepalive_s`: how long an idle connection can be reused; 0 =
    one request per connection. `headers`: of every request.
    """
    import aiohttp  # lazy: rewards without a service do not need it

    connector = aiohttp.TCPConnector(
        limit=max_connections,
        keepalive_timeout=keepalive_s or None,
        force_close=not keepalive_s,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=decompress,
        headers=headers,
        trust_env=False,
    )


async def send_request(
    session: "aiohttp.ClientSession",
    method: str,
    url: "str | URL",
    timeout_s: float,
    token: str = "",
    body: object = None,
    proxy: str | None = None,
    max_bytes: float = math.inf,
    tls_name: str | None = None,
) -> HttpAnswer:
    """Send one request, with `body` as JSON and `token` as bearer token ("" for none).

    `max_bytes`: of the answer. `tls_name`: whose certificate it must be; None = the URL's host. An
    answer of any status is returned. Raises RequestFailed.
    """
    import aiohttp  # lazy: rewards without a service do not need it

    connect_s = min(timeout_s, CONNECT_TIMEOUT_S)
    try:
        async with session.request(
            method,
            url,
            json=body,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            allow_redirects=False,
            proxy=proxy,
            server_hostname=tls_name,
        ) as response:
            content = bytearray()
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > max_bytes:
                    raise RequestFailed("answer", f"it has more than {max_bytes} bytes", str(url))
            if response.status != 200:
                response.close()  # also closes the connection: servers hang up after an error
            return HttpAnswer(response.status, bytes(content), response.headers)
    except (aiohttp.ClientError, OSError) as error:
        raise _named_failure(error, str(url), timeout_s, connect_s) from None


def _named_failure(error: Exception, url: str, timeout_s: float, connect_s: float) -> RequestFailed:
    """An aiohttp error as a RequestFailed with its reason."""
    import aiohttp  # lazy: rewards without a service do not need it

    why = str(error) or type(error).__name__
    reason: FailureReason = "answer"
    match error:
        case aiohttp.InvalidURL():
            reason, why = "address", "it is not a valid address"
        case aiohttp.ConnectionTimeoutError():
            reason, why = "connection", f"no connection within {round(connect_s, 2):g} s"
        case TimeoutError():
            reason, why = "timeout", f"no answer within {round(timeout_s, 2):g} s"
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            reason = "certificate"
        case aiohttp.ClientConnectorError():
            reason, why = "connection", f"no connection: {error.os_error}"
        case aiohttp.ServerDisconnectedError():
            reason, why = "closed", f"the connection broke: {why}"
        case OSError():
            reason, why = "broken", f"the connection broke: {why}"
        case aiohttp.ClientPayloadError():
            why = "it was truncated"
        case aiohttp.ClientResponseError():  # its text has the proxy's password
            why = f"{error.status} {error.message}"
    return RequestFailed(reason, why, url)


async def send_with_retries(
    send: Callable[[], Awaitable[HttpAnswer]],
    deadline: float = math.inf,
    reasons: frozenset[FailureReason] = RETRY_REASONS,
    statuses: frozenset[int] = RETRY_STATUSES,
    max_tries: int = MAX_TRIES,
) -> HttpAnswer:
    """Call `send`, and retry after these failures and statuses, until `deadline` (the loop's time).

    It waits for Retry-After between tries, or twice as long each time, except after the first
    connection closed by the server, which may have been an idle one. Returns the last answer, or
    raises the last RequestFailed.
    """
    now, backoff_s = asyncio.get_running_loop().time, FIRST_BACKOFF_S
    for tries in itertools.count(1):
        wait_s, last_failure = backoff_s * _jitter_rng.uniform(0.5, 1.5), None
        try:
            answer = replace(await send(), tries=tries)
            if answer.status not in statuses:
                return answer
            wait_s = _retry_after_seconds(answer.headers.get("Retry-After", ""), wait_s)
        except RequestFailed as failure:
            if failure.reason not in reasons:
                raise
            failure.tries, last_failure = tries, failure
            if failure.reason == "closed" and tries == 1:
                wait_s = 0.0
        if tries == max_tries or wait_s >= deadline - now():
            break
        await asyncio.sleep(wait_s)
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    if last_failure is not None:
        raise last_failure
    return answer


def _retry_after_seconds(header: str, default_s: float) -> float:
    """The wait in a Retry-After header, given in seconds or as a date; else `default_s`."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return default_s


def environment_proxy(url: str) -> str | None:
    """The environment's proxy for a URL; None if the host needs none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "//" in proxy else f"http://{proxy}"


class EventLoopThread:
    """An event loop on a thread, for callers that are not coroutines themselves."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name=name)
        self.thread.start()

    def run(
        self,
        work: Coroutine[object, object, T],
        timeout_s: float = math.inf,
        poll: Callable[[], None] = lambda: None,
    ) -> T:
        """Do `work` on the loop and wait for it. `poll` is called meanwhile.

        When `poll` raises or time runs out, the work is cancelled, which closes its requests so
        that servers abort them. Raises what `work` and `poll` raise, and RequestFailed.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        end = time.monotonic() + timeout_s
        try:
            while not wait([future], POLL_S).done:
                poll()
                if time.monotonic() > end:
                    raise RequestFailed("timeout", f"no answer within {timeout_s:g} s")
            return future.result()
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


async def gather_or_cancel(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results of all, in order. An error of one cancels the others, which closes their requests
    so that servers abort them."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_in_event_loop(
    work: Coroutine[object, object, T], poll: Callable[[], None] = lambda: None
) -> T:
    """Do `work` on a new event loop. `poll` is called meanwhile; when it raises, the work
    is cancelled, which closes its requests."""
    thread = EventLoopThread("questions")
    try:
        return thread.run(work, poll=poll)
    finally:
        thread.close()
