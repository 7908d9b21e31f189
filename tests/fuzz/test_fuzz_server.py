"""Whatever a server answers: completions that are what they claim to be, or one clear error."""

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fuzz_cases import TREES, clear_error, count_case, damage, effort
from hypothesis import example, given
from hypothesis import strategies as st

from rloo_cli.generation.vllm.engine import EngineCompletion, EngineLost
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.generation.vllm.http_engine import parse_completion, parse_group_completions
from rloo_cli.generation.vllm.server_file import read_server_file, running_server

FACTS: dict[str, Any] = {
    "vllm": "0.32.0", "model": "m", "dtype": "float32", "tokenizer": "t", "max_model_len": 64,
    "transfer": "gloo", "logprobs_mode": "processed_logprobs", "routes": ["/rloo/generate"],
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "choices": [
        {"token_ids": [3, 1], "finish_reason": "stop", "weight_versions": [{"version": "a/1"}],
         "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -0.5}]}}
    ]
}  # fmt: skip
GROUP: dict[str, Any] = {
    "completions": [
        {"ids": "AwAAAAEAAAA=", "logp": "AACAvwAAAL8=", "finish_reason": "stop", "versions": ["1"]}
    ]
}
RECORD: dict[str, Any] = {
    "url": "http://127.0.0.1:1", "token": "t", "pid": 1, "group": 1, "pid_started": "1",
    "host": "h", "by": "train", "model": "m", "dtype": "float32", "vllm": "0.32", "transfer":
    "gloo", "devices": [], "log": "x",
}  # fmt: skip
DEEP = b"[" * 100_000


@st.composite
def altered(draw: st.DrawFn, values: Any) -> Any:
    """These values with something else in one place, or with one place fewer."""
    if isinstance(values, dict) and values and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(values)))
        rest = {key: value for key, value in values.items() if key != name}
        return rest if draw(st.booleans()) else rest | {name: draw(altered(values[name]))}
    if isinstance(values, list) and values and draw(st.booleans()):
        return [draw(altered(values[0])), *values[1:]]
    return draw(TREES)


def bodies(values: Any) -> st.SearchStrategy[bytes]:
    """Answers that are nearly this one."""
    text = json.dumps(values).encode()
    return st.one_of(
        altered(values).map(lambda found: json.dumps(found).encode()), damage(text),
        st.binary(max_size=40), TREES.map(lambda tree: json.dumps(tree).encode()),
    )  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    """Says the same to everybody: `said`, a status and a body."""

    said: tuple[int, bytes] = (200, b"")

    def do_GET(self) -> None:
        status, body = self.said
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[HttpClient, str]]:
    """Our client, and the URL of a server that answers with `Answers.said`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    client = HttpClient()
    yield client, f"http://127.0.0.1:{server.server_address[1]}"
    client.close()
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def clear_or_lost() -> Iterator[None]:
    """As `clear_error`; and a server may be lost, for which there is another try."""
    with clear_error(), contextlib.suppress(EngineLost):
        yield


STATUSES = st.sampled_from([200, 200, 200, 201, 400, 401, 404, 422, 500, 503])


@pytest.mark.wide
@effort(40)
@given(STATUSES, bodies(FACTS))
@example(200, b"[]")
@example(200, DEEP)
def test_whatever_a_server_says_of_itself(
    asked: tuple[HttpClient, str], status: int, body: bytes
) -> None:
    client, url = asked
    Answers.said = (status, body)
    expected = ExpectedServer("m", "float32", "t", 64, "gloo")
    with clear_or_lost():
        transfer, has_route, devices, warning = expected.check(client, url, "t")
        assert isinstance(transfer, str) and isinstance(warning, str) and has_route in (True, False)
        assert all(isinstance(gpu, str) for gpu in devices)


def is_completion(found: EngineCompletion) -> None:
    """Ids that are numbers of tokens; what else must hold is checked by `check_completion`."""
    assert all(type(token) is int and 0 <= token < 2**31 for token in found.ids), found
    assert all(type(value) is float for value in found.logp), found


@effort(60)
@given(STATUSES, bodies(COMPLETION))
@example(200, b"null")
@example(
    200, json.dumps({"choices": [COMPLETION["choices"][0] | {"token_ids": [None, 1]}]}).encode()
)
def test_whatever_a_completion_looks_like(
    asked: tuple[HttpClient, str], status: int, body: bytes
) -> None:
    client, url = asked
    Answers.said = (status, body)
    with clear_or_lost():
        is_completion(parse_completion(client.post(url, "/x", "t", {}, 10), url))


@effort(60)
@given(bodies(GROUP))
@example(b"[1]")
@example(b'{"completions": [{"ids": "AAwAAAAEAAAA", "logp": "", "finish_reason": "stop"}]}')
def test_whatever_a_groups_completions_look_like(
    asked: tuple[HttpClient, str], body: bytes
) -> None:
    client, url = asked
    Answers.said = (200, body)
    with clear_or_lost():
        for found in parse_group_completions(client.post(url, "/x", "t", {}, 10), url, 1):
            is_completion(found)


@effort(40)
@given(bodies(RECORD))
@example(json.dumps(RECORD | {"pid": "x", "host": None}).encode())
def test_whatever_server_json_holds(tmp_path: Path, body: bytes) -> None:
    count_case()
    (tmp_path / "server.json").write_bytes(body)
    running_server(tmp_path)
    found = read_server_file(tmp_path)
    assert found is None or (type(found.pid) is int and type(found.url) is str)
