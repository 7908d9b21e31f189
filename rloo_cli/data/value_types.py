"""Converts the values of columns: data.types, and artefacts of pandas and Arrow.

Every conversion is reported in the log, with a count.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_cli.config.column_names import field_or_none, is_field_of_rows, refuse_unknown_column
from rloo_cli.config.pasted import paste_setting
from rloo_cli.data.exact_values import dataset_of_rows, iter_rows, with_column
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

FLAGS = {"true": True, "false": False, "1": True, "0": False}
PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def convert_value(value: object, kind: str) -> object:
    """A value as str, int, float or bool; None and blank text are None.

    Raises ValueError if it cannot be converted: 2.5 is not an int.
    """
    if value is None or (kind != "str" and isinstance(value, str) and not value.strip()):
        return None
    if kind == "str":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == "bool":
        text = str(value).strip().lower()
        if text not in FLAGS:
            raise ValueError("expected true, false, 1 or 0")
        return FLAGS[text]
    if isinstance(value, list | dict):
        raise ValueError("a list or an object is not a number")
    if kind == "float":
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("it has a fraction")
    return int(value)  # type: ignore[call-overload]


def convert_row(
    row: JsonObject, number: int, types: Mapping[str, str], changed: Counter[str]
) -> JsonObject:
    """A row with the columns of data.types converted, and counted in `changed`.

    Raises DataError.
    """
    after = dict(row)
    for column, kind in types.items():
        before = field_or_none(row, column)
        after[column] = _converted(before, number, column, kind)
        changed[column] += type(after[column]) is not type(before)
    return after


def convert_columns(data: "Dataset", types: Mapping[str, str]) -> tuple["Dataset", list[str]]:
    """The data with the columns of data.types converted, and a line for each that changed.

    Raises DataError for a missing column, and for a value with its row.
    """
    changed: Counter[str] = Counter()
    for column, kind in types.items():
        if column not in data.column_names:
            refuse_unknown_column("data.types", column, data.column_names)
        rows = enumerate(iter_rows(data.select_columns([column])))
        converted = dataset_of_rows(convert_row(row, n, {column: kind}, changed) for n, row in rows)
        if changed[column]:
            data = with_column(data, converted)
    return data, conversion_notes(changed, types)


def conversion_notes(changed: Mapping[str, int], types: Mapping[str, str]) -> list[str]:
    """A line for each column whose values data.types changed."""
    return [
        f"{changed[column]} values of column {column} were read as {kind} (data.types)"
        for column, kind in types.items()
        if changed[column]
    ]


def _converted(value: object, number: int, column: str, kind: str) -> object:
    try:
        return convert_value(value, kind)
    except (ValueError, OverflowError) as error:
        what = f"row {number} of column {column!r} is not of type {kind}: {value!r:.80}"
        fix = f"correct the row, or {paste_setting('data.types', {column: 'str'})}"
        refuse(f"data.types.{column}", what, fix, error, error=DataError)


def nested_columns(data: "Dataset", names: Sequence[str]) -> "Dataset":
    """The data with a column for each dotted name in `names` that is a field of a column."""
    for name in names:
        roots = [c for c in data.column_names if name.startswith(f"{c}.")]
        if name in data.column_names or not roots:
            continue
        column = data.select_columns([max(roots, key=len)])
        if is_field_of_rows(iter_rows(column), name):  # else it is reported as a missing column
            found = dataset_of_rows({name: field_or_none(row, name)} for row in iter_rows(column))
            data = with_column(data, found)
    return data


def clean_columns(data: "Dataset") -> tuple["Dataset", list[str]]:
    """The data without artefacts of pandas: its index, and NaN for None.

    Also returns lines that report this, and columns whose types may surprise a reward: text
    read as dates, whole numbers that became floats because of empty cells.
    """
    notes = []
    index = [c for c in data.column_names if PANDAS_INDEX.fullmatch(c)]
    if index and len(index) < len(data.column_names):
        data = data.remove_columns(index)
        notes.append(f"column {index[0]} was left out: pandas' index of {len(data)} rows")
    for column, kind in data.features.items():
        dtype = str(getattr(kind, "dtype", ""))
        if dtype.startswith(("float", "double")):
            data, more = _clean_floats(data, column)
            notes += more
        elif dtype.startswith(("timestamp", "date", "time")):
            how = "rewards get datetimes, not text"
            notes.append(f"column {column} holds {len(data)} dates or times: {how}")
    return data, notes


def _clean_floats(data: "Dataset", column: str) -> tuple["Dataset", list[str]]:
    values: Any = data.with_format("arrow").select_columns([column])[:].column(column)
    missing = pc.sum(pc.cast(pc.is_nan(values), pa.int64())).as_py() or 0
    notes = []
    if missing:
        numbers = (row[column] for row in iter_rows(data.select_columns([column])))
        found = ({column: None if v is None or math.isnan(v) else v} for v in numbers)
        data = with_column(data, dataset_of_rows(found))
        notes.append(f"{missing} values of column {column} that are NaN were read as None")
        values = pc.if_else(pc.is_nan(values), None, values)
    if values.null_count and values.null_count < len(values) and _are_whole(values):
        count = len(values) - values.null_count
        key = f"data.types={{{column}: int}}"
        notes.append(
            f"column {column} holds {count} whole numbers as floats, an effect of pandas: {key}"
        )
    return data, notes


def _are_whole(values: Any) -> bool:
    return bool(pc.all(pc.equal(values, pc.floor(values))).as_py())
