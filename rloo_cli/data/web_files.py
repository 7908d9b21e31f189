"""Reads a file of the web whose address a data set names: bounded, and from nowhere else.

Whoever wrote the data chooses the address, and this machine asks. So it is http or https only, with
a limit on bytes and on time; and no address of this machine, of its network or of a cloud's own
services (169.254.169.254) is asked, however it is spelt: the name is resolved once, every address
that it has is looked at, and the connection goes to one that was. Each redirect is checked alike,
and none leaves https. Through a proxy of the environment, names that only the proxy can resolve are
its own affair.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

SCHEMES = {"http": 80, "https": 443}  # scheme -> its port
MOST_REDIRECTS = 5
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
PART_BYTES = 1 << 16
# What holds an IPv4 address in its last 32 bits, and leads there.
WRAPPED_IPV4 = tuple(map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96")))
LOCAL_TRANSLATION = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215: of this network alone
SAFE_IN_PATH = "/%:=&?~+!$,;'@()*[]"


class FetchRefused(ValueError):
    """A file of the web was not read; the text says why."""


@dataclass(frozen=True)
class FetchLimits:
    """What one file may take, and where it may come from."""

    num_bytes: int
    seconds: float  # of all, redirects included
    private: bool = False  # addresses of this machine and its network too


def fetch_web_file(url: str, limits: FetchLimits) -> bytes:
    """The content of a file of the web. Raises FetchRefused."""
    deadline = time.monotonic() + limits.seconds
    for _ in range(MOST_REDIRECTS + 1):
        found = _request_once(url, limits, deadline)
        if isinstance(found, bytes):
            return found
        url = _redirect_target(url, found)
    raise FetchRefused(f"it redirects more than {MOST_REDIRECTS} times")


def is_public_address(address: str) -> bool:
    """Whether an IP address is of the open network: not this machine's, a local or a shared one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None:
            return is_public_address(str(ip.sixtofour))
        if ip.teredo is not None or ip in LOCAL_TRANSLATION:
            return False
        if any(ip in network for network in WRAPPED_IPV4):
            return is_public_address(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _redirect_target(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
        scheme, before = urlsplit(target).scheme, urlsplit(url).scheme
    except ValueError as error:
        raise FetchRefused(f"it redirects to what is not an address: {error}") from None
    if scheme not in SCHEMES or (before == "https" and scheme == "http"):
        raise FetchRefused(f"it redirects from {before} to {scheme or 'nothing'}: {target!r:.80}")
    return target


def _request_once(url: str, limits: FetchLimits, deadline: float) -> bytes | str:
    """The content, or where a redirect leads. Raises FetchRefused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or SCHEMES.get(parts.scheme, 0)
    except ValueError as error:
        raise FetchRefused(f"it is not an address: {error}") from None
    if parts.scheme not in SCHEMES or not host:
        raise FetchRefused("it is not an http or https address")
    if parts.username is not None:
        raise FetchRefused("it holds a user's name")
    connection = _open_connection(parts.scheme, host, port, limits, deadline)
    target = quote(parts.path or "/", safe=SAFE_IN_PATH)
    target += f"?{quote(parts.query, safe=SAFE_IN_PATH)}" if parts.query else ""
    if connection.whole_target:
        target = f"http://{parts.netloc}{target}"
    # A server that sends a byte now and then keeps every single read in time, and the whole not.
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), connection.cut)
    timer.daemon = True
    timer.start()
    try:
        headers = {"User-Agent": "rloo", "Accept": "*/*", "Accept-Encoding": "identity"}
        connection.request("GET", target, headers=headers)
        content = _read_answer(connection.getresponse(), limits.num_bytes)
        if connection.is_cut:  # what has come of a file without a length looks like all of it
            raise TimeoutError
        return content
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, FetchRefused) and not connection.is_cut:
            raise
        late = f"it was not there within {limits.seconds:g} s"
        why = late if connection.is_cut else f"{type(error).__name__}: {error}"
        raise FetchRefused(why) from None
    finally:
        timer.cancel()
        connection.close()


def _read_answer(answer: http.client.HTTPResponse, most: int) -> bytes | str:
    location = answer.headers.get("Location")
    if answer.status in REDIRECT_STATUSES and location:
        return str(location)
    if answer.status != 200:
        raise FetchRefused(f"the server answered {answer.status}")
    content = bytearray()
    while part := answer.read(PART_BYTES):
        content += part
        if len(content) > most:
            raise FetchRefused(f"it has more than {most / 2**20:g} MiB")
    if answer.length:
        raise FetchRefused("it ended in the middle")
    return bytes(content)


class _CheckedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked, under the name that was asked for."""

    whole_target = False  # a proxy is sent the whole URL
    is_cut = False
    open_socket: socket.socket | None = None

    def __init__(self, host: str, port: int, addresses: list[str], tls: bool, deadline: float):
        super().__init__(host, port)
        self.addresses, self.tls, self.deadline = addresses, tls, deadline
        if tls:
            self.default_port = SCHEMES["https"]

    def connect(self) -> None:
        """Connect to the first address that answers; with TLS, the certificate is of the name."""
        for number, address in enumerate(self.addresses, 1):
            left = max(0.01, self.deadline - time.monotonic())
            try:
                self.sock = socket.create_connection((address, self.port), left)
                break
            except OSError:
                if number == len(self.addresses):
                    raise
        tunnel: str | None = getattr(self, "_tunnel_host", None)
        if tunnel:
            self._tunnel()  # type: ignore[attr-defined]
        if self.tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=tunnel or self.host)
        self.open_socket = self.sock  # a file without a length is read after `sock` was forgotten
        if self.is_cut:
            raise TimeoutError

    def cut(self) -> None:
        """End the connection from another thread: what is read ends."""
        self.is_cut = True
        if self.open_socket is not None:
            with suppress(OSError):
                self.open_socket.shutdown(socket.SHUT_RDWR)


def _open_connection(
    scheme: str, host: str, port: int, limits: FetchLimits, deadline: float
) -> _CheckedConnection:
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and urllib.request.proxy_bypass(host):
        proxy = None
    addresses = _checked_addresses(host, port, limits.private, needed=proxy is None)
    if proxy is None:
        return _CheckedConnection(host, port, addresses, scheme == "https", deadline)
    at = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    name = at.hostname or ""
    connection = _CheckedConnection(name, at.port or 80, [name], scheme == "https", deadline)
    if scheme == "https":
        connection.set_tunnel(host, port)
    connection.whole_target = scheme == "http"
    return connection


def _checked_addresses(host: str, port: int, private: bool, needed: bool) -> list[str]:
    """The addresses of a host, all of which may be asked; none where its name is not known here.

    `needed`: a name that is not known is refused. Raises FetchRefused.
    """
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if needed:
            raise FetchRefused(f"its host is not known: {error}") from None
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    for address in addresses:
        if not private and not is_public_address(address):
            why = f"{host} is {address}, an address of this machine or of its network"
            raise FetchRefused(f"{why}; data.allow_private_addresses is false")
    return addresses
