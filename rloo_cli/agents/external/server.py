"""The HTTP server for agents: OpenAI's two APIs, and a few routes of our own.

Each episode has its own URL, `http://HOST:PORT/episodes/N/v1`, and a key that opens only that
episode. `/rloo/next`, with the run's token, gives an episode to an agent that connects on its own.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from rloo_cli.agents.external import wire_answers
from rloo_cli.agents.external.conversation import AgentAnswer, Conversation
from rloo_cli.agents.external.message_forms import (
    MODEL_NAME,
    AgentRequest,
    RequestRefused,
    read_chat_request,
    read_responses_request,
)
from rloo_cli.agents.external.request_queue import RequestQueue, row_of_group, same_secret
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.http import EventLoopThread
from rloo_cli.utils.ports import bind_or_refuse

MOST_BODY_BYTES = 16 << 20
BACKLOG = 512
NEXT_WAIT_S = 20.0  # /rloo/next waits this long for an episode
NEXT_POLL_S = 0.1
END_S = 1.0  # for running requests when the server ends

Work = Callable[[Conversation, JsonObject, web.Request], Awaitable[web.StreamResponse]]


class ProxyServer:
    """The HTTP server, on its own thread. Raises ConfigError if it cannot listen."""

    def __init__(self, queue: RequestQueue, host: str, port: int, token: str, max_seconds: float):
        self.queue, self.token, self.max_seconds = queue, token, max_seconds
        listening = bind_or_refuse("agent", host, port, BACKLOG, ConfigError)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listening.getsockname()[1]}"
        self.thread = EventLoopThread("proxy")
        self.runner = web.AppRunner(self._make_app(), access_log=None, shutdown_timeout=END_S)
        self.thread.run(self._start_site(listening), timeout_s=30.0)

    async def _start_site(self, listening: Any) -> None:
        await self.runner.setup()
        await web.SockSite(self.runner, listening).start()

    def close(self) -> None:
        """Close the port and every connection."""
        self.thread.close(self.runner.cleanup())

    def base_url(self, conversation: Conversation) -> str:
        """The URL of one episode."""
        return f"{self.url}/episodes/{conversation.slug}/v1"

    def _make_app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        base = "/episodes/{slug}/v1"
        app.router.add_post("/rloo/next", self._give_episode)
        app.router.add_post(f"{base}/chat/completions", self._guarded(self._chat))
        app.router.add_post(f"{base}/responses", self._guarded(self._responses))
        app.router.add_get(f"{base}/models", self._guarded(self._models))
        app.router.add_get(f"{base}/models/{MODEL_NAME}", self._guarded(self._model))
        app.router.add_get(f"{base}/rloo/row", self._guarded(self._row))
        app.router.add_post(f"{base}/rloo/reward", self._guarded(self._reward))
        app.router.add_post(f"{base}/rloo/done", self._guarded(self._done))
        return app

    def _guarded(self, work: Work) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that checks the episode's key first, and turns refusals into errors."""

        async def handle(request: web.Request) -> web.StreamResponse:
            conversation = None
            try:
                key = _bearer_token(request)
                conversation = self.queue.find_conversation(request.match_info["slug"], key)
                return await work(conversation, await _read_body(request), request)
            except RequestRefused as refused:
                if conversation is not None:
                    self.queue.note_refusal(conversation, refused)
                return _refusal(refused)

        return handle

    async def _chat(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        asked = read_chat_request(body)
        options = body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        if body.get("stream"):
            pieces = lambda answer: wire_answers.chat_pieces(answer, usage)  # noqa: E731
            return await self._stream(conversation, asked, http, pieces)
        return await self._answer(conversation, asked, http, wire_answers.chat_answer)

    async def _responses(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        asked = read_responses_request(body)
        if body.get("stream"):
            return await self._stream(conversation, asked, http, wire_answers.responses_pieces)
        return await self._answer(conversation, asked, http, wire_answers.responses_answer)

    async def _answer(
        self, conversation: Conversation, asked: AgentRequest, http: web.Request,
        shape: Callable[[AgentAnswer], JsonObject],
    ) -> web.StreamResponse:  # fmt: skip
        future = self.queue.ask_policy(conversation, asked)
        answer = await asyncio.shield(asyncio.wrap_future(future))
        if _is_cut(http):
            self.queue.note_lost_answer(conversation, asked)
        return web.json_response(shape(answer))

    async def _stream(
        self, conversation: Conversation, asked: AgentRequest, http: web.Request,
        pieces: Callable[[AgentAnswer], Iterator[str]],
    ) -> web.StreamResponse:  # fmt: skip
        future = self.queue.ask_policy(conversation, asked)  # a refusal gets its own status
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(http)
            answer = await asyncio.shield(asyncio.wrap_future(future))
            for piece in pieces(answer):
                await response.write(f"{piece}\n\n".encode())
            await response.write_eof()
        except RequestRefused as refused:  # the status is sent, so the stream says it
            error = json.dumps(wire_answers.error_body(refused.code, str(refused)))
            await response.write(f"data: {error}\n\n".encode())
        except OSError:
            self.queue.note_lost_answer(conversation, asked)
        else:
            if _is_cut(http):
                self.queue.note_lost_answer(conversation, asked)
        return response

    async def _models(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        return web.json_response(wire_answers.model_list())

    async def _model(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        return web.json_response(wire_answers.model_entry())

    async def _row(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        row = row_of_group(conversation.episode.group)
        return web.json_response(row, dumps=lambda value: json.dumps(value, default=str))

    async def _reward(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        value = body.get("reward")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
            what = f"reward = {value!r:.80} is not a finite number"
            raise RequestRefused(400, "invalid_request", what)
        self.queue.take_reward(conversation, float(value))  # type: ignore[arg-type]
        return web.json_response({})

    async def _done(
        self, conversation: Conversation, body: JsonObject, http: web.Request
    ) -> web.StreamResponse:
        error = body.get("error")
        self.queue.end_conversation(conversation, None if error is None else str(error))
        return web.json_response({})

    async def _give_episode(self, http: web.Request) -> web.StreamResponse:
        """An episode for an agent that connects on its own; 204 if none is waiting for a while."""
        if not self.token or not same_secret(self.token, _bearer_token(http)):
            self.queue.wrong_keys += 1
            return _refusal(RequestRefused(401, "wrong_key", "wrong token for this run"))
        limit = asyncio.get_running_loop().time() + NEXT_WAIT_S
        while not _is_cut(http) and asyncio.get_running_loop().time() < limit:
            if (found := self.queue.take_offer()) is not None:
                answer: JsonObject = {"base_url": self.base_url(found), "api_key": found.key}
                answer |= {"model": MODEL_NAME, "max_seconds": self.max_seconds}
                answer |= {"row": row_of_group(found.episode.group), "seed": found.episode.seed}
                return web.json_response(answer, dumps=lambda v: json.dumps(v, default=str))
            await asyncio.sleep(NEXT_POLL_S)
        return web.Response(status=204)


def _bearer_token(request: web.Request) -> str:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _read_body(request: web.Request) -> JsonObject:
    if request.method != "POST":
        return {}
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError):
        raise RequestRefused(400, "invalid_request", "the body is not JSON") from None
    except web.HTTPRequestEntityTooLarge:
        what = f"the body has more than {MOST_BODY_BYTES >> 20} MiB"
        raise RequestRefused(413, "too_large", what) from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "invalid_request", "the body is not an object")
    return body


def _is_cut(request: web.Request) -> bool:
    """Whether the agent has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def _refusal(refused: RequestRefused) -> web.Response:
    body = wire_answers.error_body(refused.code, str(refused))
    return web.json_response(body, status=refused.status)
