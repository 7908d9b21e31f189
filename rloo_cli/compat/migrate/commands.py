"""Converts commands that do not train: a server of vLLM, and answers to held-out prompts.

`trl vllm-serve` and `swift rollout` become `rloo vllm-serve`, TRL's generate_tldr.py `rloo eval`.
The answer is a command, not a recipe: what it says stands in the words.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.old_run import read_old_file
from rloo_cli.compat.migrate.shell import simple_commands

STARTS = ("vllm-serve", "vllm_serve.py", "rollout")  # after these come the flags of a server


def convert_other_command(args: list[str]) -> str | None:
    """Our command, and comments on what was left out; None if the words are of another kind."""
    answer: list[str] = []
    scripts: list[str] = []
    for words in _commands_of(args):
        kind = _kind_of(words)
        if kind is not None and not answer:
            command, notes = convert_words(kind, words)
            answer = [command, *(f"# {note}" for note in notes)]
        elif kind is None:
            scripts += [word for word in words if word.endswith(".py")]
    left = [f"# {name} is not a file here: rloo migrate {name}, where it is" for name in scripts]
    return "\n".join(answer + left) if answer else None


def server_command(words: list[str]) -> str | None:
    """`rloo vllm-serve ...` for a command that starts a server; None for another command."""
    kind = _kind_of(words)
    return convert_words(kind, words)[0] if kind == "vllm-serve" else None


def convert_words(kind: str, words: list[str]) -> tuple[str, list[str]]:
    """-> our command for one of the kinds of tables.OTHER_COMMANDS, and what was left out."""
    ours, renamed = tables.OTHER_COMMANDS[kind]
    command, notes = [*ours], []
    starts = [i for i, word in enumerate(words) if word in STARTS or Path(word).name == kind]
    for name, value in _flags_of(words[max(starts) :]):  # not the flags of a launcher
        key = renamed.get(name)
        if key is None:
            note = tables.OTHER_COMMAND_NOTES.get(name, "there is nothing for it here")
            notes.append(f"--{name} {value}".strip() + f": {note}")
        else:
            command.append(key.format(value or "true"))
    return shlex.join(command), notes


def _kind_of(words: list[str]) -> str | None:
    """The key of tables.OTHER_COMMANDS for a command: by its verb, or by its script."""
    names = [Path(word).name for word in words]
    if "vllm-serve" in names or "vllm_serve.py" in names or {"swift", "rollout"} <= {*names}:
        return "vllm-serve"
    return next((name for name in names if name in tables.OTHER_COMMANDS), None)


def _commands_of(args: list[str]) -> Iterator[list[str]]:
    """The commands in the words after `rloo migrate`, or in the script that they name."""
    if len(args) == 1:
        path = Path(args[0])
        text = read_old_file(path) if path.is_file() else args[0]
        for words, _ in simple_commands(text):
            yield list(words)
    else:
        yield args


def _flags_of(words: list[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each flag; "" for a flag without one."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            if not equals and not following.startswith("--"):
                value = following
            yield name.replace("-", "_"), value
