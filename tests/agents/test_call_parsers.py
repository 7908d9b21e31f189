"""Calls in what a model wrote, for each way to write them."""

import pytest
from agent_cases import chat_tokenizer, tools_agent
from assert_refused import assert_refused

from rloo_cli.agents.common.call_parsers import PARSERS, choose_parser
from rloo_cli.config import agent as config_agent
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.utils.errors import ConfigError

ADD = {"name": "add", "arguments": {"a": 1, "b": "x"}}
WRITTEN = {
    "hermes": 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "pythonic": '[add(a=1, b="x")]',
}
TWICE = {
    "hermes": WRITTEN["hermes"] + WRITTEN["hermes"],
    "llama3_json": WRITTEN["llama3_json"] + "; " + WRITTEN["llama3_json"].partition(">")[2],
    "mistral": '[TOOL_CALLS]add{"a": 1, "b": "x"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}',
    "pythonic": '[add(a=1, b="x"), add(a=1, b="x")]',
}
BROKEN = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1',
    "mistral": '[TOOL_CALLS] [{"name": "add"',
    "pythonic": "[add(a=other)]",
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read_and_what_cannot_be_read_is_said(name):
    parse = PARSERS[name]
    assert parse(WRITTEN[name]).calls == [ADD] and not parse(WRITTEN[name]).unreadable
    assert parse(TWICE[name]).calls == [ADD, ADD]
    broken = parse(BROKEN[name])
    assert not broken.calls and len(broken.unreadable) == 1
    answer = parse("The answer is 4 [see above], {x: 1}.")
    assert not answer.calls and not answer.unreadable


def test_a_call_may_stop_before_its_end_mark_and_hold_json_in_json():
    parse = PARSERS["hermes"]
    assert parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}').calls == [
        {"name": "f", "arguments": {"a": 2}}
    ]
    assert parse('<tool_call>["f"]</tool_call>').unreadable
    assert parse("<tool_call>" + "[" * 100_000).unreadable  # nested too deep


def test_the_parser_is_chosen_by_the_chat_template_or_refused(sentence):
    names = [choose_parser("auto", chat_tokenizer(t))[0] for t in ("chatml", "mistral", "llama3")]
    assert names == ["hermes", "mistral", "llama3_json"]
    bare = chat_tokenizer()
    bare.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name, fix in (("auto", "agent.parser=hermes"), ("response", "agent.parser=auto")):
        with pytest.raises(ConfigError) as caught:
            choose_parser(name, bare)
        assert_refused(caught, 2, where="agent.parser", fix=fix)
        sentence(caught)


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
        },
    },
}  # fmt: skip


def test_the_tokenizers_own_parser_is_told_how_an_answer_begins():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.response_template = RESPONSE_TEMPLATE
    name, parse = choose_parser("response", tokenizer)
    assert name == "response" and parse(TWICE["hermes"]).calls == [ADD, ADD]
    answer = parse("The answer is 4.")
    assert not answer.calls and not answer.unreadable
    assert len(parse("<tool_call>{nonsense}</tool_call>").unreadable) == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_vllms_parser_of_a_name_reads_what_ours_reads():
    pytest.importorskip("vllm", reason="vLLM, whose parsers are asked, is not installed")
    tokenizer, ours = chat_tokenizer(), PARSERS["hermes"]
    name, theirs = choose_parser("vllm:hermes", tokenizer)
    assert name == "vllm:hermes"
    for text in (WRITTEN["hermes"], TWICE["hermes"], "The answer is 4."):
        assert theirs(text) == ours(text)
    for text in (BROKEN["hermes"], '<tool_call>{"name": "add", "arg', "<tool_call>[1]</tool_call>"):
        assert not theirs(text).calls and len(theirs(text).unreadable) == 1
        assert not ours(text).calls and len(ours(text).unreadable) == 1
    with pytest.raises(ConfigError) as caught:
        choose_parser("vllm:hermez", tokenizer)
    assert_refused(caught, 2, "vllm:hermez", fix="agent.parser=vllm:hermes")
    with pytest.raises(ConfigError) as caught:
        choose_parser("vllm:openai", tokenizer)  # a stub, which reads streams alone
    assert_refused(caught, 2, "vllm:openai")
    schema = {"type": "function", "function": {"name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>", "</tool_call>"]})
    typed = choose_parser("vllm:qwen3_coder", tokenizer, [schema])[1](text)
    assert typed.calls == [{"name": "add", "arguments": {"a": 1}}]  # not "1": by the schema


def test_a_parser_of_vllms_without_vllm_is_refused_before_anything_starts(monkeypatch):
    run = RunConfig.model_construct(
        agent=tools_agent(["tools.py:add"], parser="vllm:hermes"),
        generation=GenerationConfig.model_construct(backend="transformers"),
    )
    monkeypatch.setattr(config_agent, "find_spec", lambda name: None)
    (problem,) = config_agent.agent_package_problems(run.agent)
    assert problem.where == "agent.parser" and "vllm" in problem.why
    monkeypatch.setattr(config_agent, "find_spec", lambda name: object())
    assert not list(config_agent.agent_package_problems(run.agent))
