"""A hub on this machine: the routes that huggingface_hub and datasets ask for, over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

Repositories = dict[str, dict[str, bytes]]  # "models/org/name" -> file -> content


class Hub(ThreadingHTTPServer):
    """Serves repositories; `asked` are the paths of what was downloaded (GET, no API)."""

    daemon_threads = True

    def __init__(self, repositories: Repositories):
        self.repositories, self.asked = repositories, []
        self.status = 0  # answer everything with this code
        self.gated = False
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str) -> str:
        files = sorted((k, v) for k, v in self.repositories[name].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:  # paths-info: which of these files are there
        length = int(self.headers.get("Content-Length", 0))
        self.posted = self.rfile.read(length).decode()
        self._answer()

    def log_message(self, *_: object) -> None: ...

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        if self.server.status:
            return self._send(self.server.status, b"{}")
        if self.server.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("api/"):
            return self._api(path.removeprefix("api/"))
        repository, found, rest = path.partition("/resolve/")
        if not repository.startswith("datasets/"):
            repository = f"models/{repository}"
        files = self.server.repositories.get(repository)
        name = rest.partition("/")[2]
        if not found or files is None or name not in files:
            code = "EntryNotFound" if files is not None else "RepoNotFound"
            return self._send(404, b"{}", {"X-Error-Code": code})
        if self.command == "GET":
            self.server.asked.append(f"{repository}/{name}")
        tag = hashlib.sha256(files[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.server.commit(repository)}
        self._send(200, files[name], headers)

    def _api(self, path: str) -> None:
        name = next((n for n in self.server.repositories if f"{path}/".startswith(f"{n}/")), None)
        if name is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        files, commit = self.server.repositories[name], self.server.commit(name)
        tree = [
            {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
            for f, c in files.items()
        ]
        action = path.removeprefix(name).strip("/").partition("/")[0]
        if action == "tree":
            return self._json(tree)
        if action == "paths-info":
            return self._json([e for e in tree if e["path"] in self.posted])
        siblings = [{"rfilename": e["path"], "size": e["size"]} for e in tree]
        about = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
        self._json(about | {"private": False, "gated": False, "disabled": False, "downloads": 0})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub(repositories: Repositories) -> Iterator[Hub]:
    """A hub that serves these while the block lasts."""
    server = Hub(repositories)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
