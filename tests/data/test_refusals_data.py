"""The scorecard's refusals of data (BD) and models (BM): before any weights load, no run left."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from assert_refused import assert_refused
from cli_cases import Rloo
from loop_cases import make
from policy_cases import fresh

from rloo_cli.data.splits import split_notes
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import load
from rloo_cli.utils.errors import ConfigError, MachineError, RunError

ROWS = [{"prompt": f"p{i}"} for i in range(10)]
ONE_SET = ("data.eval_split=null", "max_steps=1")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is an error."""
    monkeypatch.setattr(load, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def refused(folder: Path, content: str | bytes, *words: str) -> RunError:
    """What a run with a data file of this content is refused with."""
    file = folder / "d.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError) as caught:
        make(folder, f"data.path={file}", *ONE_SET, *words)
    return caught.value


# The rows and overrides, then: the code, the key, where, and the fix.
CASES: dict[str, tuple[list[Any], tuple[str, ...], tuple[Any, ...]]] = {
    "BD-2 fewer than a step": (
        ROWS[:3], (), (4, "4", "train.prompts_per_step", "train.prompts_per_step=3"),
    ),
    "BD-3 all too long": (
        [{"prompt": "long"}] * 8, ("data.max_prompt_length=1",),
        (4, "8 of 8", "data.max_prompt_length", "data.max_prompt_length=4"),
    ),
    "BD-3 60 % too long": (
        [{"prompt": "long"}] * 6 + [{"prompt": "s"}] * 4, ("data.max_prompt_length=3",),
        (4, "6 of 10", "data.max_prompt_length", "data.overlong=truncate_left"),
    ),
    "a template that is none": (ROWS, ("data.template='{'",), (2, "'{'", "data.template")),
    "a column of ours": (
        [{"prompt": "x", "completions": "y"}] * 8, (), (2, "'completions'", "data.columns"),
    ),
    "a row whose prompt is null": ([*ROWS, {"prompt": None}], (), (4, "NoneType", "row 10")),
    "a row whose prompt is empty": ([*ROWS, {"prompt": ""}], (), (4, "prompt 10", "row 10")),
    "a row whose prompt is a number": ([{"prompt": 5}] * 8, (), (4, "int: '5'", "row 0")),
    "a message whose content is null": (
        [{"prompt": [{"role": "user", "content": None}]}] * 8, (), (4, "'content': None", "row 0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_data_are_refused_before_any_weights_load(
    name: str, tmp_path: Path, no_weights: None, sentence: Callable[..., None]
) -> None:
    rows, words, expected = CASES[name]
    error = refused(tmp_path, lines(rows), *words)
    assert_refused(error, *expected)
    if name in ("BD-2 fewer than a step", "a column of ours", "a row whose prompt is empty"):
        sentence(error)


BROKEN = {  # what the file holds, what is told, and of which line
    "nothing": (b"", "0 rows", ""),
    "noise": (bytes(range(256)) * 4, "JSON", ":1"),
    "UTF-16": (lines(ROWS).encode("utf-16"), "UTF-8", ":1"),
    "a half line": (lines(ROWS).encode()[:-5], "JSON", ":10"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}\n' * 8, "'prompt'", ":1"),
    "lists": (b"[1, 2]\n" * 8, "JSON", ":2"),
    "numbers": (b"5\n" * 8, "5", ":1"),
    "half a letter": (b'{"prompt": "\\ud800"}\n' * 8, "'\\ud800'", ":1"),
    "5000 levels": (b'{"prompt": "x", "y": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "deeply", ":1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_table_is_refused(name: str, tmp_path: Path, no_weights: None) -> None:
    content, key, line = BROKEN[name]
    assert_refused(refused(tmp_path, content), 4, key, where=f"d.jsonl{line}" if line else "data")


TAKEN = {
    "a byte order mark": "\ufeff" + lines(ROWS),
    "CRLF": lines(ROWS).replace("\n", "\r\n"),
    "blank lines": lines(ROWS).replace("\n", "\n\n"),
    "no end of line": lines(ROWS).rstrip(),
    "odd columns": lines([r | {"class": 1, "a b": 2, "": None} for r in ROWS]),
    "BD-3 one too long": lines([*ROWS, {"prompt": "long" * 9}]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_unusual_and_right_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(TAKEN[name].encode())
    run = make(tmp_path, f"data.path={tmp_path}/d.jsonl", "data.max_prompt_length=9", *ONE_SET)
    assert len(run.prompts) == 10
    assert run.prompts.dropped == (1 if "too long" in name else 0)


def test_bd_4_a_name_that_is_not_here_names_the_caches_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError) as caught:
        make(tmp_path, "data.path=nobody/nothing", *ONE_SET)
    assert_refused(caught, 3, "'nobody/nothing'", where="data.path", fix="rloo fetch")


def test_bd_6_conversations_for_a_model_without_a_template(
    tmp_path: Path, no_weights: None
) -> None:
    fresh(vocab_size=len(tiny.tiny_tokenizer()), max_position_embeddings=2048).save_pretrained(
        tmp_path / "m"
    )
    tokens = tiny.tiny_tokenizer()
    tokens.chat_template = None
    tokens.save_pretrained(tmp_path / "m")
    rows = lines([{"prompt": [{"role": "user", "content": "x"}]}] * 8)
    error = refused(tmp_path, rows, f"model.path={tmp_path}/m")
    assert_refused(error, 4, where="data.prompt_column", fix="model.chat_template=FILE.jinja")


@pytest.mark.slow
def test_bd_7_100_000_identical_prompts_are_warned_of_and_work(
    tmp_path: Path,
) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "same"}\n' * 100_000)
    run = make(tmp_path, f"data.path={tmp_path}/d.jsonl", *ONE_SET)
    assert len(run.prompts) == 100_000
    assert "identical" in split_notes(None, run.prompts)[-1]


@pytest.mark.parametrize("kind", ["fifo", "folder", "broken link"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path, no_weights: None) -> None:
    path = tmp_path / "x.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(RunError) as caught:
        make(tmp_path, f"data.path={path}", *ONE_SET)
    assert_refused(caught, 4 if kind == "folder" else 2, "x.jsonl", where="data.path")


def test_refused_data_leave_no_run(rloo: Rloo) -> None:
    (rloo.folder / "d.jsonl").write_text(lines([{"question": "x"}] * 8))
    ended = rloo("train", "+recipe=smoke", "data.path=d.jsonl", "data.eval_split=null")
    assert_refused(ended, 4, fix="data.prompt_column=question")
    assert rloo.left() == ["d.jsonl"]


# Models.


def test_bm_2_a_model_that_wants_its_own_code_names_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    classes = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    tiny.tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={folder}", *ONE_SET)
    assert_refused(caught, 2, where="model.path", fix="model.trust_remote_code=true")
    assert not (tmp_path / "pwned").exists()


def test_bm_3_two_vocabularies_are_told_by_their_sizes(tmp_path: Path) -> None:
    sizes = len(tiny.tiny_tokenizer()), len(tiny.tiny_tokenizer()) + 8
    for name, size in zip("ab", sizes, strict=True):
        fresh(vocab_size=size, max_position_embeddings=2048).save_pretrained(tmp_path / name)
        tiny.tiny_tokenizer().save_pretrained(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={tmp_path}/a", f"model.ref_path={tmp_path}/b", *ONE_SET)
    problem = assert_refused(caught, 2, f"{sizes[0]} tokens", fix="model.ref_path=")
    assert f" {sizes[1]}" in problem.why


def test_bc_20_bfloat16_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    with pytest.raises(MachineError) as caught:
        load.resolve_dtype("bfloat16", torch.device("cuda"))
    assert_refused(caught, 3, "Old GPU", where="model.dtype", fix="model.dtype=float32")
    assert load.resolve_dtype("auto", torch.device("cuda")) is torch.float32
