"""`rloo compare RUN...`: compare runs, or configurations by their means over seeds.

A RUN is a folder, a name under runs/, a folder with runs in it, or a pattern. For two runs the last
section shows where they first differ: key, version, data row, token or number. The verb writes
curves.png, curves.svg, table.md, table.csv and table.json to <their folder>/comparison. Imports no
torch.

    charts          Draws the comparison as one picture
    configurations  Groups runs into configurations
    judgements      Chooses the win rates that can be compared
    results         Compares configurations
    tables          Writes the comparison as tables
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from rloo_cli.checkpoint import resume
from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.compare import charts, configurations, results, tables
from rloo_cli.cli.compare.configurations import Configuration
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.inspection import first_difference, run_folders, run_record
from rloo_cli.inspection.first_difference import FirstDifference
from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.reporting.panel import clean_line
from rloo_cli.utils.errors import FOUND_CODE, ConfigError, refuse
from rloo_cli.utils.files import JsonObject, write_json, write_text

USAGE = "rloo compare RUN ... [flags]"
OUTPUT_FOLDER = "comparison"


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for missing, unfinished or incomparable runs."""
    options = parse_verb("compare", args)
    tolerance = options.tolerance or 0.0
    folders = run_folders.find_compared_runs(options.run)
    if options.first_difference:
        return _print_first_difference(folders, tolerance, options.json)
    runs = [run_record.read_run_record(folder) for folder in folders]
    configs = _configurations(runs, options.unfinished)
    score = _metric(configs, options.metric)
    notes = _notes(configs, options.anyway)
    baseline = _baseline_index(configs, options.against)
    comparison = results.compare_configurations(configs, score, baseline, notes)
    parting = None
    if len(folders) == 2:
        parting = first_difference.find_first_difference(folders[0], folders[1], tolerance)
    out = Path(options.out) if options.out else _common_folder(runs) / OUTPUT_FOLDER
    _write_files(out, comparison, configs, parting)
    if options.json:
        print(json.dumps(_comparison_values(comparison, parting), indent=2))
    else:
        _print_comparison(comparison, configs, runs, out)
        if parting is not None:
            _print_parting(parting)
    return 0


def _print_first_difference(folders: list[Path], tolerance: float, as_json: bool) -> int:
    """Print where two runs first differ. Exits with 20 if they do."""
    if len(folders) != 2:
        what = f"--first-difference compares two runs; {len(folders)} are given"
        why = f"found {', '.join(map(str, folders[:5])) or 'no run'}"
        refuse("command line", what, "rloo compare A B --first-difference", why)
    result = first_difference.find_first_difference(folders[0], folders[1], tolerance)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        for line in first_difference.difference_lines(result):
            answer_console(140).print(clean_line(line), markup=False, soft_wrap=True)
    return FOUND_CODE if result.found else 0


def _configurations(runs: list[RunRecord], unfinished: bool) -> list[Configuration]:
    if len(runs) < 2:
        refuse("command line", "rloo compare needs at least two runs", USAGE, f"found {len(runs)}")
    configs = configurations.group_by_configuration(runs, unfinished)
    if not any(config.runs for config in configs):
        why = "\n".join(f"{run.folder}: {run.status_text}" for run in runs)
        refuse("command line", "none of the runs is finished", "rloo compare ... --unfinished", why)
    return configs


def _metric(configs: list[Configuration], wanted: str | None) -> str | None:
    """The requested metric, or the first held-out reward; None if no run was evaluated."""
    metrics = run_record.held_out_metrics([run for config in configs for run in config.runs])
    if wanted is None:
        return next((name for name in metrics if name.endswith("reward")), None)
    if wanted not in metrics:
        close = nearest_names(wanted, metrics)
        why = f"metrics of all runs: {', '.join(metrics) or 'none'}"
        fix = f"--metric {close[0]}" if close else "omit --metric"
        refuse("--metric", f"{wanted!r} is missing in some runs", fix, why)
    return wanted


def _notes(configs: list[Configuration], anyway: bool) -> list[str]:
    counted = [config for config in configs if config.runs]
    problems = [*configurations.comparability_problems(counted)]
    if problems and not anyway:
        raise ConfigError(*problems)
    return [*(problem.what for problem in problems), *configurations.fairness_warnings(configs)]


def _baseline_index(configs: list[Configuration], label: str | None) -> int:
    """The index of the baseline configuration."""
    labels = [one.label for one in configs]
    if label is None:
        return next(i for i, one in enumerate(configs) if one.runs)
    if label not in labels:
        refuse_unknown_name("configuration", label, labels, "--against 'NAME'", key="--against")
    return labels.index(label)


def _common_folder(runs: list[RunRecord]) -> Path:
    """The folder that contains all the runs."""
    parents = [str(run.folder.absolute().parent) for run in runs]
    common = Path(os.path.commonpath(parents))
    return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common


def _comparison_values(
    comparison: results.Comparison, parting: FirstDifference | None
) -> JsonObject:
    """The comparison as plain values; for two runs, with their first difference."""
    values: JsonObject = tables.comparison_json(comparison)
    return values if parting is None else values | {"first_difference": parting.to_json()}


def _print_parting(parting: FirstDifference) -> None:
    """The last section of a comparison of two runs: where they first differ."""
    console = answer_console(140)
    console.print("\nfirst difference", style="bold")
    for line in first_difference.difference_lines(parting):
        console.print(clean_line(line), markup=False, soft_wrap=True)


def _write_files(
    out: Path,
    comparison: results.Comparison,
    configs: list[Configuration],
    parting: FirstDifference | None,
) -> None:
    runs = [run for config in configs for run in config.runs]
    recipes = [str(run.run_metadata.get("recipe") or run.name) for run in runs]
    title = " · ".join(dict.fromkeys(recipes))
    if find_spec("matplotlib") is None:
        print("no curves.png without matplotlib: pip install 'rloo-cli[view]'", file=sys.stderr)
    else:
        for name in ("curves.png", "curves.svg"):
            charts.draw_comparison(comparison, out / name, title)
    text = tables.comparison_markdown(comparison, configs)
    if parting is not None:
        lines = map(clean_line, first_difference.difference_lines(parting))
        text = f"{text.rstrip()}\n\n## First difference\n\n```\n{chr(10).join(lines)}\n```\n"
    write_text(out / "table.md", text)
    write_text(out / "table.csv", tables.comparison_csv(comparison))
    write_json(out / "table.json", _comparison_values(comparison, parting))


def _print_comparison(
    comparison: results.Comparison, configs: list[Configuration], runs: list[RunRecord], out: Path
) -> None:
    console = answer_console(160)
    parts = [tables.terminal_table(tables.comparison_table(comparison), comparison.score)]
    if len(runs) == 2:
        console.print(clean_line(f"{runs[0].name} -> {runs[1].name}"), markup=False)
        changes = resume.describe_changes(_differing_values(*runs)) or ["the same config"]
        console.print("\n".join(map(clean_line, changes)), markup=False)
    else:
        parts.append(tables.terminal_table(tables.differing_key_table(configs), "keys that differ"))
    for table in parts:
        if table is not None:
            console.print(table)
    lines = [*tables.legend_lines(comparison), *results.conclusion_lines(comparison)]
    lines += [f"excluded: {line}" for line in tables.excluded_run_lines(comparison)]
    lines += [f"note: {line}" for line in comparison.notes]
    for line in [*lines, f"written to {out}"]:
        console.print(clean_line(line), soft_wrap=True)


def _differing_values(one: RunRecord, other: RunRecord) -> dict[str, list[object]]:
    """The keys of two configs whose values differ -> both values."""
    old, new = ({"seed": run.seed} | configurations.flat_config(run) for run in (one, other))
    return {k: [old.get(k), new.get(k)] for k in {**old, **new} if old.get(k) != new.get(k)}
