"""`rloo compare RUN...`: runs side by side, configurations as means over their seeds.

    rloo compare A B                    two runs: what differs in their configs, figures, charts
    rloo compare 'runs/compare-*'       runs that differ in the seed alone are one configuration
    rloo compare runs --out comparison  every run in a folder
    --metric eval_reward/gold/mean      the held-out score to compare; usually eval_reward
    --against LABEL                     whom differences are to; usually rloo, else the first
    --unfinished                        runs that are not at their end count as far as they are
    --anyway                            compare what is not comparable, with a warning
    --json                              all figures, seed by seed

A RUN is a folder, a name under runs/, a folder with runs in it, or a pattern. Written to
<their folder>/comparison: curves.png, curves.svg, table.md, table.csv, table.json. No torch.

    charts          The comparison as one picture
    configurations  Runs -> configurations
    results         What can be said of configurations
    runs            The runs that are compared
    statistics      Means over seeds with Student's interval, and differences seed by seed
    tables          The comparison in words and figures
"""

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from rloo_cli.checkpoint import resume
from rloo_cli.cli.compare import charts, configurations, results, tables
from rloo_cli.cli.compare import runs as compare_runs
from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.cli.compare.runs import RunRecord
from rloo_cli.cli.run_folders import RunArgumentParser
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import write_json, write_text

USAGE = "rloo compare RUN... [--out FOLDER] [--metric NAME] [--against LABEL] [--unfinished]" \
    " [--anyway] [--json]"  # fmt: skip
OUTPUT_FOLDER = "comparison"


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for what is not there, not finished or not comparable."""
    parser = RunArgumentParser("compare", USAGE)
    parser.add_argument("more", nargs="*", metavar="RUN")
    for flag in ("--out", "--metric", "--against"):
        parser.add_argument(flag)
    for flag in ("--unfinished", "--anyway", "--json"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_intermixed_args(args)
    runs = [
        compare_runs.read_run_record(p)
        for p in compare_runs.find_compared_runs([w for w in (given.run, *given.more) if w])
    ]
    found = _configurations(runs, given.unfinished)
    score = _metric(found, given.metric)
    notes = _notes(found, given.anyway)
    told = results.compare_configurations(
        found, score, _baseline_index(found, given.against), notes
    )
    out = Path(given.out) if given.out else _common_folder(runs) / OUTPUT_FOLDER
    _write_files(out, told, found)
    if given.json:
        print(json.dumps(tables.comparison_json(told), indent=2))
    else:
        _print_comparison(told, found, runs, out)
    return 0


def _configurations(runs: list[RunRecord], unfinished: bool) -> list[Configuration]:
    if len(runs) < 2:
        why = f"only {runs[0].folder}" if runs else ""
        raise ConfigError(
            Problem("rloo compare needs two runs or more", "command line", why, USAGE)
        )
    found = configurations.group_by_configuration(runs, unfinished)
    if not any(one.runs for one in found):
        why = "\n".join(f"{run.folder}: {run.status_text}" for run in runs)
        fix = "rloo compare ... --unfinished"
        raise ConfigError(Problem("none of the runs is finished", "command line", why, fix))
    return found


def _metric(configs: list[Configuration], wanted: str | None) -> str | None:
    known = compare_runs.held_out_metrics([run for one in configs for run in one.runs])
    if wanted is None:
        return next((name for name in known if name.endswith("reward")), None)
    if wanted not in known:
        close = nearest_names(wanted, known)
        why = f"all have: {', '.join(known) or 'no evaluation at all'}"
        fix = f"--metric {close[0]}" if close else ""
        raise ConfigError(Problem(f"not every run has {wanted!r}", "--metric", why, fix))
    return wanted


def _notes(configs: list[Configuration], anyway: bool) -> list[str]:
    counted = [one for one in configs if one.runs]
    wrong = [*configurations.comparability_problems(counted)]
    if wrong and not anyway:
        raise ConfigError(*wrong)
    return [*(problem.what for problem in wrong), *configurations.fairness_warnings(configs)]


def _baseline_index(configs: list[Configuration], label: str | None) -> int:
    """The configuration that the others are measured by."""
    labels = [one.label for one in configs]
    if label is None:
        return next(i for i, one in enumerate(configs) if one.runs)
    if label not in labels:
        close = nearest_names(label, labels)
        fix = f"--against {close[0]!r}" if close else ""
        why = f"configurations: {', '.join(labels)}"
        raise ConfigError(Problem(f"there is no configuration {label!r}", "--against", why, fix))
    return labels.index(label)


def _common_folder(runs: list[RunRecord]) -> Path:
    """The folder that all the runs lie in."""
    parents = [str(run.folder.absolute().parent) for run in runs]
    common = Path(os.path.commonpath(parents))
    return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common


def _write_files(out: Path, comparison: results.Comparison, configs: list[Configuration]) -> None:
    title = " · ".join(dict.fromkeys(str(run.run_metadata.get("recipe") or run.name)
                                     for one in configs for run in one.runs))  # fmt: skip
    for name in ("curves.png", "curves.svg"):
        charts.draw_comparison(comparison, out / name, title)
    write_text(out / "table.md", tables.comparison_markdown(comparison, configs))
    write_text(out / "table.csv", tables.comparison_csv(comparison))
    write_json(out / "table.json", tables.comparison_json(comparison))


def _print_comparison(
    comparison: results.Comparison, configs: list[Configuration], runs: list[RunRecord], out: Path
) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    parts = [tables.terminal_table(tables.comparison_table(comparison), comparison.score)]
    if len(runs) == 2:
        console.print(f"{runs[0].name} -> {runs[1].name}", markup=False)
        console.print(
            "\n".join(resume.describe_changes(_differing_values(*runs)) or ["the same config"]),
            markup=False,
        )
    else:
        parts.append(tables.terminal_table(tables.differing_key_table(configs), "keys that differ"))
    for table in parts:
        if table is not None:
            console.print(table)
    lines = [*tables.legend_lines(comparison), *results.conclusion_lines(comparison)]
    lines += [f"does not count: {line}" for line in tables.excluded_run_lines(comparison)]
    lines += [f"mind: {line}" for line in comparison.notes]
    console.print("\n".join([*lines, f"written to {out}"]), markup=False, soft_wrap=True)


def _differing_values(one: RunRecord, other: RunRecord) -> dict[str, list[object]]:
    """Keys of two configs whose values differ."""
    old, new = configurations.flat_config(one), configurations.flat_config(other)
    old, new = ({"seed": run.seed} | keys for run, keys in ((one, old), (other, new)))
    keys = dict.fromkeys([*old, *new])
    return {k: [old.get(k), new.get(k)] for k in keys if old.get(k) != new.get(k)}
