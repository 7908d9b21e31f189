"""`rloo migrate`: turn a TRL or ms-swift command into a recipe that means the same.

    rloo migrate accelerate launch ... rloo_tldr.py --rloo_k 2 ...     the old command itself
    rloo migrate config.yaml | config.json                             or a file of its settings
    --world-size N     processes the old run had, if its command does not say
    --from TRAINER     rloo or grpo (TRL's), swift; or a version of TRL:
                       trl_0_9 (<=0.10), trl_0_21 (0.11-0.21), trl_0_28 (0.22-0.28),
                       grpo_0_16 (0.14-0.16), grpo_0_28 (0.22-0.28);
                       trl: RLOO or GRPO as its settings say
    --json             the recipe's text as JSON, or the command's

The output is a recipe; everything that is not YAML is a comment, so `> my.yaml` keeps it all. For
`trl vllm-serve`, `swift rollout` and TRL's generate_tldr.py it is a command of ours. The old tool's
defaults are written out where they differ from ours, with what was corrected. If nothing says
whether the old run was RLOO or GRPO, --from has to.

A Python script runs here with one changed import, `from rloo_cli.compat.trl import ...`
(docs/migrate.md). Runs of other trainers are refused, with the command to begin with.
"""

import json
from pathlib import Path

from rloo_cli.compat.migrate.commands import convert_other_command
from rloo_cli.compat.migrate.convert import choose_dialect, convert_to_recipe
from rloo_cli.compat.migrate.old_run import OldRun
from rloo_cli.compat.migrate.other_trainers import refuse_trainer_name
from rloo_cli.compat.migrate.parse import USAGE, read_command, read_settings, split_command
from rloo_cli.compat.migrate.tables import DIALECTS
from rloo_cli.config.pasted import guess_name
from rloo_cli.utils.errors import ConfigError, Problem

FROM_CHOICES = [*DIALECTS, "swift", "rloo"]


def run(args: list[str]) -> int:
    """Print the recipe of an old run. Raises ConfigError for what cannot be read or converted."""
    options, old_args = _options(args)
    if "--help" in options:
        print(__doc__)
        return 0
    if not old_args:
        what, why = "rloo migrate needs an old run", "neither a file nor a command was given"
        raise ConfigError(Problem(what, "command line", why, USAGE))
    if (chosen := options.get("--from")) and chosen not in FROM_CHOICES:
        refuse_trainer_name(chosen)
        why = f"one of {', '.join(FROM_CHOICES)}"
        fix = f"--from {guess_name(chosen, FROM_CHOICES)}"
        what = f"--from {chosen}: no such trainer"
        raise ConfigError(Problem(what, "command line", why, fix))
    try:
        return _convert(old_args, chosen or "", options)
    except RecursionError:
        what, fix = "the old run cannot be read", "write its settings less deeply nested"
        raise ConfigError(Problem(what, "the old run", "it is nested too deeply", fix)) from None


def _convert(old_args: list[str], chosen: str, options: dict[str, str]) -> int:
    """Print what these arguments become."""
    words = split_command(old_args)
    if words and (command := convert_other_command(words)):
        return _print_answer("command", command, options)
    old_run = read_command(words) if words else read_settings(Path(old_args[0]))
    world = _world_size(options, old_run)
    recipe = convert_to_recipe(old_run, choose_dialect(old_run, chosen), world)
    return _print_answer("recipe", recipe, options)


def _print_answer(kind: str, text: str, options: dict[str, str]) -> int:
    print(json.dumps({kind: text}) if "--json" in options else text.rstrip("\n"))
    return 0


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our own flags, before the old command or after a file, and the arguments that are left."""
    options: dict[str, str] = {}
    rest = list(args)
    while rest and rest[0] != "--":
        at = 0 if rest[0].startswith("--") else 1  # `rloo migrate FILE --world-size 8`
        name, equals, value = rest[at].partition("=") if len(rest) > at else ("", "", "")
        if name in ("-h", "--help") and at == 0:
            return {"--help": ""}, []
        if name == "--json":
            options[name] = ""
            del rest[at]
            continue
        if name not in ("--from", "--world-size"):
            break
        if not equals and len(rest) < at + 2:
            what, why = f"{name} needs a value", "nothing follows it"
            fix = "--world-size N" if name == "--world-size" else "--from trl"
            raise ConfigError(Problem(what, "command line", why, fix))
        options[name] = value if equals else rest[at + 1]
        del rest[at : at + (1 if equals else 2)]
    return options, rest[1:] if rest[:1] == ["--"] else rest


def _world_size(options: dict[str, str], old_run: OldRun) -> int:
    """W, the old run's processes: by --world-size, by its launcher, or 1 with a note."""
    if text := options.get("--world-size"):
        if not text.isdigit() or int(text) < 1:
            what = f"--world-size {text}: a whole number >= 1 is expected"
            fix = "--world-size N, the number of processes of the old run"
            why = "the old run's batch is that of one process, times this number"
            raise ConfigError(Problem(what, "command line", why, fix))
        return int(text)
    if old_run.processes is None:
        old_run.notes.append(
            "the old run's number of processes is not known: 1 is assumed. With more, the batch was"
            " larger: rloo migrate --world-size N ..."
        )
        return 1
    old_run.notes.append(f"{old_run.processes} processes, by {old_run.processes_from}")
    return old_run.processes
