"""IFEval's instructions: which texts follow them."""

import json

import pytest
from assert_refused import assert_refused

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.data.synthetic import chat_tasks as made
from rloo_cli.rewards import ifeval
from rloo_cli.rewards.common.instructions import CHECKS, is_followed
from rloo_cli.utils.errors import DataError
from rloo_cli.utils.files import JsonObject

# instruction: arguments, a text that follows it, a text that does not
CASES: dict[str, list[tuple[JsonObject, str, str]]] = {
    "keywords:existence": [
        ({"keywords": ["sea", "Salt"]}, "The SEA has salt.", "A seaside, salty.")
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["the"]}, "There is one.", "In the sea.")],
    "keywords:frequency": [
        ({"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea, sea.", "The sea."),
        ({"keyword": "sea", "frequency": 2, "relation": "less than"}, "The sea.", "Sea, sea."),
    ],
    "keywords:letter_frequency": [
        ({"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Q q", "quiet"),
        ({"letter": "q", "let_frequency": 1, "let_relation": "less than"}, "calm", "Quiet"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "less than"}, "It's well-known.", "One two three."),
        ({"num_words": 3, "relation": "at least"}, "One two three.", "One, two."),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "less than"}, "Pi is 3.14, they say", "One. Two!"),
        ({"num_sentences": 2, "relation": "at least"}, 'He said "no!" Then he left.', "One."),
    ],
    "length_constraints:number_paragraphs": [({"num_paragraphs": 2}, "One.\n***\nTwo.", "One.")],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            "One.\n\nThen two.",
            "Then one.\n\nTwo.",
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"}, "A b.", "A b.\n\nC."),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "Dear [name], [date]", "Dear [name] []")
    ],
    "detectable_content:postscript": [({"postscript_marker": "P.S."}, "Bye. p.s. Write.", "Bye.")],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
        ({"num_bullets": 1}, "* one\n**bold**", "**bold**"),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", "*one* and two")
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 a\nSECTION 2 b", "SECTION 1")
    ],
    "detectable_format:constrained_response": [({}, "My answer is no.", "My answer is well.")],
    "detectable_format:json_format": [({}, '```json\n{"a": 1}\n```', "{a: 1}")],
    "detectable_format:title": [({}, "<<The sea>> is wide", "<< >> <The sea>")],
    "combination:two_responses": [({}, "One ****** two", "One ****** One")],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Say it."}, "say it. Yes.", "Yes.")],
    "startend:end_checker": [({"end_phrase": "The end."}, "So. the end.\n", "The end. So.")],
    "startend:quotation": [({}, ' "All of it" ', '"All" of it')],
    "change_case:english_lowercase": [({}, "all small 1.", "All small")],
    "change_case:english_capital": [({}, "ALL LARGE 1.", "All large")],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "THE SEA is", "THE sea"),
        ({"capital_frequency": 1, "capital_relation": "less than"}, "The sea", "A SEA"),
    ],
    "punctuation:no_comma": [({}, "No commas; none.", "One, two")],
}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_instruction_is_followed_by_one_text_and_not_by_another(name: str) -> None:
    for arguments, follows, breaks in CASES[name]:
        assert is_followed(name, follows, arguments), follows
        assert not is_followed(name, breaks, arguments), breaks
        assert not is_followed(name, " \n", arguments)


def config(*keys: str) -> ifeval.Config:
    composed = compose_config(["+recipe=smoke", "data=instructions", "reward=ifeval", *keys])
    reward = check_config(composed).rewards["ifeval"]
    assert isinstance(reward, ifeval.Config)
    return reward


def test_the_score_is_the_share_or_with_strict_all_or_nothing() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    columns = {"instruction_id_list": [names, names, []], "kwargs": ["[{}, {}]", [{}, None], "[]"]}
    texts = ["Two words", "two words", "anything"]
    assert ifeval.score([*texts], columns, config()) == [0.5, 1.0, None]
    strict = config("reward.ifeval.strict=true")
    assert ifeval.score([*texts], columns, strict) == [0.0, 1.0, None]


def test_arguments_that_arrow_filled_with_null_are_as_if_they_were_absent() -> None:
    columns = {
        "instruction_id_list": [["length_constraints:number_words"]],
        "kwargs": [[{"num_words": 2, "relation": None, "keywords": None}]],
    }
    assert ifeval.score(["one two"], columns, config()) == [1.0]


def test_an_instruction_that_cannot_be_checked_is_refused_by_name(sentence) -> None:
    for ids, kwargs, key in (
        (["language:response_language"], "[{}]", "response_language"),
        (["punctuation:no_comma"], "[]", "length"),
    ):
        with pytest.raises(DataError) as caught:
            ifeval.score(["x"], {"instruction_id_list": [ids], "kwargs": [kwargs]}, config())
        assert_refused(caught, 4, key)
        sentence(caught)


def test_every_made_prompt_can_be_checked_and_topics_held_out_are_others() -> None:
    rows = {split: made.instruction_examples(split) for split in ("train", "test")}
    for row in (row for part in rows.values() for row in part):
        arguments = json.loads(row["kwargs"])
        for name, values in zip(row["instruction_id_list"], arguments, strict=True):
            is_followed(name, "Some text.", values)  # it has all that the check asks for
        assert len(row["instruction_id_list"]) == len(arguments) >= 1
    assert not {*made.TOPICS} & {*made.HELD_OUT_TOPICS}
    assert made.instruction_examples("test") == rows["test"]
