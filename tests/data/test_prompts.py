"""Rows -> tokenized prompts."""

import pytest
from assert_refused import assert_refused
from prompt_cases import (
    LEARNT,
    LONG,
    TEXTS,
    WITH_BOS,
    chat,
    config,
    decoded,
    learnt_tokenizer,
    plain,
    prepare,
    refused,
    tokenizer,
)
from transformers import AutoTokenizer, ByT5Tokenizer

from rloo_cli.data import prompts
from rloo_cli.data.exact_values import dataset_of_rows
from rloo_cli.data.prompts import _cut_left
from rloo_cli.data.synthetic import tiny
from rloo_cli.utils.errors import DataError


def test_plain_prompts_are_tokenised_as_they_are():
    found = prepare(plain("abc", " d\n"))
    assert not found.conversational
    assert found.prompts == ["abc", " d\n"]
    assert decoded(found) == ["abc", " d\n"]


def test_conversations_go_through_the_chat_template_with_a_generation_prompt():
    found = prepare(chat("abc"))
    assert found.conversational
    assert found.prompts == [[{"role": "user", "content": "abc"}]]
    assert decoded(found) == ["<|user|>abc\n<|assistant|>"]


def test_a_plain_prompt_gets_the_beginning_of_text_once():
    tokens = tokenizer(bos=True)
    assert prepare(plain("abc"), tokens).prompt_ids == [
        [tokens.bos_token_id, *tokenizer()("abc").input_ids]
    ]


def test_a_template_and_a_tokenizer_that_both_add_the_beginning_add_it_once():
    tokens = tokenizer(WITH_BOS, bos=True)
    ids = prepare(chat("abc"), tokens).prompt_ids[0]
    assert ids.count(tokens.bos_token_id) == 1 and ids[0] == tokens.bos_token_id


def test_no_special_token_is_added_to_what_a_template_wrote():
    tokens = tokenizer(bos=True)  # its template writes none, and means it
    assert tokens.bos_token_id not in prepare(chat("abc"), tokens).prompt_ids[0]


TOKENIZERS = (
    *LEARNT,
    "single bytes",
    "ByT5, in Python",
    pytest.param("SmolLM2", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rows_are_tokenised_as_the_tokenizer_and_its_chat_template_do_it(kind, request):
    if kind == "SmolLM2":
        tokens = AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2_folder"))
    elif kind == "ByT5, in Python":
        tokens = ByT5Tokenizer()
        tokens.chat_template = tiny.TEMPLATE
    else:
        tokens = tokenizer() if kind == "single bytes" else learnt_tokenizer(kind)
    found = prepare(plain(*TEXTS), tokens)
    assert found.prompt_ids == [tokens(text)["input_ids"] for text in TEXTS]
    talks = [
        talk
        for text in TEXTS
        for user in [{"role": "user", "content": text}]
        for said in [{"role": "assistant", "content": f"{text}!"}]
        for talk in ([{"role": "system", "content": text}, user], [user, said, user], [user, said])
    ]
    found = prepare(plain(*talks), tokens)
    for talk, ids in zip(talks, found.prompt_ids, strict=True):
        answered = talk[-1]["role"] == "assistant"
        theirs = tokens.apply_chat_template(
            talk, add_generation_prompt=not answered, continue_final_message=answered
        )
        assert ids == list(theirs["input_ids"])
        assert len(set(ids)) > 3 and ids[:2] != [tokens.bos_token_id] * 2


@pytest.mark.parametrize("texts", [["<bos>a", "b"], ["a", "<bos>b"]])
def test_two_beginnings_in_a_plain_prompt_are_an_error_in_any_row(texts):
    row = texts.index(max(texts, key=len))
    assert_refused(refused(plain(*texts), tokenizer(bos=True)), 4, "'<bos>'", where=f"row {row}")


def test_two_beginnings_in_a_template_are_an_error(sentence):
    tokens = tokenizer("{{ bos_token }}" + WITH_BOS, bos=True)
    error = refused(chat("abc"), tokens)
    assert_refused(error, 4, "'<bos>'")
    sentence(error)


def mixed(*values):
    rows = dataset_of_rows({"prompt": value} for value in values)
    return prompts.tokenize_prompts(rows, config(), tokenizer(), {}, None, 1)


TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "values, row",
    [
        (["a", "b", TALK], 2),
        ([TALK, "b"], 1),
        ([TALK, []], 1),
        ([TALK, ["x"]], 1),
        (["a", None], 1),
        (["a", 3], 1),
        ([None, "a"], 0),
        ([["a", "b"], ["c"]], 0),
        ([[], []], 0),
    ],
)
def test_a_prompt_of_another_kind_is_named_by_its_row(values, row):
    with pytest.raises(DataError) as caught:
        mixed(*values)
    assert_refused(caught, 4, f"prompt {row}", where=f"row {row}")


def test_conversations_without_a_chat_template_have_two_ways_out(sentence):
    error = refused(chat("abc"), tokenizer(template=None))
    problem = assert_refused(error, 4, fix="model.chat_template=FILE.jinja")
    assert "data.prompt_column=" in problem.fix
    sentence(error)


def test_what_the_chat_template_refuses_is_named_by_its_row():
    strict = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}"
        "{% endif %}" + tiny.TEMPLATE
    )
    rows = [*chat("a"), {"prompt": [{"role": "system", "content": "x"}]}]
    problem = assert_refused(refused(rows, tokenizer(strict)), 4, "prompt 1")
    assert "no system here" in problem.why


def test_a_system_message_comes_before_every_conversation():
    found = prepare(chat("a", "b"), system="Be brief.")
    assert decoded(found)[1] == "<|system|>Be brief.\n<|user|>b\n<|assistant|>"
    assert found.prompts[1][0] == {"role": "system", "content": "Be brief."}


def test_a_last_message_of_the_assistant_is_continued():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]
    assert decoded(prepare(plain(talk))) == ["<|user|>a\n<|assistant|>The answer is"]


def test_chat_template_kwargs_reach_the_template():
    tokens = tokenizer("{% if thinking %}<think>{% endif %}" + tiny.TEMPLATE)
    assert decoded(prepare(chat("a"), tokens))[0].startswith("<|user|>")
    found = prepare(chat("a"), tokens, template_kwargs={"thinking": True})
    assert decoded(found)[0].startswith("<think><|user|>")


def test_a_template_is_filled_from_the_columns():
    rows = [{"prompt": "p{0}", "topic": "t", "n": 3}]
    found = prepare(rows, template=" {topic}/{n}: {prompt} {{x}}")
    assert found.prompts == [" t/3: p{0} {x}"] and decoded(found) == found.prompts


def test_a_template_knows_the_prompt_by_both_its_names():
    rows = [{"question": "q"}]
    found = prepare(rows, prompt_column="question", template="{prompt}={question}")
    assert found.prompts == ["q=q"]


@pytest.mark.parametrize("name", ["nope", "prompt.__class__", "prompt[0]", "", "0"])
def test_a_template_names_columns_and_nothing_else(name):
    problem = assert_refused(refused(plain("a"), template="{" + name + "}"), 4, "columns: prompt")
    assert f"{{{name}}}" in problem.render()


@pytest.mark.parametrize("template", ["{", "a } b", "{prompt"])
def test_a_template_that_is_not_one_is_refused(template):
    assert_refused(refused(plain("a"), template=template), 4, where="data.template")


def test_overlong_filter_leaves_out_and_counts():
    found = prepare(LONG, longest=3)
    assert decoded(found) == ["ab", "abc", "a"]
    assert (found.dropped, found.truncated, len(found)) == (1, 0, 3)
    assert list(found.unfiltered_lengths) == [6, 2, 3, 1]
    assert len(found.examples) == len(found.prompts) == 3


def test_overlong_truncate_left_keeps_the_end_and_counts():
    found = prepare(LONG, longest=3, overlong="truncate_left")
    assert decoded(found) == ["def", "ab", "abc", "a"]
    assert (found.dropped, found.truncated) == (0, 1)


def test_overlong_error_names_the_longest_and_the_first(sentence):
    error = refused(LONG, longest=3, overlong="error")
    problem = assert_refused(error, 4, "1 of 4")
    assert "longest has 6" in problem.render() and "row 0" in problem.render()
    sentence(error)


@pytest.mark.parametrize("overlong", ["filter", "error", "truncate_left"])
def test_prompts_that_all_fit_are_left_alone(overlong):
    found = prepare(LONG, longest=6, overlong=overlong)
    assert decoded(found) == [row["prompt"] for row in LONG]
    assert (found.dropped, found.truncated) == (0, 0)


@pytest.mark.parametrize(
    "overlong, longest, share",
    [("filter", 1, "3 of 4"), ("filter", 0, "4 of 4"), ("truncate_left", 0, "4 of 4")],
)
def test_a_limit_that_most_prompts_exceed_is_an_error_unless_they_are_cut(overlong, longest, share):
    error = refused(LONG, longest=longest, overlong=overlong)
    assert_refused(error, 4, share, fix="data.max_prompt_length=6")


def test_prompts_are_cut_as_configured_however_many_are_too_long():
    found = prepare(LONG, longest=1, overlong="truncate_left")
    assert decoded(found) == ["f", "b", "c", "a"]
    assert (found.dropped, found.truncated) == (0, 3)


def test_exactly_half_over_the_limit_is_not():
    assert prepare(LONG, longest=2).dropped == 2


def test_a_prompt_without_tokens_is_refused():
    assert_refused(refused(plain("a", "")), 4, "prompt 1")


def test_the_other_columns_reach_the_rows_and_those_of_trl_do_not():
    row = {"prompt": "a", "completion": "x", "completion_ids": [1], "answer": "y", "n": 3}
    found = prepare([row, row | {"answer": "z"}])
    assert found.examples == [{"answer": "y", "n": 3}, {"answer": "z", "n": 3}]
    assert found.group_of(1).example == {"answer": "z", "n": 3}


def test_a_prompt_column_of_another_name_is_no_row_column_either():
    assert prepare([{"q": "a", "prompt": "b", "c": 1}], prompt_column="q").examples == [{"c": 1}]
    assert prepare([{"q": "a"}], prompt_column="q").examples == [{}]


def test_a_prompt_cut_on_the_left_keeps_its_beginning_of_text():
    assert _cut_left([1, 5, 6, 7, 8], 3, bos_token_id=1) == [1, 7, 8]
    assert _cut_left([5, 6, 7, 8], 3, bos_token_id=1) == [6, 7, 8]
    assert _cut_left([1, 5], 3, bos_token_id=1) == [1, 5]


def test_rows_keep_their_number_when_others_are_filtered():
    found = prepare(LONG, longest=2)
    assert list(found.example_numbers) == [1, 3] and found.overlong_examples == [0, 2]
    assert len(found.overlong_examples) == found.dropped
    for how in ({"overlong": "truncate_left", "longest": 2}, {}):
        found = prepare(LONG, **how)
        assert list(found.example_numbers) == [0, 1, 2, 3] and found.overlong_examples == []
