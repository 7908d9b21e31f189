"""Proves that the prompt ledger of a run adds up; what does not is an AssertionError with its line.

Each line must follow the one before it, its rows must be those that the order has at its places
(computed again), every prompt that was drawn must have one fate, a complete epoch must have had
every prompt once, and run.json and metrics.jsonl must have the same steps.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_cli.data import order
from rloo_cli.inspection.ledger_sums import LedgerSums
from rloo_cli.reporting.prompt_ledger import (
    LEDGER_FILE,
    PROMPT_FATES,
    entry_check,
    position_after,
    read_ledger_entries,
)

Row = dict[str, Any]
FINAL_STATES = ("finished", "stopped", "failed")  # in these, run.json has the last progress


@dataclass
class LedgerAudit(LedgerSums):
    """The sums of a ledger; each line is checked before it is counted."""

    last_check: str = ""
    rows: list[int] = field(default_factory=list)  # the row of each prompt
    mixture: tuple[order.Source, ...] = ()
    header_place: int = 0  # of the last header
    drawn_rows: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def check_entry(self, entry: Row) -> str:
        """Check and count the next line. -> what is wrong with it, or ''"""
        is_header = "ledger" in entry
        problem = self._header_problem(entry) if is_header else self._step_problem(entry)
        without = {k: v for k, v in entry.items() if k != "check"}
        self.last_check = entry_check(without, self.last_check)
        if not problem and entry["check"] != self.last_check:
            problem = "this line, or the one before it, is not as it was written (check)"
        if problem:
            return problem
        self.add_entry(entry)
        return self._begin_order(entry) if is_header else self._epoch_problem(entry)

    def _header_problem(self, entry: Row) -> str:
        rows, filtered, prompts = entry["data_rows"], entry["filtered"], entry["prompts"]
        if prompts < 1 or prompts + len(filtered) != rows:
            return f"{prompts} prompts and {len(filtered)} filtered are not {rows} rows"
        if sorted({*filtered}) != filtered or not {*filtered} <= {*range(rows)}:
            return f"the filtered rows are not rows of {rows}, each once and in order"
        if self.header and position_after(entry) != (self.steps, self.prompt_offset):
            return f"a header after {position_after(entry)}, behind {self.prompt_offset}"
        sources = entry.get("mixture")
        if sources and sum(source["prompts"] for source in sources) != prompts:
            return f"its sources do not have {prompts} prompts together"
        return ""

    def _begin_order(self, entry: Row) -> str:
        self.rows = [row for row in range(entry["data_rows"]) if row not in {*entry["filtered"]}]
        self.mixture = tuple(order.Source(**source) for source in entry.get("mixture", []))
        self.header_place = self.prompt_offset
        self.drawn_rows.clear()
        return ""

    def _step_problem(self, entry: Row) -> str:
        """What is wrong with a step's line, taken by itself and after those before it."""
        if not self.header:
            return "the header is missing: this line is a step's"
        step, start, count, rows = (entry[k] for k in ("step", "place", "draws", "rows"))
        if step != self.steps + 1:
            return f"step {step} comes after step {self.steps}"
        if start != self.prompt_offset:
            return f"step {step} begins at place {start}, {self.prompt_offset} were drawn before"
        if count < 1 or len(rows) != count:
            return f"step {step} has {count} draws and {len(rows)} rows"
        waiting = {*entry.get("pending", [])}
        before = self.prompt_offset + len(self.pending)
        drawn = {*self.pending, *range(before, start + count + len(waiting))}
        if not waiting <= drawn or len(waiting) != len(entry.get("pending", [])):
            return f"step {step} has pending draws that were not drawn, or that are there twice"
        offsets, n = sorted(drawn - waiting), len(self.rows)
        fates = [(p, fate) for fate in PROMPT_FATES for p in entry.get(fate, [])]
        for p in sorted({*offsets, *(p for p, _ in fates)}):
            met = [fate for q, fate in fates if q == p]
            if p not in offsets:
                return f"draw {p} is none of step {step}, which has {start} to {offsets[-1]}"
            if len(met) != 1:
                return f"draw {p} has {' and '.join(met) or 'no fate'}"
        seed, fingerprint, shuffle = (self.header[k] for k in ("seed", "fingerprint", "shuffle"))
        for p, row in zip(offsets, rows, strict=True):
            index = order.prompt_index_at(p, n, seed, fingerprint, shuffle, self.mixture)
            if row != self.rows[index]:
                return f"draw {p} is row {row}; epoch {p // n} has row {self.rows[index]} there"
        if entry["epochs"] != sorted({p // n for p in offsets}):
            return f"step {step} says epochs {entry['epochs']}; there are {n} prompts in one"
        return f"step {step} has no update" if "trained" in entry and not entry["updates"] else ""

    def _epoch_problem(self, entry: Row) -> str:
        """Which epoch is over with a step, and did not have every prompt once, or ''."""
        n = len(self.rows)
        offsets = sorted(p for name in PROMPT_FATES for p in entry.get(name, []))
        for p, row in zip(offsets, entry["rows"], strict=True):
            self.drawn_rows[p // n][row] += 1
        whole = min(self.pending, default=self.prompt_offset)  # every draw before it has a fate
        for epoch in [e for e in self.drawn_rows if (e + 1) * n <= whole]:
            times = self.drawn_rows.pop(epoch)
            odd = [row for row in self.rows if times[row] != 1]
            # A mixture's epoch has a row as often as the weight of its source says.
            if odd and epoch * n >= self.header_place and not self.mixture:
                return f"epoch {epoch} had row {odd[0]} {times[odd[0]]} times"
        return ""


def audit_ledger(folder: Path) -> LedgerAudit:
    """Check a run's whole ledger, and whether its other files have the same steps. -> its sums"""
    path, audit = folder / LEDGER_FILE, LedgerAudit()
    for number, entry in enumerate(read_ledger_entries(path), 1):
        problem = audit.check_entry(entry)
        assert not problem, f"{path}:{number}: {problem}"
    assert audit.header, f"{path} is empty"
    logged, progress = _last_logged_step(folder / "metrics.jsonl"), _last_progress(folder)
    assert logged is None or logged <= audit.steps, f"metrics.jsonl is at step {logged}"
    counts = {"step": audit.steps, "place": audit.prompt_offset}
    if audit.first_position == (0, 0):
        counts["updates"] = audit.updates
    for name in counts.keys() & progress.keys():
        assert counts[name] == progress[name], f"{name}: run.json has {progress[name]}: {counts}"
    if progress:  # the run has ended
        logged = audit.first_position[0] if logged is None else logged
        assert logged == audit.steps, f"metrics.jsonl is at step {logged}, not {audit.steps}"
    return audit


def _last_progress(folder: Path) -> Row:
    """What run.json counted; {} of a run that goes on, was killed, or has no run.json."""
    path = folder / "run.json"
    about = json.loads(path.read_text()) if path.is_file() else {}
    # An attempt that ended before its first step leaves the progress of the attempt before it.
    ended = about.get("state") in FINAL_STATES and about.get("began") == about.get("attempt")
    return about.get("progress", {}) if ended else {}


def _last_logged_step(path: Path) -> int | None:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else None
