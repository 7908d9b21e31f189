"""vLLM's own parsers of calls: `agent.parser=vllm:NAME`.

They are those of `vllm serve --tool-call-parser NAME`, and take whole answers here. What such a
parser cannot read it takes for an answer in words; where a mark of a call stands in it, the model
is told. A new parser is made for each answer, as vLLM's server does, since it may keep a state.
"""

import logging
from collections.abc import Sequence
from typing import Any

from rloo_cli.agents.common.call_parsers import CallParser, ParsedCalls
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

# What a parser calls the text that begins a call.
MARK_ATTRIBUTES = ("tool_call_start_token", "bot_token", "tool_calls_start_token")
LISTED = 8  # names in an error, the nearest first


def vllm_parser(name: str, tokenizer: Any, schemas: Sequence[JsonObject]) -> CallParser:
    """vLLM's parser of this name. `schemas`: the tools, whose types some parsers ask for.

    Raises ConfigError where vLLM has none of this name, or it does not fit the tokenizer.
    """
    # lazy: vLLM is optional, and takes seconds to import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer  # lazy: as above
    from vllm.tool_parsers import ToolParserManager  # lazy: as above

    names = ToolParserManager.list_registered()
    if name not in names:
        near = nearest_names(name, names)
        listed = ", ".join([*near, *(n for n in names if n not in near)][:LISTED])
        what, why = f"agent.parser = vllm:{name}: vLLM has no such parser", f"it has: {listed}, ..."
        fix = f"agent.parser=vllm:{near[0]}" if near else "vllm serve --help: --tool-call-parser"
        raise ConfigError(Problem(what, "agent.parser", why, fix))
    asked = [{"role": "user", "content": ""}]
    tools: JsonObject = {"tools": list(schemas), "tool_choice": "auto"} if schemas else {}
    try:
        factory = ToolParserManager.get_tool_parser(name)
        request = ChatCompletionRequest(messages=asked, model="policy", **tools)
        cached = get_cached_tokenizer(tokenizer)
        factory(cached, request.tools).extract_tool_calls("", request)
    except Exception as error:  # it lacks a token, or reads streams alone
        what = f"agent.parser = vllm:{name} cannot be used with this tokenizer"
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(Problem(what, "agent.parser", why, "agent.parser=auto")) from None
    logging.getLogger(factory.__module__).disabled = True  # the model is told of what it logs

    def parse_with_vllm(text: str) -> ParsedCalls:
        found, parser = ParsedCalls(), factory(cached, request.tools)
        try:
            read = parser.extract_tool_calls(text, request)
        except Exception as error:  # a parser that meets a text that it was not written for
            found.unreadable.append(f"a call cannot be read ({type(error).__name__}): {text:.200}")
            return found
        for call in read.tool_calls if read.tools_called else ():
            found.add({"name": call.function.name, "arguments": call.function.arguments})
        marks = [getattr(parser, attribute, None) for attribute in MARK_ATTRIBUTES]
        if not read.tools_called and any(isinstance(m, str) and m and m in text for m in marks):
            found.unreadable.append(f"a call cannot be read: {text:.200}")
        return found

    return parse_with_vllm
