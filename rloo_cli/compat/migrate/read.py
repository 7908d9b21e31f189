"""Reads the old settings: of one command, or of one YAML or JSON file.

Nothing is ever executed or imported, and shell variables are not expanded.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.compat.migrate.other_trainers import (
    PASTE,
    names_in_command,
    names_of_settings,
    other_file_error,
    python_script_error,
    refuse_other_trainer,
)
from rloo_cli.compat.migrate.scripts import BUILT_IN
from rloo_cli.config.old_names import find_old_name
from rloo_cli.config.provenance import YAML_ERRORS, load_plain_yaml
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

COMMAND_ENDS = {"&", "|", ">", ">>", "2>&1", "2>"}  # words that end the arguments of a command
# A shell line, whose quotes may span several lines; or a comment.
COMMAND_LINE = re.compile(
    r"""(?:[^'"\\\n#]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(?<=\S)\#)+|\#[^\n]*""", re.DOTALL
)
TOOLS = ("swift", "trl", "rloo", "grpo")
MAX_COMMAND_CHARS = 32_000  # shlex is quadratic in a word's length
MAX_FILE_BYTES = 256_000  # of a script or a config, which is parsed several times
USAGE = "rloo migrate FILE.yaml, or rloo migrate -- OLD COMMAND"
PROCESS_COUNT_FLAGS = ("num_processes", "nproc_per_node", "num_gpus")
LAUNCHER_FLAGS = {
    *PROCESS_COUNT_FLAGS, "nnodes", "num_machines", "config_file", "accelerate_config"
}  # fmt: skip
# TRL's own launcher files, each of which starts 8 processes except the first.
TRL_LAUNCHERS = {"single_gpu": 1} | dict.fromkeys(
    ("multi_gpu", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp1", "fsdp2",
     "zero1", "zero2", "zero3"), 8,
)  # fmt: skip


@dataclass
class OldRun:
    """Old settings by name, and how they were launched."""

    flags: JsonObject
    tool: str = ""  # trl, swift, or grpo and rloo if the command says no more
    method: str = ""  # the argument after the tool: rloo, grpo, rlhf, sft ...
    script: str = ""  # path of the training script
    file: str = ""  # file name of the config
    kind: str = ""  # rloo or grpo, from the class of a trainer
    setting_format: str = "--{} {}"
    processes: int | None = None
    processes_from: str = ""
    nodes: int = 1  # machines that these processes ran on
    launcher_file: str = ""  # accelerate's config, which names the engine
    notes: list[str] = field(default_factory=list)


def split_command(args: list[str]) -> list[str]:
    """The words of the old command; [] if the arguments name a file instead.

    Raises ConfigError for a text with several commands, and for one that is too long.
    """
    if len(args) > 1:
        return _words_of_one(args)
    if not re.search(r"\s", args[0].strip()):
        return []
    if len(args[0]) > MAX_COMMAND_CHARS:
        what, why = "the command is too long", f"over {MAX_COMMAND_CHARS} characters"
        fix = "write its settings into a file: rloo migrate FILE.yaml"
        raise ConfigError(Problem(what, "the command", why, fix))
    text = re.sub(r"\\\r?\n", " ", args[0]).rstrip().rstrip("\\")
    commands = [shlex.split(line) for line in COMMAND_LINE.findall(text) if line[0] != "#"]
    if set(COMMAND_LINE.sub("", text)) & set("'\""):
        what, fix = "a quote in the command is not closed", "close it, or paste the whole command"
        raise ConfigError(Problem(what, "the command", text.strip()[-80:], fix))
    commands = [words for words in commands if words]
    if len(commands) != 1:
        raise _not_one_command_error(len(commands))
    return _words_of_one(commands[0])


def _words_of_one(words: list[str]) -> list[str]:
    """The words of a command without redirections. Raises ConfigError if another follows."""
    if any(word in ("&&", "||") or re.fullmatch(r"\S*;", word) for word in words):
        raise _not_one_command_error(2)
    stop = next((i for i, word in enumerate(words) if word in COMMAND_ENDS), len(words))
    return words[:stop]


def _not_one_command_error(count: int) -> ConfigError:
    what = "several commands were given" if count else "no command was given"
    why = "rloo migrate converts one command at a time"
    fix = f"paste only the training command: {PASTE}"
    return ConfigError(Problem(what, "the command", why, fix))


def read_settings(path: Path) -> OldRun:
    """Read a YAML or JSON file of settings; it may include the launcher's.

    Raises ConfigError for a file that is missing, of another kind, or without known settings.
    """
    if path.is_file() and path.suffix not in (".yaml", ".yml", ".json"):
        raise other_file_error(path)
    old_run = OldRun(read_settings_file(path), setting_format="{}: {}", file=path.name)
    old_run.flags.pop("config", None)
    refuse_other_trainer(names_of_settings(old_run.flags), str(path))
    _read_process_count(old_run)
    if not any(find_old_name(name) for name in old_run.flags):
        names = ", ".join(list(old_run.flags)[:5]) or "there are none"
        why = f"none of its names are known: {names}"
        what = f"{path} has no training settings"
        raise ConfigError(Problem(what, str(path), why, USAGE))
    return old_run


def read_command(words: list[str]) -> OldRun:
    """Read an old command, from its launcher (or its first flag) on.

    Raises ConfigError for another trainer's command, and for one whose settings are in a script.
    """
    refuse_other_trainer(names_in_command(words), "the command")
    old_run = OldRun({})
    _sort_arguments(old_run, words)
    old_run.flags = {name: _flag_value(given) for name, given in old_run.flags.items()}
    script = old_run.script
    known = [name for name in old_run.flags if find_old_name(name)]
    if script and set(known) - LAUNCHER_FLAGS <= {"bf16", "fp16"}:  # which the launcher says
        why = "its settings are in the script, not in the command"
        raise python_script_error(script, why)
    if script and Path(script).name not in BUILT_IN:
        old_run.notes.append(
            f"{script} is not read: settings in its code (data, rewards, its own defaults) are not"
            " in this recipe"
        )
    if config := old_run.flags.pop("config", None):  # the command's own flags come first
        old_run.flags = read_settings_file(Path(str(config))) | old_run.flags
        old_run.file = Path(str(config)).name
    _read_process_count(old_run)
    if not old_run.flags:
        what, why = "no flags in this command", " ".join(words)[:200]
        raise ConfigError(Problem(what, "the command", why, USAGE))
    return old_run


def _sort_arguments(old_run: OldRun, args: list[str]) -> None:
    """Sort arguments into flags, the tool, its method and the script."""
    name, extras = "", []
    for word in args:
        if word == "...":
            old_run.notes.append("the dots stand for settings missing in the command")
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            old_run.flags[name] = [value] if equals else []
        elif word.endswith(".py") and not old_run.script and old_run.tool != "swift":
            old_run.script, name = word, ""
            _drop_launcher_flags(old_run)
        elif word.startswith("trl.scripts.") and not old_run.script:
            old_run.script, name = f"{word.rpartition('.')[2]}.py", ""
            _drop_launcher_flags(old_run)
        elif name:
            old_run.flags[name].append(word.rstrip(",") if word.endswith('",') else word)
        elif variable := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            if variable[1] in ("NPROC_PER_NODE", "NNODES"):
                old_run.flags[variable[1].lower()] = [variable[2]]
        elif word in TOOLS and not old_run.tool:
            old_run.tool = word
        elif old_run.tool and not old_run.method and old_run.flags.keys() <= LAUNCHER_FLAGS:
            old_run.method = word
        else:
            extras.append(word)
    if unread := [w for w in extras if w.startswith("$")]:
        old_run.notes.append(f"{' '.join(unread)} is not expanded: its value is not read")
    for name, values in old_run.flags.items():
        if unset := [w for w in values[1:] if re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", w)]:
            values[:] = [w for w in values if w not in unset]
            note = f"{' '.join(unset)} after --{name} is not expanded: it is not read"
            old_run.notes.append(note)


def _drop_launcher_flags(old_run: OldRun) -> None:
    """Drop the flags before the script: only the launcher's number of processes matters."""
    others = [name for name in old_run.flags if name not in LAUNCHER_FLAGS]
    precision = old_run.flags.get("mixed_precision") or [""]
    old_run.flags = {k: v for k, v in old_run.flags.items() if k in LAUNCHER_FLAGS}
    if precision[0] in ("bf16", "fp16"):
        old_run.flags[precision[0]] = []
    if others:
        old_run.notes.append(f"the launcher's own flags: --{', --'.join(others)}")


def _read_process_count(old_run: OldRun) -> None:
    """Read how many processes the launcher started, from its flags or its file."""
    launcher = {k: old_run.flags.pop(k) for k in LAUNCHER_FLAGS if k in old_run.flags}
    file = str(launcher.get("config_file") or launcher.get("accelerate_config") or "")
    source = next((name for name in PROCESS_COUNT_FLAGS if name in launcher), "")
    count = launcher.get(source)
    old_run.launcher_file = file
    if count is None and file and Path(file).is_file():
        count, source = read_settings_file(Path(file)).get("num_processes"), file
    if count is None and Path(file).stem in TRL_LAUNCHERS:
        count, source = TRL_LAUNCHERS[Path(file).stem], f"TRL's {file}"
    if count is None:
        return
    nodes = launcher.get("nnodes", launcher.get("num_machines", 1))
    if not isinstance(count, int) or not isinstance(nodes, int):
        old_run.notes.append(f"{source} {count} is not a number of processes")
        return
    per_node = source == "nproc_per_node"  # else it counts those of all nodes
    old_run.processes, old_run.processes_from = count * (nodes if per_node else 1), source
    old_run.nodes = max(1, nodes)


def read_old_file(path: Path) -> str:
    """The text of a file of an old run. Raises ConfigError for one that is too large."""
    if path.stat().st_size > MAX_FILE_BYTES:
        what, why = f"{path} is too large for an old run", f"over {MAX_FILE_BYTES // 1000} kB"
        fix = "give a file with only its command or its settings"
        raise ConfigError(Problem(what, str(path), why, fix))
    return path.read_text(encoding="utf-8", errors="strict")


def read_settings_file(path: Path) -> JsonObject:
    """Read a YAML or JSON file. Raises ConfigError unless it exists and maps names to values."""
    if not path.is_file():
        where = f"looked at {path.absolute()}"
        raise ConfigError(Problem(f"{path} is not a file", str(path), where, USAGE))
    try:
        values = load_plain_yaml(read_old_file(path))  # JSON is YAML
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what, fix = f"{path} is not YAML", f"correct {path}{line}"
        raise ConfigError(Problem(what, f"{path}{line}", str(error), fix)) from None
    if not isinstance(values, dict):
        what, fix = f"{path} has no settings", "give a file with a name: value on each line"
        raise ConfigError(Problem(what, str(path), "expected name: value", fix))
    return {str(k): parse_argument(v) if isinstance(v, str) else v for k, v in values.items()}


def parse_argument(text: str) -> object:
    """An argument as bool, null, number, JSON or text; `3e-6` is a number (YAML says text)."""
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for convert in (int, float, json.loads if text[:1] in "[{" else str):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _flag_value(args: list[str]) -> object:
    """The value after a flag: true without arguments, a list of several."""
    values = [parse_argument(text) for text in args] or [True]
    return values[0] if len(values) == 1 else values
