"""One episode's session at a server that speaks our protocol (docs/agents_elsewhere.md).

    GET  /tools  -> {"tools": [...]}, or {"environments": {name: [...]}}
    POST /reset  {"session", "environment", "seed", "row"}   -> {"session", "text"?}
    POST /step   {"session", "tool", "arguments"}            -> {"session", "text" or "error",
                                                                 "done"?, "reward"?}
    POST /close  {"session"}                                 -> {"session", "reward"?, "state"?}

A session's name is made here, by chance, and every answer repeats it: an answer about another
session is a failure of the row that asked, and is given to no other.
"""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress

from rloo_cli.agents.common.tool_set import Environment, ToolSet
from rloo_cli.agents.processes.tool_pool import ToolGone
from rloo_cli.agents.remote import described_tools
from rloo_cli.agents.remote.service import (
    FAREWELL_S,
    RemoteCaller,
    RemoteService,
    observation_text,
    read_reward,
    sendable_row,
    unreachable_error,
)
from rloo_cli.utils.files import JsonObject


class HttpCaller(RemoteCaller):
    """A `ToolCaller` whose environment is a session of a server."""

    def __init__(self, service: RemoteService, environment: str):
        super().__init__(service)
        self.environment, self.name, self.is_open = environment, secrets.token_hex(16), False

    def answers(self) -> Mapping[str, Callable[[JsonObject, float], JsonObject]]:
        """What answers `reset`, `call` and `end`."""
        return {"reset": self._reset, "call": self._step, "end": self._close}

    def kill(self) -> None:
        """Forget the session; the server is told where it may still have it."""
        self.is_killed = True
        if self.is_open:
            self.is_open = False
            self.service.start_farewell(self._say_farewell)

    def _say_farewell(self) -> None:
        with suppress(ToolGone):
            body = {"session": self.name}
            self.service.request_json("POST", "/close", body, FAREWELL_S)

    def _reset(self, message: JsonObject, timeout_s: float) -> JsonObject:
        self.is_open = True
        body = {"environment": self.environment or None, "seed": message["seed"]}
        answer = self._ask("/reset", body | {"row": sendable_row(message["row"])}, timeout_s)
        text = answer.get("text")
        told = None if text is None else observation_text(text, message["max_characters"])
        return {"text": told, "done": False}

    def _step(self, message: JsonObject, timeout_s: float) -> JsonObject:
        body = {"tool": message["name"], "arguments": message["arguments"]}
        answer = self._ask("/step", body, timeout_s)
        if answer.get("error") is not None:
            return {"error": observation_text(answer["error"], message["max_characters"])}
        if "text" not in answer:
            raise ToolGone(f'{self.service.url}/step: the answer has neither "text" nor "error"')
        self._add_reward(answer, "/step")
        text = observation_text(answer["text"], message["max_characters"])
        return {"text": text, "done": answer.get("done") is True}

    def _close(self, message: JsonObject, timeout_s: float) -> JsonObject:
        self.is_open = False
        answer = self._ask("/close", {}, timeout_s)
        self._add_reward(answer, "/close")
        state = answer.get("state")
        return {"reward": self.reward, "state": state if isinstance(state, dict) else {}}

    def _add_reward(self, answer: JsonObject, path: str) -> None:
        reward = read_reward(answer, self.service.url + path)
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward

    def _ask(self, path: str, body: JsonObject, timeout_s: float) -> JsonObject:
        body = {"session": self.name} | body
        answer = self.service.request_json("POST", path, body, timeout_s, self._raise_if_killed)
        if answer.get("session") != self.name:
            what = f"{self.service.url}{path} answered about another session"
            raise ToolGone(f"{what}: {answer.get('session')!r:.80}")
        return answer

    def _raise_if_killed(self) -> None:
        if self.is_killed:
            raise ToolGone("the run has ended the episode")


def load_http_tools(url: str, token_env: str | None, timeout_s: float) -> ToolSet:
    """The environments that a server describes at /tools.

    Raises MachineError where it does not answer, ConfigError where it describes a tool wrongly.
    """
    service = RemoteService(url, token_env)
    where = f"{service.url}/tools"
    try:
        answer = service.request_json("GET", "/tools", None, timeout_s)
    except ToolGone as gone:
        raise unreachable_error(url, str(gone)) from None
    several = answer.get("environments")
    by_name = several if isinstance(several, dict) and several else {"": answer.get("tools")}
    found = {}
    for name, tools in by_name.items():
        schemas = described_tools.check_tools(tools, where)
        specs = {schema["function"]["name"]: service.url for schema in schemas}
        connect = _connector(service, name)
        found[name] = Environment(schemas, specs, has_reward=True, connect=connect)
    return ToolSet(found, service.close)


def _connector(service: RemoteService, environment: str) -> Callable[[], HttpCaller]:
    return lambda: HttpCaller(service, environment)
