"""Prints the result of `rloo reward test`: time, spread, errors and exploits."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rloo_cli.cli.reward.probe import Exploit, ProbeErrors, RewardProbe, spread_within_rows
from rloo_cli.cli.reward.subject import ProbeSubject
from rloo_cli.reporting.panel import clean_line, format_number
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

SHOWN_CHARACTERS = 70  # of a completion's text
SHOWN_KINDS = 3  # kinds of completions listed with an error


def probe_report(
    subject: ProbeSubject, probes: Sequence[RewardProbe], agreement: JsonObject | None
) -> Iterator[str]:
    """The report, line by line."""
    yield from subject.notes
    columns = sorted({row.column for row in subject.rows if row.column is not None})
    source = f"right answers from {', '.join(columns)}" if columns else ""
    if any(row.column is None for row in subject.rows):
        source = f"{source}; " if source else ""
        source += "without an answer column, a plain text is used"
    rows = f"{len(subject.rows)} row{'s' if len(subject.rows) > 1 else ''}"
    yield f"{rows} of {subject.config.data.path or 'data.mixture'}; {source}"
    for probe in probes:
        yield ""
        yield from _probe_lines(probe, len(subject.rows))
        if agreement is not None:
            yield _agreement_line(agreement, probe.name)


def _probe_lines(probe: RewardProbe, num_rows: int) -> Iterator[str]:
    count, scores = sum(map(len, probe.values)), probe.scores
    yield f"{probe.name} ({shown_location(probe.location)})"
    if probe.call_seconds:
        middle, most = median(probe.call_seconds), max(probe.call_seconds)
        per_call = f"{count / max(1, probe.calls):.0f} completions"
        times = f"median {_milliseconds(middle)}, max {_milliseconds(most)}"
        yield f"  time      {probe.calls} calls of {per_call}: {times}"
    spread = spread_within_rows(probe.values)
    if scores:
        limits = f"{format_number(min(scores))} to {format_number(max(scores))}"
        deviation = "-" if spread is None else format_number(spread)
        distinct = f"{len({*scores})} distinct scores, {limits}"
        yield f"  spread    {distinct}; std within a row {deviation}"
    failed = probe.num_errors
    none = count - len(scores) - failed
    yield f"  scored    {len(scores)} of {count} completions; {none} None, {failed} failed"
    for error in probe.errors.values():
        yield from _error_lines(error)
    if probe.gave_up:
        yield f"  gave up   after {len(probe.values)} of {num_rows} rows: every call timed out"
    if probe.undecided_rows:
        yield (
            f"  unsure    in {len(probe.undecided_rows)} of {len(probe.values)} rows no form of the"
            " right answer scored more than the worst trick"
        )
    yield from _exploit_lines(probe)


def _error_lines(error: ProbeErrors) -> Iterator[str]:
    kinds = [kind for kind, _ in error.completions.most_common(SHOWN_KINDS)]
    more = len(error.completions) - len(kinds)
    shown = ", ".join(kinds) + (f" and {more} more kinds" if more else "")
    yield f"  {error.kind:<9} {error.count} completions: {clean_line(error.message)} ({shown})"
    for line in error.frames.splitlines():
        yield f"            {line}"


def _exploit_lines(probe: RewardProbe) -> Iterator[str]:
    if not probe.exploits:
        if probe.scores and not probe.undecided_rows:
            yield "  exploits  none of the tricks scored as much as a right answer"
        return
    by_kind: dict[str, list[Exploit]] = {}
    for exploit in probe.exploits:
        by_kind.setdefault(exploit.kind, []).append(exploit)
    yield "  exploits  these score at least as much as a right answer:"
    for kind, found in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        first = found[0]
        yield (
            f"    {kind}: {len(found)} of {len(probe.values)} rows, scores"
            f" {format_number(first.score)}, right {format_number(first.right_score)}"
        )
        yield f'      "{_shortened(first.text)}"'


def _agreement_line(agreement: JsonObject, name: str) -> str:
    found, other = agreement["agreement"][name], agreement["reward"]
    if found["pairs_alike"] is None:
        errors = f" ({agreement['errors'][0]})" if agreement["errors"] else ""
        return f"  against   {other}: no pair of completions is distinguished by both{errors}"
    rank = found["rank_correlation"]
    correlated = "-" if rank is None else f"{rank:.2f}"
    return (
        f"  against   {other}: rank correlation {correlated} (mean of {found['rows']} rows);"
        f" {found['pairs_alike']:.0%} of {found['pairs']} pairs ranked alike,"
        f" {found['pairs_that_one_ties']} distinguished by only one"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def shown_location(location: str) -> str:
    """A file and line, shortened if below the current folder or in the package."""
    for folder in (Path.cwd(), paths.PACKAGE.parent):
        if Path(location).is_relative_to(folder):
            return str(Path(location).relative_to(folder))
    return location


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return clean_line(text)
    return f"{clean_line(text[:SHOWN_CHARACTERS])}... ({len(text)} characters)"
