"""Reads a file of the web whose address a data set names, with limits and only from public hosts.

The author of the data chooses the address, and this machine sends the request. So only http and
https are allowed, with limits on bytes and time; addresses of this machine, of its network or of
a cloud's own services (169.254.169.254) are refused, however they are spelt: the name is resolved
once, every address that it has is checked, and the connection goes to a checked one. Redirects are
checked alike, and none leaves https. Names that only an environment's proxy can resolve are left
to the proxy.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from rloo_cli.utils import http, web_addresses

SCHEMES = frozenset({"http", "https"})
MOST_REDIRECTS = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
SAFE_IN_PATH = "/%:=&?~+!$,;'@()*[]"
HEADERS = {"User-Agent": "rloo", "Accept": "*/*", "Accept-Encoding": "identity"}


class FetchRefused(ValueError):
    """A file of the web was not read; the text says why."""


@dataclass(frozen=True)
class FetchLimits:
    """The limits for one file, and the allowed hosts."""

    num_bytes: int
    seconds: float  # in total, redirects included
    private: bool = False  # addresses of this machine and its network too


def fetch_web_file(url: str, limits: FetchLimits) -> bytes:
    """The content of a file of the web. Raises FetchRefused."""
    try:
        return http.run_in_event_loop(_follow_redirects(url, limits))
    except TimeoutError:
        raise FetchRefused(f"it was not read within {limits.seconds:g} s") from None
    except http.RequestFailed as failed:
        raise FetchRefused(failed.why) from None
    except web_addresses.PrivateAddress as error:
        raise FetchRefused(f"{error}; data.allow_private_addresses is false") from None


async def _follow_redirects(url: str, limits: FetchLimits) -> bytes:
    async with asyncio.timeout(limits.seconds):
        for _ in range(MOST_REDIRECTS + 1):
            answer = await _request_once(url, limits)
            location = answer.headers.get("Location")
            if answer.status == 200:
                return answer.content
            if answer.status not in REDIRECT_STATUSES or not location:
                raise FetchRefused(f"the server answered {answer.status}")
            url = _redirect_target(url, location)
    raise FetchRefused(f"it redirects more than {MOST_REDIRECTS} times")


def _redirect_target(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
        scheme, before = urlsplit(target).scheme, urlsplit(url).scheme
    except ValueError as error:
        raise FetchRefused(f"it redirects to an invalid address: {error}") from None
    if scheme not in SCHEMES or (before == "https" and scheme == "http"):
        raise FetchRefused(f"it redirects from {before} to {scheme or 'nothing'}: {target!r:.80}")
    return target


async def _request_once(url: str, limits: FetchLimits) -> http.HttpAnswer:
    """The answer of the first of the host's addresses that accepts a connection."""
    from yarl import URL  # lazy: aiohttp's, which a run without such images does not need

    try:
        parts = urlsplit(url)
        netloc = parts.netloc.encode("idna").decode()
        path, query = (quote(part, safe=SAFE_IN_PATH) for part in (parts.path, parts.query))
        target = URL(urlunsplit((parts.scheme, netloc, path, query, "")), encoded=True)
        host, port, user = target.raw_host or "", target.port or 0, target.raw_user
    except ValueError as error:
        raise FetchRefused(f"it is not a valid address: {error}") from None
    if target.scheme not in SCHEMES or not host:
        raise FetchRefused("it is not an http or https address")
    if user is not None:
        raise FetchRefused("it contains a user name")
    proxy = http.environment_proxy(url)
    try:
        hosts = await web_addresses.resolve_host(host, port, limits.private)
    except OSError as error:
        if proxy is None:
            raise FetchRefused(f"its host cannot be resolved: {error}") from None
    if proxy is not None:
        hosts = [host]
    headers = HEADERS | {"Host": netloc}
    async with http.open_session(keepalive_s=0, decompress=False, headers=headers) as session:
        while True:
            try:
                return await http.send_request(
                    session, "GET", target.with_host(hosts.pop(0)), limits.seconds,
                    proxy=proxy, max_bytes=limits.num_bytes, tls_name=host,
                )  # fmt: skip
            except http.RequestFailed as failed:
                if failed.reason != "connection" or not hosts:
                    raise
