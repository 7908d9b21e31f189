"""Messages and requests of agents, converted to one common form.

Chat completions and responses express the same content in two ways. Both become a list of
messages with a role, a text, and calls or the id of the answered call. A request option that
would change the meaning of an answer and is not supported is refused; the run decides how the
policy samples, so a request's temperature, top_p, seed, penalties and max_tokens have no effect.
"""

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from rloo_cli.utils.files import JsonObject

MODEL_NAME = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "tool"}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
# Keys of requests that are not supported, and their values that change nothing.
NOT_DONE: dict[str, tuple[object, ...]] = {
    "n": (None, 1), "stop": (None, [], ""), "logprobs": (None, False), "top_logprobs": (None, 0),
    "functions": (None, []), "function_call": (None,), "logit_bias": (None, {}),
    "modalities": (None, ["text"]), "audio": (None,), "background": (None, False),
    "conversation": (None,), "prompt": (None,),
}  # fmt: skip


class RequestRefused(Exception):
    """A request that gets an HTTP error. `ends_episode`: its episode also loses its score."""

    def __init__(self, status: int, code: str, message: str, ends_episode: bool = False):
        super().__init__(message)
        self.status, self.code, self.ends_episode = status, code, ends_episode


@dataclass(frozen=True)
class AgentRequest:
    """A request: two equal ones are the same request, sent twice."""

    messages: list[JsonObject]
    tools: list[JsonObject]  # as chat templates take them
    reads_calls: bool  # whether calls in the answer are parsed
    previous_id: str | None = None  # responses API: the answer that `messages` continue


def read_chat_request(body: JsonObject) -> AgentRequest:
    """A request of /chat/completions. Raises RequestRefused."""
    _check_request(body, body.get("response_format"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad_request("messages is not a list of messages")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_chat_tool(tool) for tool in tools):
        raise _bad_request("tools is not a list of {type: function, function: {name: ...}}")
    shown = [{"type": "function", "function": tool["function"]} for tool in tools]
    read = [_read_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    return AgentRequest(read, shown, _reads_calls(body, shown))


def read_responses_request(body: JsonObject) -> AgentRequest:
    """A request of /responses. Raises RequestRefused."""
    text = body.get("text")
    _check_request(body, text.get("format") if isinstance(text, dict) else None)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise _bad_request("input is neither a text nor a list of items")
    messages: list[JsonObject] = []
    if body.get("instructions") is not None:
        system = {"role": "system", "content": body["instructions"]}
        messages.append(_read_message(system, "instructions"))
    for i, item in enumerate(items):
        _add_item(messages, item, f"input[{i}]")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_response_tool(tool) for tool in tools):
        raise _bad_request("tools is not a list of {type: function, name: ...}")
    kept = ("name", "description", "parameters")
    shown: list[JsonObject] = [
        {"type": "function", "function": {k: tool[k] for k in kept if k in tool}} for tool in tools
    ]
    previous = body.get("previous_response_id")
    return AgentRequest(messages, shown, _reads_calls(body, shown), previous)


def _check_request(body: JsonObject, wanted_format: object) -> None:
    model = body.get("model")
    if model != MODEL_NAME:
        what = f"model {model!r:.80} not found; the policy's name is {MODEL_NAME!r}"
        raise RequestRefused(404, "model_not_found", what)
    for name, nothing in NOT_DONE.items():
        if body.get(name) not in nothing:
            raise _bad_request(f"{name} = {body[name]!r:.80} is not supported; leave it out")
    kind = wanted_format.get("type") if isinstance(wanted_format, dict) else wanted_format
    if kind not in (None, "text"):
        raise _bad_request(f"the format {kind!r:.80} is not supported; answers are text")


def _reads_calls(body: JsonObject, tools: list[JsonObject]) -> bool:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _bad_request(f"tool_choice = {choice!r:.80} is not supported; use auto or none")
    return bool(tools) and choice != "none"


def _bad_request(message: str) -> RequestRefused:
    return RequestRefused(400, "invalid_request", message)


def _is_chat_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_response_tool(tool: Any) -> bool:
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    return is_function and isinstance(tool.get("name"), str)


def _read_message(message: Any, where: str) -> JsonObject:
    role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if role is None:
        raise _bad_request(f"{where} needs a role: {', '.join(ROLES)}")
    found: JsonObject = {"role": role, "content": _read_text(message.get("content"), where)}
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise _bad_request(f"{where}.tool_calls is not a list of calls of functions")
        read = [_read_call(c.get("id"), c["function"]) for c in calls]
        found["tool_calls"] = read
    if role == "tool":
        found["tool_call_id"] = str(message.get("tool_call_id"))
    return found


def _is_call(call: Any) -> bool:
    return _is_chat_tool(call)


def _read_call(call_id: object, function: JsonObject) -> JsonObject:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # it stays a text
            arguments = json.loads(arguments)
    return {"id": str(call_id), "name": function["name"], "arguments": arguments}


def _read_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad_request(f"{where}.content is neither a text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            what = f"{where} has a part of type {kind!r:.40}; only text is supported"
            raise _bad_request(what)
        texts.append(part["text"])
    return "".join(texts)


def _add_item(messages: list[JsonObject], item: Any, where: str) -> None:
    """Add one item of the responses shape; calls belong to the answer before them."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append(_read_message(item, where))
    elif kind == "function_call_output":
        text = _read_text(item.get("output"), where)
        call_id = str(item.get("call_id"))
        messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
    elif kind == "function_call" and isinstance(item.get("name"), str):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = _read_call(item.get("call_id"), item)
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        raise _bad_request(f"{where} is of type {kind!r:.40}, which is not supported")


def message_for_template(message: JsonObject) -> JsonObject:
    """A parsed message, as chat templates take it."""
    shown = {"role": message["role"], "content": message["content"]}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {"id": c["id"], "type": "function",
             "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls
        ]  # fmt: skip
    if "tool_call_id" in message:
        shown |= {"tool_call_id": message["tool_call_id"], "name": message.get("name", "")}
    return shown


def first_difference(known: list[JsonObject], given: list[JsonObject]) -> str | None:
    """Where a history differs from the known one, as a sentence; None = it continues that one."""
    for i, message in enumerate(known):
        if i >= len(given):
            return f"it has {len(given)} messages, and this episode already has {len(known)}"
        if given[i] != message:
            names = [n for n in ("role", "content", "tool_calls", "tool_call_id")
                     if given[i].get(n) != message.get(n)]  # fmt: skip
            name = names[0] if names else "role"
            found, had = given[i].get(name), message.get(name)
            return f"messages[{i}].{name} is {found!r:.80}, and was {had!r:.80}"
    return None
