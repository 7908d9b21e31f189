"""`rloo doctor RUN`: what went wrong in a run, from its own files.

    rloo doctor RUN          pathologies with their figures and the key to turn; then the advice
    --json                   the same as data

Exits with 20 where a pathology is found, with 0 where none is. Reads files only, and imports no
torch.
"""

import json

from rich.text import Text

from rloo_cli.cli.run_arguments import RunArgumentParser, answer_console
from rloo_cli.inspection.diagnosis import Diagnosis, diagnose_run
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting.panel import clean_line
from rloo_cli.utils.errors import FOUND_CODE

USAGE = "rloo doctor RUN [--json]"


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for a run that is not there."""
    parser = RunArgumentParser("doctor", USAGE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    diagnosis = diagnose_run(find_run_folder(options.run, "doctor"))
    if options.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        console = answer_console(120)
        for line in _diagnosis_lines(diagnosis):
            console.print(line, soft_wrap=True)
    return FOUND_CODE if diagnosis.findings else 0


def _diagnosis_lines(diagnosis: Diagnosis) -> list[Text]:
    record = diagnosis.record
    lines = [Text(f"{record.folder}: {record.state}, {record.last_step} steps logged", "bold")]
    lines += [Text(f"  damaged  {clean_line(text)}", "red") for text in diagnosis.problems]
    for finding in diagnosis.findings:
        lines.append(Text(f"✗ {finding.name}", "bold red"))
        lines.append(Text(f"  seen     {clean_line(finding.figures)}"))
        lines.append(Text(f"  turn     {finding.fix}"))
        lines.append(Text(f"  more     docs/doctor.md#{finding.anchor}"))
    if not diagnosis.findings:
        few = "too few steps to say much: " if record.last_step < 8 else ""
        lines.append(Text(f"✓ {few}none of the known pathologies is in its files", "green"))
    for step, text in diagnosis.advice:
        lines.append(Text(f"  step {step} said: {clean_line(text)}", "bright_black"))
    return lines
