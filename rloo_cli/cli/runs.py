"""`rloo runs [FOLDER] [--json]`: the runs in a folder, newest write first.

Each line shows state, age, steps, last held-out score, and size. A run whose process ended without
recording why is `killed`. Only reads files; imports no torch.
"""

import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.inspection.run_folders import RUNS_ROOT
from rloo_cli.inspection.run_list import RunSummary, list_runs
from rloo_cli.reporting.panel import clean_line, format_duration, format_number
from rloo_cli.utils.errors import refuse

STATE_STYLES = {"finished": "green", "training": "cyan", "failed": "red", "damaged": "red"}


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for a missing folder."""
    options = parse_verb("runs", args)
    root = Path(options.folder) if options.folder else RUNS_ROOT
    if options.folder and not root.is_dir():
        why, fix = f"looked at {root.absolute()}", "rloo runs FOLDER, with an existing folder"
        refuse("command line", f"folder {root} does not exist", fix, why)
    runs = list_runs(root)
    if options.json:
        print(json.dumps([run.to_json() for run in runs], indent=2))
    elif not runs:
        print(f"no runs in {root}/; rloo train +recipe=quickstart trains one in two minutes")
    else:
        answer_console(140).print(_runs_table(runs, root))
    return 0


def _runs_table(runs: list[RunSummary], root: Path) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for name in ("age", "steps", "held out", "size"):
        table.add_column(name, justify="right")
    for run in runs:
        folder = Path(run.run)
        shown = folder.relative_to(root) if folder != root else folder
        ended = run.state in ("finished", "training") or run.code is None
        state = run.state if ended else f"{run.state} ({run.code})"
        table.add_row(
            clean_line(shown),
            Text(clean_line(state), STATE_STYLES.get(run.state, "yellow")),
            "–" if run.age_s is None else format_duration(run.age_s),
            f"{run.step}/{run.of_steps}" if run.of_steps else str(run.step),
            "–" if run.score is None else format_number(run.score),
            format_size(run.size_bytes),
        )
    return table


def format_size(size: int) -> str:
    """Bytes in the largest unit whose value is at least one."""
    number, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return (
        f"{number:.0f} {units[0]}"
        if number >= 10 or units[0] == "B"
        else (f"{number:.1f} {units[0]}")
    )
