"""Data of many rows: what is looked at at the start, what is kept, and what is read when drawn.

Here a dozen rows are many: the limits are made small.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import datasets
import pytest
from assert_refused import assert_refused
from prompt_cases import chat, config, tokenizer
from resume_cases import attempt, differing, left

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.data import cache, dataset, exact_values, fingerprint, prompts, splits, survey
from rloo_cli.data.render import PromptRows
from rloo_cli.data.vocabulary import check_prompt_ids
from rloo_cli.utils.errors import ConfigError, DataError, RunError

COUNT = 60


@pytest.fixture(autouse=True)
def a_dozen_is_many(monkeypatch, tmp_path):
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(survey, "ROWS_WORTH_KEEPING", 12)
    monkeypatch.setattr(survey, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(survey, "LONGEST_ROWS", 2)
    monkeypatch.setattr(exact_values, "ROWS_AT_ONCE", 11)
    monkeypatch.setattr(dataset, "LARGE_FILE_BYTES", 100)
    monkeypatch.setattr(fingerprint, "ROWS_AT_ONCE", 9)
    monkeypatch.setattr(prompts, "FIRST_PROMPTS", 7)


def texts(count=COUNT):
    return [f"{i} and {i * i}" for i in range(count)]


def json_file(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path, **changes):
    settings = config(path=str(path), split="train", **changes)
    return dataset.open_split(settings, "train"), settings


def prepared(path, tokens=None, longest=None, vocab_size=None, **changes):
    split, settings = opened(path, **changes)
    return prompts.tokenize_prompts(
        split.dataset, settings, tokens or tokenizer(), {}, longest, 1, vocab_size=vocab_size
    )


def counted(monkeypatch):
    """The rows that are tokenized from now on."""
    seen = []
    tokenize = PromptRows.tokenize

    def count(self, rows, texts_alone=False):
        seen.extend(rows)
        return tokenize(self, rows, texts_alone)

    monkeypatch.setattr(PromptRows, "tokenize", count)
    return seen


def forms():
    rows = [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts())]
    talks = [{"prompt": [{"role": "user", "content": text}]} for text in texts()]
    nested = [{"q": {"prompt": text}, "answer": i} for i, text in enumerate(texts())]
    mixed = [{"prompt": text, "answer": i if i % 2 else str(i)} for i, text in enumerate(texts())]
    return {
        "plain": (rows, {}),
        "conversations": (talks, {}),
        "a nested column": (nested, {"prompt_column": "q.prompt"}),
        "a column of two types": (mixed, {}),
        "a template": (rows, {"template": "{prompt} {answer}"}),
        "filtered": (rows, {"filter": {"answer": [str(i) for i in range(0, COUNT, 2)]}}),
    }


@pytest.mark.parametrize("form", [*forms()])
def test_a_prompt_that_is_read_when_it_is_drawn_is_what_all_at_once_would_be(form, tmp_path):
    rows, changes = forms()[form]
    path = json_file(tmp_path, rows)
    found = prepared(path, **changes)
    again = prepared(path, **changes)  # from the cache
    whole = opened(path, **changes)[0].dataset.to_list()
    assert len(found) == len(whole) and found.fingerprint == again.fingerprint
    one_by_one = [found.group_of(i) for i in reversed(range(len(found)))][::-1]
    together = again.groups_at(0, len(again))
    drawn = sorted(together, key=lambda group: found.prompt_ids.index(group.prompt_ids))
    for group, other in zip(one_by_one, drawn, strict=True):
        assert (group.prompt, group.example) == (other.prompt, other.example)
    assert found.max_length == max(map(len, found.prompt_ids))


def with_last(value):
    return [*({"prompt": text} for text in texts()), {"prompt": value}]


TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        pytest.param(with_last(None), {}, id="no text"),
        pytest.param(with_last(3), {}, id="a number"),
        pytest.param(with_last(""), {}, id="empty text"),
        pytest.param([*chat(*texts()), {"prompt": [{"role": "user"}]}], {}, id="no content"),
        pytest.param([*chat(*texts()), {"prompt": []}], {}, id="no message"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_wrong_row_at_the_very_end_is_refused_at_the_start(rows, changes, ending, tmp_path):
    path = json_file(tmp_path, rows)
    if ending == "parquet":
        path = tmp_path / "rows.parquet"
        exact_values.dataset_of_rows(rows).to_parquet(path)
    with pytest.raises(DataError) as caught:
        prepared(path, **changes)
    assert_refused(caught, 4, f"prompt {COUNT}", where=f"row {COUNT}")
    assert not list((tmp_path / "cache").glob("lengths-*"))


def test_a_file_of_rows_is_mapped_in_few_batches_as_each_takes_memory_of_every_rank(tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"prompt": texts(3_000)}).to_parquet(path)
    split, _ = opened(path)
    assert split.dataset.data.column(0).num_chunks == 1


def test_only_texts_that_may_be_too_long_or_wrong_are_tokenised_at_the_start(tmp_path, monkeypatch):
    rows = texts()
    rows[30], rows[40], rows[50] = "a" * 60, "\u4e16" * 4, "longest but for two" * 2
    path = json_file(tmp_path, [{"prompt": text} for text in rows])
    seen = counted(monkeypatch)
    found = prepared(path, longest=45)
    assert {*seen} == {*range(7), 30, 40, 50}
    assert found.dropped == 1 and list(found.overlong_examples) == [30]
    assert found.max_length == len(rows[50])  # the tokens are bytes
    assert [found.groups_at(0, 59)[i].prompt_ids for i in range(59)]  # every row can be drawn


def test_tokens_that_the_model_lacks_are_found_in_any_row(tmp_path):
    tokens = tokenizer()
    rows = [*texts(), "a" * 80, "b" * 80, "soft\u00ad"]  # two that are longer
    path, size = json_file(tmp_path, [{"prompt": text} for text in rows]), len(tokens) - 1
    assert size in tokens(rows[-1])["input_ids"]
    with pytest.raises(ConfigError):
        check_prompt_ids(tokens, size, {None: prepared(path, tokens, vocab_size=size)})
    assert check_prompt_ids(tokens, None, {None: prepared(path, tokens)}) == []


def test_what_was_found_of_all_rows_is_kept(tmp_path, monkeypatch):
    path = json_file(tmp_path, chat(*texts()))
    seen = counted(monkeypatch)
    first = prepared(path)
    assert {*seen} == {*range(COUNT)}
    seen.clear()
    assert prepared(path).lengths.tolist() == first.lengths.tolist()
    assert {*seen} == {*range(7)}


def test_lengths_are_kept_for_what_they_depend_on(tmp_path):
    rows = chat(*texts())
    path, lengths = json_file(tmp_path, rows), []
    lengths.append(prepared(path).lengths)
    lengths.append(prepared(path, system="Be brief.").lengths)
    lengths.append(prepared(path, tokenizer("{{ messages[0]['content'] }}")).lengths)
    rows[-1]["prompt"][0]["content"] += " and more"
    path.unlink()
    lengths.append(prepared(json_file(tmp_path, rows)).lengths)
    assert len({tuple(found) for found in lengths}) == 4


def test_a_large_file_is_read_once_and_again_when_it_changed(tmp_path, monkeypatch):
    path, read = json_file(tmp_path, chat(*texts())), []
    reader = dataset.ROW_READERS[".jsonl"]
    monkeypatch.setitem(dataset.ROW_READERS, ".jsonl", lambda p: read.append(p) or reader(p))
    first = opened(path)[0].dataset.to_list()
    assert opened(path)[0].dataset.to_list() == first and len(read) == 1
    changed = path.read_text().replace("3 and 9", "3 and 8")
    path.write_text(changed)
    os.utime(path, ns=(1, 1))
    assert opened(path)[0].dataset.to_list() != first and len(read) == 2


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work):
    """Do this in a fork. -> its exit code, below 0: the signal that ended it"""
    if not (pid := os.fork()):
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dying_at(number, function):
    """`function`, which kills its process when it is called for the `number`th time."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        return die() if len(calls) == number else function(*args, **kwargs)

    return call


CUTS = {
    "while the file is read": (exact_values, "_encode_rows", 3),
    "while rows are written": (exact_values, "_write_tables", 2),
    "while rows are joined": (exact_values, "_as_table", 4),
    "while prompts are tokenized": (PromptRows, "tokenize", 5),
    "before lengths are written": (survey.np, "flatnonzero", 1),
    "before the folder gets its name": (Path, "rename", 1),
}


@pytest.mark.parametrize("where", [*CUTS])
def test_what_was_cut_off_by_kill_is_never_read(where, tmp_path, monkeypatch):
    path = json_file(tmp_path, chat(*texts()))
    owner, name, number = CUTS[where]

    def child():
        setattr(owner, name, dying_at(number, getattr(owner, name)))
        prepared(path)

    assert in_child(child) == -signal.SIGKILL
    made = {p.name.partition("-")[0] for p in (tmp_path / "cache").glob("[!.]*")}
    assert made <= ({"rows"} if "prompts" in where or "lengths" in where else set())
    found = prepared(path)
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "other"))
    whole = prepared(path)
    assert found.fingerprint == whole.fingerprint
    assert found.lengths.tolist() == whole.lengths.tolist()
    assert [*found.prompt_ids] == [*whole.prompt_ids]


def test_what_a_killed_run_left_is_removed_a_day_later(tmp_path, monkeypatch):
    made = cache.cached_folder("x", "a", lambda folder: (folder / "file").write_text("x"))
    old, new = (made.with_name(f".{made.name}.{pid}") for pid in (1, 2))
    for folder in (old, new):
        folder.mkdir()
    then = time.time() - 25 * 3600
    os.utime(old, (then, then))
    (made / "file").unlink()
    made.rmdir()
    cache.cached_folder("x", "a", lambda folder: (folder / "file").write_text("x"))
    assert not old.exists() and new.exists()


def test_two_runs_that_make_the_same_cache_both_have_it(tmp_path):
    path = json_file(tmp_path, chat(*texts()))

    def child(answer):
        found = prepared(path)
        answer.write_text(f"{found.fingerprint} {found.lengths.tolist()}")

    answers = [tmp_path / name for name in ("one", "two")]
    threads = [threading.Thread(target=in_child, args=(lambda a=a: child(a),)) for a in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, two = (answer.read_text() for answer in answers)
    assert one == two and len(one) > 40


def test_without_a_cache_the_rows_are_the_same_and_a_line_says_it(tmp_path, monkeypatch):
    path = json_file(tmp_path, chat(*texts()))
    first = prepared(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "file" / "below"))
    found = prepared(path)
    assert found.fingerprint == first.fingerprint and [*found.prompt_ids] == [*first.prompt_ids]
    assert "RLOO_CACHE" in "\n".join(splits.split_notes(None, found)) or found.value_notes


class RankThreads:
    """Ranks that are threads of this process."""

    def __init__(self, size):
        self.barrier, self.got, self.number = threading.Barrier(size), [], threading.local()
        self.values = [None] * size

    def run_on_rank0(self, work):
        if self.number.rank == 0:
            self.got.append(work())
        self.barrier.wait()
        answer = self.got[-1]
        self.barrier.wait()
        return answer

    def gather(self, value):
        self.values[self.number.rank] = value
        self.barrier.wait()
        found = [*self.values]
        self.barrier.wait()
        return found

    def rank0_first(self, work):
        found = []
        self.run_on_rank0(lambda: found.append(work()))
        return found[0] if found else work()


def on_rank_threads(job, size=2):
    """What a function of the ranks returns on each, or the error that it raises."""
    ranks, results = RankThreads(size), [None] * size

    def be(rank):
        ranks.number.rank = rank
        try:
            results[rank] = job(ranks)
        except RunError as error:
            results[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


MAPS = """
import pathlib
import random

def note():
    with pathlib.Path(__file__).with_name("calls").open("a") as calls:
        calls.write(".")

def change(row):
    note()
    return row | {"prompt": row["prompt"] + str(random.random())}

def some(row):
    note()
    return random.random() < 0.5
"""


@pytest.mark.parametrize("key", ["map", "filter"])
def test_all_ranks_have_the_rows_that_a_map_made_on_rank_0(key, tmp_path):
    (tmp_path / "my.py").write_text(MAPS)
    path = json_file(tmp_path, [{"prompt": text} for text in texts()])
    spec = f"{tmp_path}/my.py:{'change' if key == 'map' else 'some'}"
    words = (f"data.path={path}", f"data.{key}={spec}", "data.eval_split=null")
    run = check.check_config(compose_config(["+recipe=smoke", *words]))
    rows = on_rank_threads(lambda ranks: splits.open_splits(run, ranks=ranks)[None].dataset)
    assert len((tmp_path / "calls").read_text()) == COUNT  # rank 0 alone calls it
    rows = [data.to_list() for data in rows]
    assert rows[0] == rows[1] and rows[0] != splits.open_splits(run)[None].dataset.to_list()
    assert not list((tmp_path / "cache").glob("shared-*"))


def test_a_rank_with_other_rows_is_refused(tmp_path):
    runs = []
    for rank, count in enumerate((COUNT, COUNT - 1)):
        (tmp_path / str(rank)).mkdir()
        path = json_file(tmp_path / str(rank), [{"prompt": text} for text in texts(count)])
        words = ["+recipe=smoke", "data=default", f"data.path={path}", "data.eval_split=null"]
        runs.append(check.check_config(compose_config(words)))

    def prepare(ranks):
        run = runs[ranks.number.rank]
        opened = splits.open_splits(run)
        return splits.tokenize_splits(run, opened, tokenizer(), None, ranks=ranks)

    for error in on_rank_threads(prepare):
        assert_refused(error, 4, "rank 1", where="data.path")


def resumed_forms(folder):
    """Words of the smoke recipe, for runs whose rows are many."""
    files = [folder / name for name in ("one.jsonl", "two.jsonl")]
    for file, count in zip(files, (COUNT, 20), strict=True):
        rows = [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts(count))]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = files
    mixed = f"data.mixture={{a: {{path: {one}, weight: 2}}, b: {{path: {two}, weight: 1}}}}"
    alone = ("data=default", f"data.path={one}", "data.eval_split=null")
    return {
        "inside an epoch": alone,
        "across epochs": (*alone, "data.max_samples=14"),
        "a mixture": ("data=default", "data.path=null", mixed, "data.eval_split=null"),
        "some filtered": (*alone, "data.max_prompt_length=10", "data.overlong=filter"),
    }


@pytest.mark.slow_but("across epochs")
@pytest.mark.parametrize("form", ["inside an epoch", "across epochs", "a mixture", "some filtered"])
def test_a_run_on_many_rows_that_was_stopped_goes_on_as_if_it_had_not_been(form, tmp_path):
    (tmp_path / "data").mkdir()
    words = (*resumed_forms(tmp_path / "data")[form], "train.prompts_per_step=6", "eval.every=0")
    looks = []
    assert attempt(tmp_path / "whole", *words, looks=looks)
    root = tmp_path / "stopped"
    assert not attempt(root, *words, stop_at=2 * len(looks) // 3) and attempt(root, *words)
    assert not differing(left(tmp_path / "whole" / "smoke"), left(root / "smoke"))


def test_the_fingerprint_of_much_data_is_kept_until_its_files_change(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MUCH_DATA_BYTES", 100)
    path, read = json_file(tmp_path, [{"prompt": text} for text in texts()]), []
    content = fingerprint.content_fingerprint
    monkeypatch.setattr(fingerprint, "content_fingerprint", lambda d: read.append(d) or content(d))
    first = prepared(path).fingerprint
    assert prepared(path).fingerprint == first and len(read) == 1
    assert prepared(path, max_samples=50).fingerprint != first and len(read) == 2
    other = [{"prompt": text} for text in ["0 and 1", *texts()[1:]]]  # as many bytes
    json_file(tmp_path, other)
    os.utime(path, ns=(1, 1))
    assert prepared(path).fingerprint != first and len(read) == 3


def test_the_fingerprint_of_values_in_memory_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MUCH_DATA_BYTES", 100)
    datasets.Dataset.from_dict({"prompt": texts()}).save_to_disk(tmp_path / "saved")
    in_file = datasets.load_from_disk(tmp_path / "saved")
    found = []
    for text in ("one", "two"):
        in_memory = datasets.Dataset.from_dict({"prompt": [text]})
        both = datasets.concatenate_datasets([in_file, in_memory])
        both._fingerprint = "the same"
        found.append(fingerprint.kept_fingerprint(both, cache.OneProcess()))
    assert found[0] != found[1]


def test_a_fingerprint_is_of_values_and_not_of_how_they_lie_in_files(tmp_path):
    rows = [
        {"a": text, "b": None if i % 3 else i, "c": [{"d": text}] * (i % 3), "e": i / 7, "f": i > 9}
        for i, text in enumerate(texts())
    ]
    memory = datasets.Dataset.from_list(rows)
    memory.save_to_disk(tmp_path / "saved", num_shards=4)
    memory.to_parquet(tmp_path / "rows.parquet")
    saved = datasets.load_from_disk(tmp_path / "saved")
    part = range(5, 50)
    for one, other in ((memory, saved), (memory.select(part), saved.select(part))):
        assert fingerprint.content_fingerprint(one) == fingerprint.content_fingerprint(other)
    shuffled = saved.select([*reversed(range(COUNT))]).select([*reversed(range(COUNT))])
    assert fingerprint.content_fingerprint(shuffled) == fingerprint.content_fingerprint(memory)
    for name, value in {"a": "x", "b": 7, "c": [{"d": "x"}], "e": 0.5, "f": False}.items():
        changed = datasets.Dataset.from_list([*rows[:-1], rows[-1] | {name: value}])
        assert fingerprint.content_fingerprint(changed) != fingerprint.content_fingerprint(memory)
    renamed = memory.rename_column("a", "g")
    assert fingerprint.content_fingerprint(renamed) != fingerprint.content_fingerprint(memory)
