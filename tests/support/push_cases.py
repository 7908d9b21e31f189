"""A hub on this machine that takes models: the routes of huggingface_hub's commits."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PushHub(ThreadingHTTPServer):
    """Keeps what is sent to it; files whose content it has are not to be sent again."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # repository -> file -> content
        self.private: dict[str, bool] = {}
        self.branches: list[str] = []
        self.said: list[str] = []  # messages of commits
        self.commits, self.refuses = 0, 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: PushHub

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if name not in self.server.private:
            return self._send({"error": "Repository not found"}, 404)
        siblings = [{"rfilename": file} for file in self.server.files[name]]
        got = {"id": name, "private": self.server.private[name], "siblings": siblings}
        return self._send(got | {"sha": "0" * 40, "tags": [], "downloads": 0, "likes": 0})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if self.server.refuses:
            return self._send({"error": "the token may only read"}, self.server.refuses)
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if "/branch/" in path:
            self.server.branches.append(path.rpartition("/branch/")[2])
            return self._send({}, 201)
        _, _, what = path.removeprefix("/api/models/").partition("/preupload/")
        if what:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._send({"files": files})
        return self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'account'}/{asked['name']}"
        known = name in self.server.private
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.server.private.setdefault(name, private)
        self.server.files.setdefault(name, {})
        url = f"{self.server.url}/{name}"
        self._send({"url": url, "name": name}, 409 if known else 200)

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.server.said.append(entry["value"]["summary"])
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.files[name][entry["value"]["path"]] = content
        self.server.commits += 1
        url = f"{self.server.url}/{name}/commit/1"
        self._send({"success": True, "commitUrl": url, "commitOid": "1" * 40})

    def _send(self, got: object, code: int = 200) -> None:
        data = json.dumps(got).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def push_hub() -> Iterator[PushHub]:
    """The hub, while it is needed."""
    hub = PushHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
