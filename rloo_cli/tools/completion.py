"""`rloo completion bash|zsh|fish`: the shell's script; it asks `rloo completion query WORDS`."""

import os

from rloo_cli import paths
from rloo_cli.errors import ConfigError, Problem
from rloo_cli.tools import folders
from rloo_cli.tools.config import leaves

BASH = """_rloo() {
  local IFS=$'\\n'
  COMPREPLY=($(rloo completion query "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _rloo rloo
"""
ZSH = """#compdef rloo
_rloo() {
  local -a found
  found=("${(@f)$(rloo completion query "${words[@]:1:$((CURRENT-1))}" 2>/dev/null)}")
  compadd -Q -S '' -- $found
}
compdef _rloo rloo
"""
FISH = """complete -c rloo -f -a '(rloo completion query (commandline -opc)[2..] (commandline -ct))'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
VERBS = (
    "train",
    "sweep",
    "sft",
    "reward-model",
    "vllm-serve",
    "eval",
    "fetch",
    "plan",
    "recipes",
    "config",
    "samples",
    "ledger",
    "compare",
    "slurm",
    "migrate",
    "completion",
)
APPENDED = ("recipe", "debug")


def run(words: list[str]) -> int:
    """The verb; for `query` the words typed so far, the last one unfinished."""
    match words:
        case [shell] if shell in SCRIPTS:
            print(SCRIPTS[shell], end="")
        case ["query", *typed]:
            print("\n".join(answers(typed)))
        case _:
            shell = os.path.basename(os.environ.get("SHELL", "bash"))
            fix = f'eval "$(rloo completion {shell if shell in SCRIPTS else "bash"})"'
            raise ConfigError(
                Problem("rloo completion needs a shell", "command line", "bash, zsh or fish", fix)
            )
    return 0


def answers(typed: list[str]) -> list[str]:
    """What the last word could become."""
    *before, word = typed or [""]
    if not before:
        return [v for v in VERBS if v.startswith(word)]
    if before[0] == "recipes":
        choices = ["list", "show", "copy"] if len(before) == 1 else list(paths.recipe_files())
        return [c for c in choices if c.startswith(word)]
    if before[0] in ("samples", "ledger", "compare"):
        return [name for name in folders.names() if name.startswith(word)]
    if before[0] == "completion":
        return [s for s in SCRIPTS if s.startswith(word)]
    groups = paths.group_choices([])
    words = [
        f"{'+' if group in APPENDED else ''}{group}={choice}"
        for group, choices in groups.items()
        for choice in choices
    ]
    words += [] if "=" in word or word.startswith("+") else _keys(before[0])
    return sorted({w for w in words if w.startswith(word)})


def _keys(verb: str) -> list[str]:
    ending = "" if verb == "config" else "="
    return [key + ending for key in leaves()]
