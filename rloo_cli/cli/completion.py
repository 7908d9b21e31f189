"""`rloo completion bash|zsh|fish`: print the shell's script, which calls `rloo completion query`.

An answer takes a fifth of a second: recipes and groups are listed from their folders, and the keys
with their values come from a file in the cache, which is written again when the code has changed.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rloo_cli.cli import verb_help
from rloo_cli.inspection import run_folders
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import write_text

# Bash splits a word at = and : (COMP_WORDBREAKS), and replaces only what follows the last of them.
# So the script reads the words from the line itself, and returns only that last part of an answer.
BASH_SCRIPT = """_rloo() {
  local line="${COMP_LINE:0:COMP_POINT}" typed word answer sign head=""
  read -ra typed <<<"$line"
  [[ $line == *[[:space:]] ]] && typed+=("")
  word="${typed[${#typed[@]}-1]}"
  for sign in = :; do
    if [[ $word == *"$sign"* && $COMP_WORDBREAKS == *"$sign"* ]]; then
      answer="${word%"${word##*"$sign"}"}"
      [[ ${#answer} -gt ${#head} ]] && head="$answer"
    fi
  done
  COMPREPLY=()
  while IFS= read -r answer; do
    [[ -n $answer ]] && COMPREPLY+=("${answer#"$head"}")
  done < <(rloo completion query "${typed[@]:1}" 2>/dev/null)
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _rloo rloo
"""
ZSH_SCRIPT = """#compdef rloo
_rloo() {
  local -a found open
  found=("${(@f)$(rloo completion query "${words[@]:1:$((CURRENT-1))}" 2>/dev/null)}")
  open=(${(M)found:#*[=.]})
  found=(${found:#*[=.]})
  (( $#open )) && compadd -Q -S '' -- $open
  (( $#found )) && compadd -Q -- $found
  (( $#open + $#found )) || _files
}
compdef _rloo rloo
"""
FISH_SCRIPT = """\
complete -c rloo -a '(rloo completion query (commandline -opc)[2..] (commandline -ct))'
"""
SCRIPTS = {"bash": BASH_SCRIPT, "zsh": ZSH_SCRIPT, "fish": FISH_SCRIPT}
GROUPS_WITH_PLUS = ("recipe", "debug")  # groups that are chosen with a +
VERBS_WITH_RUN = (
    "top",
    "doctor",
    "report",
    "sync",
    "push",
    "samples",
    "ledger",
    "compare",
    "eval",
)
FIRST_ARGUMENTS: dict[str, tuple[str, ...]] = {  # verb -> what its first argument may be
    "recipes": ("list", "show", "copy"),
    "config": ("explain",),
    "completion": tuple(SCRIPTS),
    "sweep": ("show", "resume", "stop", "promote", "clone"),
    "slurm": ("render", "submit"),
    "reward": ("list", "test"),
    "help": tuple(verb_help.VERBS),
}
JOB_KINDS = ("train", "train_and_serve", "sweep", "eval")  # kinds of batch jobs
VERBS_WITH_OVERRIDES = (
    "train", "sweep", "sft", "reward-model", "vllm-serve", "eval", "fetch", "plan", "config",
    "verify-resume", "slurm", "doctor", "reward",
)  # fmt: skip


def run(args: list[str]) -> int:
    """Run the verb. After `query` come the arguments typed so far, the last one unfinished."""
    match args:
        case [shell] if shell in SCRIPTS:
            print(SCRIPTS[shell], end="")
        case [shell, "--json"] if shell in SCRIPTS:
            print(json.dumps({"shell": shell, "script": SCRIPTS[shell]}))
        case ["query", *typed]:
            print("\n".join(completion_candidates(typed)))
        case _:
            shell = os.path.basename(os.environ.get("SHELL", "bash"))
            fix = f'eval "$(rloo completion {shell if shell in SCRIPTS else "bash"})"'
            what, why = "rloo completion needs a shell", "bash, zsh or fish"
            raise ConfigError(Problem(what, "command line", why, fix))
    return 0


def completion_candidates(typed: list[str]) -> list[str]:
    """What the last argument could become."""
    *previous, prefix = typed or [""]
    return sorted({c for c in _candidates(previous, prefix) if c.startswith(prefix)})


def _candidates(previous_args: list[str], prefix: str) -> Iterable[str]:
    if not previous_args:
        return [*verb_help.VERBS, *(["--help", "--version"] if prefix.startswith("-") else [])]
    verb = previous_args[0]
    if prefix.startswith("-"):
        return verb_help.verb_flags(verb)
    if (values := verb_help.flag_values(verb, previous_args[-1])) is not None:
        return values
    candidates: list[str] = []
    if len(previous_args) == 1:
        candidates += FIRST_ARGUMENTS.get(verb, ())
    elif verb == "recipes" and previous_args[1] in ("show", "copy") and len(previous_args) == 2:
        candidates += paths.recipe_files()
    elif verb == "slurm" and len(previous_args) == 2:
        candidates += JOB_KINDS
    elif previous_args == ["config", "explain"]:
        return cached_key_values()
    if _takes_run(verb, previous_args):
        candidates += run_folders.list_run_names()
    if verb in VERBS_WITH_OVERRIDES:
        choices = paths.group_choices(_config_dirs(previous_args))
        candidates += _override_candidates(prefix, choices)
    return candidates


def _config_dirs(previous_args: list[str]) -> list[Path]:
    """The folders that --config-dir names among the arguments."""
    pairs = zip(previous_args, [*previous_args[1:], ""], strict=True)
    folders = [value if flag in ("--config-dir", "-cd") else flag.partition("=")[2]
               for flag, value in pairs if flag.startswith(("--config-dir", "-cd"))]  # fmt: skip
    return [Path(folder) for folder in folders if folder]


def _takes_run(verb: str, previous_args: list[str]) -> bool:
    """Whether the next argument may be a run: `compare` takes several, the others one."""
    return verb in VERBS_WITH_RUN and (len(previous_args) == 1 or verb == "compare")


def _override_candidates(prefix: str, groups: dict[str, dict[str, Path]]) -> Iterable[str]:
    """Choices of groups, and keys with their values, that begin with this prefix."""
    name, equals, value = prefix.partition("=")
    bare = name.lstrip("+")
    if not equals:
        signs = {group: "+" if group in GROUPS_WITH_PLUS else "" for group in groups}
        names = {f"{signs[group]}{group}=": choices for group, choices in groups.items()}
        matching = [n for n in names if n.startswith(prefix)]
        if len(matching) == 1:
            matching = [f"{n}{choice}" for n in matching for choice in names[n]]
        return [*matching, *([] if prefix.startswith("+") else _key_candidates(prefix))]
    values = [*(groups.get(bare) or cached_key_values().get(bare) or ())]
    head = value[: value.rfind(",") + 1]  # a=b,c: one more value of a sweep
    if bare == "recipe":
        path = Path(value.removeprefix(head))
        folder = path if value.endswith("/") else path.parent
        values += [str(p) for p in folder.glob("*.yaml")]
    return [f"{name}={head}{choice}" for choice in values]


def _key_candidates(prefix: str) -> list[str]:
    """The keys that begin with this prefix; before the first dot only their sections."""
    keys = cached_key_values()
    if "." in prefix:
        return [f"{key}=" for key in keys]
    return [f"{key}=" if "." not in key else f"{key.partition('.')[0]}." for key in keys]


def cached_key_values() -> dict[str, list[str]]:
    """Every key -> the values that can be listed, from the cache; {} if it cannot be read."""
    path = paths.cache_folder() / f"completion-{_code_fingerprint()}.json"
    try:
        if path.is_file():
            return dict(json.loads(path.read_text()))
        command = [sys.executable, "-m", "rloo_cli.cli.key_values"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        values = dict(json.loads(run.stdout))
        for old in paths.cache_folder().glob("completion-*.json"):
            old.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, run.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return values


def _code_fingerprint() -> str:
    """A fingerprint of every file that keys come from."""
    files = [*paths.PACKAGE.rglob("*.py"), *paths.CONF.rglob("*.yaml")]
    stats = sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files)
    return hashlib.sha256(str(stats).encode()).hexdigest()[:12]
