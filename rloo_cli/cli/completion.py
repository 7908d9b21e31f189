"""`rloo completion bash|zsh|fish`: print the shell's completion script, which shtab makes.

Verbs, flags and their values stand in the script. For the words the shell asks `rloo completion
query`, a fifth of a second: recipes and groups are listed from their folders, and the keys with
their values come from a file in the cache, which is written again when the code has changed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rloo_cli.cli.verb_parser import VerbParser, is_bare, parse_verb
from rloo_cli.cli.verbs import NEW, VERBS
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.inspection import run_folders
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import write_text

# Bash splits a word at = and : (COMP_WORDBREAKS), and replaces only what follows the last of them.
# So the words are read from the line itself, and only that last part of an answer is printed.
BASH_WORDS = """_rloo_words() {
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
  rloo completion query "${typed[@]:1}" 2>/dev/null | while IFS= read -r answer; do
    echo "${answer#"$head"}"
  done
}
"""
BASH_END = """
_rloo() {  # no blank behind a key, and files where there is no answer
  _shtab_rloo
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _rloo rloo
"""
ZSH_WORDS = """_rloo_words() {
  local -a found open
  found=("${(@f)$(rloo completion query "${(@)words[1,CURRENT]}" 2>/dev/null)}")
  open=(${(M)found:#*[=.]})
  found=(${found:#*[=.]})
  (( $#open )) && compadd -Q -S '' -- $open
  (( $#found )) && compadd -Q -- $found
  (( $#open + $#found )) || _files
}
"""
FISH_WORDS = "(rloo completion query (commandline -opc)[2..] (commandline -ct))"
WORDS = {
    "bash": "_rloo_words", "zsh": "_rloo_words", "fish": FISH_WORDS,
    "preamble": {"bash": BASH_WORDS, "zsh": ZSH_WORDS},
}  # fmt: skip
SHELLS = ("bash", "zsh", "fish")
GROUPS_WITH_PLUS = ("recipe", "debug")  # groups that are chosen with a +
WORD_CHOICES = {  # a word of a usage -> what it may be
    "SHELL": SHELLS,
    "KIND": ("train", "train_and_serve", "sweep", "eval"),
    "TRACKER": (
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "swanlab",
        "comet_ml",
        "aim",
        "clearml",
        "dvclive",
    ),
}


def run(args: list[str]) -> int:
    """Run the verb. After `query` come the arguments typed so far, the last one unfinished."""
    if args[:1] == ["query"]:
        print("\n".join(completion_candidates(args[1:])))
        return 0
    options = parse_verb("completion", args)
    if options.shell not in SHELLS:
        shell = os.path.basename(os.environ.get("SHELL", "bash"))
        fix = f'eval "$(rloo completion {shell if shell in SHELLS else "bash"})"'
        refuse_unknown_name("shell", options.shell, SHELLS, fix)
    script = completion_script(options.shell)
    print(json.dumps({"shell": options.shell, "script": script}) if options.json else script)
    return 0


def completion_script(shell: str) -> str:
    """The script of a shell: shtab's, with the words asked of `rloo completion query`."""
    import shtab  # lazy: a key press needs none of it

    whole = argparse.ArgumentParser("rloo", add_help=False)
    whole.add_argument("--help", "-h", action="store_true", help="list verbs and recipes")
    whole.add_argument("--version", action="store_true", help="print the version")
    verbs = whole.add_subparsers()
    for name, verb in VERBS.items():
        flags = VerbParser(name, with_words=False)
        for action in flags._actions:
            if action.metavar in ("DIR", "FOLDER"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        parser = verbs.add_parser(name, parents=[flags], add_help=False, help=verb.summary)
        words = parser.add_argument("words", nargs="*", help="words")
        words.complete = WORDS  # type: ignore[attr-defined]
    script = str(shtab.complete(whole, shell))
    if shell == "zsh":  # shtab's form of `nargs="*"` completes the first word alone
        script = script.replace('"(*)::words:', '"*:words:')
    return script + BASH_END if shell == "bash" else script


def completion_candidates(typed: Sequence[str]) -> list[str]:
    """What the last word could become; the first is a verb."""
    if len(typed) < 2 or typed[0] not in VERBS:
        return []
    verb, *previous, prefix = typed
    found: Iterable[str] = ()
    with contextlib.suppress(ConfigError):  # a flag whose value is wrong
        options, words = VerbParser(verb, with_words=False).parse_known_args(previous)
        dirs = [Path(folder) for folder in getattr(options, "config_dir", [])]
        found = _word_candidates(verb, [w for w in words if is_bare(w)], prefix, dirs)
    return sorted({c for c in found if c.startswith(prefix)})


def _word_candidates(
    verb: str, named: list[str], prefix: str, config_dirs: list[Path]
) -> list[str]:
    """What may follow the words `named`, those that are not key=value."""
    forms = VERBS[verb].words
    action = named[0] if named and named[0] in forms else NEW
    candidates = [] if named else [*filter(None, forms)]
    form, at = forms.get(action, ""), len(named) - bool(action)
    names = [word for w in form.split() if (word := w.strip("[]")).isupper()]
    name = names[min(at, len(names) - 1)] if names and (at < len(names) or "..." in form) else ""
    if name == "RUN":
        candidates += run_folders.list_run_names()
    elif name == "RECIPE":
        candidates += paths.recipe_files()
    elif name == "PAGE":
        candidates += paths.doc_pages()
    elif name == "KEY":
        return [*cached_key_values()]
    candidates += WORD_CHOICES.get(name, ())
    if "=" in form:
        candidates += _override_candidates(prefix, paths.group_choices(config_dirs))
    return candidates


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
