"""HTTP to vLLM's servers: many requests in flight on a thread of their own, each with a deadline.

The answer decides which error is raised: a closed connection is EngineLost, a 5xx
EngineRefused; a 401, a 404 or a page of HTML comes from a server other than the configured one,
and is final.
"""

import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rloo_cli.generation.vllm.engine import EngineLost, EngineRefused
from rloo_cli.utils import http, signals
from rloo_cli.utils.errors import GenerationError, Problem, refuse

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
KEEPALIVE_S = 2.0
MAX_ERROR_CHARS = 300  # characters of an answer in an error


@dataclass(frozen=True)
class ServerKind:
    """How errors name a kind of server, and what they suggest."""

    noun: str  # in one word
    name: str
    section: str  # of the config
    expected: str  # the API that it must have
    token: str  # where its token is found
    start: str  # how one is started


ROLLOUT_SERVER = ServerKind(
    "server", "a rollout server", "generation.server",
    "vLLM's API with its reinforcement-learning routes", "the token in the server's server.json",
    "rloo vllm-serve starts one",
)  # fmt: skip
TEACHER_SERVER = ServerKind(
    "teacher", "a teacher's server", "algorithm.teacher", "vLLM's OpenAI-compatible API",
    "the key that the server was started with", "vllm serve MODEL starts one",
)  # fmt: skip


class HttpClient:
    """A loop thread and its connections to servers of one kind.

    `token_variable`: the environment variable that has the servers' token, for errors.
    """

    def __init__(
        self, token_variable: str = "RLOO_SERVER_TOKEN", kind: ServerKind = ROLLOUT_SERVER
    ):
        self.token_variable, self.kind = token_variable, kind
        self.loop_thread = http.EventLoopThread("http")
        # Servers close connections after a 500, and those idle for 5 s: the next
        # request on one would look like a dead server. Only completions keep theirs.
        self.keepalive_session, self.fresh_session = self.run(self._open_sessions(), 30)

    async def _open_sessions(self) -> "tuple[aiohttp.ClientSession, aiohttp.ClientSession]":
        return http.open_session(keepalive_s=KEEPALIVE_S), http.open_session(keepalive_s=0)

    def run(
        self, work: Coroutine[object, object, T], limit_s: float, interruptible: bool = False
    ) -> T:
        """Do `work` on the loop and wait for it. `interruptible`: a signal cancels it (Stopped)."""
        poll = signals.raise_if_stopped if interruptible else lambda: None
        try:
            return self.loop_thread.run(work, limit_s, poll)
        except http.RequestFailed as failed:
            raise EngineLost(str(failed)) from None

    def get(self, url: str, path: str, token: str, limit_s: float) -> Any:
        """GET; returns the answer's JSON. Raises EngineLost, GenerationError."""
        return self.run(self.request("GET", url, path, token, None, limit_s), limit_s + 5)

    def get_when_ready(self, url: str, path: str, token: str, limit_s: float) -> Any:
        """GET until the server answers; returns the answer's JSON. Raises GenerationError."""
        from rloo_cli.generation.vllm.deadlines import poll_until_ready  # lazy: it imports torch

        lost = EngineLost("")

        def ask() -> tuple[Any] | None:
            nonlocal lost
            try:
                return (self.get(url, path, token, 5),)
            except EngineLost as error:
                lost = error
                return None

        try:
            return poll_until_ready(limit_s, url + path, ask)[0]
        except EngineLost:  # the limit is used up: no second wait
            why = f"expected an answer within {limit_s:g} s; {lost}"
            raise GenerationError(no_answer_problem(url, why, self.kind)) from None

    def post(self, url: str, path: str, token: str, body: object, limit_s: float) -> Any:
        """POST JSON once; returns the answer's JSON. Raises EngineLost, GenerationError."""
        return self.run(self.request("POST", url, path, token, body, limit_s), limit_s + 5)

    async def request(
        self, method: str, url: str, path: str, token: str, body: object, limit_s: float,
        keep_alive: bool = False,
    ) -> Any:  # fmt: skip
        """Send one request, on the loop. Raises EngineLost, GenerationError.

        `keep_alive`: on a connection that is reused. It is sent again if the server had closed that
        connection meanwhile, so the request must be repeatable.
        """
        where = url.rstrip("/") + path
        sessions = [self.fresh_session] + [self.keepalive_session] * keep_alive
        try:
            answer = await http.send_with_retries(
                lambda: http.send_request(sessions.pop(), method, where, limit_s, token, body),
                reasons=frozenset({"closed"}), statuses=frozenset(), max_tries=len(sessions),
            )  # fmt: skip
        except http.RequestFailed as failed:
            if failed.reason == "address":
                problem = not_a_server_problem(where, "it is not a valid address", self.kind)
                raise GenerationError(problem) from None
            raise EngineLost(str(failed)) from None
        return parse_answer(where, answer, self.token_variable, self.kind)

    def close(self) -> None:
        """Close every connection and end the thread."""
        self.loop_thread.close(self._close_sessions())

    async def _close_sessions(self) -> None:
        await self.keepalive_session.close()
        await self.fresh_session.close()


def parse_answer(
    url: str, answer: http.HttpAnswer, token_variable: str, kind: ServerKind = ROLLOUT_SERVER
) -> Any:
    """The answer's JSON. Raises EngineRefused (an error of the server), GenerationError."""
    status, text = answer.status, answer.text
    if status == 200:
        try:
            return json.loads(text or "null")
        except (ValueError, RecursionError):
            why = f"it answered {text[:80]!r}"
            raise GenerationError(not_a_server_problem(url, why, kind)) from None
    said = answer.error_message()[:MAX_ERROR_CHARS]
    if status in (401, 403):
        refuse(
            kind.section,
            f"{status} from {url}: wrong token for this server",
            f"set {token_variable} ({kind.section}.api_key_env) to {kind.token}",
            said,
            error=GenerationError,
        )
    if status in (404, 405) or status < 400:
        raise GenerationError(not_a_server_problem(url, f"it answered {status} {said}", kind))
    if status >= 500:
        raise EngineRefused(f"{url}: {status} {said}")
    fix = f"change what it names, here or where the server is started: {kind.start}"
    if status == 429:  # too many requests
        fix = f"a lower {kind.section}.max_in_flight, such as 16"
    what, why = f"{url} refused a request", f"{status} {said}"
    refuse(kind.section, what, fix, why, error=GenerationError)


def no_answer_problem(url: str, why: str, kind: ServerKind) -> Problem:
    """The problem that nothing answers at `url`, for the reason `why`."""
    where = f"{kind.section}.base_url"
    return Problem(f"the {kind.noun} at {url} does not answer", where, why, kind.start)


def not_a_server_problem(url: str, why: str, kind: ServerKind = ROLLOUT_SERVER) -> Problem:
    """The problem that `url` is not a server of this kind, for the reason `why`."""
    return Problem(
        f"{url} is not {kind.name}",
        f"{kind.section}.base_url",
        f"expected {kind.expected}; {why}",
        kind.start,
    )
