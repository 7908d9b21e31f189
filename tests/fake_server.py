"""A rollout server without a model: vLLM 0.32's routes and forms, and switches for what goes wrong.

`tests/test_vllm_contract.py` holds it to the real one. Its tokens depend on prompt and seed alone;
each has the probability 1/V, as a model's whose head is zero.
"""

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

GENERATE = "/inference/v1/generate"
PAGE = "<!DOCTYPE html><html><body>Welcome to nginx!</body></html>"


class Fake:
    """One server, answering until `close`. The switches may be changed while it runs."""

    # What the routes are like when all is well.
    READS: ClassVar = {"/health", "/rloo", "/version", "/v1/models", "/weight_info", "/is_paused",
                       "/get_world_size"}  # fmt: skip

    def __init__(self, facts: dict[str, Any] | None, vocabulary: int, token: str = "t" * 32):
        self.facts, self.vocabulary, self.token = facts, vocabulary, token  # facts None: no /rloo
        self.version = "0.32.0"  # of vLLM
        self.label, self.paused, self.open = "default", False, False
        self.hangs: set[str] = set()  # paths that are never answered
        self.slow_s = 0.0  # before each completion
        self.dies_at: set[int] = set()  # the n-th completion: it is gone, and another is there
        self.dead = False  # every connection is closed without an answer
        self.fails_at: dict[int, int] = {}  # the n-th completion -> this status
        self.locked = False  # 401, whatever the token
        self.page = 0  # a page of HTML with this status, for every path
        self.keeps_label = False  # of the weights it had
        self.says = ""  # another label on completions
        self.resets = True  # the prefix cache
        self.tells_logp = True
        self.shift = 0.0  # of every log-probability
        self.asked: list[tuple[str, Any]] = []  # every request: path, body
        self.drawn = self.now = self.most = 0  # completions asked for; under way, at most
        self.lock, self.ended = threading.Condition(), threading.Event()
        handler = type("Bound", (_Handler,), {"fake": self})
        server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 256})
        self.http = server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def draws(self) -> list[Any]:
        """The bodies of all requests for completions."""
        return [body for path, body in self.asked if path == GENERATE]

    def close(self) -> None:
        """Stop answering, and let go of the port."""
        self.dead = True
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of a request that brought the token."""
        reading = path in self.READS
        if path == GENERATE and method == "POST":
            return self._generate(body)
        if path not in self.READS | set(_CHANGES) or (path == "/rloo" and self.facts is None):
            return _error(404, "Not Found")
        if (method == "GET") != reading:
            return _error(405, "Method Not Allowed")
        if reading:
            return 200, {
                "/health": None,
                "/rloo": self.facts,
                "/version": {"version": self.version},
                "/v1/models": {"object": "list", "data": [{"id": "fake", "max_model_len": 48}]},
                "/weight_info": {"weight_version": self.label},
                "/is_paused": {"is_paused": self.paused},
                "/get_world_size": {"world_size": 0},  # there is nobody to send tensors to
            }[path]
        with self.lock:
            found = getattr(self, _CHANGES[path])(body)
            self.lock.notify_all()
        return found if isinstance(found, tuple) else (200, found)

    def _pause(self, body: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    def _resume(self, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def _connection(self, body: Any) -> Any:
        return _error(500, "an update is open") if self.open else {"message": "done"}

    def _start(self, body: Any) -> Any:
        if self.open:
            return _error(500, "start_weight_update called while a weight update is active")
        self.open = True
        return {"message": "Weight update started"}

    def _update(self, body: Any) -> Any:
        return {"message": "Weights updated"} if self.open else _error(500, "no update is open")

    def _finish(self, body: Any) -> Any:
        if not self.open:
            return _error(500, "start_weight_update must be called first")
        self.open = False
        label = (body or {}).get("weight_version")
        self.label = label if label and not self.keeps_label else self.label
        return {"message": "Weight update finished"}

    def _reset(self, body: Any) -> Any:
        return {"success": self.resets and not self.now}

    def _generate(self, body: Any) -> tuple[int, Any]:
        with self.lock:
            self.drawn += 1
            number = self.drawn
            self.now += 1
            self.most = max(self.most, self.now)
            self.lock.wait_for(lambda: not self.paused or self.ended.is_set())
        self.ended.wait(self.slow_s)
        with self.lock:
            self.now -= 1
            if number in self.dies_at:
                self.label, self.paused, self.open = "default", False, False
                return 0, None
        if number in self.fails_at:
            return _error(self.fails_at[number], "it went wrong")
        prompt, given = body["token_ids"], body["sampling_params"]
        chance = random.Random(f"{prompt}/{given['seed'] if given['temperature'] else 'greedy'}")
        ids: list[int] = []
        while len(ids) < given["max_tokens"] and (
            not ids or ids[-1] not in given["stop_token_ids"]
        ):
            ids.append(chance.randrange(self.vocabulary))
        logp = self.shift - math.log(self.vocabulary)
        content = [{"token_id": i, "logprob": logp, "rank": 1, "top_logprobs": []} for i in ids]
        ended = ids[-1] in given["stop_token_ids"]
        choice = {"index": 0, "finish_reason": "stop" if ended else "length", "token_ids": ids}
        choice |= {"logprobs": {"content": content} if self.tells_logp else None}
        span = {"version": self.says or self.label, "start": 0, "end": len(ids)}
        return 200, {"request_id": str(number), "choices": [choice | {"weight_versions": [span]}]}


_CHANGES = {
    "/pause": "_pause", "/resume": "_resume", "/init_weight_transfer_engine": "_connection",
    "/shutdown_weight_transfer_engine": "_connection", "/start_weight_update": "_start",
    "/update_weights": "_update", "/finish_weight_update": "_finish",
    "/reset_prefix_cache": "_reset",
}  # fmt: skip


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "", "param": None, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        fake, path = self.fake, urlsplit(self.path).path
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(data or "null")
        fake.asked.append((path, body))
        if path in fake.hangs:
            fake.ended.wait()
        known = self.headers.get("Authorization") == f"Bearer {fake.token}" and not fake.locked
        if fake.page:
            status, said = fake.page, PAGE
        elif not known and (path != "/health" or fake.locked):
            status, said = 401, json.dumps({"error": "this server wants its token"})
        else:
            status, found = fake.answer(self.command, path, body)
            said = "" if path == "/health" else json.dumps(found)
        if fake.dead or not status:
            self.close_connection = True
            return
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if fake.page else "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said.encode())
        except OSError:  # the client did not wait
            self.close_connection = True

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""
