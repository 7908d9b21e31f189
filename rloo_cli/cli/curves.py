"""`rloo curves RUN [OUT]`: the curves of a run that is running, stopped, failed or finished.

OUT ends in .png or .svg; without it the picture is the run's own curves.png. Imports no torch.
"""

import json
from pathlib import Path

from rloo_cli.cli.run_arguments import RunArgumentParser
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting import curves
from rloo_cli.reporting.metrics_lines import read_metrics_lines
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import ConfigError, Problem, StorageError

USAGE = "rloo curves RUN [OUT.png|OUT.svg] [--json]"
IMAGE_SUFFIXES = (".png", ".svg")


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for a run that is not there or has no metrics yet."""
    parser = RunArgumentParser("curves", USAGE)
    parser.add_argument("out", nargs="?", metavar="OUT")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(args)
    folder = find_run_folder(given.run, "curves")
    out = Path(given.out) if given.out else folder / "curves.png"
    if out.suffix.lower() not in IMAGE_SUFFIXES:
        what = f"{out} ends neither in .png nor in .svg"
        why = f"the ending says how the image is written: found {out.suffix or 'none'}"
        raise ConfigError(Problem(what, "command line", why, f"{out.with_suffix('.png')}"))
    if not read_metrics_lines(folder / "metrics.jsonl"):
        why = "its first step, or its first evaluation, has not ended yet"
        fix = f"wait for it; rloo doctor {folder} says what keeps it"
        raise ConfigError(Problem(f"{folder} has no metrics to draw", "command line", why, fix))
    try:
        drawn = curves.draw_run_curves(folder / "metrics.jsonl", out, folder.name)
        shown = show_control_characters(str(drawn))
        print(json.dumps({"curves": str(drawn)}) if given.json else shown)
    except OSError as error:
        fix = f"rloo curves {given.run} FOLDER/{out.name}, in a folder that can be written"
        raise StorageError(
            Problem(f"{out} cannot be written", "command line", str(error), fix)
        ) from None
    return 0
