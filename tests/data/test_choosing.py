"""data.filter and data.streaming: which rows are used, and what is said of the others."""

import json
from pathlib import Path

import datasets
import pytest
from assert_refused import assert_refused
from loop_cases import checked, make
from prompt_cases import config

from rloo_cli.config.user_code import user_code_notes
from rloo_cli.data import dataset, splits
from rloo_cli.data.json_files import json_rows
from rloo_cli.utils.errors import ConfigError, DataError

ROWS = [{"question": f"p{i}", "level": i % 3, "hard": i > 7, "kind": "ab"[i % 2]} for i in range(9)]
CODE = """
seen = []
def odd(row):
    seen.append(row["level"])
    return row["level"] == 1
def number(row): return 1
def fails(row): return row["nope"]
"""
BOTH = pytest.mark.parametrize("how", [{}, {"streaming": True, "max_samples": 9}], ids=["", "rows"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(CODE)
    return path


def opened(file: Path, split: str = "train", **changes) -> dataset.OpenedSplit:
    changes = {"path": str(file), "columns": {"question": "prompt"}} | changes
    return dataset.open_split(config(**changes), split)


@BOTH
def test_rows_are_chosen_by_the_values_of_columns(file, how) -> None:
    found = opened(file, filter={"level": 1}, **how)
    assert found.dataset["prompt"][:] == ["p1", "p4", "p7"] and found.filtered_out == 6
    found = opened(file, filter={"level": [0, 1], "kind": "a"}, **how)
    assert found.dataset["prompt"][:] == ["p0", "p4", "p6"]
    assert opened(file, **how).filtered_out == 0
    # Flags and numbers are told apart: 1 == True in Python.
    assert opened(file, filter={"hard": True}, **how).dataset["prompt"][:] == ["p8"]
    with pytest.raises(DataError):
        opened(file, filter={"hard": 1}, **how)


@BOTH
def test_rows_are_chosen_by_a_function_of_ones_own(file, how) -> None:
    mine = file.with_name("mine.py")
    assert len(opened(file, filter=f"{mine}:odd", **how).dataset) == 3
    for name, key in (("number", "row 0"), ("fails", "KeyError: 'nope'")):
        with pytest.raises(DataError) as caught:
            opened(file, filter=f"{mine}:{name}", **how)
        assert_refused(caught, 4, key, where=f"data.filter={mine}:{name}", fix=f"{mine}:{name}")


@pytest.mark.parametrize(
    "changes, key, where",
    [
        ({"filter": {"level": 7}}, "all 9", "data.filter"),
        ({"filter": {"levle": 7}}, "'levle'", "data.filter"),
        ({"columns": {"nope": "prompt"}}, "'nope'", "data.columns"),
        ({"columns": {}}, "'prompt'", "data.prompt_column"),
        ({"path": "empty.jsonl"}, "0 rows", "data.path"),
        ({"split": "test"}, "'test'", "data.split"),
    ],
    ids=["no row left", "filter", "columns", "prompt_column", "no rows", "split"],
)
@BOTH
def test_what_the_rows_lack_is_refused_however_they_are_read(
    changes, key, where, file, how, monkeypatch, sentence
) -> None:
    monkeypatch.chdir(file.parent)
    Path("empty.jsonl").write_text("")
    with pytest.raises(DataError) as caught:
        opened(file, **changes, **how)
    assert_refused(caught, 4, key, where=where)
    if where == "data.filter" and not how:
        sentence(caught)


def test_the_filter_comes_before_max_samples(file) -> None:
    found = opened(file, filter={"level": [1, 2]}, max_samples=3)
    assert found.dataset["prompt"][:] == ["p1", "p2", "p4"] and found.filtered_out == 3


def test_streaming_reads_no_further_than_it_must(file, monkeypatch) -> None:
    read = []

    def counted(path):
        for row in json_rows(path):
            read.append(row)
            yield row

    monkeypatch.setitem(dataset.ROW_READERS, ".jsonl", counted)
    found = opened(file, streaming=True, max_samples=2)
    assert found.dataset["prompt"][:] == ["p0", "p1"] and len(read) == 2
    read.clear()
    found = opened(file, streaming=True, max_samples=2, filter={"level": 2})
    assert found.dataset["prompt"][:] == ["p2", "p5"] and found.filtered_out == 4 and len(read) == 6


def test_streamed_and_whole_are_the_same_rows(file) -> None:
    whole = opened(file, max_samples=5).dataset
    assert opened(file, max_samples=5, streaming=True).dataset.to_list() == whole.to_list()


def test_what_lies_on_the_disk_is_not_streamed(tmp_path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "d", streaming=True, max_samples=2)
    assert_refused(caught, 4, where="data.streaming", fix="data.streaming=false")


# In the config, and in a run


def test_streaming_needs_an_end_and_something_to_read(file) -> None:
    for words, key, fix in (
        (("data.streaming=true",), "data.streaming", "data.max_samples="),
        (("data.streaming=true", "data.max_samples=3"), "make:tiny", "data.streaming=false"),
        (
            (f"eval.sets.a={{path: '{file}', split: train, streaming: true}}",),
            "eval.sets.a.streaming",
            "eval.sets.a.max_samples=",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            checked((), words)
        assert_refused(caught, 2, key, fix=fix)


def test_a_filter_that_is_no_code_is_found_before_it_runs(file) -> None:
    mine = file.with_name("mine.py")
    for spec, key in ((f"{mine}:od", "'od'"), ("odd", "'odd'"), ("no.py:f", "no.py"),
                      ("os:system", "'os:system'")):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            checked((), (f"data.filter={spec}",))
        assert_refused(caught, 2, key, where="data.filter", fix="data.filter=")
    (note,) = user_code_notes(checked((), (f"data.filter={mine}:odd",)))
    assert note.startswith(f"data.filter: code from {mine}:odd, sha256 ")


def test_a_run_counts_and_says_what_was_left_out(file, tmp_path) -> None:
    words = (f"data.path={file}", "data.columns={question: prompt}", "data.eval_split='train[6:]'")
    run = make(tmp_path, *words, "data.filter={level: [0, 1]}")
    assert len(run.prompts) == 6 and run.prompts.filtered_out == 3
    for name, split, count in ((None, run.prompts, "3"), ("", run.eval_sets[""], "1")):
        notes = splits.split_notes(name, split)
        assert [n.split()[0] for n in notes if n.endswith("(data.filter)")] == [count]
    other = make(tmp_path, *words, "data.filter={level: [0, 2]}", "name=other")
    assert other.prompts.fingerprint != run.prompts.fingerprint
