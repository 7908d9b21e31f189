"""`rloo doctor`: checks the machine before a run; diagnoses a run afterwards.

Before a run, each line is ok, warn or fail, with the fix; exits with 3 if any line is fail. For a
RUN it exits with 20 if it finds a problem. Imports torch only with --deep.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict

from rich.text import Text

from rloo_cli.cli.answers import answer_console
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.inspection.diagnosis import Diagnosis, diagnose_run
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting.panel import clean_line
from rloo_cli.utils.errors import FOUND_CODE, MachineError, refuse

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
MAX_NAME_WIDTH = 24  # cells of a line's name


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for an unknown run and an invalid config."""
    options = _parse_args(args)
    if options.kill_orphans is not None:
        return _kill_orphans(options.kill_orphans, options.json)
    if options.run is None:
        return _inspect_environment(options.overrides, options)
    diagnosis = diagnose_run(find_run_folder(options.run, "doctor"))
    if options.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        console = answer_console(120)
        for line in _diagnosis_lines(diagnosis):
            console.print(line, soft_wrap=True)
    return FOUND_CODE if diagnosis.findings else 0


def _parse_args(args: list[str]) -> argparse.Namespace:
    """The flags, RUN, and config overrides: at most one of them names a run."""
    options = parse_verb("doctor", args)
    both = [name for name in (options.run, options.kill_orphans) if name is not None]
    if len(both) > 1 or (both and (options.overrides or options.deep)):
        what = "a RUN cannot be combined with a recipe, keys or --deep"
        why = "for a RUN, doctor only reads the run's files"
        refuse("command line", what, f"rloo doctor {both[0]}", why)
    if options.deep and not options.overrides:
        what, why = "--deep needs a recipe", "it checks its data and rewards"
        refuse("command line", what, "rloo doctor +recipe=NAME --deep", why)
    return options


def _inspect_environment(overrides: list[str], options: argparse.Namespace) -> int:
    """Check the machine, and the run of these overrides. -> 3 if a line is fail"""
    from rloo_cli.config import check, compose, hf_cache  # lazy: Hydra takes a third of a second
    from rloo_cli.inspection import environment  # lazy: a RUN needs none of it

    if overrides:
        composed = compose.compose_config(overrides)
        settings = check.check_config(composed)
        # Output of libraries and rewards does not belong on stdout.
        with (
            hf_cache.recorded_command(composed.user_overrides),
            contextlib.redirect_stdout(sys.stderr),
        ):
            lines = environment.inspect_environment(settings, options.deep)
    else:
        lines = environment.inspect_environment()
    counts = {status: sum(line.status == status for line in lines) for status in STYLES}
    if options.json:
        print(json.dumps({**counts, "lines": [asdict(line) for line in lines]}, indent=2))
    else:
        console = answer_console(120)
        width = min(MAX_NAME_WIDTH, max(len(line.name) for line in lines))
        for line in lines:
            head = (f"{line.status:<5} ", STYLES[line.status])
            found = clean_line(line.found)
            console.print(Text.assemble(head, f"{line.name:<{width}} {found}"), soft_wrap=True)
            if line.fix and line.status != "ok":
                text = f"{'':<6}{'fix':<{width}} {clean_line(line.fix)}"
                console.print(Text(text), soft_wrap=True)
        console.print(f"{counts['fail']} fail, {counts['warn']} warn, {counts['ok']} ok")
    return MachineError.code if counts["fail"] else 0


def _kill_orphans(name: str, as_json: bool) -> int:
    """Kill leftover processes. Raises ConfigError for a run that is training, MachineError."""
    from rloo_cli.launch import leftovers  # lazy: one flag's

    folder = find_run_folder(name, "doctor --kill-orphans")
    leftovers.check_run_ended(folder)
    found = leftovers.find_leftovers(folder)
    stuck = leftovers.end_leftovers(found)
    ended = [process for process in found if process not in stuck]
    if as_json:
        values = {"run": str(folder), "ended": [asdict(p) for p in ended]}
        print(json.dumps(values | {"left": [asdict(p) for p in stuck]}, indent=2))
    for process in [] if as_json else ended:
        command = clean_line(process.command)[:120]
        print(f"ended process {process.pid}: {process.role} of {folder}: {command}")
    if not found and not as_json:
        print(f"{folder}: no process of this run is left running")
    if stuck:
        pids = ", ".join(str(process.pid) for process in stuck)
        why = "SIGKILL had no effect: other user, or blocked on a device or file system"
        fix = f"as their user: kill -9 {pids.replace(',', '')}; or reboot the machine"
        what = f"processes {pids} of {folder} did not exit"
        refuse("command line", what, fix, why, error=MachineError)
    return 0


def _diagnosis_lines(diagnosis: Diagnosis) -> list[Text]:
    record = diagnosis.record
    head = clean_line(f"{record.folder}: {record.state}, {record.last_step} steps logged")
    lines = [Text(head, "bold")]
    lines += [Text(f"  damaged  {clean_line(text)}", "red") for text in diagnosis.problems]
    for finding in diagnosis.findings:
        lines.append(Text(f"✗ {clean_line(finding.name)}", "bold red"))
        lines.append(Text(f"  seen     {clean_line(finding.figures)}"))
        lines.append(Text(f"  fix      {clean_line(finding.fix)}"))
        lines.append(Text(f"  more     rloo docs inspect#{finding.anchor}"))
    if not diagnosis.findings:
        few = "only a few steps: " if record.last_step < 8 else ""
        lines.append(Text(f"✓ {few}no known problem found in its files", "green"))
    for step, text in diagnosis.advice:
        lines.append(Text(f"  step {step} said: {clean_line(text)}", "bright_black"))
    return lines
