"""One episode's session at a server of OpenEnv: a WebSocket, which has an environment of its own.

The protocol is that of openenv-core 0.3 (`core/env_server/http_server.py`): messages of a `type`
(reset, step, state, close) with `data`, answered by `observation`, `state` or `error`. Its plain
/reset and /step over HTTP make a new environment for each request, so episodes cannot use them.

An environment whose actions are calls of MCP tools offers these; of any other, the one tool `step`
has the fields of an action as arguments (GET /schema).
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo_cli.agents.common.tool_set import Environment, ToolSet
from rloo_cli.agents.processes.tool_pool import ToolGone
from rloo_cli.agents.remote import described_tools
from rloo_cli.agents.remote.service import (
    FAREWELL_S,
    MAX_ANSWER_BYTES,
    RemoteCaller,
    RemoteService,
    observation_text,
    read_reward,
    sendable_row,
    unreachable_error,
)
from rloo_cli.utils import http
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    import aiohttp

STEP = "step"  # the tool of an environment without tools of its own
MCP_FIELDS = {"tool_name", "arguments"}  # of an action that calls a tool
NOT_ARGUMENTS = ("metadata", "type")  # fields of an action that a model has no say in
TOLD_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # of a step; the session lives on
LARGEST_SEED = 2**31  # what any library takes as a seed is smaller


@dataclass(frozen=True)
class OpenenvRules:
    """What all sessions of a run have in common."""

    has_tools: bool  # of its own, by MCP
    observation: str | None  # the field that the model is told; None = all of them
    reward: str  # sum, last: what the rewards of an episode's steps come to


class OpenenvCaller(RemoteCaller):
    """A `ToolCaller` whose environment is a session of a server."""

    def __init__(self, service: RemoteService, rules: OpenenvRules):
        super().__init__(service)
        self.rules = rules
        self.url = service.url.replace("http", "ws", 1) + "/ws"
        self.socket: http.TextSocket | None = None

    def answers(self) -> Mapping[str, Callable[[JsonObject, float], JsonObject]]:
        """What answers `reset`, `call` and `end`."""
        return {"reset": self._reset, "call": self._step, "end": self._end}

    def kill(self) -> None:
        """Close the connection; the server ends its environment then."""
        self.is_killed = True
        socket, self.socket = self.socket, None
        if socket is not None:
            self.service.start_farewell(lambda: self._say_farewell(socket))

    def _say_farewell(self, socket: http.TextSocket) -> None:
        async def close(session: object) -> None:
            await socket.close(json.dumps({"type": "close"}))

        self.service.run_request(close, FAREWELL_S)

    def _reset(self, message: JsonObject, timeout_s: float) -> JsonObject:
        row = sendable_row(message["row"])
        row |= {"seed": message["seed"] % LARGEST_SEED, "episode_id": secrets.token_hex(16)}
        answer = self._ask("reset", row, timeout_s)
        if answer["type"] == "error":
            raise ToolGone(f"{self.url}: {_error_text(answer)}")
        told = self._observed(answer)
        # Most environments say 0 here: it is the score of a policy that makes no step.
        self._add_reward(answer)
        most = message["max_characters"]
        return {"text": observation_text(told, most) if told else None, "done": False}

    def _step(self, message: JsonObject, timeout_s: float) -> JsonObject:
        action = message["arguments"]
        if self.rules.has_tools:
            action = {"type": "call_tool", "tool_name": message["name"], "arguments": action}
        answer, most = self._ask("step", action, timeout_s), message["max_characters"]
        if answer["type"] == "error":
            if answer["data"].get("code") not in TOLD_ERRORS:
                raise ToolGone(f"{self.url}: {_error_text(answer)}")
            return {"error": _error_text(answer)[:most]}
        told = self._observed(answer)
        self._add_reward(answer)
        if self.rules.has_tools:
            error = answer["data"]["observation"].get("error")
            if error is not None:
                said = error.get("message") if isinstance(error, dict) else error
                return {"error": observation_text(said, most)}
        done = answer["data"].get("done") is True
        return {"text": observation_text(told, most), "done": done}

    def _add_reward(self, answer: JsonObject) -> None:
        reward = read_reward(answer["data"], self.url)
        if reward is not None:
            before = self.reward or 0.0
            self.reward = reward if self.rules.reward == "last" else before + reward

    def _end(self, message: JsonObject, timeout_s: float) -> JsonObject:
        answer = self._ask("state", None, timeout_s)
        state = answer["data"] if answer["type"] == "state" else {}
        return {"reward": self.reward, "state": state}

    def _observed(self, answer: JsonObject) -> Any:
        """What the model is told of an observation. Raises ToolGone."""
        found = answer["data"].get("observation")
        if answer["type"] != "observation" or not isinstance(found, dict):
            raise ToolGone(f"{self.url}: {str(answer)[:200]!r} is not an observation")
        if self.rules.has_tools and "result" in found:
            return _tool_result(found["result"])
        if self.rules.observation is None:
            return found
        if self.rules.observation not in found:
            names = ", ".join(found)
            raise ToolGone(
                f"{self.url}: an observation has no {self.rules.observation!r}"
                f" (agent.observation); it has: {names}"
            )
        return found[self.rules.observation]

    def _ask(self, kind: str, data: JsonObject | None, timeout_s: float) -> JsonObject:
        text = json.dumps({"type": kind} | ({} if data is None else {"data": data}))

        began = time.monotonic()

        async def exchange(session: "aiohttp.ClientSession") -> str:
            if self.socket is None:
                self.socket = await http.open_websocket(
                    session, self.url, self.service.token, timeout_s, MAX_ANSWER_BYTES
                )
            left = timeout_s - (time.monotonic() - began)
            return await self.socket.exchange_text(text, max(left, 0.0), timeout_s)

        answered = self.service.run_request(exchange, timeout_s + 5.0, self._raise_if_killed)
        answer = self.service.parse_object(answered, self.url)
        if not isinstance(answer.get("type"), str) or not isinstance(answer.get("data"), dict):
            raise ToolGone(f"{self.url}: {answered[:200]!r} is not an answer of OpenEnv")
        return answer

    def _raise_if_killed(self) -> None:
        if self.is_killed:
            raise ToolGone("the run has ended the episode")


def _error_text(answer: JsonObject) -> str:
    """The message of an error, and its details."""
    data = answer["data"]
    details = "".join(f"; {e.get('loc')}: {e.get('msg')}" for e in data.get("errors", []))
    hint = " (the server's max_concurrent_envs)" if data.get("code") == "CAPACITY_REACHED" else ""
    return f"{data.get('code')}: {data.get('message')}{details}{hint}"


def _tool_result(result: Any) -> Any:
    """What a tool of MCP returned: the value itself, or the texts of its content."""
    if not isinstance(result, dict) or "content" not in result:
        return result
    if result.get("data") is not None:
        return result["data"]
    texts = [c.get("text", "") for c in result["content"] or [] if isinstance(c, dict)]
    return "\n".join(map(str, texts))


def load_openenv_tools(
    url: str, token_env: str | None, observation: str | None, reward: str, timeout_s: float
) -> ToolSet:
    """The tools of a server's environment.

    Raises MachineError where it does not answer, ConfigError where it describes a tool wrongly.
    """
    service = RemoteService(url, token_env)
    try:
        action = service.request_json("GET", "/schema", None, timeout_s).get("action")
        if not isinstance(action, dict):
            raise ToolGone(f'{service.url}/schema: the answer has no object "action"')
        fields = {n: v for n, v in action.get("properties", {}).items() if n not in NOT_ARGUMENTS}
        has_tools = not fields or set(fields) >= MCP_FIELDS
        if has_tools:
            schemas = _list_tools(service, timeout_s)
        else:
            description = action.get("description") or "Does one step in the environment."
            schemas = [
                described_tools.describe_tool(STEP, description, action | {"properties": fields})
            ]
    except ToolGone as gone:
        raise unreachable_error(url, str(gone)) from None
    schemas = described_tools.check_tools(schemas, service.url)
    rules = OpenenvRules(has_tools, observation, reward)
    specs = {schema["function"]["name"]: service.url for schema in schemas}
    connect = lambda: OpenenvCaller(service, rules)  # noqa: E731
    environment = Environment(schemas, specs, has_reward=True, connect=connect)
    return ToolSet({"": environment}, service.close)


def _list_tools(service: RemoteService, timeout_s: float) -> list[JsonObject]:
    """The descriptions of an environment's MCP tools. Raises ToolGone."""
    ask = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
    answer = service.request_json("POST", "/mcp", ask, timeout_s)
    result = answer.get("result")
    tools = result.get("tools") if isinstance(result, dict) else None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ToolGone(f"{service.url}/mcp: {str(answer)[:200]} has no list of tools")
    return [
        described_tools.describe_tool(
            str(tool.get("name")),
            str(tool.get("description") or ""),
            tool.get("inputSchema") or tool.get("input_schema") or {},
        )
        for tool in tools
    ]
