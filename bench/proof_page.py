"""docs/gpu.md from what `gpu_proof.py` found: machine, versions, every row, losses included."""

import re
from collections.abc import Sequence
from typing import Any

from proof_rows import FINDINGS, ProofRow

Result = dict[str, Any]
LOSES = "**`rloo` loses**"
HEAD = """# On a GPU

<!-- Made by `python bench/gpu_proof.py` from bench/gpu_proof.jsonl: change those, not this. -->

What was written for GPUs, and what a GPU said of it. One command runs every row below, each in a
process of its own, keeps what it finds as it goes and writes this page:

```
make gpu-proof
```

That is `python bench/gpu_proof.py --minutes 40`. It stops in time and goes on where it was when it
is started again; `--rows NAME` runs some rows alone, `--again` runs what is known already, `--show`
says which rows this machine cannot run, and why. Rows that need vLLM, TRL or several GPUs say so
where they are not there. TRL supports other versions of vLLM than `rloo`: `--trl-python PATH` names
the Python of an environment of its own. `--rehearse` runs the same functions on a CPU with tiny
shapes, and keeps nothing.

Where a GPU is there for a quarter of an hour, `--short` takes the rows that say most, in small
sizes; most of an engine's row is its start, a minute or more. Where it has no network,
`bench/carry.py` brings wheels, and `python bench/slim_libraries.py FOLDER` first overwrites all but
one GPU's code in their libraries, which then compress to a fraction.

- **confirmed**, **refuted**: the row has a criterion, and the GPU met it or did not.
- **measured**: figures without a criterion. A row where `rloo` is slower than TRL stays, marked.
- MFU is of the work that was needed, and of the matrix product measured on the same machine; the
  roofline is what that work would take at that rate, and decoding at the measured bandwidth.
"""
NOT_YET = "not yet run"
BESIDE = "beside other rows, so without times"


def page(rows: Sequence[ProofRow], results: Sequence[Result]) -> str:
    """The whole page."""
    results = [result for result in results if not result.get("rehearsed")]
    machines = list(dict.fromkeys(result["machine"] for result in results))
    parts = [HEAD]
    if not machines:
        parts.append(
            "## Not yet run\n\nNo GPU has run any of it: every line below is not yet run.\n"
        )
        parts.append("\n".join([table(rows, {}), *refusals(rows, {}), *findings(rows, {})]) + "\n")
    for machine in machines:
        mine = [result for result in results if result["machine"] == machine]
        parts.append(section(rows, machine, mine))
    return "\n".join(parts)


def section(rows: Sequence[ProofRow], machine: str, results: Sequence[Result]) -> str:
    """One machine: the latest result of each row."""
    latest = {result["row"]: result for result in results}
    versions: dict[str, set[str]] = {}
    for result in latest.values():
        for name, version in result["versions"].items():
            versions.setdefault(name, set()).add(version)
    told = ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in sorted(versions.items()))
    commits = ", ".join(sorted({result["commit"] for result in latest.values()}))
    dates = sorted(result["date"][:10] for result in latest.values())
    lines = [f"## {machine}", "", f"{told}; commit {commits}; {dates[0]} to {dates[-1]}.", ""]
    lines += [table(rows, latest), *refusals(rows, latest), *findings(rows, latest)]
    for row in rows:
        found = latest.get(row.name, {})
        if found.get("facts", {}).get("table") and not found.get("beside"):
            lines += ["", f"### {row.name}", "", *facts_table(latest[row.name]["facts"]["table"])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[ProofRow], latest: dict[str, Result]) -> str:
    """A line for each row, also for those that nobody has run."""
    lines = ["| row | what it shows | | s | |", "|---|---|---|---|---|"]
    for row in rows:
        found = latest.get(row.name)
        about = f"{row.does} ({', '.join(row.findings)})" if row.findings else row.does
        if found is None:
            lines.append(f"| {row.name} | {about} | {NOT_YET} | | {wants(row)} |")
            continue
        verdict = found.get("verdict") or found["status"]
        said = found.get("why") or facts_line(found.get("facts", {}))
        if changed := {n: v for n, v in found.get("changed", {}).items() if n != "model"}:
            said += f"; with {', '.join(f'{n} {v}' for n, v in changed.items())}"
        said += f"; {BESIDE}" if found.get("beside") else ""
        said += f"; {found['note']}" if found.get("note") else ""
        cells = [row.name, about, f"**{verdict}**", f"{found['seconds']:.0f}", cell(said)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def wants(row: ProofRow) -> str:
    """What a row needs."""
    needs = [f"{row.gpus} GPUs"] if row.gpus > 1 else []
    needs += ["vLLM"] if row.vllm else []
    return ", ".join([*needs, *row.packages])


def refusals(rows: Sequence[ProofRow], latest: dict[str, Result]) -> list[str]:
    """What is refused until a row was confirmed, and whether it may be allowed now."""
    lines = ["", "Refused without `generation.allow_untested=true` until its row is confirmed:", ""]
    for row in rows:
        if row.refusal:
            told = outcome(latest[row.name]) if row.name in latest else NOT_YET
            lines.append(f"- {row.name}: {told}")
    return lines


def findings(rows: Sequence[ProofRow], latest: dict[str, Result]) -> list[str]:
    """What was expected by reading, and what came of it in the rows about it."""
    lines = ["", "What was expected before a GPU was there, by the rows about it:", ""]
    for name, says in FINDINGS.items():
        about = [row.name for row in rows if name in row.findings]
        said = [f"{n}: {outcome(latest[n])}" for n in about if n in latest]
        lines.append(f"- {name}, {says}: {'; '.join(said) or NOT_YET}")
    return lines


def outcome(result: Result) -> str:
    """A row's in a word or two."""
    said = str(result.get("verdict") or result["status"])
    return f"{said} (without times)" if result.get("beside") else said


def facts_line(facts: dict[str, Any]) -> str:
    """The plain facts of a row; tables come later."""
    kept = {n: v for n, v in facts.items() if not isinstance(v, list | dict) and v is not None}
    return ", ".join(f"{name} {number(v)}{mark(name, v)}" for name, v in kept.items())


def mark(name: str, value: Any) -> str:
    """Marks a ratio of TRL's seconds, or memory, by `rloo`'s that is below 1."""
    ratio = "ratio" in name and isinstance(value, int | float)
    return f" {LOSES}" if ratio and value < 1 else ""


def facts_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of a row's own; a ratio below 1 is one that `rloo` loses."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = []
        for name in names:
            value = row.get(name)
            cells.append(cell(number(value)) + mark(name, value))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def number(value: Any) -> str:
    """As a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return re.sub(r"[\^~]{4,}", "", text).replace("|", "/").replace("\n", " ")[:600]
