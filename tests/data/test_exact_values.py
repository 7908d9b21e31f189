"""The values that rewards see are those in the file, with their types; conversions are said."""

import datetime
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from assert_refused import assert_refused
from prompt_cases import config, tokenizer

from rloo_cli.data import dataset, exact_values, mixture, prompts
from rloo_cli.utils.errors import DataError

BIG = 12345678901234567890123
COLUMNS = {
    "dates": ["2024-01-15", "2024-01-16", "2024-01-17"],
    "times": ["2024-01-15 10:00:00", "2024-01-15T10:00:00Z", None],
    "digits": ["007", "1e5", "1,234"],
    "integers beside a null": [1, None, 3],
    "integers beside a fraction": [1, 2.5, 3],
    "fractions": [0.1234567890123456, 2.0, None],
    "large integers": [BIG, 1, 2**63],
    "text and numbers": ["5", 5, 5.0],
    "flags and numbers": [True, 1, None],
    "empty": [None, None, None],
    "late": [None, None, "2024-01-15"],
    "lists": [[1, 2], [], None],
    "lists of mixtures": [[1, 2.5], ["a"], [None, True]],
    "objects": [{"a": 1}, {"b": "2024-01-15"}, {}],
    "nested objects": [{"a": {"b": [1, 2.0]}}, {"a": None}, None],
    "objects and text": [{"a": 1}, "x", ["y"]],
    "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "n": 1}], []],
}  # fmt: skip
HOW = pytest.mark.parametrize("how", [{}, {"streaming": True, "max_samples": 9}], ids=["", "rows"])


def file_of(path, values, column="answer"):
    rows = [{"prompt": f"p{i}", column: value} for i, value in enumerate(values)]
    texts = [json.dumps(row) for row in rows]
    path.write_text(f"[{', '.join(texts)}]" if path.suffix == ".json" else "\n".join(texts))
    return path


def opened(path, **changes):
    return dataset.open_split(config(path=str(path), **changes), "train")


def examples(path, **changes):
    """What rewards are given."""
    settings = config(path=str(path), **changes)
    data = dataset.load_split(settings, "train")
    found = prompts.tokenize_prompts(data, settings, tokenizer(), {}, None, 1)
    return found.examples


def answers(path, **changes):
    return [row["answer"] for row in examples(path, **changes)]


@HOW
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)
def test_a_value_of_json_reaches_rewards_as_it_is_written(values, suffix, how, tmp_path):
    path = file_of(tmp_path / f"a.{suffix}", values)
    # repr tells 1, 1.0 and True apart.
    assert repr(answers(path, **how)) == repr(values)


@pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)
def test_types_that_change_in_the_middle_of_a_large_file_change_no_value(
    values, tmp_path, monkeypatch
):
    monkeypatch.setattr(exact_values, "ROWS_AT_ONCE", 1)
    path = file_of(tmp_path / "a.jsonl", values)
    assert repr(answers(path)) == repr(values)
    assert repr(opened(path).dataset["answer"][:]) == repr(values)


def test_a_folder_of_files_and_its_slices_keep_values_too(tmp_path):
    file_of(tmp_path / "train.jsonl", COLUMNS["dates"])
    file_of(tmp_path / "test.jsonl", COLUMNS["text and numbers"])
    assert answers(tmp_path) == COLUMNS["dates"]
    settings = config(path=str(tmp_path))
    assert repr(dataset.load_split(settings, "test[1:]")["answer"][:]) == "[5, 5.0]"
    assert len(dataset.load_split(settings, "train+test")) == 6


MAP = """
import datetime
def same(row): return row
def mixed(row): return row | {"answer": 1 if row["prompt"] == "p0" else 2.5}
def dated(row): return row | {"answer": datetime.date(2024, 1, 15)}
"""


@HOW
def test_what_a_map_returns_keeps_its_types(how, tmp_path):
    (tmp_path / "mine.py").write_text(MAP)
    path = file_of(tmp_path / "a.jsonl", COLUMNS["objects"])
    assert answers(path, map=f"{tmp_path}/mine.py:same", **how) == COLUMNS["objects"]
    assert repr(answers(path, map=f"{tmp_path}/mine.py:mixed", **how)) == "[1, 2.5, 2.5]"
    dates = answers(path, map=f"{tmp_path}/mine.py:dated", **how)
    assert dates == [datetime.date(2024, 1, 15)] * 3


def test_a_reward_and_a_filter_see_the_text_of_a_date(tmp_path):
    path = file_of(tmp_path / "a.jsonl", COLUMNS["dates"])
    found = opened(path, filter={"answer": "2024-01-16"})
    assert found.dataset["prompt"][:] == ["p1"] and found.notes == ()


def test_rows_of_mixed_values_keep_them_where_they_are_saved(tmp_path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "x"}]
    exact_values.dataset_of_rows(rows).save_to_disk(tmp_path / "d")
    assert answers(tmp_path / "d") == [1, "x"]


# CSV


CSV = 'prompt,answer,level\np0,007,1\np1,NA,\n"p2, 3",None,3\np3,2024-01-15,4\n'


@HOW
def test_a_cell_of_a_csv_file_is_text_and_an_empty_one_is_none(how, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    assert answers(path, **how) == ["007", "NA", "None", "2024-01-15"]
    found = opened(path, **how)
    assert found.dataset["level"][:] == ["1", None, "3", "4"]
    assert [note[:2] + note[-5:] for note in found.notes] == ["1 level"]


@HOW
def test_data_types_converts_columns_and_says_how_many_values(how, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    found = opened(path, types={"level": "int"}, filter={"level": [3, 4]}, **how)
    assert repr(found.dataset["level"][:]) == "[3, 4]"
    assert any(note.startswith("3 ") and "data.types" in note for note in found.notes)
    with pytest.raises(DataError) as caught:
        opened(path, types={"answer": "float"}, **how)
    assert_refused(caught, 4, "row 1", where="data.types.answer", fix="data.types={answer: str}")
    renamed = {"columns": {"level": "hard"}, "types": {"hard": "bool"}, "filter": {"hard": True}}
    with pytest.raises(DataError) as caught:
        opened(path, **renamed, **how)
    assert_refused(caught, 4, "row 2", where="data.types.hard")


def test_data_types_names_a_column(tmp_path, sentence):
    path = file_of(tmp_path / "a.jsonl", ["1"])
    with pytest.raises(DataError) as caught:
        opened(path, types={"answr": "int"})
    assert_refused(caught, 4, "'answr'", where="data.types", fix="answer")
    sentence(caught)


@pytest.mark.parametrize(
    "kind, values, wanted",
    [
        ("str", [5, 2.5, True, "x", {"a": 1}, None], ["5", "2.5", "true", "x", '{"a": 1}', None]),
        ("int", ["5", 5.0, " 7 ", "", True, BIG], [5, 5, 7, None, 1, BIG]),
        ("float", ["5", 2, "1e3", None], [5.0, 2.0, 1000.0, None]),
        ("bool", ["True", "0", 1, False, " "], [True, False, True, False, None]),
    ],
)
def test_each_type_of_data_types_converts_what_means_the_same(kind, values, wanted, tmp_path):
    path = file_of(tmp_path / "a.jsonl", values)
    assert repr(answers(path, types={"answer": kind})) == repr(wanted)


@pytest.mark.parametrize(("text", "line"), [
    ('prompt,answer\na,"b\nc,d\n', 3),
    ("prompt,answer\na\n", 2),
    ("prompt,prompt\na,b\n", 1),
], ids=["quote", "short", "twice"])  # fmt: skip
def test_a_csv_file_that_would_lose_cells_is_refused_with_its_line(text, line, tmp_path, sentence):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        opened(path)
    assert_refused(caught, 4, "a.csv", where=f"{path}:{line}", fix=f"line {line}")
    sentence(caught)


# Parquet, saved data sets, mixtures


def test_the_index_and_the_nan_of_pandas_are_left_out_and_said(tmp_path, sentence):
    path = tmp_path / "a.parquet"
    nan = float("nan")
    values = {"prompt": ["a", "b", "c"], "score": [0.5, nan, None], "n": [1.0, None, 3.0]}
    pq.write_table(pa.table(values | {"__index_level_0__": [7, 8, 9]}), path)
    found = opened(path)
    assert found.column_names == ["prompt", "score", "n"]
    assert found.dataset["score"][:] == [0.5, None, None]
    sentence("\n".join(found.notes))
    assert repr(opened(path, types={"n": "int"}).dataset["n"][:]) == "[1, None, 3]"


def test_a_column_of_dates_is_named_where_a_file_has_dates(tmp_path, sentence):
    path = tmp_path / "d"
    day = datetime.datetime(2024, 1, 15)
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": [day]}).save_to_disk(path)
    found = opened(path)
    assert found.dataset["answer"][0] == day
    sentence("\n".join(found.notes))


def test_sources_with_other_types_keep_their_own_and_it_is_said(tmp_path, sentence):
    found = {}
    for name, values in {"a": ["1", "2"], "b": [1, 2]}.items():
        settings = config(path=str(file_of(tmp_path / f"{name}.jsonl", values)))
        data = dataset.load_split(settings, "train")
        found[name] = prompts.tokenize_prompts(data, settings, tokenizer(), {}, None, 1)
    joined = mixture.join_prompts(found, {"a": 1.0, "b": 1.0}, 1)
    assert [row["answer"] for row in joined.examples] == ["1", "2", 1, 2]
    sentence("\n".join(joined.value_notes))
