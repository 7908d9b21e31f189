"""Finding and opening a split: every source, and every way in which it is not there."""

import csv
import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import yaml
from assert_refused import assert_refused

from rloo_cli.config.schema import DataConfig
from rloo_cli.data import dataset
from rloo_cli.utils.errors import DataError, MachineError

YAML = Path(__file__).parents[2] / "conf/data/default.yaml"
ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def config(path, **changes):
    return DataConfig(**yaml.safe_load(YAML.read_text()) | {"path": str(path)} | changes)


def load(path, split="train", **changes):
    return dataset.load_split(config(path, **changes), split)


def refused(path, split="train", error=DataError, **changes):
    with pytest.raises(error) as caught:
        load(path, split, **changes)
    return caught.value


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_each_kind_gives_its_rows(suffix, tmp_path):
    found = load(write(tmp_path / f"a.{suffix}"))
    assert found["prompt"][:] == [row["prompt"] for row in ROWS]
    assert [str(a) for a in found["answer"]] == [row["answer"] for row in ROWS]


def test_a_folder_of_files_has_their_splits(tmp_path):
    jsonl(tmp_path / "train.jsonl")
    jsonl(tmp_path / "test.jsonl", ROWS[:2])
    assert len(load(tmp_path)) == 10
    assert len(load(tmp_path, "test")) == 2
    problem = assert_refused(refused(tmp_path, "validation"), 4, "'validation'", "data.split")
    assert "['train', 'test']" in problem.why


def on_disk(path):
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=whole, test=whole.select(range(2))).save_to_disk(path)
    return path


def test_a_saved_dataset_dict_has_its_splits(tmp_path):
    assert len(load(on_disk(tmp_path / "d"))) == 10
    assert load(tmp_path / "d", "test")["answer"][:] == ["0", "1"]
    wrong = refused(tmp_path / "d", "validation")
    problem = assert_refused(wrong, 4, "'validation'", where="data.split")
    assert "['train', 'test']" in problem.why


def test_a_saved_dataset_is_its_only_split(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    assert load(tmp_path / "d")["prompt"][:] == load(tmp_path / "d", "any")["prompt"][:]
    assert len(load(tmp_path / "d")) == 10


def source(kind, folder):
    if kind == "file":
        return jsonl(folder / "a.jsonl")
    if kind == "folder":
        jsonl(folder / "train.jsonl")
        return folder
    if kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(folder / "d")
        return folder / "d"
    return on_disk(folder / "d")


@pytest.mark.parametrize("kind", ["file", "folder", "saved", "saved_dict"])
def test_one_file_is_parted_by_slices_of_its_split(kind, tmp_path):
    path = source(kind, tmp_path)
    first, rest = load(path, "train[:80%]"), load(path, "train[80%:]")
    assert (len(first), len(rest)) == (8, 2)
    assert [*first["answer"], *rest["answer"]] == [row["answer"] for row in ROWS]
    assert load(path, "train[3:5]")["answer"][:] == ["3", "4"]


@pytest.mark.parametrize("kind", ["file", "saved_dict"])
def test_a_slice_that_cannot_be_read_is_a_wrong_split(kind, tmp_path):
    assert_refused(refused(source(kind, tmp_path), "train[:x]"), 4, "train[:x]", "data.split")


def test_a_file_has_no_split_but_train(tmp_path, sentence):
    error = refused(jsonl(tmp_path / "a.jsonl"), "test")
    assert_refused(error, 4, "'test'", where="data.split", fix="data.split=train")
    sentence(error)


def test_addition_is_made_here():
    train, test = load("make:addition"), load("make:addition", "test")
    assert (len(train), len(test)) == (7600, 500)
    a, b = train[0]["prompt"].removesuffix("=").split("+")
    assert int(a) + int(b) == int(train[0]["answer"])


def test_tiny_prompts_are_made_here():
    assert len(load("make:tiny")) == 64
    assert len(load("make:tiny", "train[:10]")) == 10
    assert load("make:tiny", "test")["prompt"][:] == load("make:tiny", "validation")["prompt"][:]
    assert dataset.is_messages(load("make:tiny_chat", "test")[0]["prompt"])


@pytest.mark.parametrize("split", ["tset", "test[:x]", "train+test"])
def test_a_made_data_set_has_no_other_split(split):
    assert_refused(refused("make:tiny", split), 4, f"{split!r}", where="data.split")


def test_a_missing_prompt_column_is_answered_with_the_columns_and_a_guess(tmp_path, sentence):
    path = jsonl(tmp_path / "a.jsonl", [{"id": 1, "promt": "x", "answer": "y"}])
    error = refused(path)
    problem = assert_refused(error, 4, "'prompt'", fix="data.prompt_column=promt")
    assert "id, promt, answer" in problem.why
    sentence(error)


def test_the_guess_is_a_column_of_text_where_no_name_is_near(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"id": 1, "question": "x"}])
    assert_refused(refused(path), 4, fix="data.prompt_column=question")
    talk = [{"id": 1, "talk": [{"role": "user", "content": "x"}]}]
    assert_refused(refused(jsonl(tmp_path / "b.jsonl", talk)), 4, fix="data.prompt_column=talk")


@pytest.mark.parametrize("name, text", [("a.jsonl", ""), ("a.json", "[]"), ("a.csv", "prompt\n")])
def test_a_file_without_rows_is_empty(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert_refused(refused(tmp_path / name), 4, "empty", where="data.path")


def test_a_split_without_rows_is_empty(tmp_path, sentence):
    error = refused(jsonl(tmp_path / "a.jsonl"), "train[:0]")
    assert_refused(error, 4, "0 rows", where="data.path", fix="data.split")
    sentence(error)
    assert_refused(refused(on_disk(tmp_path / "some"), "train[:0]"), 4, "0 rows")
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "d")
    assert_refused(refused(tmp_path / "d"), 4, "0 rows")


def test_columns_are_renamed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "x", "gold": "y"}])
    found = load(path, columns={"question": "prompt", "gold": "answer"})
    assert found[0] == {"prompt": "x", "answer": "y"}


def test_two_columns_can_change_names(tmp_path):
    found = load(jsonl(tmp_path / "a.jsonl"), columns={"prompt": "answer", "answer": "prompt"})
    assert found[3] == {"answer": "p3", "prompt": "3"}


def test_renaming_what_is_not_there_is_refused(tmp_path, sentence):
    error = refused(jsonl(tmp_path / "a.jsonl"), columns={"question": "prompt"})
    assert_refused(error, 4, "'question'", where="data.columns")
    sentence(error)


@pytest.mark.parametrize("columns", [{"answer": "prompt"}, {"answer": "x", "prompt": "x"}])
def test_renaming_to_a_name_that_is_taken_is_refused(columns, tmp_path):
    error = refused(jsonl(tmp_path / "a.jsonl"), columns=columns)
    assert_refused(error, 4, "two", where="data.columns")


@pytest.mark.parametrize("most, rows", [(3, 3), (10, 10), (99, 10)])
def test_max_samples_keeps_the_first_rows(most, rows, tmp_path):
    found = load(jsonl(tmp_path / "a.jsonl"), max_samples=most)
    assert found["answer"][:] == [row["answer"] for row in ROWS[:rows]]


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_a_hub_name_without_network_says_where_it_was_looked_for(name):
    problem = assert_refused(refused(name, error=MachineError), 3, repr(name), fix="rloo fetch")
    assert str(datasets.config.HF_DATASETS_CACHE) in problem.render()


BROKEN = {
    "a.jsonl": (b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
    "a.json": (b"[1, 2", "line 1"),
    "a.csv": (b'prompt,answer\n"a,b\n', "EOF"),
    "b.csv": (b"prompt,answer\n\xff\xfe\xff,b\n", "utf-8"),
    "c.csv": (b"", "columns"),
    "a.parquet": (b"PAR1 nonsense", "magic"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_corrupt_file_is_refused_with_what_is_wrong_in_it(name, tmp_path):
    content, why = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    problem = assert_refused(refused(tmp_path / name), 4, why, where="data.path")
    assert name in problem.what


@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_a_file_of_an_unknown_kind_is_refused_with_the_known_ones(name, tmp_path):
    (tmp_path / name).write_text("x")
    problem = assert_refused(refused(tmp_path / name), 4, name, where="data.path")
    assert ".parquet" in problem.render()


def test_a_folder_without_data_is_refused(tmp_path):
    assert_refused(refused(tmp_path), 4, tmp_path.name, where="data.path")


def test_a_script_beside_the_data_is_not_run(tmp_path):
    folder, mark = tmp_path / "script", tmp_path / "mark"
    folder.mkdir()
    (folder / "script.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert_refused(refused(folder), 4, "script", where="data.path")
    assert not mark.exists()


def test_a_conversation_is_a_list_of_messages():
    message = {"role": "user", "content": "x"}
    assert dataset.is_messages([message]) and dataset.is_messages([message, message])
    for other in ("x", [], [message, "x"], [{"role": "user"}], [{"content": "x"}], message, None):
        assert not dataset.is_messages(other)


def test_a_message_has_a_role_and_a_text_parts_or_calls():
    good = [{"content": "x"}, {"content": [{"type": "text", "text": "x"}]}]
    good += [{"content": None, "tool_calls": [{"name": "f"}]}, {"content": ""}]
    assert all(dataset.is_messages([{"role": "assistant"} | m]) for m in good)
    bad = [{"content": None}, {"content": None, "tool_calls": None}, {"content": 3}, {"role": 3}]
    assert not any(dataset.is_messages([{"role": "user", "content": None} | m]) for m in bad)
