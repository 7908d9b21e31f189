"""The calls in a turn's text, for five formats that models write, and vLLM's parsers.

A parser takes the turn's text, special tokens included but without the one that ended it, and
returns the calls in it and an error text for the model for each unreadable one. A text without
any sign of a call has neither: it is an answer.
"""

import ast
import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rloo_cli.config.agent import VLLM_PREFIX
from rloo_cli.config.old_names import list_nearest_first, nearest_names
from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
MISTRAL_MARK = "[TOOL_CALLS]"
MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)")
PYTHONIC_HEAD = re.compile(r"\[\s*[A-Za-z_]\w*\s*\(")
LLAMA_HEAD = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(?=\{)")

# The attributes in which vLLM's parsers keep the text that begins a call.
MARK_ATTRIBUTES = ("tool_call_start_token", "bot_token", "tool_calls_start_token")
LISTED = 8  # names in an error, the nearest first


@dataclass
class ParsedCalls:
    """The calls of a turn, in order."""

    calls: list[JsonObject] = field(default_factory=list)  # name: str, arguments: any JSON
    unreadable: list[str] = field(default_factory=list)  # what was wrong, one text for each

    def add(self, value: object) -> None:
        """Add one call, given as parsed JSON."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(name, str):
            self.unreadable.append(f"a call needs a name and arguments, found {value!r:.200}")
            return
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # OpenAI's form: JSON within JSON
            try:
                arguments = read_json_text(arguments)
            except ValueError as error:
                self.unreadable.append(f"the arguments of {name} cannot be read: {error}")
                return
        self.calls.append({"name": name, "arguments": arguments})


CallParser = Callable[[str], ParsedCalls]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON number")


def read_json_text(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity are refused. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_hermes(text: str) -> ParsedCalls:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times (Qwen)."""
    found = ParsedCalls()
    for body in HERMES.findall(text):
        try:
            found.add(read_json_text(body))
        except ValueError as error:
            found.unreadable.append(f"a call is not JSON ({error}): {body:.200}")
    return found


def parse_llama3_json(text: str) -> ParsedCalls:
    """The whole answer is {"name": ..., "parameters": {...}}; several are separated by ;."""
    found, head = ParsedCalls(), LLAMA_HEAD.match(text)
    position = head.end() if head is not None else len(text)
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            found.unreadable.append(f"a call is not JSON ({error}): {text[position:]:.200}")
            break
        found.add(value)
        rest = re.compile(r"[\s;]*").match(text, position)
        position = rest.end() if rest is not None else len(text)
        if position < len(text) and text[position] != "{":
            break  # text after the call
    return found


def parse_mistral(text: str) -> ParsedCalls:
    """[TOOL_CALLS] and a list of calls, or name{...} after each [TOOL_CALLS] (newer models)."""
    found = ParsedCalls()
    for body in text.split(MISTRAL_MARK)[1:]:
        named = MISTRAL_CALL.match(body)
        try:
            if named is not None:
                arguments, _ = json.JSONDecoder().raw_decode(body, named.end())
                found.add({"name": named[1], "arguments": arguments})
                continue
            values, _ = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(body.strip())
        except (ValueError, RecursionError) as error:
            found.unreadable.append(f"a call is not JSON ({error}): {body:.200}")
            continue
        for value in values if isinstance(values, list) else [values]:
            found.add(value)
    return found


def parse_pythonic(text: str) -> ParsedCalls:
    """The whole answer is a list of calls with literal arguments: [f(a=1), g(b="x")]."""
    found, body = ParsedCalls(), text.strip()
    body = body.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>").strip()
    if PYTHONIC_HEAD.match(body) is None:
        return found
    try:
        items = ast.parse(body, mode="eval").body
        if not isinstance(items, ast.List):
            raise ValueError("it is not a list of calls")
        for item in items.elts:
            found.calls.append(_read_python_call(item))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found.unreadable.append(f"the calls cannot be read ({error}): {body:.200}")
        found.calls.clear()
    return found


def _read_python_call(node: ast.expr) -> JsonObject:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("an entry is not a call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"the arguments of {node.func.id} need names")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    try:
        return {"name": node.func.id, "arguments": read_json_text(json.dumps(arguments))}
    except TypeError as error:  # a set, bytes
        raise ValueError(str(error)) from None


def response_parser(tokenizer: Any) -> CallParser:
    """The tokenizer's own `parse_response`, for models that ship a template for it.

    It gets the beginning of the answer too, since a chat template may write that part itself.
    """
    asked = [{"role": "user", "content": ""}]
    begun = apply_chat_template(tokenizer, asked, add_generation_prompt=True)
    # Before transformers 5.13 a response has no prefix.
    takes_prefix = "prefix" in inspect.signature(tokenizer.parse_response).parameters
    prefix = {"prefix": begun} if takes_prefix else {}

    def parse_response(text: str) -> ParsedCalls:
        found = ParsedCalls()
        try:
            message = tokenizer.parse_response(text, **prefix)
        except Exception as error:  # a regular expression that does not match, odd JSON
            found.unreadable.append(f"the answer cannot be read: {type(error).__name__}: {error}")
            return found
        for call in (message.get("tool_calls") if isinstance(message, dict) else None) or []:
            found.add(call.get("function", call) if isinstance(call, dict) else call)
        return found

    return parse_response


def vllm_parser(name: str, tokenizer: Any, schemas: Sequence[JsonObject]) -> CallParser:
    """vLLM's parser of this name (`vllm serve --tool-call-parser`), for whole answers.

    What it cannot read it returns as text; if that contains the start of a call, the model gets an
    error. `schemas`: the tools, whose types some parsers need. Each answer gets a new parser, as in
    vLLM's server, since a parser may keep state.

    Raises ConfigError if vLLM has no parser of this name, or it does not fit the tokenizer.
    """
    # lazy: vLLM is optional, and takes seconds to import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer  # lazy: as above
    from vllm.tool_parsers import ToolParserManager  # lazy: as above

    names = ToolParserManager.list_registered()
    if name not in names:
        near = nearest_names(name, names)
        what = f"agent.parser = vllm:{name}: vLLM has no such parser"
        why = f"it has: {list_nearest_first(near, names, LISTED)}"
        fix = f"agent.parser=vllm:{near[0]}" if near else "vllm serve --help: --tool-call-parser"
        refuse("agent.parser", what, fix, why)
    asked = [{"role": "user", "content": ""}]
    tools: JsonObject = {"tools": list(schemas), "tool_choice": "auto"} if schemas else {}
    try:
        factory = ToolParserManager.get_tool_parser(name)
        request = ChatCompletionRequest(messages=asked, model="policy", **tools)
        cached = get_cached_tokenizer(tokenizer)
        factory(cached, request.tools).extract_tool_calls("", request)
    except Exception as error:  # a token is missing, or it only supports streaming
        what = f"agent.parser = vllm:{name} cannot be used with this tokenizer"
        refuse("agent.parser", what, "agent.parser=auto", error)
    logging.getLogger(factory.__module__).disabled = True  # the model gets what it logs

    def parse_with_vllm(text: str) -> ParsedCalls:
        found, parser = ParsedCalls(), factory(cached, request.tools)
        try:
            read = parser.extract_tool_calls(text, request)
        except Exception as error:  # a parser given text that it does not expect
            found.unreadable.append(f"a call cannot be read ({type(error).__name__}): {text:.200}")
            return found
        for call in read.tool_calls if read.tools_called else ():
            found.add({"name": call.function.name, "arguments": call.function.arguments})
        marks = [getattr(parser, attribute, None) for attribute in MARK_ATTRIBUTES]
        if not read.tools_called and any(isinstance(m, str) and m and m in text for m in marks):
            found.unreadable.append(f"a call cannot be read: {text:.200}")
        return found

    return parse_with_vllm


PARSERS: dict[str, CallParser] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    "pythonic": parse_pythonic,
}
# What a chat template writes around calls -> the parser. The first match counts.
MARKS = (
    ("<tool_call>", "hermes"), (MISTRAL_MARK, "mistral"), ("<|tool_call_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"), ('"parameters"', "llama3_json"),
    ("'parameters'", "llama3_json"),
)  # fmt: skip


def choose_parser(
    name: str, tokenizer: Any, schemas: Sequence[JsonObject] = ()
) -> tuple[str, CallParser]:
    """The parser of `agent.parser`, with its name. Raises ConfigError if there is none.

    `schemas`: the run's tools, for vLLM parsers that need the types of arguments.
    """
    if name.startswith(VLLM_PREFIX):
        return name, vllm_parser(name.removeprefix(VLLM_PREFIX), tokenizer, schemas)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    has_own = any(getattr(tokenizer, n, None) for n in ("response_template", "response_schema"))
    if name == "auto":
        marked = next((parser for mark, parser in MARKS if mark in template), None)
        name = marked or ("response" if has_own else "")
        if not name:
            what = "the chat template does not show how this model writes a call"
            fix = "agent.parser=hermes, or another format that the model was trained on"
            looked = f"looked in it for {', '.join(mark for mark, _ in MARKS)}, and found none"
            why = looked if template else "the tokenizer has no chat template"
            refuse("agent.parser=auto", what, fix, why)
    if name != "response":
        return name, PARSERS[name]
    if not has_own:
        what = "agent.parser = response, and the tokenizer has no template for answers"
        why = "found neither a response_template nor a response_schema in it"
        refuse("agent.parser", what, "agent.parser=auto", why)
    return name, response_parser(tokenizer)
