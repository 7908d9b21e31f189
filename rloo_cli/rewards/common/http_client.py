"""Questions to a model that somebody else serves: JSON over HTTP, bounded, repeated where safe.

A question is asked again only where that cannot do harm and may help: the connection was refused
or broke before an answer, the server is too busy (408, 429, 500, 502, 503, 504), or one request
took too long while the call has time left. Every other refusal is said at once, with what the
server answered. Keys are read from the environment, sent to the address of the config and nowhere
else (no redirect is followed), and masked in whatever a server quotes back.

Connections belong to one `Client`, opened and closed on the event loop that uses it: nothing
breaks when that loop is replaced. How many requests are under way is counted per loop and service.
"""

import asyncio
import email.utils
import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rloo_cli.utils import redact
from rloo_cli.utils.errors import ConfigError, Problem

T = TypeVar("T")
RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FATAL_STATUSES = frozenset({401, 403, 404, 405, 407, 410, 501})  # no other question would do better
MAX_TRIES = 5
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 20.0  # of the pauses between two tries, which double
CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_CHARS = 200  # characters of an answer in an error
REQUEST_POLL_S = 0.1  # seconds between two looks at `poll`
# Its own source of chance: a pause must not move the random state of a training.
_jitter_rng = random.Random()
_request_semaphores: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict["HttpService", asyncio.Semaphore]
] = WeakKeyDictionary()


@dataclass(frozen=True)
class HttpService:
    """Where something is served, and how it may be asked."""

    url: str  # without the path of a question
    api_key_env: str | None  # environment variable of its key
    concurrency: int  # most requests under way
    request_timeout_s: float  # of one request

    @property
    def api_key(self) -> str:
        """The key, "" for none. Never printed."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


class EndpointError(Exception):
    """No answer to a question. `final`: the service would answer no other one either."""

    def __init__(self, message: str, final: bool = False):
        super().__init__(message)
        self.final = final


class _RetryableError(Exception):
    """Worth another try; `after`: seconds that the server asks for."""

    def __init__(self, message: str, retry_after_s: float | None = None, final: bool = False):
        super().__init__(message)
        self.retry_after_s, self.final = retry_after_s, final


def check_api_key(where: str, variable: str | None) -> None:
    """Raises ConfigError when the environment variable that should hold a key does not."""
    if variable and not os.environ.get(variable):
        raise ConfigError(
            Problem(
                f"the environment has no {variable}",
                where,
                "it should hold the key of the service; no config does",
                f"export {variable}=..., or {where}=null for a service without keys",
            )
        )


class JsonClient:
    """`async with Client(service, limit_s) as client`, then `client.post`, all within `limit_s`."""

    def __init__(self, service: HttpService, timeout_s: float):
        self.service, self.timeout_s = service, timeout_s
        self.session: Any = None

    async def __aenter__(self) -> "JsonClient":
        import aiohttp

        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + self.timeout_s
        gates = _request_semaphores.setdefault(loop, {})
        self.semaphore = gates.setdefault(self.service, asyncio.Semaphore(self.service.concurrency))
        connector = aiohttp.TCPConnector(limit=self.service.concurrency)
        self.session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def post(self, path: str, body: Any) -> Any:
        """POST JSON to the service's `path`; the JSON of the answer. Raises EndpointError."""
        where, pause = self.service.url.rstrip("/") + path, FIRST_BACKOFF_S
        now = asyncio.get_running_loop().time
        for number in range(1, MAX_TRIES + 1):
            try:
                async with self.semaphore:
                    return await self._post_once(where, body, self.deadline - now())
            except _RetryableError as error:
                wait = (
                    pause * _jitter_rng.uniform(0.5, 1.5)
                    if error.retry_after_s is None
                    else error.retry_after_s
                )
                if number == MAX_TRIES or wait >= self.deadline - now():
                    tries = f", {number} tries" if number > 1 else ""
                    raise EndpointError(f"{error}{tries}", error.final) from None
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_BACKOFF_S)
        raise AssertionError("unreachable")

    async def _post_once(self, url: str, body: Any, seconds_left: float) -> Any:
        import aiohttp

        limit = min(self.service.request_timeout_s, seconds_left)
        if limit <= 0:
            raise EndpointError(f"{url}: no answer within {self.timeout_s:g} s")
        key = self.service.api_key
        try:
            async with self.session.post(
                url,
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(
                    total=limit, sock_connect=min(limit, CONNECT_TIMEOUT_S)
                ),
                allow_redirects=False,
                proxy=_https_proxy(url),
            ) as response:
                text = await response.text(errors="replace")
                return self._parse_response(url, response.status, text, response.headers)
        except aiohttp.InvalidURL:
            raise EndpointError(f"{url} is no address", final=True) from None
        except TimeoutError:
            raise _RetryableError(f"{url}: no answer within {limit:.3g} s") from None
        except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
            raise EndpointError(f"{url}: {error}", final=True) from None
        except aiohttp.ClientConnectorError as error:
            raise _RetryableError(f"{url}: no connection: {error.os_error}", final=True) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _RetryableError(f"{url}: the connection broke: {error}") from None
        except aiohttp.ClientError as error:  # in the middle of an answer
            raise EndpointError(f"{url}: {error or type(error).__name__}") from None

    def _parse_response(self, url: str, status: int, text: str, headers: Any) -> Any:
        """The JSON of an answer."""
        page = text.lstrip()[:15].lower().startswith(("<!doctype", "<html"))
        if status == 200 and not page:
            try:
                return json.loads(text)
            except ValueError:
                said = f"{url} answered no JSON: {self._response_error_text(text)!r}"
                raise EndpointError(said) from None
        if page and status not in RETRY_STATUSES:
            said = f"{url} answered {status} and a page of HTML: it is no service of models"
            raise EndpointError(said, final=True)
        said = (
            f"{url} answered {status}: "
            f"{'a page of HTML' if page else self._response_error_text(text)}"
        )
        if status in RETRY_STATUSES:
            raise _RetryableError(said, _retry_after_seconds(headers.get("Retry-After")))
        if status in (401, 403):
            variable = self.service.api_key_env
            said += (
                f"; it wants another key than {variable} has" if variable else "; it wants a key"
            )
        raise EndpointError(said, final=status in FATAL_STATUSES or status < 400)

    def _response_error_text(self, text: str) -> str:
        """What an error's JSON says, or the beginning of its text; without the key."""
        with suppress(ValueError, AttributeError):
            body = json.loads(text)
            error = body.get("error", body.get("detail", body.get("message", body)))
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        text = text.replace(self.service.api_key, redact.MASK) if self.service.api_key else text
        return redact.redact_text(text)[:MAX_ERROR_CHARS]


def _retry_after_seconds(header: str | None) -> float | None:
    """A Retry-After header, in seconds or as a date."""
    if header is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _https_proxy(url: str) -> str | None:
    """The environment's proxy for https, which sees no key; http goes straight."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "https" or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get("https")


def run_in_event_loop(
    coroutine: Coroutine[Any, Any, T], poll: Callable[[], None] = lambda: None
) -> T:
    """Do `work` on an event loop of its own. `poll` is called meanwhile; when it raises, the work
    is cancelled, which closes its requests."""
    held: list[Any] = []
    box: list[tuple[Any, BaseException | None]] = []

    async def main() -> T:
        task = asyncio.ensure_future(coroutine)
        held.extend([asyncio.get_running_loop(), task])
        return await task

    def turn() -> None:
        try:
            box.append((asyncio.run(main()), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=turn, daemon=True, name="questions")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(REQUEST_POLL_S)
            poll()
    except BaseException:
        if held:
            with suppress(RuntimeError):  # its loop is closed already
                held[0].call_soon_threadsafe(held[1].cancel)
            thread.join(5)
        raise
    found, error = box[0]
    if error is not None:
        raise error
    answer: T = found
    return answer
