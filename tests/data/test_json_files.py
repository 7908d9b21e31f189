"""Rows of JSON files, as they are written; what is not a row is refused with its line."""

from pathlib import Path

import pytest
from assert_refused import assert_refused
from prompt_cases import config

from rloo_cli.data import dataset
from rloo_cli.data.json_files import json_rows
from rloo_cli.utils.errors import DataError

DEEP = b'{"a":' * 9000 + b"1" + b"}" * 9000
GOOD = b'{"prompt": "a"}\n'
BAD = {
    "null": (b"\n\nnull\n" + GOOD, "line 3"),
    "null later": (GOOD + b"\nnull\n", "line 3"),
    "null in an array": (b'[{"prompt": "a"}, null]', "element 1"),
    "deep": (GOOD + DEEP, "line 2"),
    "half of a pair": (GOOD + b'{"prompt": "\\ud83d"}', "line 2"),
}


@pytest.mark.parametrize("text, key", BAD.values(), ids=BAD)
def test_what_is_not_a_row_is_refused_with_its_line(
    text: bytes, key: str, tmp_path: Path, sentence
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        list(json_rows(path))
    sentence(assert_refused(caught, 4, key).what)
    with pytest.raises(DataError) as caught:
        dataset.load_split(config(path=str(path)), "train")
    assert_refused(caught, 4, key, where="data.path")


FORMS = {
    "lines": b'\xef\xbb\xbf{"prompt": "a", "n": 1}\n\n{"prompt": "b", "n": 2.5}',
    "an array": b'[{"prompt": "a", "n": 1},\n {"prompt": "b", "n": 2.5}]',
    "lists": b'{"prompt": ["a", "b"],\n "n": [1, 2.5]}',
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_a_json_file_is_lines_an_array_or_one_object_of_lists(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    rows = list(json_rows(path))
    assert repr(rows) == repr([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2.5}])


def test_whole_pairs_and_an_object_of_many_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00",\n "x": null}')
    assert list(json_rows(path)) == [{"prompt": "\U0001f600", "x": None}]
