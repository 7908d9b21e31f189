"""The lines of a metrics.jsonl, read so that a run of a million steps fits in memory.

A line of metrics has some eighty numbers. As a dict it takes twelve kilobytes, because json creates
every name of every line again; here lines with the same names share them, and a line is
only its numbers in eight bytes each. It reads like the dict, and its values are the same to
the last bit.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

MetricsMapping = Mapping[str, Any]  # a dict, or a line that is packed

KINDS = {float: "d", int: "q"}  # type -> its code in struct, eight bytes each
UNPACKERS = {kind: struct.Struct(f"={kind}").unpack_from for kind in KINDS.values()}
# Name -> how its value is unpacked, and its offset.
Layout = dict[str, tuple[Callable[..., tuple[Any, ...]], int]]


class PackedLine(Mapping[str, Any]):
    """A line of numbers that shares its names with other lines. Reads like a dict."""

    __slots__ = ("_layout", "_numbers")

    def __init__(self, layout: Layout, numbers: bytes):
        self._layout, self._numbers = layout, numbers

    def __getitem__(self, name: str) -> Any:
        unpack, offset = self._layout[name]
        return unpack(self._numbers, offset)[0]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name; `default` if missing."""
        entry = self._layout.get(name)
        return default if entry is None else entry[0](self._numbers, entry[1])[0]

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def __repr__(self) -> str:
        return repr(dict(self))


class LinePacker:
    """Packs lines; those with the same names and types share their names."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, ...], tuple[Layout, struct.Struct]] = {}

    def pack(self, line: JsonObject) -> MetricsMapping:
        """The line packed; unchanged if it has anything but numbers of eight bytes."""
        kinds = "".join([KINDS.get(type(value), "?") for value in line.values()])
        if "?" in kinds:
            return line
        layout, packer = self._layouts.get((kinds, *line)) or self._new_layout(kinds, line)
        try:
            return PackedLine(layout, packer.pack(*line.values()))
        except struct.error:  # an integer of more than eight bytes
            return line

    def _new_layout(self, kinds: str, line: JsonObject) -> tuple[Layout, struct.Struct]:
        named = enumerate(zip(line, kinds, strict=True))
        layout = {name: (UNPACKERS[kind], 8 * i) for i, (name, kind) in named}
        self._layouts[(kinds, *line)] = made = layout, struct.Struct(f"={kinds}")
        return made


def metric_names(lines: Iterable[MetricsMapping]) -> list[str]:
    """All names in these lines, in order of appearance."""
    names: dict[str, None] = {}
    seen: set[int] = set()
    for line in lines:
        layout = line._layout if isinstance(line, PackedLine) else line
        if id(layout) not in seen:
            seen.add(id(layout))
            names |= dict.fromkeys(layout)
    return list(names)


def read_metrics_lines(path: Path) -> list[MetricsMapping]:
    """The lines of a metrics.jsonl, by step; a last line that a kill cut off is left out.

    Raises ConfigError for a missing file, and for any other line that is not JSON.
    """
    if not path.is_file():
        why = "it is not a file" if path.exists() else "file not found"
        fix = "name a run's metrics.jsonl"
        refuse(str(path), "no metrics found", fix, why)
    packer = LinePacker()
    lines = [packer.pack(metrics) for metrics in _json_lines(path)]
    return sorted(lines, key=lambda metrics: metrics["step"])


def read_training_lines(path: Path, step: int) -> list[JsonObject]:
    """The lines of training up to `step`, as rewards saw them; [] if there is no such file.

    Raises ConfigError as `read_metrics_lines`.
    """
    lines = _json_lines(path) if path.is_file() else ()
    return [line for line in lines if line["step"] <= step and "step_time" in line]


def _json_lines(path: Path) -> Iterator[JsonObject]:
    """Each line of a metrics.jsonl that has a step, except a last one that a kill cut off."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                metrics = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:  # also for invalid UTF-8
                if not file.read(1):
                    return
                what, where = "a line of metrics is not JSON", f"{path}:{number}"
                refuse(where, what, "correct that line", error)
            if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
                yield metrics


class MetricsReader:
    """Reads the valid lines of a metrics.jsonl, and continues as it grows.

    A truncated file, such as a resumed run's, is read from its beginning again: if it is shorter
    than the part read so far, or the last line read has changed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.lines: list[MetricsMapping] = []  # the entries so far, by step
        self.problems: list[str] = []  # invalid lines
        self._packer, self._last_line = LinePacker(), b""
        self._offset = self._count = 0  # bytes and lines read so far

    def read(self) -> list[MetricsMapping]:
        """The numbers of all entries that the file has now, by step. Raises OSError.

        An unfinished last line is left for the next call: it is being written, or a kill cut it
        off, and then the next attempt removes it.
        """
        if not self.path.is_file():
            self._begin_anew()
            return self.lines
        with self.path.open("rb") as file:
            file.seek(max(0, self._offset - len(self._last_line)))
            if file.read(len(self._last_line)) != self._last_line:
                self._begin_anew()
                file.seek(0)
            in_order = True
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset, self._count = self._offset + len(line), self._count + 1
                self._last_line = line
                in_order &= self._add_line(line)
        if not in_order:
            self.lines.sort(key=lambda metrics: metrics["step"])
        return self.lines

    def _add_line(self, line: bytes) -> bool:
        """Add one line. Returns whether the lines are still in the order of their steps."""
        try:
            entry = json.loads(line.decode("utf-8", "replace"), parse_constant=lambda _: None)
            if type(entry["step"]) is not int:
                raise TypeError
            packed = self._packer.pack(entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            where = f"{self.path}:{self._count}"
            self.problems.append(f"{where}: not a valid line of metrics")
            return True
        follows = not self.lines or self.lines[-1]["step"] <= entry["step"]
        if not isinstance(packed, PackedLine):
            numbers = {k: v for k, v in entry.items() if isinstance(v, int | float)}
            packed = self._packer.pack(numbers)
        self.lines.append(packed)
        return follows
