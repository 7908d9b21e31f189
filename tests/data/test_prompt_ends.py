"""Prompts that end with an end of text or the answer, or hold two beginnings: one warning."""

import json

import pytest
from loop_cases import make
from prompt_cases import WITH_BOS, chat, plain, prepare, tokenizer
from tokenizers import processors

from rloo_cli.data import splits
from rloo_cli.data.synthetic import tiny

EOS = tiny.tiny_tokenizer().eos_token
SEP = "<sep>"


def appending(token):
    """The byte tokenizer; it puts this token after every text."""
    made = tiny.tiny_tokenizer()
    made.add_special_tokens({"sep_token": SEP})
    ids = [(token, made.convert_tokens_to_ids(token))]
    made.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {token}", special_tokens=ids),
        ]
    )
    return made


@pytest.mark.parametrize("token", [EOS, SEP], ids=["end of text", "separator"])
def test_a_token_that_the_tokenizer_puts_at_the_end_is_warned_of(token, sentence):
    (said,) = prepare(plain("ab", "c"), tokens=appending(token)).value_notes
    assert "2 of 2" in said and repr(token) in said and "model.tokenizer=" in said
    sentence(said)


def test_an_end_of_text_in_the_rows_or_the_template_is_warned_of(sentence):
    (said,) = prepare(plain("ab", f"c{EOS}")).value_notes
    assert "1 of 2" in said and "data.map=" in said
    sentence(said)
    ended = tokenizer(template=tiny.TEMPLATE + EOS)
    (said,) = prepare(chat("a", "b"), tokens=ended).value_notes
    assert "2 of 2" in said and "model.chat_template=" in said
    sentence(said)


def test_a_second_beginning_of_text_is_warned_of(sentence):
    tokens = tokenizer(bos=True)
    (said,) = prepare(plain("ab", "c<bos>d"), tokens=tokens).value_notes
    assert "1 of 2" in said and "row 1" in said and "[0, 2]" in said
    sentence(said)
    (said,) = prepare(chat("a<bos>"), tokens=tokenizer(WITH_BOS, bos=True)).value_notes
    assert "'<bos>'" in said and "model.chat_template=" in said
    sentence(said)


def talks(*answers):
    question = {"role": "user", "content": "Q"}
    return plain(*([question, {"role": "assistant", "content": a}] for a in answers))


def test_rows_that_hold_the_answer_are_warned_of_and_a_common_beginning_is_not(sentence):
    (said,) = prepare(talks("four", "five")).value_notes
    assert "2 of 2" in said and "'four'" in said
    sentence(said)
    assert prepare(talks("<think>", "<think>")).value_notes == ()
    rows = [{"prompt": f"Q: {n}? A: {n * n}", "answer": n * n} for n in range(4, 8)]
    (said,) = prepare(rows).value_notes
    assert "4 of 4" in said and "'16'" in said
    sentence(said)


def test_nothing_is_said_of_prompts_as_they_should_be():
    rows = [{"prompt": f"{n}+{n}=", "answer": str(n + n), "kind": "sum", "n": None} for n in "1234"]
    for good in (rows, plain("a b", "c"), chat("a", "b")):
        assert prepare(good).value_notes == ()
    assert prepare(plain("a"), tokens=tokenizer(bos=True)).value_notes == ()


def test_a_run_says_it_at_its_start(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = talks("four", "five", "six", "seven")
    path.write_text("\n".join(map(json.dumps, rows)))
    run = make(tmp_path, f"data.path={path}", "data.eval_split=null")
    assert run.prompts.value_notes[0] in splits.split_notes(None, run.prompts)
