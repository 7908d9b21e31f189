"""Writes the comparison as tables: on the terminal, as Markdown, CSV and JSON."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Column, Table
from rich.text import Text

from rloo_cli.cli.compare.configurations import Configuration, differing_keys, format_value
from rloo_cli.cli.compare.results import (
    END_FRACTION,
    THRESHOLD_FRACTION,
    WIN_RATE_PREFIX,
    Comparison,
    ConfigurationResult,
    conclusion_lines,
)
from rloo_cli.reporting.panel import clean_line, format_number
from rloo_cli.reporting.statistics import Estimate, describe_difference
from rloo_cli.utils.files import JsonObject

NO_VALUE = "–"
MAX_LABEL_WIDTH = 44  # characters of a label that are not broken


@dataclass(frozen=True)
class FigureColumn:
    """One column: heading, figure and format."""

    heading: str
    figure: str
    format_cell: Callable[[ConfigurationResult, Estimate], str]


def figure_columns(comparison: Comparison) -> list[FigureColumn]:
    """The columns for which at least one configuration has a figure."""
    score = "held-out score" if comparison.held_out else "training reward"
    columns = [
        FigureColumn(f"{score}, final", "final", _format_final),
        FigureColumn(f"{score}, best", "best", _format_mean),
        FigureColumn(f"training reward, last {END_FRACTION:.0%}", "reward", _format_mean),
        FigureColumn("KL at the end", "kl", _format_mean),
        FigureColumn("completions to the threshold", "reached", _format_completions),
        FigureColumn("s/step", "step_s", _format_mean),
        FigureColumn("peak GiB", "peak_gib", _format_mean),
        FigureColumn("updates", "updates", lambda _, e: format_number(e.mean)),
    ]
    if not comparison.held_out:
        columns.pop(2)  # the training reward is already the first column
    for name in dict.fromkeys(name for o in comparison.results for name in o.figures):
        if name.startswith(WIN_RATE_PREFIX):
            heading = f"win rate against {name.removeprefix(WIN_RATE_PREFIX)}"
            columns.insert(2, FigureColumn(heading, name, _win_rate_formatter(name)))
    return [c for c in columns if any(o.figures.get(c.figure) for o in comparison.results)]


def _format_mean(_: ConfigurationResult, estimate: Estimate) -> str:
    return estimate.text(3 if abs(estimate.mean) < 100 else 1)


def _format_final(result: ConfigurationResult, estimate: Estimate) -> str:
    """The final score; with one seed, its interval is over prompts."""
    limits = result.limits.get("final")
    if limits is None:
        return _format_mean(result, estimate)
    return f"{estimate.mean:.3f} ({limits[0]:.3f} to {limits[1]:.3f} over prompts)"


def _win_rate_formatter(figure: str) -> Callable[[ConfigurationResult, Estimate], str]:
    """A function that formats a win rate; with one seed, its interval is over the judge's pairs."""

    def format_cell(result: ConfigurationResult, estimate: Estimate) -> str:
        rate, limits = f"{estimate.mean:.1%}", result.limits.get(figure)
        if estimate.half_width is not None:
            return f"{rate} ± {100 * estimate.half_width:.1f}"
        return f"{rate} ({limits[0]:.1%} to {limits[1]:.1%} over pairs)" if limits else rate

    return format_cell


def _format_completions(result: ConfigurationResult, estimate: Estimate) -> str:
    """The mean over the seeds that reached it, and how many did not."""
    late = len(result.seeds) - estimate.n
    spread = "" if estimate.half_width is None else f" ± {estimate.half_width:,.0f}"
    not_reached = f"; {late} of {len(result.seeds)} not" if late else ""
    return f"{estimate.mean:,.0f}{spread}{not_reached}"


def figure_cell(result: ConfigurationResult, column: FigureColumn) -> str:
    """The text of a column for a configuration."""
    estimate = result.mean_over_seeds(column.figure)
    if estimate is None:
        return "not reached" if column.figure == "reached" and result.seeds else NO_VALUE
    return column.format_cell(result, estimate)


def comparison_table(comparison: Comparison) -> Iterator[list[str]]:
    """Headings, then a line per configuration."""
    columns = figure_columns(comparison)
    yield ["configuration", "seeds", *(column.heading for column in columns)]
    for result in comparison.results:
        left = f" ({len(result.excluded_runs)} left out)" if result.excluded_runs else ""
        cells = [figure_cell(result, column) for column in columns]
        yield [result.label, f"{len(result.seeds)}{left}", *cells]


def legend_lines(comparison: Comparison) -> list[str]:
    """Explanations of the figures."""
    lines = [
        "± is half of a 95 % interval: Student's t over seeds, at least as wide as the scores' own"
        " error over prompts. A single seed, or seeds with equal values, have none."
    ]
    if comparison.held_out:
        lines.append(f"Held-out score: {comparison.score}, of the evaluations during training.")
    else:
        lines.append("No evaluation score is common to all runs: the training reward is shown.")
    if comparison.threshold is not None:
        lines.append(
            f"Threshold: {comparison.threshold:.3f}, {THRESHOLD_FRACTION:.0%} of the way from the"
            " start to the best configuration's end; completions are counted up to the first"
            " evaluation at or above it."
        )
    if len(conclusion_lines(comparison)) > 1:
        lines.append("Each difference has its own interval: one in twenty misleads.")
    return lines


def excluded_run_lines(comparison: Comparison) -> list[str]:
    """A line per excluded run."""
    return [
        f"{result.label}, seed {run.seed} ({run.folder}): {run.status_text}"
        for result in comparison.results
        for run in result.excluded_runs
    ]


def differing_key_table(configs: Sequence[Configuration]) -> Iterator[list[str]]:
    """Headings, then a line per key whose value differs between configurations."""
    if keys := differing_keys(configs):
        yield ["key", *(c.label for c in configs)]
        for k in keys:
            yield [k, *(format_value(c.keys[k]) if k in c.keys else NO_VALUE for c in configs)]


# As files.


def comparison_markdown(comparison: Comparison, configs: Sequence[Configuration]) -> str:
    """The whole table.md."""
    lines = [*_markdown_grid(comparison_table(comparison)), "", *legend_lines(comparison), ""]
    if comparison.differences:
        lines += ["Paired by seed; the final score unless noted:", ""]
        lines += [f"- {line}" for line in conclusion_lines(comparison)]
    excluded = excluded_run_lines(comparison)
    for title, items in (("Excluded runs:", excluded), ("Notes:", comparison.notes)):
        lines += ["", title, "", *(f"- {item}" for item in items)] if items else []
    if grid := _markdown_grid(differing_key_table(configs)):
        lines += ["", "Differing keys, of those that every configuration has:", "", *grid]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_grid(cells: Iterator[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(clean_line(c).replace('|', '/') for c in row)} |" for row in cells]
    rule = f"|{'---|' * (lines[0].count(' | ') + 1)}" if lines else ""
    return [lines[0], rule, *lines[1:]] if lines else []


def comparison_csv(comparison: Comparison) -> str:
    """The whole table.csv: a line per configuration and figure."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(["configuration", "figure", "n", "mean", "low", "high"])
    for result in comparison.results:
        for name in result.figures:
            e = result.mean_over_seeds(name)
            if e is not None:
                interval = [e.low, e.high] if e.half_width is not None else ["", ""]
                write([result.label, name, e.n, e.mean, *interval])
    return text.getvalue()


def comparison_json(comparison: Comparison) -> JsonObject:
    """The whole table.json, with the figures of each seed and the excluded runs."""
    return {
        "score": comparison.score,
        "held_out": comparison.held_out,
        "threshold": comparison.threshold,
        "configurations": [
            {
                "label": o.label,
                "seeds": o.seeds,
                "figures": {
                    name: _estimate_json(o.mean_over_seeds(name))
                    | {"by_seed": {str(k): v for k, v in by.items()}}
                    | _errors_json(o, name)
                    for name, by in o.figures.items()
                    if by
                },
                "left_out": [
                    {"run": str(r.folder), "seed": r.seed, "ended": r.status_text}
                    for r in o.excluded_runs
                ],
            }
            for o in comparison.results
        ],
        "against": comparison.against,
        "differences": {
            label: _estimate_json(e) | {"verdict": describe_difference(e)}
            for label, e in comparison.differences.items()
        },
        "notes": comparison.notes,
    }


def _errors_json(result: ConfigurationResult, name: str) -> JsonObject:
    """The standard error over prompts of each seed's figure, where it is known."""
    errors = result.errors.get(name)
    return {"error_by_seed": {str(k): v for k, v in errors.items()}} if errors else {}


def _estimate_json(e: Estimate | None) -> JsonObject:
    if e is None:
        return {"n": 0}
    interval = {} if e.half_width is None else {"low": e.low, "high": e.high}
    return {"n": e.n, "mean": e.mean, **interval}


# On the terminal.


def terminal_table(cells: Iterator[list[str]], title: str) -> Table | None:
    """A table for a terminal; None without cells."""
    headings, *body = [*cells] or [[]]
    if not headings:
        return None
    width = max(len(line[0]) for line in [headings, *body])
    first, *rest = [Text(clean_line(heading)) for heading in headings]
    columns = [Column(first, no_wrap=width <= MAX_LABEL_WIDTH), *map(Column, rest)]
    title_text = Text(clean_line(title))
    table = Table(*columns, box=box.SIMPLE_HEAD, title=title_text, title_justify="left")
    for line in body:
        table.add_row(*[Text(clean_line(c)) for c in line])
    return table
