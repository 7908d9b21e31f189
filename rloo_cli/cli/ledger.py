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
from typing import Any

from rloo_cli.cli.run_folders import Words, find
from rloo_cli.data import order
from rloo_cli.reporting.prompt_ledger import FATES, FORMAT, NAME, Row, after, entries, sealed
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import read_json

USAGE = "rloo ledger RUN [--json]"
ENDED = ("finished", "stopped", "failed")  # states of run.json in which its progress is the last
COLUMNS = 6  # epochs shown beside each other
HEADER = {
    "ledger": int,
    "prompts": int,
    "data_rows": int,
    "filtered": list,
    "cut": int,
    "seed": int,
}
HEADER |= {"shuffle": bool, "fingerprint": str}
STEP = {"draws": int, "epochs": list, "updates": int, "rows": list}
ALWAYS = {"step": int, "place": int, "check": str}


def run(words: list[str]) -> int:
    """The verb. Raises ConfigError (no such run, no ledger) and DataError (it does not add up)."""
    parser = Words("ledger", USAGE)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    folder = find(given.run, "ledger")
    if not (folder / NAME).is_file():
        why = "it has not begun its first step, or an older rloo made it"
        raise ConfigError(Problem(f"{folder} has no {NAME}", "command line", why))
    account, notes = audit(folder)
    if given.json:
        print(json.dumps({"run": str(folder)} | summary(account) | {"notes": notes}, indent=2))
    else:
        print("\n".join([str(folder / NAME), *report(account), *notes]))
    return 0


@dataclass
class Account:
    """What the lines so far add up to."""

    header: Row = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)  # the row of each prompt
    steps: int = 0
    place: int = 0
    began: tuple[int, int] = (0, 0)  # steps and place of the first header
    since: int = 0  # place of the last header
    updates: int = 0
    epochs: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # fates
    drawn: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # rows
    trained: Counter[int] = field(default_factory=Counter)  # rows
    mix: tuple[order.Source, ...] = ()

    def add(self, entry: Row) -> str:
        """Take in the next line. Returns what is wrong with it, or ""."""
        first, begins = not self.header, "ledger" in entry
        if begins and entry["ledger"] != FORMAT:
            return f"format {entry['ledger']!r}: this rloo reads format {FORMAT}"
        kinds: dict[str, type] = ALWAYS | (HEADER if begins else STEP)
        may: dict[str, type] = {"mixture": list} if begins else dict.fromkeys(FATES, list)
        wrong = _fields(entry, kinds, may)
        if wrong:
            return wrong
        if first and not begins:
            return "the header is missing: this line is a step's"
        if begins:
            return self._header(entry, first)
        return self._wrong(entry) or self._step(entry)

    def _header(self, entry: Row, first: bool) -> str:
        rows, filtered = entry["data_rows"], entry["filtered"]
        if entry["prompts"] + len(filtered) != rows or entry["prompts"] < 1:
            return f"{entry['prompts']} prompts and {len(filtered)} filtered are not {rows} rows"
        if sorted({*filtered}) != filtered or not {*filtered} <= {*range(rows)}:
            return f"the filtered rows are not rows of {rows}, each once and in order"
        if not first and after(entry) != (self.steps, self.place):
            return f"a header after {_at(*after(entry))}, behind {_at(self.steps, self.place)}"
        if first:
            self.began = self.steps, self.place = after(entry)
        try:
            self.mix = tuple(order.Source(**source) for source in entry.get("mixture", []))
            few = any(s.prompts < 1 or s.weight <= 0 for s in self.mix)
        except TypeError:
            return "its mixture is not a list of sources"
        if self.mix and (few or sum(s.prompts for s in self.mix) != entry["prompts"]):
            return f"its sources do not have {entry['prompts']} prompts together"
        left_out = {*filtered}
        self.header, self.since = entry, self.place
        self.kept = [row for row in range(rows) if row not in left_out]
        self.drawn.clear()
        return ""

    def _wrong(self, entry: Row) -> str:
        """What is wrong with a step's line, taken by itself and after those before it."""
        step, place, draws, rows = (entry[k] for k in ("step", "place", "draws", "rows"))
        if step != self.steps + 1:
            return f"step {step} comes after step {self.steps}"
        if place != self.place:
            return f"step {step} begins at place {place}; {self.place} places were drawn before it"
        if draws < 1 or len(rows) != draws:
            return f"step {step} has {draws} draws and {len(rows)} rows"
        places, n = range(place, place + draws), len(self.kept)
        met = [(p, fate) for fate in FATES for p in entry.get(fate, [])]
        times = Counter(p for p, _ in met)
        for p in sorted({*places} | {*times}):
            if p not in places:
                return f"draw {p} is none of step {step}, which has {place} to {places[-1]}"
            if times[p] != 1:
                said = " and ".join(fate for q, fate in met if q == p)
                return f"draw {p} has {f'{times[p]} fates: {said}' if said else 'no fate'}"
        order_of = [*(self.header[k] for k in ("seed", "fingerprint", "shuffle")), self.mix]
        for p, row in zip(places, rows, strict=True):
            wanted = self.kept[order.at(p, n, *order_of)]
            if row != wanted:
                return f"draw {p} is row {row}; the order of epoch {p // n} has row {wanted} there"
        if entry["epochs"] != sorted({p // n for p in places}):
            return f"step {step} says epochs {entry['epochs']}; there are {n} prompts in one"
        if "trained" in entry and not entry["updates"]:
            return f"step {step} has trained draws, and no update"
        return ""

    def _step(self, entry: Row) -> str:
        """Count a step's draws. Returns which epoch did not have every prompt once, or ""."""
        fate = {p: name for name in FATES for p in entry.get(name, [])}
        n = len(self.kept)
        for p, row in enumerate(entry["rows"], entry["place"]):
            self.epochs[p // n][fate[p]] += 1
            self.drawn[p // n][row] += 1
            self.trained[row] += fate[p] == "trained"
        self.updates += entry["updates"]
        self.steps, self.place = after(entry)
        for epoch in [e for e in self.drawn if (e + 1) * n <= self.place]:
            rows = self.drawn.pop(epoch)
            odd = sorted(r for r in self.kept if rows[r] != 1)
            # A mixture's epoch has rows as often as their source's weight says.
            if odd and epoch * n >= self.since and not self.mix:
                return f"epoch {epoch} had row {odd[0]} {rows[odd[0]]} times"
        return ""

    @property
    def fates(self) -> Counter[str]:
        """Draws that met each fate, over all epochs."""
        return sum(self.epochs.values(), Counter())


def audit(folder: Path) -> tuple[Account, list[str]]:
    """Check a run's whole ledger; what it adds up to, and notes on what could not be compared.

    Raises DataError (exit 4), which names the first line that is wrong, and how.
    """
    # The ledger last: a run that is going on writes it before it writes these.
    facts, logged = read_json(folder / "run.json"), _logged(folder / "metrics.jsonl")
    path, account, seal = folder / NAME, Account(), ""
    lines = entries(path)
    for number, entry in enumerate(lines, 1):
        wrong = account.add(entry)
        seal = sealed({k: v for k, v in entry.items() if k != "check"}, seal)
        if not wrong and entry["check"] != seal:
            wrong = "this line, or the one before it, is not as it was written (check)"
        if wrong:
            raise DataError(Problem("the ledger does not add up", f"{path}:{number}", wrong))
    # An attempt that ended before it began leaves the counts of one before it.
    began = facts.get("began") == facts.get("attempt")
    ended = facts.get("state") in ENDED and began
    wrong = _disagrees(account, facts if ended else {}, logged, ended) if lines else "it is empty"
    if wrong:
        raise DataError(Problem("the ledger does not add up", f"{path}:{len(lines)}", wrong))
    note = "run.json was not compared: the last attempt goes on, was killed, or never began"
    return account, [] if ended else [note]


def _disagrees(account: Account, facts: Row, logged: int | None, ended: bool) -> str:
    """What the run's other files say otherwise, or ""."""
    found = {"step": account.steps, "place": account.place}
    if account.began == (0, 0):
        found["updates"] = account.updates
    for name, value in (facts.get("progress") or {}).items():
        if found.get(name, value) != value:
            return f"it ends at {name} {found[name]}, run.json's progress at {name} {value}"
    fingerprint = account.header["fingerprint"]
    if facts.get("fingerprint", fingerprint) != fingerprint:
        return f"it is of the data {fingerprint}, the run of {facts['fingerprint']}"
    logged = account.began[0] if logged is None else logged
    if logged > account.steps or (ended and logged < account.steps):
        return f"it ends at step {account.steps}, metrics.jsonl at step {logged}"
    return ""


def _logged(path: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl; None where there is none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else None
    except (ValueError, KeyError, TypeError):
        raise DataError(Problem("a line of metrics is no entry", f"{path}:{len(lines)}")) from None


def _fields(entry: Row, kinds: dict[str, type], may: dict[str, type]) -> str:
    """Which field is missing, unknown or of another kind, or ""."""
    for name, value in entry.items():
        kind = (kinds | may).get(name)
        if kind is None:
            return f"it has a field {name!r}, which no such line has"
        plain = value if isinstance(value, list) and name != "mixture" else []
        if type(value) is not kind or any(type(item) is not int for item in plain):
            what = "a list of numbers" if kind is list else kind.__name__
            return f"its {name} is not {what}"
    missing = [name for name in kinds if name not in entry]
    return f"it has no {missing[0]!r}" if missing else ""


def _at(step: int, place: int) -> str:
    return f"step {step}, place {place}"


def summary(account: Account) -> dict[str, Any]:
    """The account as plain values, for --json."""
    header, n = account.header, len(account.kept)
    epochs = [
        {"epoch": e, "draws": fates.total(), "fates": {f: fates[f] for f in FATES}}
        for e, fates in sorted(account.epochs.items())
    ]
    return {
        "conserved": True,
        "data_rows": header["data_rows"],
        "prompts": n,
        "filtered": len(header["filtered"]),
        "cut": header["cut"],
        "steps": [account.began[0] + 1, account.steps],
        "places": [account.began[1], account.place],
        "updates": account.updates,
        "draws": account.fates.total(),
        "fates": {f: account.fates[f] for f in FATES},
        "prompts_trained": sum(account.trained[row] > 0 for row in account.kept),
        "epochs": epochs,
    }


def report(account: Account) -> list[str]:
    """The account for a person: fate x draws x share, and by epoch where there are few."""
    facts, fates, few = summary(account), account.fates, sorted(account.epochs)[:COLUMNS]
    few = few if len(account.epochs) <= COLUMNS else []
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
    for name in FATES:
        cells = "".join(f"{account.epochs[e][name]:>11}" for e in few)
        lines.append(f"{name:<12}{fates[name]:>9}{fates[name] / total:>8.1%}{cells}")
    parts = [f"{name} {fates[name]}" for name in FATES if fates[name]]
    sums = f" = {' + '.join(parts)}" if parts else ""
    return [*lines, "", f"conserved: {fates.total()} draws{sums}"]
