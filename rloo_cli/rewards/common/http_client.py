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
AGAIN = frozenset({408, 429, 500, 502, 503, 504})
ELSEWHERE = frozenset({401, 403, 404, 405, 407, 410, 501})  # no other question would do better
TRIES = 5
FIRST_S, LONGEST_S = 0.5, 20.0  # of the pauses between two tries, which double
CONNECT_S = 10.0
SHOWN = 200  # characters of an answer in an error
TICK = 0.1  # seconds between two looks at `poll`
# Its own source of chance: a pause must not move the random state of a training.
_chance = random.Random()
_gates: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Service, asyncio.Semaphore]]" = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Service:
    """Where something is served, and how it may be asked."""

    url: str  # without the path of a question
    api_key_env: str | None  # environment variable of its key
    concurrency: int  # most requests under way
    request_timeout_s: float  # of one request

    @property
    def key(self) -> str:
        """The key, "" for none. Never printed."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


class EndpointError(Exception):
    """No answer to a question. `final`: the service would answer no other one either."""

    def __init__(self, said: str, final: bool = False):
        super().__init__(said)
        self.final = final


class _Busy(Exception):
    """Worth another try; `after`: seconds that the server asks for."""

    def __init__(self, said: str, after: float | None = None, final: bool = False):
        super().__init__(said)
        self.after, self.final = after, final


def check_key(where: str, variable: str | None) -> None:
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


class Client:
    """`async with Client(service, limit_s) as client`, then `client.post`, all within `limit_s`."""

    def __init__(self, service: Service, limit_s: float):
        self.service, self.limit_s = service, limit_s
        self.session: Any = None

    async def __aenter__(self) -> "Client":
        import aiohttp

        loop = asyncio.get_running_loop()
        self.end = loop.time() + self.limit_s
        gates = _gates.setdefault(loop, {})
        self.gate = gates.setdefault(self.service, asyncio.Semaphore(self.service.concurrency))
        connector = aiohttp.TCPConnector(limit=self.service.concurrency)
        self.session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def post(self, path: str, body: Any) -> Any:
        """POST JSON to the service's `path`; the JSON of the answer. Raises EndpointError."""
        where, pause = self.service.url.rstrip("/") + path, FIRST_S
        now = asyncio.get_running_loop().time
        for number in range(1, TRIES + 1):
            try:
                async with self.gate:
                    return await self._once(where, body, self.end - now())
            except _Busy as error:
                wait = pause * _chance.uniform(0.5, 1.5) if error.after is None else error.after
                if number == TRIES or wait >= self.end - now():
                    tries = f", {number} tries" if number > 1 else ""
                    raise EndpointError(f"{error}{tries}", error.final) from None
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_S)
        raise AssertionError("unreachable")

    async def _once(self, where: str, body: Any, left: float) -> Any:
        import aiohttp

        limit = min(self.service.request_timeout_s, left)
        if limit <= 0:
            raise EndpointError(f"{where}: no answer within {self.limit_s:g} s")
        key = self.service.key
        try:
            async with self.session.post(
                where,
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=min(limit, CONNECT_S)),
                allow_redirects=False,
                proxy=_proxy(where),
            ) as response:
                text = await response.text(errors="replace")
                return self._read(where, response.status, text, response.headers)
        except aiohttp.InvalidURL:
            raise EndpointError(f"{where} is no address", final=True) from None
        except TimeoutError:
            raise _Busy(f"{where}: no answer within {limit:.3g} s") from None
        except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
            raise EndpointError(f"{where}: {error}", final=True) from None
        except aiohttp.ClientConnectorError as error:
            raise _Busy(f"{where}: no connection: {error.os_error}", final=True) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _Busy(f"{where}: the connection broke: {error}") from None
        except aiohttp.ClientError as error:  # in the middle of an answer
            raise EndpointError(f"{where}: {error or type(error).__name__}") from None

    def _read(self, where: str, status: int, text: str, headers: Any) -> Any:
        """The JSON of an answer."""
        page = text.lstrip()[:15].lower().startswith(("<!doctype", "<html"))
        if status == 200 and not page:
            try:
                return json.loads(text)
            except ValueError:
                said = f"{where} answered no JSON: {self._shown(text)!r}"
                raise EndpointError(said) from None
        if page and status not in AGAIN:
            said = f"{where} answered {status} and a page of HTML: it is no service of models"
            raise EndpointError(said, final=True)
        said = f"{where} answered {status}: {'a page of HTML' if page else self._shown(text)}"
        if status in AGAIN:
            raise _Busy(said, _seconds(headers.get("Retry-After")))
        if status in (401, 403):
            variable = self.service.api_key_env
            said += (
                f"; it wants another key than {variable} has" if variable else "; it wants a key"
            )
        raise EndpointError(said, final=status in ELSEWHERE or status < 400)

    def _shown(self, text: str) -> str:
        """What an error's JSON says, or the beginning of its text; without the key."""
        with suppress(ValueError, AttributeError):
            body = json.loads(text)
            error = body.get("error", body.get("detail", body.get("message", body)))
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        text = text.replace(self.service.key, redact.MASK) if self.service.key else text
        return redact.text(text)[:SHOWN]


def _seconds(after: str | None) -> float | None:
    """A Retry-After header, in seconds or as a date."""
    if after is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(after))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    return None


def _proxy(where: str) -> str | None:
    """The environment's proxy for https, which sees no key; http goes straight."""
    parts = urlsplit(where)
    host = parts.hostname or ""
    if parts.scheme != "https" or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get("https")


def wait_for(work: Coroutine[Any, Any, T], poll: Callable[[], None] = lambda: None) -> T:
    """Do `work` on an event loop of its own. `poll` is called meanwhile; when it raises, the work
    is cancelled, which closes its requests."""
    held: list[Any] = []
    box: list[tuple[Any, BaseException | None]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
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
            thread.join(TICK)
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
