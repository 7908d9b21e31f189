"""The fingerprint of a data set's content: a hash of Arrow buffers, without making Python rows.

It depends on the values, their order, and the names and types of the columns, but not on the file
that they come from, nor on how Arrow chunked the columns.
"""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_cli.data.cache import Ranks, cached_folder, report_progress
from rloo_cli.utils.errors import MachineError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MUCH_DATA_BYTES = 200e6  # hashed in a third of a second
BYTES_AT_ONCE, ROWS_AT_ONCE = 16e6, 20_000  # while a whole data set is read


def content_fingerprint(data: "Dataset") -> str:
    """32 hex digits that stand for every value of a data set, in order."""
    columns = {name: _ColumnDigest() for name in data.column_names}
    for table in iter_tables(data):
        for name, digest in columns.items():
            for chunk in table.column(name).chunks:
                digest.update(chunk)
    parts = [(name, str(data.features[name]), d.hexdigest()) for name, d in columns.items()]
    return fingerprint_of(len(data), parts)


def kept_fingerprint(data: "Dataset", ranks: Ranks) -> str:
    """`content_fingerprint`; for large data in files it is cached until they change."""
    names = [file["filename"] for file in data.cache_files]
    # The result of a map on rank 0 lies in a file that is unlinked by now.
    in_files = _is_mapped(data) and all(map(os.path.exists, names))
    states = [(name, os.stat(name)) for name in names] if in_files else []
    if sum(state.st_size for _, state in states) < MUCH_DATA_BYTES:
        return content_fingerprint(data)
    files = [(name, state.st_size, state.st_mtime_ns) for name, state in states]

    def write(folder: Path) -> None:
        (folder / "text").write_text(content_fingerprint(data))

    # datasets' own fingerprint covers what was done to the files' rows: renaming, selection.
    recipe = repr((data._fingerprint, str(data.features), len(data), files))
    try:
        folder = ranks.rank0_first(lambda: cached_folder("fingerprint", recipe, write))
    except MachineError as error:
        report_progress(f"warning: {error.problems[0].what}: the data are hashed at each start")
        return content_fingerprint(data)
    return (folder / "text").read_text()


def _is_mapped(data: "Dataset") -> bool:
    """Whether all values of a data set lie in files."""
    from datasets.table import MemoryMappedTable  # lazy: a second of imports

    blocks = getattr(data.data, "blocks", [[data.data]])
    return all(isinstance(table, MemoryMappedTable) for tables in blocks for table in tables)


def fingerprint_of(*parts: object) -> str:
    """32 hex digits that stand for plain values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of every token and its id."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).hexdigest()


def iter_tables(data: "Dataset") -> Iterator[pa.Table]:
    """The rows as Arrow tables, some at a time, without keeping mapped pages in memory."""
    files = [file["filename"] for file in data.cache_files]
    row_bytes = data.data.nbytes / max(1, data.data.num_rows)
    rows = int(min(ROWS_AT_ONCE, 1 + BYTES_AT_ONCE // max(1, row_bytes)))
    for table in data.with_format("arrow").iter(rows):
        yield table
        drop_mapped_pages(files)


def drop_mapped_pages(files: Collection[str]) -> None:
    """Release the pages of these files that this process has read; it rereads them if needed.

    A page of a mapped file counts as memory of the process from its first read. A pass over a file
    would leave all of it there. Does nothing where /proc does not exist (macOS), and
    nothing to writable mappings.
    """
    maps = Path("/proc/self/maps")
    if not files or not maps.exists():
        return
    library = ctypes.CDLL(None)
    for line in maps.read_text().splitlines():
        addresses, permissions, *rest = line.split(maxsplit=5)
        if rest[-1].removesuffix(" (deleted)") not in files or "w" in permissions:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class _ColumnDigest:
    """The digest of a column that is read chunk by chunk."""

    def __init__(self) -> None:
        self.valid, self.sizes, self.values = (_new_hash() for _ in range(3))
        self.children: list[_ColumnDigest] = []

    def update(self, array: Any) -> None:
        """Add the values of an Arrow array."""
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        self.valid.update(_bytes_of(pc.cast(array.is_valid(), pa.uint8())))
        if pa.types.is_struct(kind):
            self._update_children(array.flatten())
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self.sizes.update(_bytes_of(pc.list_value_length(array)))
            self._update_children([array.flatten()])
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            self._update_text(array, "i4")
        elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            self._update_text(array, "i8")
        elif pa.types.is_boolean(kind):
            self.values.update(_bytes_of(pc.cast(array, pa.uint8())))
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            self.values.update(_bytes_of(array))
        else:  # dates, decimals and other rare types
            for value in array.to_pylist():
                self.values.update(repr(value).encode())

    def _update_children(self, arrays: Iterable[Any]) -> None:
        for number, child in enumerate(arrays):
            if number == len(self.children):
                self.children.append(_ColumnDigest())
            self.children[number].update(child)

    def _update_text(self, array: Any, offset_type: str) -> None:
        self.sizes.update(_bytes_of(pc.binary_length(array)))
        if array.null_count:  # the bytes of a null value are not defined
            array = array.fill_null(b"" if "binary" in str(array.type) else "")
        _, offsets, data = array.buffers()
        if len(array) and data is not None:
            ends = np.frombuffer(offsets, offset_type)[array.offset : array.offset + len(array) + 1]
            self.values.update(memoryview(data)[ends[0] : ends[-1]])

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        parts = [part.hexdigest() for part in (self.valid, self.sizes, self.values)]
        return fingerprint_of(*parts, *[child.hexdigest() for child in self.children])


def _new_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


def _bytes_of(numbers: Any) -> Any:
    """The buffer of an array of numbers, with 0 for null."""
    return np.ascontiguousarray(numbers.fill_null(0).to_numpy(zero_copy_only=False)).view("u1")
