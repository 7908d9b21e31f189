"""`rloo migrate`: turn a TRL or ms-swift command into an equivalent recipe.

The output is a recipe; everything that is not YAML is a comment, so `> my.yaml` keeps it all. For
`trl vllm-serve`, `swift rollout` and TRL's generate_tldr.py the output is an rloo command. Defaults
of the old tool that differ from ours are written out, with corrections noted. If nothing shows
whether the old run was RLOO or GRPO, --from must.

A Python script runs with one changed import, `from rloo_cli.compat.trl import ...`
(docs/migrate.md). Runs of other trainers are refused, with a command to start from.
"""

import argparse
import json
from pathlib import Path

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.compat.migrate.commands import convert_other_command
from rloo_cli.compat.migrate.convert import convert_to_recipe
from rloo_cli.compat.migrate.other_trainers import OTHER_TRAINERS, other_trainer_error
from rloo_cli.compat.migrate.read import (
    USAGE,
    OldRun,
    read_command,
    read_settings,
    split_command,
)
from rloo_cli.compat.migrate.versions import DIALECTS, choose_dialect
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.utils.errors import refuse

OWN_FLAGS = ("--from", "--world-size", "--json")
FROM_CHOICES = [*DIALECTS, "swift", "rloo"]


def run(args: list[str]) -> int:
    """Print the recipe of an old run. Raises ConfigError for unreadable or unconvertible input."""
    options = _read_arguments(args)
    if not options.command:
        what, why = "rloo migrate needs an old run", "expected a file or a command"
        refuse("command line", what, USAGE, why)
    if (chosen := vars(options)["from"]) and chosen not in FROM_CHOICES:
        if title := next((t for t in OTHER_TRAINERS if t.lower() == chosen.lower()), None):
            raise other_trainer_error(title, "command line")
        refuse_unknown_name("trainer", chosen, FROM_CHOICES, "--from NAME")
    try:
        return _convert(options.command, chosen or "", options)
    except RecursionError:
        what, fix = "the old run cannot be read", "write its settings less deeply nested"
        refuse("the old run", what, fix, "it is nested too deeply")


def _convert(old_args: list[str], chosen: str, options: argparse.Namespace) -> int:
    """Print the conversion of these arguments."""
    words = split_command(old_args)
    if words and (command := convert_other_command(words)):
        return _print_answer("command", command, options)
    old_run = read_command(words) if words else read_settings(Path(old_args[0]))
    world = _world_size(options, old_run)
    recipe = convert_to_recipe(old_run, choose_dialect(old_run, chosen), world)
    return _print_answer("recipe", recipe, options)


def _print_answer(kind: str, text: str, options: argparse.Namespace) -> int:
    print(json.dumps({kind: text}) if options.json else text.rstrip("\n"))
    return 0


def _read_arguments(args: list[str]) -> argparse.Namespace:
    """Our own flags, before the old command or after a file, and the old command."""
    options = parse_verb("migrate", args)
    first, *rest = options.command or [""]
    if first != "--" and rest and rest[0].partition("=")[0] in OWN_FLAGS:
        behind = _read_arguments([*rest])
        found = {name: value or getattr(options, name) for name, value in vars(behind).items()}
        options = argparse.Namespace(**found | {"command": [first, *behind.command]})
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


def _world_size(options: argparse.Namespace, old_run: OldRun) -> int:
    """W, the old run's processes: from --world-size, its launcher, or 1 with a note."""
    if text := options.world_size:
        if not text.isdigit() or int(text) < 1:
            what = f"--world-size {text}: expected a whole number >= 1"
            fix = "--world-size N, the number of processes of the old run"
            why = "the old run's batch is the batch of one process times this number"
            refuse("command line", what, fix, why)
        return int(text)
    if old_run.processes is None:
        old_run.notes.append(
            "the old run's number of processes is unknown; assuming 1. With more, the batch was"
            " larger: rloo migrate --world-size N ..."
        )
        return 1
    old_run.notes.append(f"{old_run.processes} processes, from {old_run.processes_from}")
    return old_run.processes
