"""Finds and opens a data set's split, and checks its columns.

It needs neither a tokenizer nor torch, so a wrong column or split is found before any model is
loaded. `prompts` turns the examples into token ids.
"""

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from rloo_cli.config import hf_cache, registry, synthetic
from rloo_cli.config.column_names import column_of_field, field_or_none, refuse_unknown_column
from rloo_cli.config.pasted import guess_prompt_column, rename_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data import filters, mapping, value_types
from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.data.csv_files import csv_rows
from rloo_cli.data.exact_values import (
    dataset_of_rows,
    join_datasets,
    read_rows,
    register_json_text,
    write_rows,
)
from rloo_cli.data.fingerprint import iter_tables
from rloo_cli.data.json_files import JSON_ENDINGS, json_rows
from rloo_cli.utils.errors import DataError, MachineError, Problem, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset

EMPTY_PROMPT = [{"role": "user", "content": ""}]
ROW_READERS = dict.fromkeys(JSON_ENDINGS, json_rows) | {".csv": csv_rows}
READERS = (*ROW_READERS, ".parquet")
LARGE_FILE_BYTES = 8e6  # of JSON and CSV files, whose rows are kept in the cache
ROWS_IN_A_BATCH = 50_000  # at most; each batch of a mapped file takes 3 kB of every rank's memory
ROWS_FILE, ROWS_FORMAT = "rows.arrow", 1


@dataclass(frozen=True)
class OpenedSplit:
    """The examples of a split that a run uses."""

    dataset: "Dataset"
    filtered_out: int  # by data.filter
    notes: tuple[str, ...] = ()  # for the log: conversions made on reading

    @property
    def column_names(self) -> list[str]:
        """The names of its columns."""
        return list(self.dataset.column_names)


def calls_user_code(config: DataConfig) -> bool:
    """Whether a user function is called with each row."""
    return config.map is not None or isinstance(config.filter, str)


def load_split(
    config: DataConfig, split: str, needs_prompts: bool = True, shared: Path | None = None
) -> "Dataset":
    """The examples of `open_split`."""
    return open_split(config, split, needs_prompts, shared).dataset


def open_split(
    config: DataConfig, split: str, needs_prompts: bool = True, shared: Path | None = None
) -> OpenedSplit:
    """Open a split, rename its columns, check that it has prompts, select its examples.

    `needs_prompts`: refuse data without the prompt column. `shared`: a path without suffix for
    files with the results of data.map and data.filter, which other processes read.
    Raises DataError (no such split or column, no examples) and MachineError (it was not found).
    """
    if config.streaming:
        return _open_stream(config, split, needs_prompts)
    with _dataset_errors(config, split):
        data = _open(config, split)
        data, notes = value_types.clean_columns(data)
    if not data.column_names:
        raise _empty_data_error(config, split)
    data = _rename_columns(data, config.columns)
    if config.types and len(data):
        data = value_types.nested_columns(data, list(config.types))
        data, converted = value_types.convert_columns(data, config.types)
        notes += converted
    if config.map is not None and len(data):
        if config.filter is None and config.max_samples is not None:
            data = data.select(range(min(config.max_samples, len(data))))
        data = mapping.map_dataset(data, config.map, shared and shared.with_suffix(".arrow"))
    data = _check_prompts(data, config, split, needs_prompts)
    file = shared and shared.with_suffix(".int64")
    kept, left_out = filters.filter_dataset(data, config.filter, config.max_samples, file)
    return OpenedSplit(kept, left_out, (*_empty_cell_notes(config, kept), *notes))


def _open_stream(config: DataConfig, split: str, needs_prompts: bool) -> OpenedSplit:
    """The first `max_samples` examples that pass, read one by one."""
    changed: Counter[str] = Counter()
    with _dataset_errors(config, split):
        examples = _rename_example_columns(_open(config, split), config.columns)
        assert config.max_samples is not None  # data_rules
        if config.types:
            examples = (
                value_types.convert_row(row, n, config.types, changed)
                for n, row in enumerate(examples)
            )
        if config.map is not None:
            examples = mapping.map_examples(examples, config.map)
        kept, left_out = filters.filter_stream(examples, config.filter, config.max_samples)
        kept, notes = value_types.clean_columns(kept)
    data = _check_prompts(kept, config, split, needs_prompts)
    notes += value_types.conversion_notes(changed, config.types)
    return OpenedSplit(data, left_out, (*_empty_cell_notes(config, data), *notes))


def _empty_cell_notes(config: DataConfig, data: "Dataset") -> list[str]:
    """A line that says how many cells of a CSV file were empty."""
    if not str(config.path).endswith(".csv") or config.map is not None:
        return []
    counts: Counter[str] = Counter()
    for table in iter_tables(data):
        counts.update({n: table.column(n).null_count for n in table.column_names})
    where, count = ", ".join(n for n in counts if counts[n]), counts.total()
    return [f"{count} empty cells of {config.path} were read as None: {where}"] if count else []


def _check_prompts(
    data: "Dataset", config: DataConfig, split: str, needs_prompts: bool
) -> "Dataset":
    """The split with its prompts; without a prompt column, each prompt is an empty user message.

    TRL does the same: the return value of the environment's reset is appended to that message.
    """
    column = config.prompts_in
    if not data.column_names:
        raise _empty_data_error(config, split)
    data = value_types.nested_columns(data, [column])
    if config.prompt_column is None:
        if column in data.column_names:
            what, where = f"the data has a column {column!r}", "data.prompt_column"
            why = "data.prompt_column=null: an environment's reset provides the whole first turn"
            fix = f"data.prompt_column={column}, or {rename_column(column, 'task')}"
            refuse(where, what, fix, why, error=DataError)
        data = data.add_column(column, [EMPTY_PROMPT] * len(data))
    if needs_prompts and column not in data.column_names:
        raise missing_prompts_error(data, config, split)
    if not len(data):
        raise _empty_data_error(config, split)
    return data


def missing_prompts_error(data: "Dataset", config: DataConfig, split: str) -> DataError:
    """The error for data without the prompt column."""
    column = config.prompts_in
    where = f"data.prompt_column, {config.path} [{split}]"
    why = f"columns: {', '.join(data.column_names)}"
    fix = _prompt_column_fix(data, config, column)
    note = "if an environment's reset provides the whole first turn: data.prompt_column=null"
    return DataError(Problem(f"the data has no column {column!r}", where, why, fix, note))


def _prompt_column_fix(data: "Dataset", config: DataConfig, column: str) -> str:
    """What gives the data a prompt column; a description if no column looks like one."""
    if len(data.column_names) == 1 and re.search(r"[;\t|]", data.column_names[0]):
        return f"{config.path} with commas between columns: it was read as one column"
    strings = prompt_like_columns(data)
    if not strings:
        return "data with a column of prompts: strings, or lists of messages"
    guess = guess_prompt_column(column, strings)
    asking = [name for name in strings if _ends_with_user(data[name][0])]
    if guess == "COLUMN" and len(asking) == 1:
        guess = asking[0]
    words = f", one of these: {', '.join(strings)}" if guess == "COLUMN" else ""
    return f"data.prompt_column={guess}{words}"


def _ends_with_user(value: object) -> bool:
    """Whether a value is a conversation that ends before an answer."""
    return is_messages(value) and value[-1]["role"] == "user"


def _empty_data_error(config: DataConfig, split: str) -> DataError:
    what = f"the data is empty: {config.path} [{split}] has 0 rows"
    why = "training and evaluation need at least one row"
    fix = "another data.split, or data.path=FILE with at least one row"
    return DataError(Problem(what, "data.path", why, fix))


def _rename_columns(data: "Dataset", new_names: dict[str, str]) -> "Dataset":
    data = value_types.nested_columns(data, list(new_names))
    _check_names(data.column_names, new_names)
    return data.rename_columns(new_names) if new_names else data


def _rename_example_columns(
    examples: Iterable[JsonObject], new_names: dict[str, str]
) -> Iterator[JsonObject]:
    for n, example in enumerate(examples):
        fields = [name for name in new_names if name not in example]
        known = [name for name in fields if column_of_field(example, name)]
        example |= {name: field_or_none(example, name) for name in known}
        if not n:
            _check_names(list(example), new_names)
        yield {new_names.get(name, name): value for name, value in example.items()}


def _check_names(column_names: list[str], new_names: dict[str, str]) -> None:
    unknown = [old for old in new_names if old not in column_names]
    if unknown:
        refuse_unknown_column("data.columns", unknown[0], column_names)
    names = [new_names.get(name, name) for name in column_names]
    double = [name for name in names if names.count(name) > 1]
    if double:
        what = f"data.columns makes two columns named {double[0]!r}"
        old = next(old for old, new in new_names.items() if new == double[0])
        fix = f"{rename_column(old, f'my_{double[0]}')}, or another unused name"
        why = f"columns: {', '.join(column_names)}"
        refuse("data.columns", what, fix, why, error=DataError)


def prompt_like_columns(data: "Dataset") -> list[str]:
    """Names of the columns that could be prompts: strings, or lists of messages."""
    first = {column: data[column][0] for column in data.column_names} if len(data) else {}
    return [c for c, v in first.items() if isinstance(v, str) or is_messages(v)]


def _open(config: DataConfig, split: str) -> "Dataset | IterableDataset | Iterator[JsonObject]":
    """Open a data set, with data.streaming an iterable one."""
    import datasets

    datasets.disable_progress_bars()
    register_json_text()
    assert config.path is not None  # data_rules
    if (made_by := synthetic.row_source(config.path)) is not None:
        return _open_made(made_by, config, split)
    path = Path(config.path).expanduser()
    rows = {"writer_batch_size": ROWS_IN_A_BATCH}
    options: JsonObject = {"streaming": True} if config.streaming else rows
    if path.is_dir() and any((path / f"{n}.json").is_file() for n in ("state", "dataset_dict")):
        if config.streaming:
            why = "a data set saved to disk is memory-mapped in any case"
            off = "data.streaming=false"
            refuse("data.streaming", "data.streaming is set", off, why, error=DataError)
        return _open_saved(datasets.load_from_disk(str(path)), split)
    if path.is_file():
        if path.suffix not in READERS:
            why = f"it ends in {path.suffix or 'nothing'}; known: {', '.join(READERS)}"
            fix = "data.path=FILE.jsonl, with a JSON object in each line"
            refuse("data.path", f"{path} is not a data file", fix, why, error=DataError)
        if path.suffix in ROW_READERS:
            return _open_row_files({"train": [str(path)]}, split, config.streaming)
        files = {"train": str(path)}
        return datasets.load_dataset("parquet", data_files=files, split=split, **options)
    if path.is_dir() and (files_of := _row_files(path, config.name)):
        return _open_row_files(files_of, split, config.streaming)
    source = str(path) if path.is_dir() else config.path
    revision = config.revision
    return datasets.load_dataset(source, config.name, split=split, revision=revision, **options)


def _row_files(folder: Path, name: str | None) -> dict[str, list[str]]:
    """Split -> files of a folder of JSON or CSV files; {} if `datasets` has to read them."""
    import datasets

    builder: Any = datasets.load_dataset_builder(str(folder), name)
    named = builder.config.data_files or {}
    files = {str(split): list(map(str, paths)) for split, paths in named.items()}
    known = all(Path(path).suffix in ROW_READERS for paths in files.values() for path in paths)
    # The folder's README may declare types, or how to read its files.
    plain = builder.config.features is None and getattr(builder.config, "field", None) is None
    plain = plain and getattr(builder.config, "sep", ",") == ","
    return files if known and plain else {}


def _open_row_files(
    files: Mapping[str, list[str]], split: str, streaming: bool
) -> "Dataset | Iterator[JsonObject]":
    """The rows of a split of JSON or CSV files, with values as written."""
    from datasets import ReadInstruction

    ReadInstruction.from_spec(split)
    names = [split] if streaming else [_split_name(part).strip() for part in split.split("+")]
    for name in names:
        if name not in files:
            raise ValueError(f'Unknown split "{name}". Should be one of {list(files)}.')
    if streaming:
        return _file_rows(files[split])
    return _select_examples({name: _dataset_of_files(files[name]) for name in names}, split)


def _file_rows(paths: Sequence[str]) -> Iterator[JsonObject]:
    return (row for path in paths for row in ROW_READERS[Path(path).suffix](Path(path)))


def _dataset_of_files(paths: Sequence[str]) -> "Dataset":
    """The rows of JSON or CSV files; large ones are converted once and then read from the cache."""
    states = [(path, os.stat(path)) for path in map(os.path.abspath, paths)]
    if sum(state.st_size for _, state in states) < LARGE_FILE_BYTES:
        return dataset_of_rows(_file_rows(paths))
    key = repr([(path, state.st_size, state.st_mtime_ns) for path, state in states])

    def write(folder: Path) -> None:
        report_progress(f"reading {', '.join(paths)} for the first time")
        write_rows(_file_rows(paths), folder / ROWS_FILE)

    try:
        return read_rows(cached_folder("rows", f"{ROWS_FORMAT} {key}", write) / ROWS_FILE)
    except MachineError as error:
        report_progress(f"warning: {error.problems[0].what}: {paths[0]} is read at each start")
        return dataset_of_rows(_file_rows(paths))


@contextmanager
def _dataset_errors(config: DataConfig, split: str) -> Iterator[None]:
    """Raise errors of `datasets` inside as DataError or MachineError."""
    from datasets import exceptions

    assert config.path is not None
    try:
        yield
    except (ValueError, LookupError, RuntimeError, StopIteration) as error:
        # An empty jsonl file ends in StopIteration, an empty saved data set in IndexError.
        nothing = isinstance(error, StopIteration | IndexError)
        if nothing or "corresponds to no data" in str(error):
            raise _empty_data_error(config, split) from None
        if any(word in str(error).lower() for word in ("split", "instruction")):
            what = f"no split {split!r} in {config.path}"
            fix = "data.split=NAME, with an existing one"
            if Path(config.path).expanduser().is_file():
                fix = "data.split=train, or a part of it such as data.split='train[-100:]'"
            refuse("data.split", what, fix, error, error=DataError)
        what = f"{config.path} cannot be read"
        fix = "correct data.path, or for a hub data set data.name and data.revision"
        refuse("data.path", what, fix, _short(error), error=DataError)
    except (OSError, exceptions.DatasetGenerationError) as error:
        raise _unreachable(config.path, Path(config.path).expanduser(), error) from None


def _open_made(source: synthetic.RowSource, config: DataConfig, split: str) -> "Dataset":
    import datasets

    name = _split_name(split)
    try:
        rows = registry.load_code(source.rows)(config, name)
        return _select_examples({name: datasets.Dataset.from_list(rows)}, split)
    except (KeyError, ValueError):
        what = f"no split {split!r} in {config.path}"
        why = f"it has the splits {' and '.join(source.splits)}"
        fix = ", or ".join(f"data.split={name}" for name in source.splits)
        refuse("data.split", what, fix, why, error=DataError)


def _open_saved(saved: "Dataset | DatasetDict", split: str) -> "Dataset":
    # A single Dataset has one split, which matches any name.
    return _select_examples(saved if hasattr(saved, "keys") else {_split_name(split): saved}, split)


def _split_name(split: str) -> str:
    return split.partition("[")[0]


def _select_examples(splits: "Mapping[str, Dataset]", split: str) -> "Dataset":
    """The examples of a split such as `train[:80%]`. Raises ValueError."""
    from datasets import ReadInstruction

    sizes = {name: len(data) for name, data in splits.items()}
    parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    return join_datasets([splits[p.splitname].select(range(p.from_, p.to)) for p in parts])


def _unreachable(name: str, path: Path, error: Exception) -> DataError | MachineError:
    from datasets import config

    if path.exists():
        # datasets reports only that it failed; the cause says why
        why = _short(error.__cause__ or error)
        fix = f"check the file; supported types: {', '.join(READERS)}"
        return DataError(Problem(f"{name} cannot be read", "data.path", why, fix))
    cache = f"{hf_cache.hub_cache_folder()} and {config.HF_DATASETS_CACHE}"
    why = f"not a local file or folder, not in the cache {cache}; the hub: {_short(error)}"
    fix = f"on a machine with network: {hf_cache.fetch_command()}; or name a local file"
    return MachineError(Problem(f"data set {name!r} was not found", "data.path", why, fix))


def _short(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def is_serialized_conversation(text: str) -> bool:
    """Whether a string is a whole conversation, as JSON or as a Python literal."""
    if not text.lstrip().startswith("[{"):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            if is_messages(read(text)):
                return True
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return False


def is_messages(value: object) -> TypeGuard[list[JsonObject]]:
    """Whether a value is a conversation: a list of {role, content}."""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_message, value))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    called = value.get("content") is None and "content" in value and bool(value.get("tool_calls"))
    # Templates would silently render None for missing content.
    return called or isinstance(value.get("content"), str | list)
