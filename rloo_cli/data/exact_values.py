"""Keeps the values of rows as they were written, in a `datasets.Dataset`.

Arrow gives each column one type: of 1 and 2.5 it makes 1.0 and 2.5, and it gives every object of a
column the keys of all others. A column whose values it would change so is kept as JSON text, which
is read again when the column is.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_AT_ONCE = 10_000  # that are Python objects beside the table, while a file is read
EXACT_KINDS = ({str}, {int}, {bool})  # of scalars, which Arrow keeps as they are
JSON_KINDS = {str, int, float, bool, list, dict}
INT64 = range(-(2**63), 2**63)


@dataclass
class JsonText:
    """The type of a column that holds JSON, as a feature of `datasets`."""

    dtype: ClassVar[str] = "string"
    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="JsonText", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def encode_example(self, value: object) -> str | None:
        """The text that is stored. Raises TypeError for what JSON has no form for."""
        return None if value is None else json.dumps(value, ensure_ascii=False)

    def decode_example(self, text: str | None, token_per_repo_id: object = None) -> object:
        """The value of a stored text."""
        return None if text is None else json.loads(text)


Column = tuple[Any, Any]  # Arrow array, feature


def dataset_of_rows(rows: Iterable[JsonObject]) -> "Dataset":
    """A data set of rows, with the columns of all of them; None where a row lacks one.

    Raises ValueError or TypeError for values that no column can hold together.
    """
    from datasets import Dataset, DatasetInfo, Features  # lazy: a second of imports

    register_json_text()
    parts = [_encode_rows(part) for part in _batches(rows)]
    names = list(dict.fromkeys(name for columns, _ in parts for name in columns))
    joined = {name: _join_parts(name, parts) for name in names}
    features = Features({name: feature for name, (_, feature) in joined.items()})
    arrays = [array for array, _ in joined.values()]
    table = pa.Table.from_arrays(arrays, schema=features.arrow_schema)
    return Dataset(table, info=DatasetInfo(features=features), fingerprint="rows")


def rows_of_dataset(data: "Dataset") -> list[JsonObject]:
    """Every row as a dict; images stay the bytes or paths that they are."""
    rows: list[JsonObject] = data.to_list()
    for name, feature in data.features.items():
        if isinstance(feature, JsonText):
            for row in rows:
                row[name] = feature.decode_example(row[name])
    return rows


def join_datasets(parts: Sequence["Dataset"]) -> "Dataset":
    """The rows of all parts, in one data set, also where their columns have other types."""
    from datasets import concatenate_datasets  # lazy: a second of imports

    if all(part.features == parts[0].features for part in parts):
        return concatenate_datasets(list(parts))
    return dataset_of_rows(row for part in parts for row in rows_of_dataset(part))


def replace_column(data: "Dataset", name: str, values: Sequence[object]) -> "Dataset":
    """The data with these values in a column, which is added at the end if it is new."""
    from datasets import concatenate_datasets  # lazy: a second of imports

    order = list(dict.fromkeys([*data.column_names, name]))
    others = data.select_columns([column for column in order if column != name])
    column = dataset_of_rows({name: value} for value in values)
    if not others.column_names:
        return column
    return concatenate_datasets([others, column], axis=1).select_columns(order)


def register_json_text() -> None:
    """Let `datasets` read columns of this type, also from a data set that was saved."""
    from datasets.features import features  # lazy: a second of imports

    features._FEATURE_TYPES.setdefault("JsonText", JsonText)


def _batches(rows: Iterable[JsonObject]) -> Iterator[list[JsonObject]]:
    rest = iter(rows)
    while part := list(itertools.islice(rest, ROWS_AT_ONCE)):
        yield part


def _encode_rows(rows: Sequence[JsonObject]) -> tuple[dict[str, Column], int]:
    """The columns of some rows, and how many rows they are."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _encode_column([row.get(name) for row in rows]) for name in names}, len(rows)


def _encode_column(values: list[Any]) -> Column:
    from datasets import Dataset, Value  # lazy: a second of imports

    kinds = {*map(type, values)} - {type(None)}
    if not kinds:
        return pa.nulls(len(values)), Value("null")
    if kinds - JSON_KINDS:  # images, dates and other objects of a user's function
        data = Dataset.from_dict({"column": values})
        return data.data.column("column"), data.features["column"]
    if kinds in EXACT_KINDS and not (kinds == {int} and _has_large_integer(values)):
        array = pa.array(values)
    elif kinds == {float} or kinds in ({list}, {dict}):
        array = _exact_array(values)
    else:
        array = None
    if array is None:
        return pa.array(map(JsonText().encode_example, values), pa.string()), JsonText()
    data = Dataset(pa.table({"column": array}), fingerprint="column")
    return array, data.features["column"]


def _has_large_integer(values: Sequence[int | None]) -> bool:
    numbers = [value for value in values if value is not None]
    return min(numbers) not in INT64 or max(numbers) not in INT64


def _exact_array(values: list[Any]) -> Any | None:
    """The values as an Arrow array; None if it would not give them back as they are."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None
    # repr tells 1, 1.0 and True apart, which are equal.
    return array if repr(array.to_pylist()) == repr(values) else None


def _join_parts(name: str, parts: Sequence[tuple[dict[str, Column], int]]) -> Column:
    """One column of all parts: of the one type that they have, else JSON text."""
    from datasets import Value  # lazy: a second of imports

    empty = Value("null")
    columns = [part.get(name, (pa.nulls(count), empty)) for part, count in parts]
    types = [feature for _, feature in columns if feature != empty]
    feature = types[0] if types else empty
    if any(other != feature for other in types):
        columns = [_as_json_text(column) for column in columns]
        feature = JsonText()
    storage = columns[[f for _, f in columns].index(feature)][0].type
    chunks: list[Any] = []
    for array, _ in columns:
        array = array if array.type == storage else pa.nulls(len(array), storage)
        chunks += array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    return pa.chunked_array(chunks, storage), feature


def _as_json_text(column: Column) -> Column:
    array, feature = column
    if isinstance(feature, JsonText):
        return column
    texts = map(JsonText().encode_example, array.to_pylist())
    return pa.array(texts, pa.string()), JsonText()
