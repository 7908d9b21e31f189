"""A rollout server without a model: vLLM 0.32's routes and forms, and switches for what goes wrong.

`tests/generation/on_vllm/test_contract_on_server.py` holds it to the real one. It has no worker to
send tensors to. Its tokens depend on prompt and seed alone; each has probability 1/V, as a model's
whose head is zero. With the fact `sampling_mask` it sends masks in the form of vLLM's protocol
class, to which `test_vllm_masks.py` holds the client, as no CPU runs a vLLM that sends any.
"""

import base64
import json
import math
import random
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

GENERATE, GROUP = "/inference/v1/generate", "/rloo/generate"
SCORE = "/v1/completions"
PLACES = 48  # tokens of a request and its answer
PAGE = "<!DOCTYPE html><html><body>Welcome to nginx!</body></html>"


class Fake:
    """One server, answering until `close`. The switches may be changed while it runs."""

    def __init__(self, facts: dict[str, Any] | None, vocabulary: int, token: str = "t" * 32):
        self.facts, self.vocabulary, self.token = facts, vocabulary, token  # facts None: no /rloo
        self.version, self.label, self.paused = "0.32.0", "default", False  # of vLLM; of weights
        self.open = 0  # an update: 2 = it lacks its weights, 1 = it has them
        self.page, self.hangs = 0, set[str]()  # HTML with this status; paths never answered
        self.lacks: set[str] = set()  # paths that another version does not have
        self.slow_s, self.shift = 0.0, 0.0  # before each completion; of each log-probability
        self.dies_at: set[int] = set()  # the n-th completion: it is gone, and soon another is there
        self.back = 0.0  # when that is; nobody starts a server between two requests
        self.fails_at: dict[int, int] = {}  # the n-th completion -> this status
        self.hangs_up = 0  # so many requests get no answer, and their connection is closed
        self.dead, self.locked = False, False  # closes without an answer; 401, whatever the token
        self.keeps_label, self.says = False, ""  # of the weights it had; another on completions
        self.resets, self.tells_logp = True, True  # the prefix cache; of completions
        self.sends_masks, self.bends_masks = True, False  # if it has the fact; of other ids
        # As a teacher: its models; log-probabilities of ids[1:], None = 1/V each; texts of the ids.
        self.models = ["fake"]
        self.teach: Callable[[list[int]], list[float]] | None = None
        self.texts: list[str] | None = None
        self.asked: list[tuple[str, Any]] = []  # every request: path, body
        self.callers: list[int] = []  # the port that each request came from
        self.drawn = self.now = self.most = self.deaths = 0  # asked for, under way, at most; died
        self.lock, self.ended = threading.Condition(), threading.Event()
        self.http = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def draws(self) -> list[Any]:  # the bodies of all requests for completions
        return [body for path, body in self.asked if path == GENERATE]

    def close(self) -> None:
        """Stop answering, and let go of the port."""
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of a request that brought the token."""
        got = {
            "/health": None, "/version": {"version": self.version},
            "/v1/models": {"object": "list", "data": [{"id": name, "max_model_len": PLACES}
                                                      for name in self.models]},
            "/weight_info": {"weight_version": self.label},
            "/get_world_size": {"world_size": 0}, "/is_paused": {"is_paused": self.paused},
        } | ({} if self.facts is None else {"/rloo": self.facts})  # fmt: skip
        changes = {
            "/pause": self.pause, "/resume": self.pause, GENERATE: self.generate, SCORE: self.score,
            "/init_weight_transfer_engine": self.connection, "/start_weight_update": self.update,
            "/shutdown_weight_transfer_engine": self.connection, "/update_weights": self.update,
            "/finish_weight_update": self.update, "/reset_prefix_cache": self.reset,
        }  # fmt: skip
        changes |= {GROUP: self.group} if GROUP in (self.facts or {}).get("routes", ()) else {}
        if path in self.lacks:
            return error(404, "Not Found")
        if path not in got | changes or (method == "GET") != (path in got):
            return error(405 if path in got | changes else 404, "it has no such route")
        with self.lock:
            self.lock.notify_all()
            return (200, got[path]) if path in got else changes[path](path, body)

    def pause(self, path: str, body: Any) -> tuple[int, Any]:
        self.paused = path == "/pause"
        return 200, {"status": "paused" if self.paused else "resumed"}

    def connection(self, path: str, body: Any) -> tuple[int, Any]:
        return error(500, "an update is active") if self.open else (200, {"message": path})

    def update(self, path: str, body: Any) -> tuple[int, Any]:
        after = {"/start_weight_update": 2, "/update_weights": 1, "/finish_weight_update": 0}[path]
        if bool(self.open) == (after == 2):
            return error(500, f"a weight update is {'' if self.open else 'not '}active")
        self.open, before = max(after, self.open - 1), self.open
        if before == 2 and not after:  # it tells, and is closed by the next
            return error(500, "weights are missing")
        label = not self.open and body and body.get("weight_version")
        self.label = label if label and not self.keeps_label else self.label
        return 200, {"message": path}

    def reset(self, path: str, body: Any) -> tuple[int, Any]:
        return 200, {"success": self.resets and not self.now}

    def generate(self, path: str, body: Any) -> tuple[int, Any]:
        self.drawn, self.now = self.drawn + 1, self.now + 1
        number, life, self.most = self.drawn, self.deaths, max(self.most, self.now)
        self.lock.notify_all()
        self.lock.wait_for(lambda: not self.paused, 60)
        self.lock.wait_for(lambda: self.ended.is_set() or self.paused, self.slow_s)
        aborted = self.paused  # a pause answers with what there is: half
        self.now -= 1
        if (broken := self.accident(number, life)) is not None:
            return broken
        prompt, given, ids = body["token_ids"], body["sampling_params"], list[int]()
        chance = random.Random(f"{prompt}/{given['seed'] if given['temperature'] else 'greedy'}")
        while len(ids) < given["max_tokens"] and not {*ids[-1:]} & {*given["stop_token_ids"]}:
            ids.append(chance.randrange(self.vocabulary))
        ids = ids[: len(ids) // 2] if aborted else ids
        masked, kept = bool((self.facts or {}).get("sampling_mask")), self.vocabulary
        if masked and min(given["temperature"], given["top_k"]) <= 0:
            return error(400, "sampling distribution replay requires temperature > 0 and top_k > 0")
        if masked:
            kept = min(given["top_k"], math.ceil(given["top_p"] * self.vocabulary))
        (logp,) = struct.unpack("f", struct.pack("f", self.shift - math.log(kept)))
        content = [{"token_id": i, "logprob": logp, "rank": 1, "top_logprobs": []} for i in ids]
        span = {"version": self.says or self.label, "start": 0, "end": len(ids)}
        choice = {"index": 0, "token_ids": ids, "weight_versions": [span]}
        ended = "stop" if {*ids[-1:]} & {*given["stop_token_ids"]} else "length"
        choice["finish_reason"] = "abort" if aborted else ended
        shift = int(self.bends_masks)
        rows = [[(i + n) % self.vocabulary for n in range(shift, kept + shift)] for i in ids]
        choice["sampling_mask"] = rows if masked and self.sends_masks else None
        choice["logprobs"] = {"content": content} if self.tells_logp else None
        return 200, {"request_id": str(number), "choices": [choice]}

    def accident(self, number: int, life: int) -> tuple[int, Any] | None:
        """What becomes of the n-th completion where a switch says so."""
        if number in self.dies_at:
            self.label, self.paused, self.open, self.deaths = "default", False, 0, self.deaths + 1
            self.back = time.monotonic() + 0.2
        if life != self.deaths:  # it went with the others
            return 0, None
        if number in self.fails_at:
            return error(self.fails_at[number], "it went wrong")
        return None

    def score(self, path: str, body: Any) -> tuple[int, Any]:
        """The log-probabilities of a prompt's ids; its own token is not worth a word."""
        self.drawn, self.now = self.drawn + 1, self.now + 1
        number, life, self.most = self.drawn, self.deaths, max(self.most, self.now)
        self.lock.wait_for(self.ended.is_set, self.slow_s)
        self.now -= 1
        if (broken := self.accident(number, life)) is not None:
            return broken
        ids, name = body["prompt"], body["model"]
        if name not in self.models:
            return error(404, f"The model `{name}` does not exist.")
        if max(ids) >= self.vocabulary:
            return error(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) + body["max_tokens"] > PLACES:
            return error(400, f"This model's maximum context length is {PLACES} tokens.")
        even = [self.shift - math.log(self.vocabulary)] * (len(ids) - 1)
        got = even if self.teach is None else self.teach(ids)
        rows: list[Any] = [None]
        for i, logp in zip(ids[1:], got, strict=True):
            text = None if self.texts is None else self.texts[i]
            rows.append({str(i): {"logprob": logp, "rank": 1, "decoded_token": text}})
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": rows}
        return 200, {"object": "text_completion", "model": name, "choices": [choice]}

    def group(self, path: str, body: Any) -> tuple[int, Any]:
        """The completions of one prompt, each as its own request would bring it."""
        rows = []
        for params in body["sampling_params"]:
            status, said = self.generate(path, body | {"sampling_params": params})
            if status != 200:
                return status, said
            choice = said["choices"][0]
            content = (choice["logprobs"] or {"content": []})["content"]
            logp = [entry["logprob"] for entry in content]
            ids = choice["token_ids"]
            rows.append({
                "ids": base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode(),
                "logp": base64.b64encode(struct.pack(f"<{len(logp)}f", *logp)).decode(),
                "finish_reason": choice["finish_reason"],
                "versions": [span["version"] for span in choice["weight_versions"]],
            })  # fmt: skip
            if (masks := choice["sampling_mask"]) is not None:
                flat, counts = [i for kept in masks for i in kept], [len(kept) for kept in masks]
                for name, values in (("mask_ids", flat), ("mask_counts", counts)):
                    packed = struct.pack(f"<{len(values)}i", *values)
                    rows[-1][name] = base64.b64encode(packed).decode()
        return 200, {"completions": rows}


def error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "", "param": None, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version, fake = "HTTP/1.1", Fake

    def do_GET(self) -> None:
        fake, path = self.fake, urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        if time.monotonic() < fake.back:
            self.close_connection = True
            return
        if fake.hangs_up:
            fake.hangs_up -= 1
            self.close_connection = True
            return
        fake.asked.append((path, body))
        fake.callers.append(self.client_address[1])
        if path in fake.hangs:
            fake.ended.wait()
        known = path == "/health" or self.headers.get("Authorization") == f"Bearer {fake.token}"
        status, found = 401, {"error": "token"}
        if known and not fake.locked and not fake.page:
            status, found = fake.answer(self.command, path, body)
        said = PAGE if fake.page else "" if path == "/health" else json.dumps(found)
        self.close_connection = fake.dead or status in (0, 500)  # after an error, as uvicorn does
        if status and not fake.dead:
            self.send_response(fake.page or status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said.encode())

    do_POST = do_GET

    def log_message(self, *args: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *args: Any) -> None: ...  # a client that did not wait
