"""Names of our keys in other trainers, and the likely key for a misspelt one.

`find_old_name` maps a name of another trainer to the current key, with notes on converting values
(TRL changed its RLOO names once, in 0.22). `nearest_names` guesses at spelling. `rloo migrate` uses
the same table, `old_names.txt`. `<name>` in a key is a name that the user chooses. Every key of the
table exists in the current schema; tests/house/test_names.py checks it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

MIN_LAST_PART_LIKENESS = 0.75  # minimal similarity of the last parts of two keys for a guess,
OTHER_SECTION_LIKENESS = 0.8  # and of keys in two sections
MIN_KEY_LIKENESS = 0.9  # higher: a long common section name makes two keys similar


@dataclass(frozen=True)
class OldName:
    """One line of the migration table."""

    names: tuple[str, ...]
    source: str  # which tool, which versions
    new_key: str | None  # current key; None = no equivalent in rloo, see the note
    note: str = ""  # conversion or correction, one line
    fix: str = ""  # what to write if `new_key` with a value is not enough: a group's choice


def find_old_name(key: str) -> OldName | None:
    """The table's line for a name of another trainer; the last part of a dotted key decides.

    Call it only for unknown keys: `beta` is in the table too.
    """
    return _OLD_NAME_OF.get(key.rpartition(".")[2].replace("-", "_"))


def nearest_names(key: str, candidates: Iterable[str]) -> list[str]:
    """Up to three known keys that `key` may be a misspelling of, best first.

    For a key without a section, equally good guesses keep the order of `candidates`.
    """
    scored = []
    for index, candidate in enumerate(candidates):
        whole = _alike(key, candidate)
        last = _alike(key.rpartition(".")[2], candidate.rpartition(".")[2])
        same = key.rpartition(".")[0] == candidate.rpartition(".")[0]
        least = MIN_LAST_PART_LIKENESS if same else OTHER_SECTION_LIKENESS
        if last >= least or whole >= MIN_KEY_LIKENESS:
            mirror = candidate.startswith("eval.")  # its keys have the names of training keys
            scored.append((-last, -whole if "." in key else mirror, index, candidate))
    return [candidate for *_, candidate in sorted(scored)[:3]]


def list_nearest_first(near: Sequence[str], names: Sequence[str], count: int) -> str:
    """A text for an error: `count` of the names, `near` (from `nearest_names`) first."""
    listed = [*near, *(name for name in names if name not in near)]
    return ", ".join(listed[:count]) + (", ..." if len(listed) > count else "")


def _alike(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()


TABLE_FILE = Path(__file__).with_name("old_names.txt")


def _parse_table(text: str) -> tuple[OldName, ...]:
    """The rows of the table, in the format described at its head."""
    entries, source = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            source = line.strip("[]")
        elif line and not line.startswith("#"):
            names, new, note = (part.strip() for part in line.split("|"))
            key = None if new == "-" else new
            fix = note.removeprefix("fix: ") if note.startswith("fix: ") else ""
            note = "" if fix else note
            entries.append(OldName(tuple(names.split(", ")), source, key, note, fix))
    return tuple(entries)


OLD_NAME_TABLE = _parse_table(TABLE_FILE.read_text(encoding="utf-8"))
_OLD_NAME_OF = {name: entry for entry in OLD_NAME_TABLE for name in entry.names}
