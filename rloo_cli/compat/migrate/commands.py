"""Converts commands that do not train: a server of vLLM, and answers to held-out prompts.

`trl vllm-serve` and `swift rollout` become `rloo vllm-serve`, TRL's generate_tldr.py `rloo eval`.
The answer is a command, not a recipe.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.compat.migrate import tables

STARTS = ("vllm-serve", "vllm_serve.py", "rollout")  # after these come the flags of a server


def convert_other_command(words: list[str]) -> str | None:
    """Our command, and comments on what was left out; None for a command of another kind."""
    kind = _kind_of(words)
    if kind is None:
        return None
    ours, renamed = tables.OTHER_COMMANDS[kind]
    command, notes = [*ours], []
    starts = [i for i, word in enumerate(words) if word in STARTS or Path(word).name == kind]
    for name, value in _flags_of(words[max(starts) :]):  # not the flags of a launcher
        key = renamed.get(name)
        if key is None:
            note = tables.OTHER_COMMAND_NOTES.get(name, "there is nothing for it here")
            notes.append(f"# --{name} {value}".strip() + f": {note}")
        else:
            command.append(key.format(value or "true"))
    return "\n".join([shlex.join(command), *notes])


def _kind_of(words: list[str]) -> str | None:
    """The key of tables.OTHER_COMMANDS for a command: by its verb, or by its script."""
    names = [Path(word).name for word in words]
    if "vllm-serve" in names or "vllm_serve.py" in names or {"swift", "rollout"} <= {*names}:
        return "vllm-serve"
    return next((name for name in names if name in tables.OTHER_COMMANDS), None)


def _flags_of(words: list[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each flag; "" for a flag without one."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            if not equals and not following.startswith("--"):
                value = following
            yield name.replace("-", "_"), value
