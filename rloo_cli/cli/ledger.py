"""`rloo ledger RUN [--json]`: what became of every prompt of a run, and whether it adds up.

The ledger is checked line by line (inspection/ledger_audit.py), and the first error is named with
its line (exit 4). Imports no torch.
"""

import json

from rloo_cli.cli.run_arguments import RunArgumentParser
from rloo_cli.inspection.ledger_audit import LedgerAudit, audit_ledger, ledger_summary
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import ConfigError, Problem

USAGE = "rloo ledger RUN [--json]"
MAX_EPOCH_COLUMNS = 6  # epochs shown beside each other


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, no ledger) and DataError (it does not add up)."""
    parser = RunArgumentParser("ledger", USAGE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    folder = find_run_folder(options.run, "ledger")
    if not (folder / LEDGER_FILE).is_file():
        why = "it has not begun its first step"
        fix = f"wait for it; rloo doctor {folder} says what keeps it"
        raise ConfigError(Problem(f"{folder} has no {LEDGER_FILE}", "command line", why, fix))
    audit, notes = audit_ledger(folder)
    if options.json:
        values = {"run": str(folder)} | ledger_summary(audit) | {"notes": notes}
        print(json.dumps(values, indent=2))
    else:
        lines = [str(folder / LEDGER_FILE), *ledger_report(audit), *notes]
        print(show_control_characters("\n".join(lines)))
    return 0


def ledger_report(account: LedgerAudit) -> list[str]:
    """The sums as a table: fate, prompts, share, and a column for each epoch if there are few."""
    sums, fates = ledger_summary(account), account.fates
    epochs = sorted(account.epochs) if len(account.epochs) <= MAX_EPOCH_COLUMNS else []
    total = max(1, fates.total())
    steps = f"steps {sums['steps'][0]} to {account.steps}" if fates else "no step yet"
    lines = [
        f"{sums['data_rows']} rows = {sums['prompts']} prompts + {sums['filtered']} filtered as"
        f" too long; {sums['cut']} prompts cut",
        f"{steps}, {sums['updates']} updates; {sums['prompts_trained']} prompts trained on at"
        " least once",
        "",
        f"{'fate':<12}{'draws':>9}{'share':>8}" + "".join(f"{f'epoch {e}':>11}" for e in epochs),
    ]
    for name in PROMPT_FATES:
        cells = "".join(f"{account.epochs[e][name]:>11}" for e in epochs)
        lines.append(f"{name:<12}{fates[name]:>9}{fates[name] / total:>8.1%}{cells}")
    parts = [f"{name} {fates[name]}" for name in PROMPT_FATES if fates[name]]
    parts += [f"pending {len(account.pending)}"] if account.pending else []
    equation = f" = {' + '.join(parts)}" if parts else ""
    drawn = fates.total() + len(account.pending)
    return [*lines, "", f"conserved: {drawn} draws{equation}"]
