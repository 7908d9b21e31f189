"""Access control of a rollout server's routes: the outermost layer before vLLM's.

The routes that reinforcement learning needs exist only in vLLM's developer mode, which also opens
arbitrary calls; vLLM's own key guards some paths only, and lets OPTIONS pass. So without the token
only `GET /health` is answered, whatever the path looks like; with it, everything except routes
that run arbitrary calls or show the whole configuration. Imports neither torch nor vLLM.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from rloo_cli.generation.vllm.handshake import SERVER_INFO_VARIABLE as FACTS

TOKEN_VARIABLE = "RLOO_SERVER_TOKEN_"  # environment variable with the token, for the guard
# Any call of a worker's method; the whole configuration and environment; a wrong label on
# weights; code and files of the machine.
FORBIDDEN_ROUTES = {"collective_rpc", "server_info", "update_weight_version", "load_lora_adapter",
             "unload_lora_adapter"}  # fmt: skip
CHECKER_ROUTE, ALLOWED_CHECKS = (
    "weight_checker",
    ("checksum", "compare"),
)  # and not `reset`: random weights
MAX_BODY_BYTES = 64 * 2**20  # bytes of a request that is read here: the checksums of a model

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application around another one. Raises ValueError without a token."""

    def __init__(self, app: App):
        self.app = app
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token.strip():
            raise ValueError(f"{TOKEN_VARIABLE} is empty: a server without a token is not started")
        self.expected_header = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_health_check(scope):
            await self.app(scope, receive, send)
        elif not self._has_token(scope):
            await _refuse(scope, receive, send, 401, "this server requires its token")
        elif scope["type"] != "http" and scope["type"] != "websocket":
            await _refuse(scope, receive, send, 403, "unknown protocol")
        elif (parts := path_segments(scope)) & FORBIDDEN_ROUTES:
            await _refuse(scope, receive, send, 403, "this route is closed, even with the token")
        elif CHECKER_ROUTE in parts:
            await self._check_weights(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/rloo" and scope["method"] == "GET":
            await _send_response(send, 200, os.environ.get(FACTS, "{}").encode())
        else:
            await self.app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        """Whether there is exactly one Authorization header, with the right token."""
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected_header)

    async def _check_weights(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body; pass it on only if it requests a read-only action."""
        body = await _read_body(receive) if scope["type"] == "http" else None
        if body is None or _requested_check(body) not in ALLOWED_CHECKS:
            await _refuse(
                scope, receive, send, 403, f"action must be one of {', '.join(ALLOWED_CHECKS)}"
            )
            return
        replayed = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


def path_segments(scope: Scope) -> set[str]:
    """The parts of a path, fully decoded, in lower case: to compare with forbidden ones."""
    path = scope.get("root_path", "") + "/" + scope["path"]
    for _ in range(10):
        path = unquote(path)
    lowered = path.lower().replace("\\", "/").replace("-", "_")
    return {part.partition(";")[0].strip() for part in lowered.split("/")}


def _is_health_check(scope: Scope) -> bool:
    """Whether this is exactly a GET or HEAD of `/health`."""
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and scope["path"] == "/health"
        and scope.get("raw_path") in (None, b"/health")
        and not scope.get("root_path")
    )


async def _read_body(receive: Receive) -> bytes | None:
    """Read a request's whole body; None if it is too long, or its sender has disconnected."""
    body: bytes = b""
    while len(body) <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body
    return None


def _requested_check(body: bytes) -> str | None:
    """The `action` of a JSON body that has it exactly once: of two, vLLM might use the other."""
    try:
        pairs = json.loads(body, object_pairs_hook=tuple)  # of JSON, only objects are tuples
    except (ValueError, RecursionError):
        return None
    found = [v for name, v in pairs if name == "action"] if isinstance(pairs, tuple) else []
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await receive()  # the request to connect; closed before it is accepted is a 403
        await send({"type": "websocket.close", "code": 1008, "reason": why})
    elif scope["type"] == "http":
        extra = [(b"www-authenticate", b"Bearer")] if status == 401 else []
        await _send_response(send, status, json.dumps({"error": why}).encode(), extra)


async def _send_response(
    send: Send, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*headers, *(extra or [])]}
    )
    await send({"type": "http.response.body", "body": body})
