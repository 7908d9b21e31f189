"""A server of environments: requests with deadlines, made from threads that wait for them.

Whatever goes wrong (no answer, another status, a redirect, an answer that is not what was asked
for) is a `ToolGone`: the environment's state is not known any more, and its row has no score.
Nothing is asked twice, since a step that was made cannot be taken back. The token is read from the
environment when it is needed, sent to the config's address alone, and masked in what is quoted.
"""

import atexit
import json
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rloo_cli.agents.processes.tool_pool import ToolGone
from rloo_cli.utils import http
from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.http import EventLoopThread, HttpAnswer, RequestFailed

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
MAX_ANSWER_BYTES = 16 << 20
FAREWELL_S = 2.0  # for what is told to a server of an episode that has failed
CONNECT_S = 10.0  # to a server that ought to be there
MAX_QUOTED = 200  # characters of an answer in an error
_services: "weakref.WeakSet[RemoteService]" = weakref.WeakSet()


class RemoteService:
    """One server, asked by all episodes of this process. `token_env`: variable of its token."""

    def __init__(self, url: str, token_env: str | None):
        self.url, self.token_env = url.rstrip("/"), token_env
        self.lock = threading.Lock()
        self.loop: EventLoopThread | None = None
        self.session: aiohttp.ClientSession | None = None
        self.farewells: set[threading.Thread] = set()
        _services.add(self)

    @property
    def token(self) -> str:
        """The token, "" for none. Never printed."""
        return os.environ.get(self.token_env, "") if self.token_env else ""

    def run_request(
        self,
        work: Callable[["aiohttp.ClientSession"], Coroutine[object, object, T]],
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
    ) -> T:
        """Do `work` with the session, and wait for it. `poll` may end the waiting by raising.

        Raises ToolGone.
        """

        async def with_session() -> T:
            self.session = self.session or http.open_session(0)
            return await work(self.session)

        with self.lock:
            self.loop = self.loop or EventLoopThread("environments")
            loop = self.loop
        try:
            return loop.run(with_session(), timeout_s, poll)
        except RequestFailed as failure:
            raise ToolGone(self.mask_token(str(failure))) from None

    def request_json(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
    ) -> JsonObject:
        """The JSON object that a path answers with status 200. Raises ToolGone."""
        url = self.url + path
        work = lambda session: http.send_json(  # noqa: E731
            session, method, url, body, self.token, timeout_s, max_bytes=MAX_ANSWER_BYTES
        )
        # The request's own deadline comes first; the loop's is for a loop that hangs.
        return self._read_object(url, self.run_request(work, timeout_s + 5.0, poll))

    def _read_object(self, url: str, answer: HttpAnswer) -> JsonObject:
        if 300 <= answer.status < 400:
            target = answer.headers.get("Location", "another address")
            raise ToolGone(f"{url} redirects to {target!r:.{MAX_QUOTED}}, which is not followed")
        if answer.status != 200:
            said = self.mask_token(answer.error_message()[:MAX_QUOTED])
            raise ToolGone(f"{url}: status {answer.status}: {said}")
        return self.parse_object(answer.text, url)

    def parse_object(self, text: str, url: str) -> JsonObject:
        """A text as a JSON object. Raises ToolGone."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            quoted = self.mask_token(text[:MAX_QUOTED])
            raise ToolGone(f"{url}: the answer is not a JSON object: {quoted!r}")
        return found

    def mask_token(self, text: str) -> str:
        """A text that is quoted, without the token."""
        return text.replace(self.token, "***") if self.token else text

    def start_farewell(self, work: Callable[[], None]) -> None:
        """Tell the server that a session is over, in a thread that only `close` waits for."""

        def tell() -> None:
            with suppress(ToolGone, RuntimeError):  # a loop that was closed meanwhile
                work()
            self.farewells.discard(threading.current_thread())

        thread = threading.Thread(target=tell, daemon=True)
        self.farewells.add(thread)
        thread.start()

    def close(self) -> None:
        """End the loop and the connections."""
        end = time.monotonic() + FAREWELL_S
        for thread in list(self.farewells):
            thread.join(max(0.0, end - time.monotonic()))
        with self.lock:
            loop, session = self.loop, self.session
            self.loop = self.session = None
        if loop is not None:
            loop.close(session.close() if session is not None else None)


def sendable_row(row: JsonObject) -> JsonObject:
    """The columns that JSON can hold; what it cannot (an image, a date) is left out."""
    values: JsonObject = {}
    for name, value in row.items():
        with suppress(TypeError, ValueError, RecursionError):
            values[name] = json.loads(json.dumps(value, allow_nan=False))
    return values


def read_reward(answer: JsonObject, url: str) -> float | None:
    """The number in an answer's `reward`; None where it has none. Raises ToolGone."""
    reward = answer.get("reward")
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ToolGone(f"{url}: the reward {reward!r:.80} is not a finite number")
    return float(reward)


class RemoteCaller:
    """A `ToolCaller` whose environment is a session of a server; a kind of server adds how."""

    def __init__(self, service: RemoteService):
        self.service = service
        self.reward: float | None = None  # what those that the server said come to
        self.is_killed = False

    def answers(self) -> Mapping[str, Callable[[JsonObject, float], JsonObject]]:
        """What answers `reset`, `call` and `end`, each from a message and seconds."""
        raise NotImplementedError

    def request(self, message: JsonObject, timeout_s: float) -> JsonObject:
        """The answer to `reset`, `call` or `end`. Raises ToolGone."""
        try:
            return self.answers()[message["do"]](message, timeout_s)
        except ToolGone as gone:
            self.kill()
            raise ToolGone(self.service.mask_token(str(gone))) from None  # it may quote an answer

    def kill(self) -> None:
        """Leave the session."""
        raise NotImplementedError


def observation_text(told: Any, max_characters: int) -> str:
    """What a model is told: a text as it is, anything else as JSON; too long a text is cut."""
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    # A lone surrogate, which JSON may hold, cannot be tokenised.
    return text[:max_characters].encode("utf-8", errors="replace").decode()


def check_token(token_env: str | None) -> None:
    """Raises MachineError where the variable that should hold a server's token does not."""
    if token_env and not os.environ.get(token_env):
        why = "agent.token_env names the variable that holds the server's token"
        fix = f"export {token_env}=..., or agent.token_env=null for a server without one"
        raise MachineError(
            Problem(f"the environment has no {token_env}", "agent.token_env", why, fix)
        )


def check_reachable(url: str) -> None:
    """Raises MachineError where nothing listens at the URL's host and port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        raise unreachable_error(url, str(error)) from None


def unreachable_error(url: str, why: str) -> MachineError:
    """The refusal of a run whose server does not describe its tools."""
    host = urlsplit(url).netloc
    what = f"the environments' server at {url} does not answer as it should"
    fix = f"start it there first, and agent.url=http://HOST:PORT where it is not {host}"
    return MachineError(Problem(what, "agent.url", why, fix))


@atexit.register
def close_remote_services() -> None:
    """End the connections of every service."""
    for service in list(_services):
        service.close()
