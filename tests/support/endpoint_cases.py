"""A service that answers as a test says: the far end of everything that asks a remote model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rloo_cli.utils import http

PAGE = "<!DOCTYPE html><html><body>Welcome to nginx!</body></html>"
# (status, JSON or text[, headers]); status 0: the connection is closed without an answer.
Answers = Callable[[str, Any], tuple[Any, ...]]


class Stub:
    """A service whose answers are those of `answer(path, body)`."""

    def __init__(self, answer: Answers):
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []  # path, body
        self.keys: list[str | None] = []  # Authorization of each
        self.now = self.most = 0  # under way; at most
        self.lock = threading.Lock()
        self.http = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"stub": self}))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, stub = "HTTP/1.1", Stub

    def do_POST(self) -> None:
        stub = self.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.asked.append((self.path, body))
            stub.keys.append(self.headers.get("Authorization"))
            stub.now += 1
            stub.most = max(stub.most, stub.now)
        try:
            status, said, *more = stub.answer(self.path, body)
        finally:
            with stub.lock:
                stub.now -= 1
        if not status:
            self.close_connection = True
            return
        text = said if isinstance(said, str) else json.dumps(said)
        self.send_response(status)
        for name, value in more[0].items() if more else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *args: Any) -> None: ...  # a client that did not wait


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answers], Stub]]:
    """Starts services; the pauses between two tries are short."""
    monkeypatch.setattr(http, "FIRST_BACKOFF_S", 0.01)
    started: list[Stub] = []

    def start(answer: Answers) -> Stub:
        started.append(Stub(answer))
        return started[-1]

    yield start
    for stub in started:
        stub.close()


def in_turn(*answers: tuple[Any, ...]) -> Answers:
    """These answers one after the other, then the last for ever."""
    left = list(answers)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]


def chats(say: Callable[[str], str | None], wait_s: float = 0.0) -> Answers:
    """A chat model: `say` turns the last message into the answer."""

    def answer(path: str, body: Any) -> tuple[Any, ...]:
        assert path == "/v1/chat/completions", path
        time.sleep(wait_s)
        said = say(body["messages"][-1]["content"])
        return 200, {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}

    return answer
