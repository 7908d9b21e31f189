"""Any rows in any file: prompts that are what the file says, or one clear error before a model."""

import json
from typing import Any

import pytest
from fuzz_cases import SOUND_TEXTS, TREES, clear_error, damage, effort
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_cases import config, tokenizer

from rloo_cli.data import dataset, prompts

pytestmark = pytest.mark.wide

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"},
]  # fmt: skip
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": 2} for row in ROWS]


def lines_of(rows: list[Any]) -> bytes:
    """As JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CONTENTS = st.one_of(SOUND_TEXTS, TREES)
MESSAGES = st.lists(
    st.one_of(TREES, st.fixed_dictionaries({"role": SOUND_TEXTS, "content": CONTENTS})), max_size=3
)
PROMPTS = st.one_of(SOUND_TEXTS, MESSAGES, TREES)
ROW = st.fixed_dictionaries({"prompt": PROMPTS}, optional={"answer": TREES})
OWN = st.lists(st.one_of(TREES, ROW))
FILES = st.one_of(
    OWN.map(lines_of), st.sampled_from([lines_of(ROWS), lines_of(CHAT)]).flatmap(damage),
    st.binary(max_size=60), SOUND_TEXTS.map(str.encode),
    TREES.map(lambda tree: json.dumps(tree).encode()),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> Any:
    """A tokenizer of bytes."""
    return tokenizer()


@effort(40)
@given(FILES, st.sampled_from(["jsonl", "json", "csv", "parquet"]),
       st.sampled_from(["filter", "truncate_left", "error"]))  # fmt: skip
@example(b"", "jsonl", "filter")
@example(b"\xff\xfe", "csv", "filter")
@example(b"null", "jsonl", "filter")
@example(b'[null, {"": null}, null]', "jsonl", "filter")
@example(b'{"a":' * 9000 + b"1" + b"}" * 9000, "jsonl", "filter")
def test_whatever_a_file_of_data_holds(
    tmp_path_factory: pytest.TempPathFactory, tokens: Any, text: bytes, ending: str, overlong: str
) -> None:
    path = tmp_path_factory.mktemp("data") / f"rows.{ending}"
    path.write_bytes(text)
    keys = config(path=str(path), overlong=overlong)
    with clear_error():
        rows = dataset.load_split(keys, "train")
        found = prompts.tokenize_prompts(rows, keys, tokens, {}, 20, 1)
        for index in range(len(found)):
            group = found.group_of(index)
            assert group.prompt_ids and len(group.prompt_ids) <= 20
