"""Keeps the values of rows exactly as written, in a `datasets.Dataset`.

Arrow gives each column one type: it turns 1 and 2.5 into 1.0 and 2.5, and gives every object of a
column the keys of all others. A column that this would change is stored as JSON text, which
is parsed again on access.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from rloo_cli.data.fingerprint import iter_tables
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_AT_ONCE = 5_000  # held as Python objects while a file is read
EXACT_KINDS = ({str}, {int}, {bool})  # scalars that Arrow keeps exactly
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
        """The stored text. Raises TypeError for a value that JSON cannot represent."""
        return None if value is None else json.dumps(value, ensure_ascii=False)

    def decode_example(self, text: str | None, token_per_repo_id: object = None) -> object:
        """The value of a stored text."""
        return None if text is None else json.loads(text)


Column = tuple[Any, Any]  # Arrow array, feature


@dataclass
class Part:
    """Some rows of a data set that is being made, each column with a type of its own."""

    columns: dict[str, Column]
    num_rows: int


def dataset_of_rows(rows: Iterable[JsonObject]) -> "Dataset":
    """A data set of rows, with the columns of all of them; None where a row lacks one.

    Raises ValueError or TypeError for values that do not fit in one column.
    """
    from datasets import Dataset, DatasetInfo  # lazy: a second of imports

    register_json_text()
    parts = [_encode_rows(batch) for batch in _batches(rows)]
    features = _joined_features(parts)
    tables = [_as_table(part, features) for part in parts]
    table = pa.concat_tables(tables) if tables else features.arrow_schema.empty_table()
    return Dataset(table, info=DatasetInfo(features=features), fingerprint="rows")


def write_rows(rows: Iterable[JsonObject], path: Path) -> None:
    """Write the data set of `dataset_of_rows` to a file, with only part of the rows in memory.

    Raises OSError, and as `dataset_of_rows`.
    """
    register_json_text()
    parts: list[tuple[Path, Part]] = []
    for number, batch in enumerate(_batches(rows)):
        encoded = _encode_rows(batch)
        table = pa.table({name: array for name, (array, _) in encoded.columns.items()})
        part_path = path.with_name(f"{path.name}.{number}")
        _write_tables([table], table.schema, part_path)
        empty = {name: (None, feature) for name, (_, feature) in encoded.columns.items()}
        parts.append((part_path, Part(empty, encoded.num_rows)))
    features = _joined_features([part for _, part in parts])

    def tables() -> Iterator[Any]:
        for part_path, part in parts:
            with pa.memory_map(str(part_path)) as source, pa.ipc.open_stream(source) as reader:
                table = reader.read_all()
                columns = {n: (table.column(n), f) for n, (_, f) in part.columns.items()}
                yield _as_table(Part(columns, part.num_rows), features)
            part_path.unlink()

    _write_tables(tables(), features.arrow_schema, path)


def _write_tables(tables: Iterable[Any], schema: Any, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def read_rows(path: Path) -> "Dataset":
    """The data set of a file of `write_rows`, memory-mapped."""
    from datasets import Dataset  # lazy: a second of imports

    register_json_text()
    return Dataset.from_file(str(path))


def rows_of_dataset(data: "Dataset") -> list[JsonObject]:
    """Every row as a dict; images stay bytes or paths."""
    return rows_of_table(data.with_format("arrow")[:], data.features)


def rows_of_table(table: Any, features: Mapping[str, Any]) -> list[JsonObject]:
    """The rows of an Arrow table as dicts. `features`: of the data set that it belongs to."""
    rows: list[JsonObject] = table.to_pylist()
    for name in table.column_names:
        feature = features[name]
        if isinstance(feature, JsonText):
            for row in rows:
                row[name] = feature.decode_example(row[name])
    return rows


def join_datasets(parts: Sequence["Dataset"]) -> "Dataset":
    """The rows of all parts, in one data set, even if their column types differ."""
    from datasets import concatenate_datasets  # lazy: a second of imports

    if all(part.features == parts[0].features for part in parts):
        return concatenate_datasets(list(parts))
    return dataset_of_rows(row for part in parts for row in rows_of_dataset(part))


def iter_rows(data: "Dataset") -> Iterator[JsonObject]:
    """The rows of `rows_of_dataset`, with only some of them in memory at a time."""
    for table in iter_tables(data):
        yield from rows_of_table(table, data.features)


def with_column(data: "Dataset", column: "Dataset") -> "Dataset":
    """The data with another data set's column, replacing its own or, if new, appended."""
    from datasets import concatenate_datasets  # lazy: a second of imports

    order = list(dict.fromkeys([*data.column_names, *column.column_names]))
    others = data.select_columns([name for name in order if name not in column.column_names])
    if not others.column_names:
        return column
    return concatenate_datasets([others, column], axis=1).select_columns(order)


def register_json_text() -> None:
    """Let `datasets` read columns of this type, also from a saved data set."""
    from datasets.features import features  # lazy: a second of imports

    features._FEATURE_TYPES.setdefault("JsonText", JsonText)


def _batches(rows: Iterable[JsonObject]) -> Iterator[list[JsonObject]]:
    rest = iter(rows)
    while part := list(itertools.islice(rest, ROWS_AT_ONCE)):
        yield part


def _encode_rows(rows: Sequence[JsonObject]) -> Part:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _encode_column([row.get(name) for row in rows]) for name in names}
    return Part(columns, len(rows))


def _encode_column(values: list[Any]) -> Column:
    from datasets import Dataset, Features, Value  # lazy: a second of imports

    kinds = {*map(type, values)} - {type(None)}
    if not kinds:
        return pa.nulls(len(values)), Value("null")
    if kinds - JSON_KINDS:  # images, dates and other objects from user functions
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
    return array, Features.from_arrow_schema(pa.schema([("column", array.type)]))["column"]


def _has_large_integer(values: Sequence[int | None]) -> bool:
    numbers = [value for value in values if value is not None]
    return min(numbers) not in INT64 or max(numbers) not in INT64


def _exact_array(values: list[Any]) -> Any | None:
    """The values as an Arrow array; None if Arrow would not return them unchanged."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None
    # repr distinguishes 1, 1.0 and True, which are equal.
    return array if repr(array.to_pylist()) == repr(values) else None


def _joined_features(parts: Sequence[Part]) -> Any:
    """The type of each column: the one type that it has in all parts, else JSON text."""
    from datasets import Features, Value  # lazy: a second of imports

    empty = Value("null")
    found: dict[str, Any] = {}
    for part in parts:
        for name, (_, feature) in part.columns.items():
            before = found.setdefault(name, feature)
            if before == empty:
                found[name] = feature
            elif feature not in (empty, before):
                found[name] = JsonText()
    return Features(found)


def _as_table(part: Part, features: Any) -> Any:
    """A part as a table with these columns and types."""
    from datasets import Value  # lazy: a second of imports

    schema, arrays = features.arrow_schema, []
    for name, feature in features.items():
        array, own = part.columns.get(name, (None, Value("null")))
        if own == Value("null"):
            array = pa.nulls(part.num_rows, schema.field(name).type)
        elif isinstance(feature, JsonText):
            array, _ = _as_json_text((array, own))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _as_json_text(column: Column) -> Column:
    array, feature = column
    if isinstance(feature, JsonText):
        return column
    texts = map(JsonText().encode_example, array.to_pylist())
    return pa.array(texts, pa.string()), JsonText()
