"""Sequences whose values are read on access, many together where possible."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rloo_cli.data.exact_values import rows_of_table
from rloo_cli.data.fingerprint import drop_mapped_pages

if TYPE_CHECKING:
    from datasets import Dataset

READ_AT_ONCE = 500  # values per read of a whole sequence
Value = TypeVar("Value")


class ReadWhenAsked(Sequence[Value]):
    """A sequence whose values are read on access. `read`: indices -> their values."""

    def __init__(self, size: int, read: Callable[[Sequence[int]], list[Value]]):
        self.size, self.read = size, read

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Value: ...

    @overload
    def __getitem__(self, index: slice) -> list[Value]: ...

    def __getitem__(self, index: int | slice) -> Value | list[Value]:
        if isinstance(index, slice):
            return self.read(range(self.size)[index])
        return self.read([range(self.size)[index]])[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __iter__(self) -> Iterator[Value]:
        for start in range(0, self.size, READ_AT_ONCE):
            yield from self[start : start + READ_AT_ONCE]


def values_at(values: Sequence[Value], indices: Sequence[int]) -> list[Value]:
    """The values at some indices, read together."""
    if isinstance(values, ReadWhenAsked):
        return values.read(indices)
    return [values[i] for i in indices]


def join_sequences(parts: Sequence[Sequence[Value]]) -> ReadWhenAsked[Value]:
    """One sequence after the other."""
    ends = list(itertools.accumulate(map(len, parts)))

    def read(indices: Sequence[int]) -> list[Value]:
        found: dict[int, Value] = {}
        for part, end in zip(parts, ends, strict=True):
            begin = end - len(part)
            ours = [i for i in indices if begin <= i < end]
            found |= zip(ours, values_at(part, [i - begin for i in ours]), strict=True)
        return [found[i] for i in indices]

    return ReadWhenAsked(ends[-1], read)


def arrow_view(data: "Dataset", columns: Sequence[str]) -> "Dataset":
    """The data with some columns, as Arrow tables.

    Constructing it touches a page of every part of the file, and the system maps nearby pages.
    """
    view = data.select_columns(list(columns)).with_format("arrow")
    drop_mapped_pages([file["filename"] for file in data.cache_files])
    return view


def arrow_rows(data: "Dataset", rows: Sequence[int]) -> Any:
    """Some rows of an `arrow_view` as a table."""
    return data[rows.start : rows.stop] if isinstance(rows, range) else data[list(rows)]


def column_values(data: "Dataset", column: str) -> ReadWhenAsked[Any]:
    """The values of a column, as stored."""
    alone = arrow_view(data, [column])

    def read(rows: Sequence[int]) -> list[Any]:
        found = rows_of_table(arrow_rows(alone, rows), data.features) if rows else []
        return [row[column] for row in found]

    return ReadWhenAsked(len(data), read)
