"""Checks the prompt ledger of a run: what became of every prompt, and whether it adds up.

Nothing in the file is trusted. Each line must follow the one before it, its examples must be those
that the order has at its offsets (computed again), every sampled prompt must have one fate, a
complete epoch must have had every prompt once, and if the run has ended, run.json and metrics.jsonl
must report the same steps. The first error is named with its line.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.data import order
from rloo_cli.reporting.prompt_ledger import (
    LEDGER_FILE,
    LEDGER_FORMAT,
    PROMPT_FATES,
    entry_check,
    position_after,
    read_ledger_entries,
)
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject, read_json

FINAL_STATES = ("finished", "stopped", "failed")  # in these, run.json has the last progress
HEADER_FIELDS = {"ledger": int, "prompts": int, "data_rows": int, "filtered": list, "cut": int}
HEADER_FIELDS |= {"seed": int, "shuffle": bool, "fingerprint": str}
STEP_FIELDS = {"draws": int, "epochs": list, "updates": int, "rows": list}
COMMON_FIELDS = {"step": int, "place": int, "check": str}


@dataclass
class LedgerAudit:
    """What the lines so far add up to. The file calls a prompt offset `place`, an example a row."""

    header: JsonObject = field(default_factory=dict)
    example_indices: list[int] = field(default_factory=list)  # the example of each prompt
    steps: int = 0
    prompt_offset: int = 0
    first_position: tuple[int, int] = (0, 0)  # steps and prompt offset of the first header
    header_offset: int = 0  # prompt offset of the last header
    updates: int = 0
    pending: frozenset[int] = frozenset()  # drawn, and taken by no step yet (overlap=carry)
    # epoch -> fate -> prompts, epoch -> example -> times sampled, example -> times trained on
    epochs: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sampled_examples: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    trained_examples: Counter[int] = field(default_factory=Counter)
    mixture_sources: tuple[order.Source, ...] = ()

    def add_line(self, entry: JsonObject) -> str:
        """Check and count the next line. Returns what is wrong with it, or ""."""
        is_header = "ledger" in entry
        if is_header and entry["ledger"] != LEDGER_FORMAT:
            return f"format {entry['ledger']!r}: this rloo reads format {LEDGER_FORMAT}"
        required: dict[str, type] = COMMON_FIELDS | (HEADER_FIELDS if is_header else STEP_FIELDS)
        names = ["mixture"] if is_header else [*PROMPT_FATES, "pending"]
        optional: dict[str, type] = dict.fromkeys(names, list)
        if problem := _field_problem(entry, required, optional):
            return problem
        if is_header:
            return self._add_header(entry, is_first=not self.header)
        if not self.header:
            return "the header is missing: this line is a step's"
        return self._step_problem(entry) or self._count_step(entry)

    def _add_header(self, entry: JsonObject, is_first: bool) -> str:
        rows, filtered = entry["data_rows"], entry["filtered"]
        if entry["prompts"] + len(filtered) != rows or entry["prompts"] < 1:
            return f"{entry['prompts']} prompts and {len(filtered)} filtered are not {rows} rows"
        if sorted({*filtered}) != filtered or not {*filtered} <= {*range(rows)}:
            return f"the filtered rows are not rows of {rows}, each once and in order"
        if not is_first and position_after(entry) != (self.steps, self.prompt_offset):
            before = _position_text(self.steps, self.prompt_offset)
            return f"a header after {_position_text(*position_after(entry))}, behind {before}"
        if is_first:
            self.first_position = self.steps, self.prompt_offset = position_after(entry)
        try:
            self.mixture_sources = tuple(order.Source(**s) for s in entry.get("mixture", []))
            few = any(s.prompts < 1 or s.weight <= 0 for s in self.mixture_sources)
        except TypeError:
            return "its mixture is not a list of sources"
        if self.mixture_sources and (
            few or sum(s.prompts for s in self.mixture_sources) != entry["prompts"]
        ):
            return f"its sources do not have {entry['prompts']} prompts together"
        left_out = {*filtered}
        self.header, self.header_offset = entry, self.prompt_offset
        self.example_indices = [row for row in range(rows) if row not in left_out]
        self.sampled_examples.clear()
        return ""

    def _step_problem(self, entry: JsonObject) -> str:
        """What is wrong with a step's line, taken by itself and after those before it."""
        step, offset, count, examples = (entry[k] for k in ("step", "place", "draws", "rows"))
        if step != self.steps + 1:
            return f"step {step} comes after step {self.steps}"
        if offset != self.prompt_offset:
            before = f"{self.prompt_offset} places were drawn before it"
            return f"step {step} begins at place {offset}; {before}"
        if count < 1 or len(examples) != count:
            return f"step {step} has {count} draws and {len(examples)} rows"
        drawn, waiting = self._drawn_offsets(entry), {*entry.get("pending", [])}
        if not waiting <= drawn or len(waiting) != len(entry.get("pending", [])):
            return f"step {step} has pending draws that were not drawn, or that are there twice"
        offsets, n = sorted(drawn - waiting), len(self.example_indices)
        fates = [(p, fate) for fate in PROMPT_FATES for p in entry.get(fate, [])]
        times = Counter(p for p, _ in fates)
        for p in sorted({*offsets} | {*times}):
            if p not in offsets:
                return f"draw {p} is none of step {step}, which has {offset} to {offsets[-1]}"
            if times[p] != 1:
                several = " and ".join(fate for q, fate in fates if q == p)
                return f"draw {p} has {f'{times[p]} fates: {several}' if several else 'no fate'}"
        seed, fingerprint, shuffle = (self.header[k] for k in ("seed", "fingerprint", "shuffle"))
        for p, example in zip(offsets, examples, strict=True):
            index = order.prompt_index_at(p, n, seed, fingerprint, shuffle, self.mixture_sources)
            if example != self.example_indices[index]:
                wanted = f"the order of epoch {p // n} has row {self.example_indices[index]} there"
                return f"draw {p} is row {example}; {wanted}"
        if entry["epochs"] != sorted({p // n for p in offsets}):
            return f"step {step} says epochs {entry['epochs']}; there are {n} prompts in one"
        if "trained" in entry and not entry["updates"]:
            return f"step {step} has trained draws, and no update"
        return ""

    def _drawn_offsets(self, entry: JsonObject) -> set[int]:
        """Prompt offsets that had no fate before a step and were drawn by then."""
        drawn = entry["place"] + entry["draws"] + len(entry.get("pending", []))
        return {*self.pending, *range(self.prompt_offset + len(self.pending), drawn)}

    def _count_step(self, entry: JsonObject) -> str:
        """Count a step's prompts. Returns which epoch did not have every prompt once, or ""."""
        fate = {p: name for name in PROMPT_FATES for p in entry.get(name, [])}
        n = len(self.example_indices)
        for p, example in zip(sorted(fate), entry["rows"], strict=True):
            self.epochs[p // n][fate[p]] += 1
            self.sampled_examples[p // n][example] += 1
            self.trained_examples[example] += fate[p] == "trained"
        self.updates += entry["updates"]
        self.steps, self.prompt_offset = position_after(entry)
        self.pending = frozenset(entry.get("pending", []))
        whole = min(self.pending, default=self.prompt_offset)  # every draw before it has a fate
        for epoch in [e for e in self.sampled_examples if (e + 1) * n <= whole]:
            times = self.sampled_examples.pop(epoch)
            odd = sorted(example for example in self.example_indices if times[example] != 1)
            # A mixture's epoch has an example as often as the weight of its source says.
            if odd and epoch * n >= self.header_offset and not self.mixture_sources:
                return f"epoch {epoch} had row {odd[0]} {times[odd[0]]} times"
        return ""

    @property
    def fates(self) -> Counter[str]:
        """How many prompts met each fate, over all epochs."""
        return sum(self.epochs.values(), Counter())


def audit_ledger(folder: Path) -> tuple[LedgerAudit, list[str]]:
    """Check a run's whole ledger. Returns its sums, and notes on what could not be compared.

    Raises DataError (exit 4), which names the first line that is wrong, and how.
    """
    # The ledger is read last: a run that is going on writes it before it writes these.
    metadata = _run_metadata(folder / "run.json")
    logged = _last_logged_step(folder / "metrics.jsonl")
    path, audit, check = folder / LEDGER_FILE, LedgerAudit(), ""
    what, number = "the ledger does not add up", 0
    fix = "put it back as the run wrote it; if nobody changed it, please report it"
    for number, entry in enumerate(read_ledger_entries(path), 1):
        problem = audit.add_line(entry)
        check = entry_check({k: v for k, v in entry.items() if k != "check"}, check)
        if not problem and entry["check"] != check:
            problem = "this line, or the one before it, is not as it was written (check)"
        if problem:
            raise DataError(Problem(what, f"{path}:{number}", problem, fix))
    # An attempt that ended before its first step leaves the progress of the attempt before it.
    began = metadata.get("began") == metadata.get("attempt")
    ended = metadata.get("state") in FINAL_STATES and began
    compared = metadata if ended else {}
    problem = _disagreement(audit, compared, logged, ended) if number else "it is empty"
    if problem:
        raise DataError(Problem(what, f"{path}:{number}", problem, fix))
    note = "run.json was not compared: the last attempt goes on, was killed, or never began"
    return audit, [] if ended else [note]


def _run_metadata(path: Path) -> JsonObject:
    """run.json, {} where there is none. Raises DataError for one that cannot be read."""
    try:
        values: object = read_json(path)
        if not isinstance(values, dict) or not isinstance(values.get("progress") or {}, dict):
            raise ValueError("an object was expected")
    except (ValueError, RecursionError) as error:
        what = "the ledger cannot be compared with run.json"
        fix = "put run.json back as the run wrote it"
        raise DataError(Problem(what, str(path), str(error), fix)) from None
    return values


def _disagreement(
    account: LedgerAudit, run_metadata: JsonObject, logged_step: int | None, has_ended: bool
) -> str:
    """What the run's other files report differently, or ""."""
    counts = {"step": account.steps, "place": account.prompt_offset}
    if account.first_position == (0, 0):
        counts["updates"] = account.updates
    for name, value in (run_metadata.get("progress") or {}).items():
        if counts.get(name, value) != value:
            return f"it ends at {name} {counts[name]}, run.json's progress at {name} {value}"
    fingerprint = account.header["fingerprint"]
    if run_metadata.get("fingerprint", fingerprint) != fingerprint:
        return f"it is of the data {fingerprint}, the run of {run_metadata['fingerprint']}"
    logged_step = account.first_position[0] if logged_step is None else logged_step
    if logged_step > account.steps or (has_ended and logged_step < account.steps):
        return f"it ends at step {account.steps}, metrics.jsonl at step {logged_step}"
    return ""


def _last_logged_step(path: Path) -> int | None:
    """The step of the last complete line of metrics.jsonl; None if there is none."""
    last, number = b"", 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    last, number = line, number + 1
    try:
        return int(json.loads(last)["step"]) if number else None
    except (ValueError, KeyError, TypeError, OverflowError):
        where, why = f"{path}:{number}", "a JSON object with its step was expected"
        what, fix = "a line of metrics is not an entry", "put it back as the run wrote it"
        raise DataError(Problem(what, where, why, fix)) from None


def _field_problem(entry: JsonObject, required: dict[str, type], optional: dict[str, type]) -> str:
    """Which field is missing, unknown or of another kind, or ""."""
    for name, value in entry.items():
        kind = (required | optional).get(name)
        if kind is None:
            return f"it has a field {name!r}, which no such line has"
        numbers = value if isinstance(value, list) and name != "mixture" else []
        if type(value) is not kind or any(type(item) is not int for item in numbers):
            what = "a list of numbers" if kind is list else kind.__name__
            return f"its {name} is not {what}"
    missing = [name for name in required if name not in entry]
    return f"it has no {missing[0]!r}" if missing else ""


def _position_text(step: int, prompt_offset: int) -> str:
    return f"step {step}, place {prompt_offset}"


def ledger_summary(account: LedgerAudit) -> JsonObject:
    """The sums as plain values, for --json."""
    header, trained = account.header, account.trained_examples
    epochs = [
        {"epoch": e, "draws": fates.total(), "fates": {f: fates[f] for f in PROMPT_FATES}}
        for e, fates in sorted(account.epochs.items())
    ]
    return {
        "conserved": True,
        "data_rows": header["data_rows"],
        "prompts": len(account.example_indices),
        "filtered": len(header["filtered"]),
        "cut": header["cut"],
        "steps": [account.first_position[0] + 1, account.steps],
        "places": [account.first_position[1], account.prompt_offset],
        "updates": account.updates,
        "draws": account.fates.total(),
        "pending": len(account.pending),
        "fates": {f: account.fates[f] for f in PROMPT_FATES},
        "prompts_trained": sum(trained[example] > 0 for example in account.example_indices),
        "epochs": epochs,
    }
