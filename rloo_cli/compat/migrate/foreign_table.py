"""Reads the table of OpenRLHF's and verl's settings: foreign_names.txt, whose head says how it is.

`find_foreign_row` answers a setting as it was typed. What a rule converts (`*`) is written by
openrlhf.py and verl.py; the rest is done by the table alone.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE_FILE = Path(__file__).with_name("foreign_names.txt")
BY_RULE = "*"
NO_KEY = "-"


@dataclass(frozen=True)
class ForeignRow:
    """One line of the table."""

    names: tuple[str, ...]  # the first is the one that the rules know
    key: str  # a key of ours, * or -
    note: str

    @property
    def answer(self) -> str:
        """What is said of the setting where it is not written as a key."""
        return f"write {self.note[5:]}" if self.note.startswith("fix: ") else self.note


@cache
def foreign_rows(tool: str) -> tuple[ForeignRow, ...]:
    """The rows of a tool: openrlhf or verl."""
    rows, section = [], ""
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#") and section == tool:
            names, key, note = (part.strip() for part in line.split("|"))
            rows.append(ForeignRow(tuple(names.split(", ")), key, note))
    return tuple(rows)


@cache
def _rows_by_name(tool: str) -> dict[str, ForeignRow]:
    return {name: row for row in foreign_rows(tool) for name in row.names}


def find_foreign_row(tool: str, name: str) -> ForeignRow | None:
    """The row of a setting: by its name, else by the longest section that has a row of its own."""
    rows = _rows_by_name(tool)
    if name in rows:
        return rows[name]
    parts = name.split(".")
    sections = (".".join(parts[:depth]) + ".*" for depth in range(len(parts) - 1, 0, -1))
    return next((rows[section] for section in sections if section in rows), None)
