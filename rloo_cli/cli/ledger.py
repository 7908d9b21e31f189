"""`rloo ledger RUN [--json]`: what became of every prompt of a run, and whether it adds up.

Nothing in the file is believed. Each line must follow the one before it, its rows must be those
that the order of draws has at its places (computed anew), every draw must have one fate, an epoch
that is over must have had every prompt once, and where the run has ended, run.json and
metrics.jsonl must tell of the same steps. The first thing that is wrong is named with its line
(exit 4). Imports no torch.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.cli.run_folders import RunArgumentParser, find_run_folder
from rloo_cli.data import order
from rloo_cli.reporting.prompt_ledger import (
    LEDGER_FILE,
    LEDGER_FORMAT,
    PROMPT_FATES,
    entry_check,
    position_after,
    read_ledger_entries,
)
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import JsonObject, read_json

USAGE = "rloo ledger RUN [--json]"
FINAL_STATES = (
    "finished",
    "stopped",
    "failed",
)  # states of run.json in which its progress is the last
MAX_EPOCH_COLUMNS = 6  # epochs shown beside each other
HEADER_FIELDS = {
    "ledger": int,
    "prompts": int,
    "data_rows": int,
    "filtered": list,
    "cut": int,
    "seed": int,
}
HEADER_FIELDS |= {"shuffle": bool, "fingerprint": str}
STEP_FIELDS = {"draws": int, "epochs": list, "updates": int, "rows": list}
COMMON_FIELDS = {"step": int, "place": int, "check": str}


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError (no such run, no ledger) and DataError (it does not add up)."""
    parser = RunArgumentParser("ledger", USAGE)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(args)
    folder = find_run_folder(given.run, "ledger")
    if not (folder / LEDGER_FILE).is_file():
        why = "it has not begun its first step, or an older rloo made it"
        raise ConfigError(Problem(f"{folder} has no {LEDGER_FILE}", "command line", why))
    account, notes = audit_ledger(folder)
    if given.json:
        print(
            json.dumps({"run": str(folder)} | ledger_summary(account) | {"notes": notes}, indent=2)
        )
    else:
        print("\n".join([str(folder / LEDGER_FILE), *ledger_report(account), *notes]))
    return 0


@dataclass
class LedgerAudit:
    """What the lines so far add up to."""

    header: JsonObject = field(default_factory=dict)
    example_indices: list[int] = field(default_factory=list)  # the row of each prompt
    steps: int = 0
    prompt_offset: int = 0
    first_position: tuple[int, int] = (0, 0)  # steps and place of the first header
    header_offset: int = 0  # place of the last header
    updates: int = 0
    epochs: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # fates
    sampled_examples: dict[int, Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # rows
    trained_examples: Counter[int] = field(default_factory=Counter)  # rows
    mixture_sources: tuple[order.Source, ...] = ()

    def add_line(self, entry: JsonObject) -> str:
        """Take in the next line. Returns what is wrong with it, or ""."""
        first, begins = not self.header, "ledger" in entry
        if begins and entry["ledger"] != LEDGER_FORMAT:
            return f"format {entry['ledger']!r}: this rloo reads format {LEDGER_FORMAT}"
        kinds: dict[str, type] = COMMON_FIELDS | (HEADER_FIELDS if begins else STEP_FIELDS)
        may: dict[str, type] = {"mixture": list} if begins else dict.fromkeys(PROMPT_FATES, list)
        wrong = _field_problem(entry, kinds, may)
        if wrong:
            return wrong
        if first and not begins:
            return "the header is missing: this line is a step's"
        if begins:
            return self._add_header(entry, first)
        return self._step_problem(entry) or self._count_step(entry)

    def _add_header(self, entry: JsonObject, is_first: bool) -> str:
        rows, filtered = entry["data_rows"], entry["filtered"]
        if entry["prompts"] + len(filtered) != rows or entry["prompts"] < 1:
            return f"{entry['prompts']} prompts and {len(filtered)} filtered are not {rows} rows"
        if sorted({*filtered}) != filtered or not {*filtered} <= {*range(rows)}:
            return f"the filtered rows are not rows of {rows}, each once and in order"
        if not is_first and position_after(entry) != (self.steps, self.prompt_offset):
            return (
                f"a header after {_position_text(*position_after(entry))}, behind "
                f"{_position_text(self.steps, self.prompt_offset)}"
            )
        if is_first:
            self.first_position = self.steps, self.prompt_offset = position_after(entry)
        try:
            self.mixture_sources = tuple(
                order.Source(**source) for source in entry.get("mixture", [])
            )
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
        step, place, draws, rows = (entry[k] for k in ("step", "place", "draws", "rows"))
        if step != self.steps + 1:
            return f"step {step} comes after step {self.steps}"
        if place != self.prompt_offset:
            return (
                f"step {step} begins at place {place}; {self.prompt_offset} places were "
                "drawn before it"
            )
        if draws < 1 or len(rows) != draws:
            return f"step {step} has {draws} draws and {len(rows)} rows"
        places, n = range(place, place + draws), len(self.example_indices)
        met = [(p, fate) for fate in PROMPT_FATES for p in entry.get(fate, [])]
        times = Counter(p for p, _ in met)
        for p in sorted({*places} | {*times}):
            if p not in places:
                return f"draw {p} is none of step {step}, which has {place} to {places[-1]}"
            if times[p] != 1:
                said = " and ".join(fate for q, fate in met if q == p)
                return f"draw {p} has {f'{times[p]} fates: {said}' if said else 'no fate'}"
        order_of = [
            *(self.header[k] for k in ("seed", "fingerprint", "shuffle")),
            self.mixture_sources,
        ]
        for p, row in zip(places, rows, strict=True):
            wanted = self.example_indices[order.prompt_index_at(p, n, *order_of)]
            if row != wanted:
                return f"draw {p} is row {row}; the order of epoch {p // n} has row {wanted} there"
        if entry["epochs"] != sorted({p // n for p in places}):
            return f"step {step} says epochs {entry['epochs']}; there are {n} prompts in one"
        if "trained" in entry and not entry["updates"]:
            return f"step {step} has trained draws, and no update"
        return ""

    def _count_step(self, entry: JsonObject) -> str:
        """Count a step's draws. Returns which epoch did not have every prompt once, or ""."""
        fate = {p: name for name in PROMPT_FATES for p in entry.get(name, [])}
        n = len(self.example_indices)
        for p, row in enumerate(entry["rows"], entry["place"]):
            self.epochs[p // n][fate[p]] += 1
            self.sampled_examples[p // n][row] += 1
            self.trained_examples[row] += fate[p] == "trained"
        self.updates += entry["updates"]
        self.steps, self.prompt_offset = position_after(entry)
        for epoch in [e for e in self.sampled_examples if (e + 1) * n <= self.prompt_offset]:
            rows = self.sampled_examples.pop(epoch)
            odd = sorted(r for r in self.example_indices if rows[r] != 1)
            # A mixture's epoch has rows as often as their source's weight says.
            if odd and epoch * n >= self.header_offset and not self.mixture_sources:
                return f"epoch {epoch} had row {odd[0]} {rows[odd[0]]} times"
        return ""

    @property
    def fates(self) -> Counter[str]:
        """Draws that met each fate, over all epochs."""
        return sum(self.epochs.values(), Counter())


def audit_ledger(folder: Path) -> tuple[LedgerAudit, list[str]]:
    """Check a run's whole ledger; what it adds up to, and notes on what could not be compared.

    Raises DataError (exit 4), which names the first line that is wrong, and how.
    """
    # The ledger last: a run that is going on writes it before it writes these.
    facts, logged = read_json(folder / "run.json"), _last_logged_step(folder / "metrics.jsonl")
    path, account, seal = folder / LEDGER_FILE, LedgerAudit(), ""
    lines = read_ledger_entries(path)
    for number, entry in enumerate(lines, 1):
        wrong = account.add_line(entry)
        seal = entry_check({k: v for k, v in entry.items() if k != "check"}, seal)
        if not wrong and entry["check"] != seal:
            wrong = "this line, or the one before it, is not as it was written (check)"
        if wrong:
            raise DataError(Problem("the ledger does not add up", f"{path}:{number}", wrong))
    # An attempt that ended before it began leaves the counts of one before it.
    began = facts.get("began") == facts.get("attempt")
    ended = facts.get("state") in FINAL_STATES and began
    wrong = (
        _disagreement(account, facts if ended else {}, logged, ended) if lines else "it is empty"
    )
    if wrong:
        raise DataError(Problem("the ledger does not add up", f"{path}:{len(lines)}", wrong))
    note = "run.json was not compared: the last attempt goes on, was killed, or never began"
    return account, [] if ended else [note]


def _disagreement(
    account: LedgerAudit, run_metadata: JsonObject, logged_step: int | None, has_ended: bool
) -> str:
    """What the run's other files say otherwise, or ""."""
    found = {"step": account.steps, "place": account.prompt_offset}
    if account.first_position == (0, 0):
        found["updates"] = account.updates
    for name, value in (run_metadata.get("progress") or {}).items():
        if found.get(name, value) != value:
            return f"it ends at {name} {found[name]}, run.json's progress at {name} {value}"
    fingerprint = account.header["fingerprint"]
    if run_metadata.get("fingerprint", fingerprint) != fingerprint:
        return f"it is of the data {fingerprint}, the run of {run_metadata['fingerprint']}"
    logged_step = account.first_position[0] if logged_step is None else logged_step
    if logged_step > account.steps or (has_ended and logged_step < account.steps):
        return f"it ends at step {account.steps}, metrics.jsonl at step {logged_step}"
    return ""


def _last_logged_step(path: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl; None where there is none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else None
    except (ValueError, KeyError, TypeError):
        raise DataError(Problem("a line of metrics is no entry", f"{path}:{len(lines)}")) from None


def _field_problem(entry: JsonObject, required: dict[str, type], optional: dict[str, type]) -> str:
    """Which field is missing, unknown or of another kind, or ""."""
    for name, value in entry.items():
        kind = (required | optional).get(name)
        if kind is None:
            return f"it has a field {name!r}, which no such line has"
        plain = value if isinstance(value, list) and name != "mixture" else []
        if type(value) is not kind or any(type(item) is not int for item in plain):
            what = "a list of numbers" if kind is list else kind.__name__
            return f"its {name} is not {what}"
    missing = [name for name in required if name not in entry]
    return f"it has no {missing[0]!r}" if missing else ""


def _position_text(step: int, prompt_offset: int) -> str:
    return f"step {step}, place {prompt_offset}"


def ledger_summary(account: LedgerAudit) -> JsonObject:
    """The account as plain values, for --json."""
    header, n = account.header, len(account.example_indices)
    epochs = [
        {"epoch": e, "draws": fates.total(), "fates": {f: fates[f] for f in PROMPT_FATES}}
        for e, fates in sorted(account.epochs.items())
    ]
    return {
        "conserved": True,
        "data_rows": header["data_rows"],
        "prompts": n,
        "filtered": len(header["filtered"]),
        "cut": header["cut"],
        "steps": [account.first_position[0] + 1, account.steps],
        "places": [account.first_position[1], account.prompt_offset],
        "updates": account.updates,
        "draws": account.fates.total(),
        "fates": {f: account.fates[f] for f in PROMPT_FATES},
        "prompts_trained": sum(
            account.trained_examples[row] > 0 for row in account.example_indices
        ),
        "epochs": epochs,
    }


def ledger_report(account: LedgerAudit) -> list[str]:
    """The account for a person: fate x draws x share, and by epoch where there are few."""
    facts, fates, few = (
        ledger_summary(account),
        account.fates,
        sorted(account.epochs)[:MAX_EPOCH_COLUMNS],
    )
    few = few if len(account.epochs) <= MAX_EPOCH_COLUMNS else []
    total = max(1, fates.total())
    steps = f"steps {facts['steps'][0]} to {account.steps}" if fates else "no step yet"
    lines = [
        f"{facts['data_rows']} rows = {facts['prompts']} prompts + {facts['filtered']} filtered as"
        f" too long; {facts['cut']} prompts cut",
        f"{steps}, {facts['updates']} updates; {facts['prompts_trained']} prompts trained on at"
        " least once",
        "",
        "".join(["fate".ljust(12), "draws".rjust(9), "share".rjust(8)]
                + [f"epoch {e}".rjust(11) for e in few]),
    ]  # fmt: skip
    for name in PROMPT_FATES:
        cells = "".join(f"{account.epochs[e][name]:>11}" for e in few)
        lines.append(f"{name:<12}{fates[name]:>9}{fates[name] / total:>8.1%}{cells}")
    parts = [f"{name} {fates[name]}" for name in PROMPT_FATES if fates[name]]
    sums = f" = {' + '.join(parts)}" if parts else ""
    return [*lines, "", f"conserved: {fates.total()} draws{sums}"]
