"""`rloo ledger RUN [--json]`: the fate of every prompt of a run, in total and per epoch.

Imports no torch.
"""

import json

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.inspection.ledger_sums import read_ledger_sums
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

MAX_EPOCH_COLUMNS = 6  # epochs shown side by side


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, no ledger) and DataError (a damaged ledger)."""
    options = parse_verb("ledger", args)
    folder = find_run_folder(options.run, "ledger")
    if not (folder / LEDGER_FILE).is_file():
        why = "it has not started its first step"
        fix = f"wait for it; rloo doctor {folder} shows why"
        refuse("command line", f"{folder} has no {LEDGER_FILE}", fix, why)
    sums = read_ledger_sums(folder)
    if options.json:
        print(json.dumps({"run": str(folder)} | sums, indent=2))
    else:
        lines = [str(folder / LEDGER_FILE), *ledger_report(sums)]
        print(show_control_characters("\n".join(lines)))
    return 0


def ledger_report(sums: JsonObject) -> list[str]:
    """The sums as a table: fate, prompts, share, and a column per epoch if there are few."""
    fates, draws = sums["fates"], sums["draws"]
    epochs = sums["epochs"] if len(sums["epochs"]) <= MAX_EPOCH_COLUMNS else []
    steps = f"steps {sums['steps'][0]} to {sums['steps'][1]}" if draws else "no step yet"
    heads = "".join(f"{'epoch ' + str(epoch['epoch']):>11}" for epoch in epochs)
    lines = [
        f"{sums['data_rows']} rows = {sums['prompts']} prompts + {sums['filtered']} filtered as"
        f" too long; {sums['cut']} prompts truncated",
        f"{steps}, {sums['updates']} updates; {sums['prompts_trained']} prompts trained on at"
        " least once",
        "",
        f"{'fate':<12}{'draws':>9}{'share':>8}{heads}",
    ]
    for name in PROMPT_FATES:
        cells = "".join(f"{epoch['fates'][name]:>11}" for epoch in epochs)
        lines.append(f"{name:<12}{fates[name]:>9}{fates[name] / max(1, draws):>8.1%}{cells}")
    parts = [f"{name} {fates[name]}" for name in PROMPT_FATES if fates[name]]
    parts += [f"pending {sums['pending']}"] if sums["pending"] else []
    equation = f" = {' + '.join(parts)}" if parts else ""
    return [*lines, "", f"{draws + sums['pending']} draws{equation}"]
