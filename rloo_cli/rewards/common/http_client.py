"""Requests to a model on a server: JSON over HTTP, bounded, repeated where safe.

A request is repeated only if that is harmless and may help: the connection was refused or broke
before an answer, the server is too busy (`RETRY_STATUSES`), or one request took too long while
the call has time left. Every other refusal is raised at once, with the server's answer.
Keys are read from the environment, and masked in whatever a server quotes back.

Connections belong to one `JsonClient`, opened and closed on the event loop that uses it: nothing
breaks when that loop is replaced. Requests in flight are counted per loop and service.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rloo_cli.utils import http, redact
from rloo_cli.utils.errors import refuse

FATAL_STATUSES = frozenset({401, 403, 404, 405, 407, 410, 501})  # other requests would fail too
FATAL_REASONS = frozenset({"address", "certificate", "connection"})
MAX_ERROR_CHARS = 200  # characters of an answer in an error
Semaphores = dict["HttpService", asyncio.Semaphore]
_request_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, Semaphores] = WeakKeyDictionary()


@dataclass(frozen=True)
class HttpService:
    """A service's address, key and limits."""

    url: str  # without the path of a request
    api_key_env: str | None  # environment variable of its key
    concurrency: int  # most requests in flight
    request_timeout_s: float  # of one request

    @property
    def api_key(self) -> str:
        """The key, "" for none. Never printed."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


class EndpointError(Exception):
    """A request without an answer. `final`: all other requests would fail too."""

    def __init__(self, message: str, final: bool = False):
        super().__init__(message)
        self.final = final


def check_api_key(where: str, variable: str | None) -> None:
    """Raises ConfigError if the environment variable for a key is not set."""
    if variable and not os.environ.get(variable):
        refuse(
            where,
            f"the environment variable {variable} is not set",
            f"export {variable}=..., or {where}=null for a service without keys",
            "it must hold the key of the service, which is never in a config",
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
        url = self.service.url.rstrip("/") + path
        try:
            ask = partial(self._post_once, url, body)
            answer = await http.send_with_retries(ask, self.deadline)
        except http.RequestFailed as failed:
            message = f"{failed}{_tries_text(failed.tries)}"
            raise EndpointError(message, final=failed.reason in FATAL_REASONS) from None
        return self._parse_answer(url, answer)

    async def _post_once(self, url: str, body: object) -> http.HttpAnswer:
        async with self.semaphore:
            seconds_left = self.deadline - asyncio.get_running_loop().time()
            limit = min(self.service.request_timeout_s, seconds_left)
            if limit <= 0:
                why = f"no answer within {self.timeout_s:g} s"
                raise http.RequestFailed("timeout", why, url)
            # A proxy for https sees no key; http bypasses proxies.
            proxy = http.environment_proxy(url) if urlsplit(url).scheme == "https" else None
            key = self.service.api_key
            return await http.send_request(self.session, "POST", url, limit, key, body, proxy=proxy)

    def _parse_answer(self, url: str, answer: http.HttpAnswer) -> Any:
        status, page = answer.status, answer.is_html
        if status == 200 and not page:
            try:
                return json.loads(answer.text)
            except ValueError:
                message = f"{url} did not answer with JSON: {self._error_message(answer)!r}"
                raise EndpointError(message) from None
        if page and status not in http.RETRY_STATUSES:
            message = f"{url} answered {status} and an HTML page: it does not serve models"
            raise EndpointError(message, final=True)
        message = f"{url} answered {status}: "
        message += "an HTML page" if page else self._error_message(answer)
        if status in (401, 403):
            variable = self.service.api_key_env
            message += f"; the key in {variable} is wrong" if variable else ""
            message += "" if variable else "; it needs a key"
        message += _tries_text(answer.tries)
        raise EndpointError(message, final=status in FATAL_STATUSES or status < 400)

    def _error_message(self, answer: http.HttpAnswer) -> str:
        """The answer's error without the key, which some servers quote."""
        text, key = answer.error_message(), self.service.api_key
        text = text.replace(key, redact.MASK) if key else text
        return redact.redact_text(text)[:MAX_ERROR_CHARS]


def _tries_text(tries: int) -> str:
    return f", {tries} tries" if tries > 1 else ""
