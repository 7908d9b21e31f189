"""The forms that prompts come in: strings, messages, chat, map; and what is refused by name."""

import json
from pathlib import Path

import pytest
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
    assert "data.chat is set" in refused(chat("a"), chat=True)
    assert "data.chat=true" in refused(plain("a"), system="Be brief.")


def test_parts_of_text_are_joined_and_other_parts_are_refused_by_name():
    found = prepare(talk(*PARTS))
    assert decoded(found) == ["<|user|>What is 2 + 2?\n<|assistant|>"]
    assert found.prompts[0] == [{"role": "user", "content": "What is 2 + 2?"}]
    assert "a part of type 'audio'" in refused(talk({"type": "audio", "text": "x"}))


def test_a_conversation_that_is_written_as_one_string_is_told_about():
    messages = [{"role": "user", "content": "it's"}]
    for text in (json.dumps(messages), str(messages)):
        said = refused(plain(text))
        assert "a conversation that is written as one string" in said and "data.map=" in said
    assert len(prepare(plain("[{}, what is this?", "[{1: 2}]"))) == 2


def test_a_column_that_is_no_prompt_is_named_with_its_type_and_those_that_could_be():
    for value, kind in ((5, "int64"), ({"text": "a"}, "text")):
        said = refused([{"prompt": value, "question": "What?", "n": 1}])
        assert "prompt 0 is not a string" in said and kind in said
        assert "data.prompt_column=question" in said


def test_a_template_that_would_format_a_column_is_refused():
    for template, part in (("{prompt!r}", "!r"), ("{n:>5}", ":>5")):
        said = refused([{"prompt": "a", "n": 7}], template=template)
        assert "data.template cannot be read" in said and f"without {part}" in said


def test_a_broken_line_of_a_data_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n')
    said = not_opened(path)
    assert f"{path}:3" in said and "line 3 is not JSON" in said


def test_a_data_file_in_latin_1_is_refused_with_the_line_and_what_to_do(tmp_path):
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a", "caf\xe9")]
        path.write_bytes("\n".join(rows).encode("latin-1"))
        said = not_opened(path)
        assert f"{path}:2" in said and "0xe9" in said and "iconv -f latin1 -t utf-8" in said


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
    ("body", "error", "parts"),
    [
        ("    return row['gone']", DataError, ["failed at row 0: KeyError", "mine.py", "line 3"]),
        ("    pass", DataError, ["returned NoneType for row 0", "is a return missing?"]),
        ("    return {1: 2}", DataError, ["returned dict for row 0"]),
        ("    return {'prompt': 'a', 'n': object()}", DataError, ["rows that make no table"]),
        ("    raise SystemExit(0)", DataError, ["failed at row 0: SystemExit"]),
        ("    return row\n1 / 0", ConfigError, ["ZeroDivisionError", "data.map"]),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_map_is_shown_as_the_users_own(body, error, parts, tmp_path):
    spec = code(tmp_path, f"# {body.strip()!r}\ndef change(row):\n{body}\n")
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "n": 0}\n{"prompt": "b", "n": 1}\n')
    said = not_opened(path, error=error, map=spec)
    for part in parts:
        assert part in said, said


def test_the_file_of_a_map_is_part_of_the_fingerprint(tmp_path):
    spec = code(tmp_path, "def change(row): return row")
    plainly = prepare(plain("a", "b")).fingerprint
    mapped = prepare(plain("a", "b"), map=spec).fingerprint
    assert mapped == prepare(plain("a", "b"), map=spec).fingerprint != plainly
    before = registry.code_fingerprint(spec)
    code(tmp_path, "def change(row): return row  # again")
    assert registry.code_fingerprint(spec) != before
    assert prepare(plain("a", "b"), map=spec).fingerprint != mapped


def test_the_first_prompt_is_shown_as_the_model_reads_it():
    text, tokens = splits.describe_first_prompt(prepare(chat("2 + 2?\n", "b")), tokenizer())
    assert text.startswith("prompt 0 is a conversation, by the chat template: ")
    assert text.endswith(r"'<|user|>2 + 2?\n\n<|assistant|>'")
    ids = prepare(chat("2 + 2?\n")).prompt_ids[0]
    assert tokens.startswith(f"its {len(ids)} tokens: {ids[0]} '<', {ids[1]} '|', ")
    assert f", ..., {ids[-5]} " in tokens and tokens.endswith(f"{ids[-1]} '>'")
    text, tokens = splits.describe_first_prompt(prepare(plain("x" * 2000)), tokenizer())
    assert text.startswith("prompt 0 is plain text: 'xxx") and len(text) < 700


def test_a_run_shows_its_first_prompt_before_the_first_step(tmp_path, capsys):
    make(tmp_path, "data.eval_split=null", "max_steps=1")
    shown = capsys.readouterr().out
    assert "prompt 0 is plain text: " in shown and "tokens: " in shown
