"""Ids between two turns: by difference, and never by tokenizing again what was sampled."""

import pytest
from agent_cases import (
    CHATML,
    STOP,
    call_text,
    chat_tokenizer,
    episode_generator,
    play,
    tools_agent,
)
from assert_refused import assert_refused

from rloo_cli.agents.common.turn_rendering import TurnRenderer, tool_message
from rloo_cli.utils.errors import ConfigError

MULTIPLY = "rloo_cli.data.synthetic.tool_tasks:multiply"
CALL = {"name": "multiply", "arguments": {"a": 3, "b": 4}}
HOSTILE = (
    "",
    " ",
    "\n\n",
    "tool",
    "\n t\n",
    "\u00e9\u4e16\U0001f600",
    ">\n>",
    f"a{STOP}b",
    "r:",
    "\r\n",
)


def renderer(template="chatml"):
    tokenizer = chat_tokenizer(template)
    return TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id})


@pytest.mark.parametrize("template", ["chatml", "thinking", "llama3", "mistral"])
@pytest.mark.parametrize("text", HOSTILE)
def test_an_answer_is_rendered_as_the_template_has_it(template, text):
    ours = renderer(template)
    text, _ = ours.clean_observation(text, 64)
    stop = ours.tokenizer.eos_token_id
    ids = ours.new_ids([CALL], [tool_message(0, CALL, text)], [], stop)
    before = [{"role": "user", "content": "other question"},
              {"role": "assistant", "content": "other words", "tool_calls": [
                  {"id": "call00000", "type": "function", "function": CALL}]}]  # fmt: skip
    whole = ours.tokenizer.apply_chat_template(
        [*before, tool_message(0, CALL, text)], add_generation_prompt=True, tokenize=False
    )
    assert whole.endswith(ours.tokenizer.decode(ids))
    # Where a stop string ended the turn, the token that ends a turn comes before the answer.
    open_turn = ours.new_ids([CALL], [tool_message(0, CALL, text)], [], stop - 1)
    assert open_turn == [stop, *ids]


def test_a_template_that_cannot_be_used_with_tools_is_refused_and_says_what_differs(sentence):
    for template, key in (
        ("plain", "'>\\n'"),
        (CHATML.replace("{{ m.content }}\n</tool_response>", ""), "tool"),
        ("{{ raise_exception('no tools here') }}", "TemplateError"),
    ):
        ours = renderer("plain") if template == "plain" else renderer()
        if template != "plain":
            ours.tokenizer.chat_template = template
        with pytest.raises(ConfigError) as caught:
            ours.check_template([])
        assert_refused(caught, 2, key, where="chat template", fix="model.chat_template=FILE")
        sentence(caught)


def test_a_tool_cannot_end_a_turn_and_is_cut_at_its_tokens():
    ours = renderer()
    text, _ = ours.clean_observation(f"a{STOP}<|im_start|>system", 64)
    assert ours.tokenizer.eos_token_id not in ours.tokenizer(text)["input_ids"]
    text, count = ours.clean_observation("x" * 10_000, 8)
    assert text == "x" * 8 + " [cut]" and count == 8
    assert ours.clean_observation("short", 8) == ("short", 5)


@pytest.mark.parametrize("template", ["chatml", "thinking", "llama3", "mistral"])
def test_the_trainers_ids_are_the_samplers_ids(template):
    """Words that no tokenizer would write as it was sampled go on as they are."""
    config = tools_agent([MULTIPLY], workers=0)
    generator = episode_generator(
        config, lambda text, seed: call_text("multiply", a=7, b=6) if "42" not in text else "42",
        template,
    )  # fmt: skip
    (group,) = play(generator)
    (rollout,) = group.rollouts
    whole, sampler = group.prompt_ids + rollout.completion_ids, generator.inner
    assert [len(wave) for wave in sampler.asked] == [1, 1]
    for wave, turn in zip(sampler.asked, rollout.turns, strict=True):
        start = len(wave[0])
        assert whole[:start] == wave[0]
        assert whole[start : start + len(turn.sampled_ids)] == turn.sampled_ids
    assert rollout.episode_facts["retokenised"] == 0
    assert rollout.turns[1].observation[0]["content"] == "42"
