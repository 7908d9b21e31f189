"""URLs that a data set names: what is asked, what is not, for how long. The servers are real."""

import base64
import gzip
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rloo_cli.data import images, web_files
from rloo_cli.data.images import BadImage, ImageReader
from rloo_cli.data.web_files import FetchLimits, FetchRefused, fetch_web_file
from rloo_cli.utils import web_addresses

HERE = FetchLimits(num_bytes=1 << 20, seconds=5.0, private=True)
OUTSIDE = FetchLimits(num_bytes=1 << 20, seconds=5.0)
Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A web server of this machine; `pages`: path -> what answers. `asked`: paths, in order."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {}
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                site.pages[self.path](self)

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None: ...  # a client that did not wait

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    made = Site()
    yield made
    made.server.shutdown()
    made.server.server_close()


def gives(content: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def refusal(url: str, limits: FetchLimits = HERE) -> str:
    with pytest.raises(FetchRefused) as caught:
        fetch_web_file(url, limits)
    return str(caught.value)


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 10, 10)).save(out, "PNG")
    return out.getvalue()


def test_a_file_is_read_also_behind_redirects(site: Site) -> None:
    site.pages = {
        "/a": gives(b"", 302, Location="/b%20c?x=1"),
        "/b%20c?x=1": gives(b"", 307, Location=site.url("/d", "localhost")),
        "/d": gives(b"content"),
    }
    assert fetch_web_file(site.url("/a"), HERE) == b"content"
    assert site.asked == ["/a", "/b%20c?x=1", "/d"]


SPELLINGS = ("127.0.0.1", "127.1", "0x7f000001", "2130706433", "localhost", "0.0.0.0",
             "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]")  # fmt: skip
OTHERS = ("169.254.169.254", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "224.0.0.1",
          "255.255.255.255", "[fe80::1]", "[fd00::1]", "[64:ff9b:1::1]")  # fmt: skip


@pytest.mark.parametrize("host", [*SPELLINGS, *OTHERS])
def test_nothing_of_this_machine_or_its_network_is_asked(host: str, site: Site) -> None:
    site.pages["/secret"] = gives(b"secret")
    with pytest.raises(BadImage, match=r"this machine|cannot be resolved"):
        ImageReader(Path(), allow_remote=True).read_image(site.url("/secret", host))
    assert site.asked == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "::", "0.0.0.0"]
)
def test_a_name_is_as_private_as_what_it_resolves_to(
    address: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = site.url("/secret", "images.example.org")
    assert "of this machine" in refusal(url, OUTSIDE)
    assert asked == ["images.example.org"] and site.asked == []


def test_the_connection_goes_to_the_address_that_was_looked_at(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to another address the second time is not asked for a second time."""
    real, looked = socket.getaddrinfo, []

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host != "images.example.org":
            return real(host, port, *args, **kwargs)
        looked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(looked) == 1 else "10.9.9.9", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(web_addresses, "is_public_address", lambda ip: ip == "127.0.0.1")
    site.pages["/a"] = gives(b"content")
    assert fetch_web_file(site.url("/a", "images.example.org"), OUTSIDE) == b"content"
    assert looked == ["images.example.org"]


def test_open_addresses_are_open() -> None:
    for address in ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"):
        assert web_addresses.is_public_address(address), address


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://example.org/a", "data:,x", "gopher://127.0.0.1:70/", "//["],
)
def test_a_redirect_leads_to_no_other_scheme(location: str, site: Site) -> None:
    site.pages["/a"] = gives(b"", 302, Location=location)
    assert "redirects" in refusal(site.url("/a")) or "address" in refusal(site.url("/a"))


def test_no_redirect_leads_from_https_to_http_or_round_and_round(site: Site) -> None:
    with pytest.raises(FetchRefused, match="https to http"):
        web_files._redirect_target("https://example.org/a", "http://example.org/b")
    site.pages["/a"] = gives(b"", 302, Location="/a")
    assert "more than 5 times" in refusal(site.url("/a"))


def test_a_redirect_to_this_machine_is_refused_as_an_address_of_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages["/a"] = gives(b"", 302, Location=site.url("/secret", "127.0.0.2"))
    monkeypatch.setattr(web_addresses, "is_public_address", lambda ip: ip == "127.0.0.1")
    said = refusal(site.url("/a"), OUTSIDE)
    assert "127.0.0.2" in said and "of this machine" in said
    assert site.asked == ["/a"]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.org/a", "http:///a", "http://[", "http://a:b@c.org/x",
     "http://127.0.0.1:99999/", "/etc/passwd", "http://\n/"],
)  # fmt: skip
def test_what_is_not_an_address_of_the_web_is_not_asked(url: str) -> None:
    assert refusal(url)


def test_a_file_has_a_limit_of_bytes_also_where_it_says_less(site: Site) -> None:
    limits = FetchLimits(num_bytes=1000, seconds=5.0, private=True)
    site.pages = {"/long": gives(b"x" * 1001), "/fits": gives(b"x" * 1000)}
    assert "more than" in refusal(site.url("/long"), limits)
    assert len(fetch_web_file(site.url("/fits"), limits)) == 1000
    site.pages["/cut"] = gives(b"x" * 10, Content_Length="50")
    assert "truncated" in refusal(site.url("/cut"), limits)
    packed = gzip.compress(bytes(100_000))  # it may be a bomb: what was sent is what counts
    site.pages["/packed"] = gives(packed, Content_Encoding="gzip")
    assert fetch_web_file(site.url("/packed"), limits) == packed


def drips(handler: BaseHTTPRequestHandler) -> None:
    """Sends a byte now and then, for much longer than anybody should wait."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def redirects_slowly(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.2)
    gives(b"", 302, Location=handler.path)(handler)


def test_a_server_that_sends_a_byte_now_and_then_is_left_in_time(site: Site) -> None:
    site.pages = {"/slow": drips, "/round": redirects_slowly}
    before = time.monotonic()
    limits = FetchLimits(num_bytes=1 << 20, seconds=0.3, private=True)
    assert "within 0.3 s" in refusal(site.url("/slow"), limits)
    assert "within 0.3 s" in refusal(site.url("/round"), limits)
    assert time.monotonic() - before < 2


def test_a_status_that_is_not_200_is_no_file(site: Site) -> None:
    site.pages = {"/a": gives(b"gone", 404), "/b": gives(b"", 302)}
    assert "answered 404" in refusal(site.url("/a"))
    assert "answered 302" in refusal(site.url("/b"))


def test_a_proxy_of_the_environment_is_asked_for_the_whole_address(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", site.url(""))
    target = "http://images.invalid/a.png"
    site.pages[target] = gives(b"content")
    assert fetch_web_file(target, OUTSIDE) == b"content"
    assert "of this machine" in refusal("http://10.0.0.1/a.png", OUTSIDE)
    assert site.asked == [target]


def test_an_image_of_an_own_server_is_read_where_the_config_says_so(site: Site) -> None:
    site.pages["/red.png"] = gives(png())
    found = ImageReader(Path(), allow_remote=True, allow_private=True).read_image(
        site.url("/red.png")
    )
    assert found.size == (24, 16)
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    assert ImageReader(Path()).read_image(url).size == (24, 16)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc", "a\0b", "LARGE"])
def test_an_images_path_is_a_file_of_a_size_that_images_have(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "LARGE").write_bytes(bytes(2000))
    monkeypatch.setattr(images, "MOST_LOCAL_BYTES", 1000)
    with pytest.raises(BadImage):
        ImageReader(tmp_path).read_image(path)


def test_a_pipe_that_the_data_names_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    ends = threading.Timer(0.5, os.close, [pipe])  # or who reads it waits for ever
    ends.start()
    with pytest.raises(BadImage, match="not a file"):
        ImageReader(tmp_path).read_image("pipe")
    ends.join()
