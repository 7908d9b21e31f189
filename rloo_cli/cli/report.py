"""`rloo report RUN`: one HTML page about a run, to open in any browser, offline.

Verdict, curves with the run's own advice, scores, best and worst samples, times, memory, ledger and
environment of a run that is training, has ended or is damaged. Imports no torch.
"""

import json
from pathlib import Path

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.inspection.report import make_report
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import StorageError, refuse
from rloo_cli.utils.files import write_text

REPORT_FILE = "report.html"


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, wrong file type), StorageError."""
    options = parse_verb("report", args)
    folder = find_run_folder(options.run, "report")
    out = Path(options.out) if options.out else folder / REPORT_FILE
    if out.suffix.lower() not in (".html", ".htm"):
        what = f"{out} does not end in .html"
        why = f"a report is an HTML page; found {out.suffix or 'no ending'}"
        refuse("command line", what, f"--out {out.with_suffix('.html')}", why)
    page, figures = make_report(folder)
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        fix = f"--out FOLDER/{out.name}, with a writable FOLDER"
        refuse("command line", f"{out} cannot be written", fix, str(error), error=StorageError)
    print(show_control_characters(str(out)))
    return 0
