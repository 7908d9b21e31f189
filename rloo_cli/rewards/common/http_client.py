"""Requests to a model that somebody else serves: JSON over HTTP, bounded, repeated where safe.

A request is repeated only where that cannot do harm and may help: the connection was refused or
broke before an answer, the server is too busy (408, 429, 500, 502, 503, 504), or one request took
too long while the call has time left. Every other refusal is raised at once, with what the server
answered. Keys are read from the environment, and masked in whatever a server quotes back.

Connections belong to one `JsonClient`, opened and closed on the event loop that uses it: nothing
breaks when that loop is replaced. Requests in flight are counted per loop and service.
"""

import asyncio
import email.utils
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rloo_cli.utils import http, redact
from rloo_cli.utils.errors import ConfigError, Problem

T = TypeVar("T")
RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FATAL_STATUSES = frozenset({401, 403, 404, 405, 407, 410, 501})  # no other question would do better
RETRY_REASONS = frozenset({"connection", "timeout", "closed", "broken"})
FATAL_REASONS = frozenset({"address", "certificate"})
MAX_TRIES = 5
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 20.0  # of the pauses between two tries, which double
MAX_ERROR_CHARS = 200  # characters of an answer in an error
# Its own source of chance: a pause must not move the random state of a training.
_jitter_rng = random.Random()
Semaphores = dict["HttpService", asyncio.Semaphore]
_request_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, Semaphores] = WeakKeyDictionary()


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
    """Worth another try; `retry_after_s`: seconds that the server asks for."""

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
    """`async with JsonClient(service, timeout_s) as client`, then `client.post`, all in time."""

    def __init__(self, service: HttpService, timeout_s: float):
        self.service, self.timeout_s = service, timeout_s

    async def __aenter__(self) -> "JsonClient":
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + self.timeout_s
        semaphores = _request_semaphores.setdefault(loop, {})
        new = asyncio.Semaphore(self.service.concurrency)
        self.semaphore = semaphores.setdefault(self.service, new)
        self.session = http.open_session(self.service.concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def post(self, path: str, body: object) -> Any:
        """POST JSON to the service's `path`. Returns the answer's JSON; raises EndpointError."""
        url, pause = self.service.url.rstrip("/") + path, FIRST_BACKOFF_S
        now = asyncio.get_running_loop().time
        for number in range(1, MAX_TRIES + 1):
            try:
                async with self.semaphore:
                    return await self._post_once(url, body, self.deadline - now())
            except _RetryableError as error:
                wait = error.retry_after_s
                if wait is None:
                    wait = pause * _jitter_rng.uniform(0.5, 1.5)
                if number == MAX_TRIES or wait >= self.deadline - now():
                    tries = f", {number} tries" if number > 1 else ""
                    raise EndpointError(f"{error}{tries}", error.final) from None
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_BACKOFF_S)
        raise AssertionError("unreachable")

    async def _post_once(self, url: str, body: object, seconds_left: float) -> Any:
        limit = min(self.service.request_timeout_s, seconds_left)
        if limit <= 0:
            raise EndpointError(f"{url}: no answer within {self.timeout_s:g} s")
        key, proxy = self.service.api_key, _https_proxy(url)
        try:
            answer = await http.send_json(self.session, "POST", url, body, key, limit, proxy)
        except http.RequestFailed as failed:
            if failed.reason in RETRY_REASONS:
                raise _RetryableError(str(failed), final=failed.reason == "connection") from None
            raise EndpointError(str(failed), final=failed.reason in FATAL_REASONS) from None
        return self._parse_answer(url, answer)

    def _parse_answer(self, url: str, answer: http.HttpAnswer) -> Any:
        status, page = answer.status, answer.is_html
        if status == 200 and not page:
            try:
                return json.loads(answer.text)
            except ValueError:
                message = f"{url} answered no JSON: {self._error_message(answer)!r}"
                raise EndpointError(message) from None
        if page and status not in RETRY_STATUSES:
            message = f"{url} answered {status} and a page of HTML: it does not serve models"
            raise EndpointError(message, final=True)
        message = f"{url} answered {status}: "
        message += "a page of HTML" if page else self._error_message(answer)
        if status in RETRY_STATUSES:
            raise _RetryableError(message, _retry_after_seconds(answer.headers.get("Retry-After")))
        if status in (401, 403):
            variable = self.service.api_key_env
            message += f"; it wants another key than {variable} has" if variable else ""
            message += "" if variable else "; it wants a key"
        raise EndpointError(message, final=status in FATAL_STATUSES or status < 400)

    def _error_message(self, answer: http.HttpAnswer) -> str:
        """The answer's error without the key, which some servers quote."""
        text, key = answer.error_message(), self.service.api_key
        text = text.replace(key, redact.MASK) if key else text
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
    work: Coroutine[object, object, T], poll: Callable[[], None] = lambda: None
) -> T:
    """Do `work` on an event loop of its own. `poll` is called meanwhile; when it raises, the work
    is cancelled, which closes its requests."""
    thread = http.EventLoopThread("questions")
    try:
        return thread.run(work, poll=poll)
    finally:
        thread.close()
