"""Reads the rows of CSV files: every cell is text, exactly as written.

Nothing is inferred: "007" stays "007", "NA" and "None" stay text. An empty cell is None. The key
data.types converts columns.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject


def csv_rows(path: Path) -> Iterator[JsonObject]:
    """The rows of a CSV file in UTF-8; the first line names the columns.

    A column without a name, such as the index that pandas writes, is `Unnamed: 0` (its number).
    Raises DataError with the line if it cannot be read.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may hold a whole document
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)  # else an open quote swallows the rest of the file
        try:
            header = next(lines, [])
            names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
            if not names:
                raise _csv_error(path, 1, "no columns: the file is empty")
            double = [name for name in names if names.count(name) > 1]
            if double:
                raise _csv_error(path, 1, f"two columns are named {double[0]!r}")
            for cells in lines:
                if not cells:
                    continue
                if len(cells) != len(names):
                    why = f"it has {len(cells)} cells, but the header has {len(names)} columns"
                    raise _csv_error(path, lines.line_num, why)
                yield {n: cell if cell else None for n, cell in zip(names, cells, strict=True)}
        except csv.Error as error:
            said = str(error).replace("unexpected end of data", "EOF inside string (an open quote)")
            raise _csv_error(path, lines.line_num, said) from None
        except UnicodeDecodeError as error:
            raise _csv_error(path, lines.line_num + 1, f"it is not utf-8: {error}") from None


def _csv_error(path: Path, line: int, why: str) -> DataError:
    fix = f"correct line {line}: cells with commas, quotes or line ends need double quotes"
    return DataError(Problem(f"{path} cannot be read", f"data.path, {path}:{line}", why, fix))
