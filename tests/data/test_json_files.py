"""Rows of JSON files, as they are written; what is not a row is refused with its line."""

from pathlib import Path

import pytest
from prompt_cases import config

from rloo_cli.data import dataset
from rloo_cli.data.json_files import json_rows
from rloo_cli.utils.errors import DataError

DEEP = b'{"a":' * 9000 + b"1" + b"}" * 9000
GOOD = b'{"prompt": "a"}\n'
BAD = {
    "null": (b"\n\nnull\n" + GOOD, "line 3 is not a JSON object"),
    "null later": (GOOD + b"\nnull\n", "line 3 is not a JSON object"),
    "null in an array": (b'[{"prompt": "a"}, null]', "element 1 is null"),
    "deep": (GOOD + DEEP, "line 2 is nested too deep"),
    "half of a pair": (GOOD + b'{"prompt": "\\ud83d"}', "line 2 is not text"),
}


@pytest.mark.parametrize("text, said", BAD.values(), ids=BAD)
def test_what_is_not_a_row_is_refused_with_its_line(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=said):
        list(json_rows(path))
    with pytest.raises(DataError, match=said):
        dataset.load_split(config(path=str(path)), "train")


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
