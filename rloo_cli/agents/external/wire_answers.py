"""Answers in the two shapes of OpenAI's API: chat completions and responses, whole or streamed.

A turn is sampled completely before it is answered, so all pieces of a stream arrive at once.
"""

import json
import time
from collections.abc import Iterator

from rloo_cli.agents.external.conversation import AgentAnswer
from rloo_cli.agents.external.message_forms import MODEL_NAME
from rloo_cli.utils.files import JsonObject

PIECE = 64  # characters of a piece of a stream


def chat_answer(answer: AgentAnswer) -> JsonObject:
    """The answer of /chat/completions."""
    message: JsonObject = {"role": "assistant", "content": answer.message["content"]}
    if calls := _chat_calls(answer):
        message |= {"content": message["content"] or None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason,
              "logprobs": None}  # fmt: skip
    return _chat_head(answer, "chat.completion") | {
        "choices": [choice],
        "usage": _chat_usage(answer),
    }


def chat_pieces(answer: AgentAnswer, with_usage: bool) -> Iterator[str]:
    """The lines of a stream of /chat/completions, without the empty lines between them."""
    head = _chat_head(answer, "chat.completion.chunk")

    def piece(delta: JsonObject, reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return _data_line(head | {"choices": [choice]})

    yield piece({"role": "assistant", "content": ""})
    for text in _text_pieces(answer.message["content"]):
        yield piece({"content": text})
    for i, call in enumerate(_chat_calls(answer)):
        yield piece({"tool_calls": [call | {"index": i}]})
    yield piece({}, answer.finish_reason)
    if with_usage:
        yield _data_line(head | {"choices": [], "usage": _chat_usage(answer)})
    yield "data: [DONE]"


def responses_answer(answer: AgentAnswer) -> JsonObject:
    """The answer of /responses."""
    cut = answer.finish_reason == "length"
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {
        "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return _response_head(answer, "incomplete" if cut else "completed") | {
        "output": _response_items(answer),
        "usage": usage,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }


def responses_pieces(answer: AgentAnswer) -> Iterator[str]:
    """The lines of a stream of /responses."""
    number = 0

    def event(kind: str, **values: object) -> str:
        nonlocal number
        line = f"event: {kind}\n" + _data_line({"type": kind, "sequence_number": number} | values)
        number += 1
        return line

    begun = _response_head(answer, "in_progress") | {"output": [], "usage": None}
    yield event("response.created", response=begun)
    for i, item in enumerate(_response_items(answer)):
        ids: JsonObject = {"output_index": i, "item_id": item["id"]}
        empty: JsonObject = {"content": []} if item["type"] == "message" else {"arguments": ""}
        open_item = item | empty | {"status": "in_progress"}
        yield event("response.output_item.added", output_index=i, item=open_item)
        if item["type"] == "message":
            part, here = item["content"][0], ids | {"content_index": 0}
            yield event("response.content_part.added", **here, part=part | {"text": ""})
            for text in _text_pieces(part["text"]):
                yield event("response.output_text.delta", **here, delta=text, logprobs=[])
            yield event("response.output_text.done", **here, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **here, part=part)
        else:
            text = item["arguments"]
            yield event("response.function_call_arguments.delta", **ids, delta=text)
            name = item["name"]
            yield event("response.function_call_arguments.done", **ids, arguments=text, name=name)
        yield event("response.output_item.done", output_index=i, item=item)
    whole = responses_answer(answer)
    yield event(f"response.{whole['status']}", response=whole)


def error_body(code: str, message: str) -> JsonObject:
    """An error, in the form that OpenAI's clients read."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def model_list() -> JsonObject:
    """The answer of /models."""
    return {"object": "list", "data": [model_entry()]}


def model_entry() -> JsonObject:
    """The answer of /models/policy."""
    return {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rloo"}


def _chat_head(answer: AgentAnswer, kind: str) -> JsonObject:
    name = f"chatcmpl-{answer.id}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def _chat_calls(answer: AgentAnswer) -> list[JsonObject]:
    return [
        {"id": c["id"], "type": "function",
         "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
        for c in answer.message.get("tool_calls", [])
    ]  # fmt: skip


def _chat_usage(answer: AgentAnswer) -> JsonObject:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


def _response_head(answer: AgentAnswer, status: str) -> JsonObject:
    return {
        "id": answer.id, "object": "response", "created_at": int(time.time()), "status": status,
        "model": MODEL_NAME, "error": None, "incomplete_details": None, "instructions": None,
        "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "temperature": None, "top_p": None,
    }  # fmt: skip


def _response_items(answer: AgentAnswer) -> list[JsonObject]:
    items: list[JsonObject] = []
    calls, text = answer.message.get("tool_calls", []), answer.message["content"]
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg-{answer.id}", "role": "assistant",
                      "status": "completed", "content": [part]})  # fmt: skip
    for call in calls:
        items.append({"type": "function_call", "id": f"fc-{answer.id}-{call['id']}",
                      "call_id": call["id"], "name": call["name"], "status": "completed",
                      "arguments": json.dumps(call["arguments"])})  # fmt: skip
    return items


def _text_pieces(text: str) -> list[str]:
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]


def _data_line(value: JsonObject) -> str:
    return f"data: {json.dumps(value)}"
