"""bench/results.jsonl: figures as they were measured, one JSON object a line, only appended to.

`docs/results/speed.md` is made from it, and from nothing else. No torch here: CI checks it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.jsonl")
Row = dict[str, Any]


def append(rows: Iterable[Row], path: Path = PATH) -> None:
    """Add rows, each as one line. A NaN is refused: it is no JSON, and no figure."""
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def read(path: Path = PATH) -> list[Row]:
    """All rows, in the order in which they were measured."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
