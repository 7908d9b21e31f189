"""The guard before a rollout server's routes: nothing passes that should not, however it asks."""

import asyncio
import json
from typing import Any

import pytest

from rloo_cli.generation.vllm import auth, handshake
from rloo_cli.generation.vllm.auth import Guard

SECRET = "7f" * 32
BEARER = b"Bearer " + SECRET.encode()
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "health"]


class Behind:
    """The application behind the guard: remembers what came through."""

    def __init__(self):
        self.came: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.after: list[dict[str, Any]] = []
        self.unread = 0  # messages that nobody asked for

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.came.append(dict(scope))
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.after.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"through"})


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Behind:
    monkeypatch.setenv(auth.TOKEN_VARIABLE, SECRET)
    monkeypatch.setenv(handshake.SERVER_INFO_VARIABLE, '{"protocol": 1}')
    return Behind()


def send_to(behind: Behind, messages: list[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
    """What the guard sends back for one scope and the messages that follow it."""
    sent: list[dict[str, Any]] = []
    left = [*messages]

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(behind)(scope, receive, send))
    behind.unread = len(left)
    return sent


def ask(
    behind: Behind,
    path: str,
    method: str = "GET",
    headers: tuple[tuple[bytes, bytes], ...] = ((b"authorization", BEARER),),
    body: bytes = b"",
    **scope: Any,
) -> int:
    """The status of one request."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    given = {"type": "http", "path": path, "method": method, "headers": [*headers], **scope}
    return send_to(behind, messages, **given)[0]["status"]


@pytest.mark.parametrize("token", ["", " ", "\n"])
def test_no_guard_stands_without_a_token(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.TOKEN_VARIABLE, token)
    with pytest.raises(ValueError, match="empty"):
        Guard(Behind())
    monkeypatch.delenv(auth.TOKEN_VARIABLE)
    with pytest.raises(ValueError, match="empty"):
        Guard(Behind())


def test_health_is_answered_to_everybody(behind: Behind) -> None:
    assert ask(behind, "/health", headers=()) == 200
    assert ask(behind, "/health", "HEAD", headers=(), raw_path=b"/health") == 200
    assert ask(behind, "/health", headers=((b"authorization", b"Bearer wrong"),)) == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/v1/completions", "/pause", "/invocations", "/", "", "/rloo"])
def test_every_method_of_a_route_wants_the_token(behind: Behind, path: str, method: str) -> None:
    assert ask(behind, path, method, headers=()) == 401
    assert not behind.came


@pytest.mark.parametrize("method", METHODS[2:])
def test_health_is_only_read(behind: Behind, method: str) -> None:
    assert ask(behind, "/health", method, headers=()) == 401
    assert not behind.came


@pytest.mark.parametrize(
    "path",
    [
        "/health/", "//health", "/./health", "/health/../pause", "/Health", "/HEALTH", "health",
        "/health%2f..%2fpause", "/%68ealth", "/health;x", "/health?", "/health\x00", "/health ",
        "/health\\..\\pause", "/x/health", "/healthz",
    ],
)  # fmt: skip
def test_what_only_looks_like_health_wants_the_token(behind: Behind, path: str) -> None:
    assert ask(behind, path, headers=()) == 401
    assert not behind.came


def test_health_written_another_way_or_mounted_elsewhere_wants_the_token(behind: Behind) -> None:
    assert ask(behind, "/health", headers=(), raw_path=b"/%68ealth") == 401
    assert ask(behind, "/health", headers=(), root_path="/health") == 401
    assert ask(behind, "/health", headers=(), root_path="/x") == 401
    assert not behind.came


@pytest.mark.parametrize(
    "given",
    [
        [b"Bearer "], [b"Bearer"], [b""], [SECRET.encode()], [b"bearer " + SECRET.encode()],
        [b"Basic " + SECRET.encode()], [BEARER + b" "], [b" " + BEARER], [BEARER + b"\x00"],
        [BEARER[:-1]], [BEARER + b"7"], [BEARER.upper()], [BEARER, BEARER], [BEARER, b"Bearer x"],
        [b"Bearer x", BEARER], [BEARER + b", " + BEARER], [b"Bearer \xff\xfe"],
        [b"Bearer  " + SECRET.encode()],
    ],
)  # fmt: skip
def test_only_one_header_with_the_very_token_opens(behind: Behind, given: list[bytes]) -> None:
    headers = tuple((b"authorization", value) for value in given)
    assert ask(behind, "/v1/models", headers=headers) == 401
    mixed = tuple((b"Authorization" if i else b"authorization", v) for i, v in enumerate(given))
    assert ask(behind, "/v1/models", headers=mixed) == 401
    assert not behind.came


@pytest.mark.parametrize("name", [b"x-authorization", b"proxy-authorization", b"x-api-key"])
def test_the_token_in_another_header_or_the_query_does_not_open(
    behind: Behind, name: bytes
) -> None:
    query = b"token=" + SECRET.encode()
    assert ask(behind, "/v1/models", headers=((name, BEARER),), query_string=query) == 401
    assert not behind.came


@pytest.mark.parametrize("method", METHODS)
def test_the_token_opens_everything_else(behind: Behind, method: str) -> None:
    assert ask(behind, "/v1/completions", method, body=b"x" * 10) == 200
    assert behind.bodies == [b"x" * 10]


# Written out: a route that is taken out of the guard's own list is still asked for here.
FORBIDDEN = (
    "collective_rpc", "load_lora_adapter", "server_info", "unload_lora_adapter",
    "update_weight_version",
)  # fmt: skip


@pytest.mark.parametrize("route", FORBIDDEN)
@pytest.mark.parametrize(
    "form",
    [
        "/{}", "/{}/", "//{}", "/{}//", "/./{}", "/x/../{}", "/{}/x", "/{};v=1", "/{} ", "{}",
        "/%2e/{}", "/{}%2f", "\\{}", "/v1/{}",
    ],
)  # fmt: skip
def test_what_runs_any_call_or_shows_everything_is_refused_even_with_the_token(
    behind: Behind, route: str, form: str
) -> None:
    for written in (route, route.upper(), route.title(), route.replace("_", "-")):
        assert ask(behind, form.format(written), "POST") == 403
        assert ask(behind, form.format(written), headers=()) == 401
    coded = "".join(f"%{ord(c):02x}" for c in route)
    assert ask(behind, form.format(coded)) == 403
    assert ask(behind, form.format(coded.replace("%", "%25"))) == 403
    assert ask(behind, "/", root_path=form.format(route)) == 403
    assert not behind.came


@pytest.mark.parametrize("action", ["checksum", "compare"])
def test_weights_may_be_checked(behind: Behind, action: str) -> None:
    body = json.dumps({"baseline": {"a": "b"}, "action": action}).encode()
    assert ask(behind, "/weight_checker", "POST", body=body) == 200
    assert behind.bodies == [body]
    assert behind.after == [{"type": "http.disconnect"}]  # what comes later is the client's


@pytest.mark.parametrize(
    "body",
    [
        b'{"action": "reset"}', b'{"action": "RESET"}', b'{"action": ["checksum"]}', b"{}", b"",
        b"reset", b"[]", b'"checksum"', b"null", b"{", b"\xff\xfe\x00",
        b'{"action": "checksum", "action": "reset"}',
        b'{"action": "reset", "action": "checksum"}',
        b'{"action": "checksum ", "x": 1}', b'{"Action": "checksum"}',
        b'{"x": {"action": "compare"}}',
        b'{"\\u0061ction": "reset"}', b"[" * 100_000, b'[["action", "checksum"]]',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/weight_checker", "//Weight-Checker/", "/%77eight_checker"])
def test_weights_are_never_reset(behind: Behind, path: str, body: bytes) -> None:
    assert ask(behind, path, "POST", body=body) == 403
    assert not behind.came


def test_a_body_in_pieces_is_read_whole(behind: Behind) -> None:
    pieces = [b'{"action"', b': "checksum"', b"}"]
    messages = [
        {"type": "http.request", "body": piece, "more_body": piece != pieces[-1]}
        for piece in pieces
    ]
    scope = {"type": "http", "path": "/weight_checker", "method": "POST"}
    sent = send_to(behind, messages, headers=[(b"authorization", BEARER)], **scope)
    assert sent[0]["status"] == 200 and behind.bodies == [b"".join(pieces)]
    whole = {"type": "http.request", "body": b"".join(pieces), "more_body": True}  # and then gone
    cut = send_to(behind, [whole], headers=[(b"authorization", BEARER)], **scope)
    assert cut[0]["status"] == 403 and len(behind.came) == 1


def test_a_body_without_end_is_not_read_to_its_end(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_BODY_BYTES", 100)
    messages = [{"type": "http.request", "body": b" " * 60, "more_body": True}] * 50
    scope = {"type": "http", "path": "/weight_checker", "method": "POST"}
    sent = send_to(behind, messages, headers=[(b"authorization", BEARER)], **scope)
    assert sent[0]["status"] == 403 and not behind.came
    assert behind.unread == 48


def test_a_websocket_without_the_token_is_closed_before_it_opens(behind: Behind) -> None:
    for path in ("/v1/realtime", "/health"):
        sent = send_to(
            behind, [{"type": "websocket.connect"}], type="websocket", path=path, headers=[]
        )
        assert [m["type"] for m in sent] == ["websocket.close"]
    assert not behind.came


def test_a_websocket_with_the_token_passes_but_not_to_what_is_forbidden(behind: Behind) -> None:
    given = {"type": "websocket", "headers": [(b"authorization", BEARER)]}
    connect = [{"type": "websocket.connect"}]
    assert send_to(behind, connect, path="/v1/realtime", **given) == []
    assert len(behind.came) == 1
    for path in ("/collective_rpc", "/weight_checker"):
        assert send_to(behind, connect, path=path, **given)[0]["type"] == "websocket.close"
    assert len(behind.came) == 1


def test_the_life_of_the_server_passes_and_an_unknown_protocol_does_not(behind: Behind) -> None:
    send_to(behind, [], type="lifespan")
    assert [scope["type"] for scope in behind.came] == ["lifespan"]
    send_to(behind, [], type="webtransport", path="/x", headers=[(b"authorization", BEARER)])
    assert len(behind.came) == 1


def test_rloo_tells_the_facts_to_whoever_has_the_token(behind: Behind) -> None:
    given = {"type": "http", "path": "/rloo", "method": "GET"}
    sent = send_to(behind, [], headers=[(b"authorization", BEARER)], **given)
    assert sent[0]["status"] == 200 and json.loads(sent[1]["body"]) == {"protocol": 1}
    assert send_to(behind, [], headers=[], **given)[0]["status"] == 401


class Words:
    """A tokenizer of two words."""

    bos_token_id, eos_token_id, unk_token_id, pad_token_id = None, 1, None, None

    def __init__(self, vocabulary: dict[str, int], shift: int = 0):
        self.vocabulary, self.shift = vocabulary, shift

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(text) + self.shift]


def test_a_fingerprint_is_the_tokenizer_s_and_nothing_else_s() -> None:
    one = handshake.tokenizer_fingerprint(Words({"a": 0, "b": 1}))
    assert handshake.tokenizer_fingerprint(Words({"b": 1, "a": 0})) == one
    padded = Words({"a": 0, "b": 1})
    padded.pad_token_id = 1
    assert handshake.tokenizer_fingerprint(padded) == one
    other = Words({"a": 0, "b": 1})
    other.eos_token_id = 0
    different = [other, Words({"a": 1, "b": 0}), Words({"a": 0}), Words({"a": 0, "b": 1}, 1)]
    assert one not in map(handshake.tokenizer_fingerprint, different)
