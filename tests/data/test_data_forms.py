"""The forms that prompts come in: strings, messages, chat, map; and what is refused by name."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from loop_cases import make
from prompt_cases import chat, decoded, plain, prepare, refused, tokenizer
from test_data import load
from test_data import refused as not_opened

from rloo_cli.config import registry
from rloo_cli.data import splits
from rloo_cli.utils.errors import ConfigError, DataError

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]


def talk(*parts):
    return [{"prompt": [{"role": "user", "content": list(parts)}]}]


def code(folder: Path, text: str) -> str:
    """The path of a file of the user's, new each time: a file is imported once."""
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:change"


def test_a_plain_question_becomes_a_message_with_the_system_message_before_it():
    found = prepare(plain("a", "b"), chat=True, system="Be brief.", template="Q: {prompt}")
    assert found.conversational
    assert decoded(found)[1] == "<|system|>Be brief.\n<|user|>Q: b\n<|assistant|>"
    assert found.prompts[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: a"},
    ]
    assert_refused(refused(chat("a"), chat=True), 4, where="data.chat", fix="data.chat=false")
    system = refused(plain("a"), system="Be brief.")
    assert_refused(system, 4, "data.chat=true", where="data.system", fix="data.system=null")


def test_parts_of_text_are_joined_and_other_parts_are_refused_by_name(sentence):
    found = prepare(talk(*PARTS))
    assert decoded(found) == ["<|user|>What is 2 + 2?\n<|assistant|>"]
    assert found.prompts[0] == [{"role": "user", "content": "What is 2 + 2?"}]
    audio = refused(talk({"type": "audio", "text": "x"}))
    assert_refused(audio, 4, "'audio'", where="row 0")
    sentence(audio)


def test_a_conversation_that_is_written_as_one_string_is_told_about(sentence):
    messages = [{"role": "user", "content": "it's"}]
    for text in (json.dumps(messages), str(messages)):
        error = refused(plain(text))
        assert_refused(error, 4, "prompt 0", where="row 0", fix="data.map=")
    sentence(error)
    assert len(prepare(plain("[{}, what is this?", "[{1: 2}]"))) == 2


def test_a_column_that_is_no_prompt_is_named_with_its_type_and_those_that_could_be(sentence):
    for value, kind in (({"text": "a"}, "text"), (5, "int64")):
        error = refused([{"prompt": value, "question": "What?", "n": 1}])
        assert_refused(error, 4, kind, where="row 0", fix="data.prompt_column=question")
    sentence(error)


def test_a_template_that_would_format_a_column_is_refused(sentence):
    for template, part in (("{n:>5}", "{n:>5}"), ("{prompt!r}", "{prompt!r}")):
        error = refused([{"prompt": "a", "n": 7}], template=template)
        assert_refused(error, 4, part, where="data.template")
    sentence(error)


def test_a_broken_line_of_a_data_file_is_named(tmp_path, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n')
    error = not_opened(path)
    assert_refused(error, 4, "line 3", where=f"{path}:3", fix="line 3")
    sentence(error)


def test_a_data_file_in_latin_1_is_refused_with_the_line_and_what_to_do(tmp_path, sentence):
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a", "caf\xe9")]
        path.write_bytes("\n".join(rows).encode("latin-1"))
        error = not_opened(path)
        assert_refused(error, 4, "0xe9", where=f"{path}:2", fix="iconv -f latin1 -t utf-8")
    sentence(error)
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes("\n".join(rows).encode("utf-16"))
        assert_refused(not_opened(tmp_path / name), 4, "0xff", fix="iconv -f utf-16 -t utf-8")


def test_rows_go_through_a_map_before_anything_else_looks_at_them(tmp_path):
    spec = code(
        tmp_path,
        "def change(row):\n"
        "    return {'prompt': [{'role': 'user', 'content': row['q']}], 'n': len(row['q'])}\n",
    )
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"question": "a" * n}) + "\n" for n in range(1, 9)))
    keys = {"columns": {"question": "q"}, "filter": {"n": [2, 3, 5]}, "max_samples": 2}
    for more in ({}, {"streaming": True}):
        found = load(path, map=spec, **keys, **more)
        assert found["n"][:] == [2, 3]
        assert found[1]["prompt"] == [{"role": "user", "content": "aaa"}]
    assert len(load(path, map=spec, columns={"question": "q"}, max_samples=3)) == 3


@pytest.mark.parametrize(
    ("body", "error", "key"),
    [
        ("    return row['gone']", DataError, "KeyError: 'gone'"),
        ("    pass", DataError, "NoneType"),
        ("    return {1: 2}", DataError, "{1: 2}"),
        ("    return {'prompt': 'a', 'n': object()}", DataError, "table"),
        ("    raise SystemExit(0)", DataError, "SystemExit: 0"),
        ("    return row\n1 / 0", ConfigError, "ZeroDivisionError"),
    ],
    ids=["fails", "no return", "no column", "no table", "exits", "no module"],
)
def test_what_goes_wrong_in_a_map_is_shown_as_the_users_own(body, error, key, tmp_path, sentence):
    spec = code(tmp_path, f"# {body.strip()!r}\ndef change(row):\n{body}\n")
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "n": 0}\n{"prompt": "b", "n": 1}\n')
    found = not_opened(path, error=error, map=spec)
    problem = assert_refused(found, error.code, key, where="data.map")
    if "Error:" in problem.why:
        assert "mine.py" in problem.why and "line " in problem.why
    elif "object at 0x" not in problem.why:
        sentence(found)


def test_the_file_of_a_map_is_part_of_the_fingerprint(tmp_path):
    spec = code(tmp_path, "def change(row): return row")
    plainly = prepare(plain("a", "b")).fingerprint
    mapped = prepare(plain("a", "b"), map=spec).fingerprint
    assert mapped == prepare(plain("a", "b"), map=spec).fingerprint != plainly
    before = registry.code_fingerprint(spec)
    code(tmp_path, "def change(row): return row  # again")
    assert registry.code_fingerprint(spec) != before
    assert prepare(plain("a", "b"), map=spec).fingerprint != mapped


def test_the_first_prompt_is_shown_as_the_model_reads_it(sentence):
    text, tokens = splits.describe_first_prompt(prepare(chat("2 + 2?\n", "b")), tokenizer())
    sentence(f"{text}\n{tokens}")
    text, _ = splits.describe_first_prompt(prepare(plain("x" * 2000)), tokenizer())
    assert "xxx" in text and len(text) < 700


def test_a_run_shows_its_first_prompt_before_the_first_step(tmp_path, capsys):
    run = make(tmp_path, "data.eval_split=null", "max_steps=1")
    shown = capsys.readouterr().out
    assert "prompt 0" in shown and f" {len(run.prompts.prompt_ids[0])} tokens" in shown
