"""Which examples of a split are used: data.filter, and lazy reading with data.streaming.

A filter runs on the split with its columns renamed, before max_samples: the first n examples that
pass are used. The log reports how many did not. This file imports no torch.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rloo_cli.config.column_names import column_of_field, field_or_none, refuse_unknown_column
from rloo_cli.config.user_code import exception_text, format_user_frames, load_user_code
from rloo_cli.data.batch import copy_value
from rloo_cli.data.exact_values import dataset_of_rows, iter_rows
from rloo_cli.data.order import IndexArray
from rloo_cli.utils.errors import DataError, Problem, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

Filter = JsonObject | str  # values by column, or `file.py:name` of a function
ExampleDict = JsonObject
Predicate = Callable[[int, ExampleDict], bool]  # (example number, example) -> whether it passes


def filter_dataset(
    data: "Dataset", row_filter: Filter | None, max_samples: int | None, file: Path | None = None
) -> tuple["Dataset", int]:
    """The first `max_samples` examples that pass, and how many of all examples did not.

    `file`: where the numbers of passing examples are written, or were by another process.
    Raises DataError (no such column, no example is left, the function failed), ConfigError (no such
    function).
    """
    left_out = 0
    if row_filter is not None and len(data):
        kept: IndexArray
        if file is not None and file.exists():
            kept = np.fromfile(file, np.int64)
        else:
            kept = _passing_rows(data, row_filter)
            if file is not None:
                kept.tofile(file)
        left_out = len(data) - len(kept)
        if not len(kept):
            raise _nothing_passes_error(row_filter, len(data))
        data = data.select(kept)
    if max_samples is not None:
        data = data.select(range(min(max_samples, len(data))))
    return data, left_out


def _passing_rows(data: "Dataset", row_filter: Filter) -> IndexArray:
    passes = _filter_predicate(row_filter, data.column_names)
    rows: Iterable[ExampleDict] = data
    if not isinstance(row_filter, str):  # only these columns are read
        columns = {column_of_field(data.column_names, name) for name in row_filter}
        rows = iter_rows(data.select_columns([c for c in data.column_names if c in columns]))
    return np.fromiter((n for n, row in enumerate(rows) if passes(n, row)), np.int64)


def filter_stream(
    examples: Iterable[ExampleDict], row_filter: Filter | None, max_samples: int
) -> tuple["Dataset", int]:
    """The first `max_samples` examples that pass, read one by one and no further.

    Raises as `filter_dataset`.
    """
    kept: list[ExampleDict] = []
    left_out = 0
    passes: Predicate | None = None
    for n, example in enumerate(examples):
        if row_filter is not None:
            passes = passes or _filter_predicate(row_filter, list(example))
            if not passes(n, example):
                left_out += 1
                continue
        kept.append(example)
        if len(kept) == max_samples:
            break
    if left_out and not kept:
        assert row_filter is not None
        raise _nothing_passes_error(row_filter, left_out)
    return dataset_of_rows(kept), left_out


def _filter_predicate(row_filter: Filter, columns: list[str]) -> Predicate:
    if isinstance(row_filter, str):
        return _load_predicate(row_filter)
    unknown = [c for c in row_filter if column_of_field(columns, c) is None]
    if unknown:
        refuse_unknown_column("data.filter", unknown[0], columns)
    return lambda _, example: matches_columns(example, row_filter)


def matches_columns(example: ExampleDict, column_values: JsonObject) -> bool:
    """Whether every column or nested field has its value in `column_values`, or one of its list."""
    lists = {c: v if isinstance(v, list) else [v] for c, v in column_values.items()}
    return all(_among(field_or_none(example, c), values) for c, values in lists.items())


def _among(value: object, values: list[object]) -> bool:
    # 1 == True in Python, but a boolean column is not a column of numbers.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _load_predicate(spec: str) -> Predicate:
    code = load_user_code(spec, "data.filter")

    def passes(number: int, example: ExampleDict) -> bool:
        try:
            with contextlib.chdir(os.getcwd()):  # relative paths start at the run folder
                passed = code(copy_value(example))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt raised by user code
            what = f"data.filter failed at row {number}"
            why = f"{format_user_frames(error)}{exception_text(error)}"
            fix = f"fix {spec}: it is called with every row"
            refuse(f"data.filter={spec}", what, fix, why, error=DataError)
        if passed is not True and passed is not False:
            what = f"data.filter returned {passed!r:.80} for row {number}"
            why, fix = "it must return True or False", f"let {spec} return bool(...)"
            refuse(f"data.filter={spec}", what, fix, why, error=DataError)
        return bool(passed)

    return passes


def _nothing_passes_error(row_filter: Filter, num_examples: int) -> DataError:
    what = f"data.filter excludes all {num_examples} rows"
    more = "values of a CSV file are text; data.types={column: int} converts them"
    why = f"the filter: {row_filter}"
    return DataError(Problem(what, "data.filter", why, "data.filter=null", more))
