"""Files of JSON that Arrow dies of are refused before it reads them."""

from pathlib import Path

import pytest
from prompt_cases import config

from rloo_cli.data import dataset
from rloo_cli.data.json_files import refuse_unreadable_json
from rloo_cli.utils.errors import DataError

DEEP = b'{"a":' * 9000 + b"1" + b"}" * 9000
GOOD = b'{"prompt": "a"}\n'
BAD = {
    "null": (b"\n\nnull\n" + GOOD, "line 1 is not a JSON object"),
    "null later": (GOOD + b"\nnull\n", "line 3 is not a JSON object"),
    "null in an array": (b'[{"prompt": "a"}, null]', "element 1 is null"),
    "deep": (GOOD + DEEP, "line 2 is nested too deep"),
}


@pytest.mark.parametrize("text, said", BAD.values(), ids=BAD)
def test_what_arrow_dies_of_is_refused_with_its_line(
    text: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=said):
        refuse_unreadable_json(path)
    with pytest.raises(DataError, match=said):
        dataset.load_split(config(path=str(path)), "train")


def test_a_null_inside_of_one_object_of_many_lines_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'{"prompt": [\n null\n]}')
    refuse_unreadable_json(path)
