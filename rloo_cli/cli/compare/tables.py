"""The comparison in words and figures: on the terminal, as Markdown, CSV and JSON."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from rloo_cli.cli.compare.configurations import Configuration, differing, plain
from rloo_cli.cli.compare.results import END, REACHED, WINS, Comparison, Outcome, verdicts
from rloo_cli.cli.compare.statistics import Estimate, verdict
from rloo_cli.reporting.panel import clean, number

NO = "–"
WIDE = 44  # characters of a label that are not broken


@dataclass(frozen=True)
class Figure:
    """One column: its heading, the figure it shows, and how."""

    heading: str
    figure: str
    show: Callable[[Outcome, Estimate], str]


def columns(told: Comparison) -> list[Figure]:
    """Those that at least one configuration has a figure for."""
    score = "held-out score" if told.held_out else "training reward"
    found = [
        Figure(f"{score}, final", "final", _mean),
        Figure(f"{score}, best", "best", _mean),
        Figure(f"training reward, last {END:.0%}", "reward", _mean),
        Figure("KL at the end", "kl", _mean),
        Figure("completions to the threshold", "reached", _completions),
        Figure("s/step", "step_s", _mean),
        Figure("peak GiB", "peak_gib", _mean),
        Figure("updates", "updates", lambda _, e: number(e.mean)),
    ]
    if not told.held_out:
        found.pop(2)  # it is the first
    for who in dict.fromkeys(name for o in told.outcomes for name in o.figures):
        if who.startswith(WINS):
            found.insert(2, Figure(f"win rate against {who.removeprefix(WINS)}", who, _share(who)))
    return [c for c in found if any(o.figures.get(c.figure) for o in told.outcomes)]


def _mean(_: Outcome, told: Estimate) -> str:
    return told.text(3 if abs(told.mean) < 100 else 1)


def _share(figure: str) -> Callable[[Outcome, Estimate], str]:
    """Of one seed, the interval is the judge's: over pairs."""

    def shown(outcome: Outcome, told: Estimate) -> str:
        rate, limits = f"{told.mean:.1%}", outcome.intervals.get(figure)
        if told.half is not None:
            return f"{rate} ± {100 * told.half:.1f}"
        return f"{rate} ({limits[0]:.1%} to {limits[1]:.1%} over pairs)" if limits else rate

    return shown


def _completions(outcome: Outcome, told: Estimate) -> str:
    """Of seeds that came so far; how many did not."""
    late = len(outcome.seeds) - told.n
    spread = "" if told.half is None else f" ± {told.half:,.0f}"
    return f"{told.mean:,.0f}{spread}" + (f"; {late} of {len(outcome.seeds)} not" if late else "")


def cell(outcome: Outcome, column: Figure) -> str:
    """What a column says of a configuration."""
    told = outcome.of(column.figure)
    if told is None:
        return "not reached" if column.figure == "reached" and outcome.seeds else NO
    return column.show(outcome, told)


def rows(told: Comparison) -> Iterator[list[str]]:
    """Headings, then a row for each configuration."""
    shown = columns(told)
    yield ["configuration", "seeds", *(column.heading for column in shown)]
    for outcome in told.outcomes:
        left = f" ({len(outcome.left)} left out)" if outcome.left else ""
        yield [
            outcome.label, f"{len(outcome.seeds)}{left}", *(cell(outcome, c) for c in shown)
        ]  # fmt: skip


def legend(told: Comparison) -> list[str]:
    """What the figures mean."""
    lines = [
        "± is half of a 95 % interval: Student's t over seeds; with one seed there is none.",
    ]
    if told.held_out:
        lines.append(f"Held-out score: {told.score}, of the evaluations during training.")
    else:
        lines.append("No evaluation has a score that all runs have: the training reward is shown.")
    if told.threshold is not None:
        lines.append(
            f"Threshold: {told.threshold:.3f}, {REACHED:.0%} of the way from the start to the best"
            " configuration's end; completions are those before the first look at it or above."
        )
    if len(told.differences) > 1:
        lines.append("Each difference has an interval of its own: of many, one in twenty misleads.")
    return lines


def lost(told: Comparison) -> list[str]:
    """Every run that does not count."""
    return [
        f"{outcome.label}, seed {run.seed} ({run.folder}): {run.ended}"
        for outcome in told.outcomes
        for run in outcome.left
    ]


def differences(found: Sequence[Configuration]) -> Iterator[list[str]]:
    """Headings, then a row for each key whose value is not the same in all configurations."""
    if keys := differing(found):
        yield ["key", *(one.label for one in found)]
        for key in keys:
            yield [key, *(plain(one.keys[key]) if key in one.keys else NO for one in found)]


# As files.


def markdown(told: Comparison, found: Sequence[Configuration]) -> str:
    """The whole table.md."""
    lines = [*_grid(rows(told)), "", *legend(told), ""]
    if told.differences:
        lines += ["Paired by seed, the final score where nothing else is said:", ""]
        lines += [f"- {line}" for line in verdicts(told)]
    for title, items in (("Runs that do not count:", lost(told)), ("Mind:", told.notes)):
        lines += ["", title, "", *(f"- {item}" for item in items)] if items else []
    if grid := _grid(differences(found)):
        lines += ["", "Keys that differ, of those that every configuration has:", "", *grid]
    return "\n".join(lines).rstrip() + "\n"


def _grid(cells: Iterator[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(clean(c).replace('|', '/') for c in row)} |" for row in cells]
    rule = f"|{'---|' * (lines[0].count(' | ') + 1)}" if lines else ""
    return [lines[0], rule, *lines[1:]] if lines else []


def comma_separated(told: Comparison) -> str:
    """The whole table.csv: a row for each configuration and figure."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(["configuration", "figure", "n", "mean", "low", "high"])
    for outcome in told.outcomes:
        for name in outcome.figures:
            e = outcome.of(name)
            if e is not None:
                sure = [e.low, e.high] if e.half is not None else ["", ""]
                write([outcome.label, name, e.n, e.mean, *sure])
    return text.getvalue()


def values(told: Comparison) -> dict[str, Any]:
    """The whole table.json: also each seed's own figures, and who does not count."""
    return {
        "score": told.score,
        "held_out": told.held_out,
        "threshold": told.threshold,
        "configurations": [
            {
                "label": o.label,
                "seeds": o.seeds,
                "figures": {
                    name: _plain(o.of(name)) | {"by_seed": {str(k): v for k, v in by.items()}}
                    for name, by in o.figures.items()
                    if by
                },
                "left_out": [
                    {"run": str(r.folder), "seed": r.seed, "ended": r.ended} for r in o.left
                ],
            }
            for o in told.outcomes
        ],
        "against": told.against,
        "differences": {
            label: _plain(e) | {"verdict": verdict(e)} for label, e in told.differences.items()
        },
        "notes": told.notes,
    }


def _plain(e: Estimate | None) -> dict[str, Any]:
    if e is None:
        return {"n": 0}
    sure = {} if e.half is None else {"low": e.low, "high": e.high}
    return {"n": e.n, "mean": e.mean, **sure}


# On the terminal.


def shown(cells: Iterator[list[str]], title: str) -> Table | None:
    """A table for a terminal; None of nothing."""
    headings, *body = [*cells] or [[]]
    if not headings:
        return None
    first = Column(headings[0], no_wrap=max(len(row[0]) for row in [headings, *body]) <= WIDE)
    table = Table(
        first, *headings[1:], box=box.SIMPLE_HEAD, title=Text(title), title_justify="left"
    )
    for row in body:
        table.add_row(*[Text(clean(c)) for c in row])
    return table
