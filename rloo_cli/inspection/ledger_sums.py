"""Sums up the prompt ledger of a run: the fates of its prompts, in total and per epoch.

It expects the lines as the run wrote them: it raises for a missing, repeated or reordered prompt.
An unreadable line is reported with its number.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.reporting.prompt_ledger import (
    LEDGER_FILE,
    PROMPT_FATES,
    position_after,
    read_ledger_entries,
)
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject


@dataclass
class LedgerSums:
    """The sums of the lines so far. The file calls a prompt offset `place`, an example a row."""

    header: JsonObject = field(default_factory=dict)  # the last one
    first_position: tuple[int, int] = (0, 0)  # steps and prompt offset of the first header
    steps: int = 0
    prompt_offset: int = 0
    updates: int = 0
    pending: Sequence[int] = ()  # drawn, but not used by a step so far (overlap=carry)
    epochs: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    trained_rows: set[int] = field(default_factory=set)

    def add_entry(self, entry: JsonObject) -> None:
        """Count the next line. Raises KeyError, TypeError or ValueError for an invalid object."""
        if "ledger" in entry:
            if not self.header:
                self.first_position = position_after(entry)
            self.header = entry
        else:
            fates = {p: name for name in PROMPT_FATES for p in entry.get(name, [])}
            for offset, row in zip(sorted(fates), entry["rows"], strict=True):
                self.epochs[offset // self.header["prompts"]][fates[offset]] += 1
                if fates[offset] == "trained":
                    self.trained_rows.add(row)
            self.updates += entry["updates"]
            self.pending = entry.get("pending", [])
        self.steps, self.prompt_offset = position_after(entry)

    @property
    def fates(self) -> Counter[str]:
        """The number of prompts per fate, over all epochs."""
        return sum(self.epochs.values(), Counter())

    def to_json(self) -> JsonObject:
        """The sums as plain values."""
        header, fates = self.header, self.fates
        filtered = {*header["filtered"]}
        known = [row for row in self.trained_rows if row < header["data_rows"]]
        epochs = [
            {"epoch": epoch, "draws": found.total(), "fates": {f: found[f] for f in PROMPT_FATES}}
            for epoch, found in sorted(self.epochs.items())
        ]
        return {
            "data_rows": header["data_rows"],
            "prompts": header["prompts"],
            "filtered": len(filtered),
            "cut": header["cut"],
            "steps": [self.first_position[0] + 1, self.steps],
            "places": [self.first_position[1], self.prompt_offset],
            "updates": self.updates,
            "draws": fates.total(),
            "pending": len(self.pending),
            "fates": {f: fates[f] for f in PROMPT_FATES},
            "prompts_trained": len({*known} - filtered),
            "epochs": epochs,
        }


def read_ledger_sums(folder: Path) -> JsonObject:
    """The sums of a run's ledger. Raises DataError (exit 4) for a line that is not an entry."""
    path, sums, number = folder / LEDGER_FILE, LedgerSums(), 0
    try:
        for entry in read_ledger_entries(path):
            number += 1
            sums.add_entry(entry)
        return sums.to_json()
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        what = "a line of the ledger is not an entry" if number else "the ledger is empty"
        why = f"{type(error).__name__}: {error}" if number else "a run writes its header first"
        fix = "restore the original file; if it was not changed, please report this"
        refuse(f"{path}:{number}" if number else str(path), what, fix, why, error=DataError)
