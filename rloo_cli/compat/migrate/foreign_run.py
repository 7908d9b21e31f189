"""Reads the settings of an OpenRLHF or verl run: a command, a shell script or a config.

Nothing is executed. OpenRLHF's settings are flags, verl's are words as Hydra's; a config is a YAML
or JSON file of either, nested or dotted.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.foreign_table import find_foreign_row
from rloo_cli.compat.migrate.old_run import read_old_file
from rloo_cli.compat.migrate.shell import parse_argument, simple_commands, split_tokens
from rloo_cli.config.provenance import YAML_ERRORS, load_foreign_yaml
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

MODULES = {"openrlhf": r"openrlhf\.cli\.|train_(ppo|grpo|rloo)\w*\.py$", "verl": r"main_"}
OTHER_METHOD = r"openrlhf\.cli\.train_((?!ppo|grpo|rloo)\w+)|verl\.trainer\.(\w*sft\w*)"
COMMAND_ENDS = {"&", "&&", "|", "||", ";"}


@dataclass
class ForeignRun:
    """Settings as they were typed, and what could not be read."""

    tool: str  # openrlhf or verl
    settings: JsonObject
    notes: list[str] = field(default_factory=list)


def read_foreign_run(args: list[str], from_option: str = "") -> ForeignRun | None:
    """The run that the words after `rloo migrate` are of; None if it is of neither tool.

    `from_option`: the value of --from. Raises ConfigError for a run of one of the two that has no
    setting.
    """
    path = Path(args[0])
    if len(args) == 1 and path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        run = _read_settings(path, from_option)
    else:
        run = _read_commands(args, from_option)
    if run is not None and not any(find_foreign_row(run.tool, name) for name in run.settings):
        title = tables.FOREIGN_TITLES[run.tool]
        what = f"this is a run of {title}, and none of its settings is in it"
        fix = "rloo migrate FILE, or rloo migrate -- OLD COMMAND"
        why = f"names found: {', '.join([*run.settings][:5]) or 'none'}"
        raise ConfigError(Problem(what, "the old run", why, fix))
    return run


def _read_settings(path: Path, tool: str) -> ForeignRun | None:
    try:
        values = load_foreign_yaml(read_old_file(path, errors="strict"))
    except YAML_ERRORS:
        return None  # the reader of TRL's configs says so
    if not isinstance(values, dict):
        return None
    settings = dict(_flatten(values))
    tool = tool if tool in tables.FOREIGN_TITLES else _tool_of_settings(settings)
    return ForeignRun(tool, settings) if tool in MODULES else None


def _flatten(values: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", parse_argument(value) if isinstance(value, str) else value


def _tool_of_settings(settings: Mapping[str, object]) -> str:
    """openrlhf or verl by the names of settings; "" if they say neither."""
    names = {name.replace("-", "_") for name in settings}
    if any(n.startswith("actor_rollout_ref.") or n == "algorithm.adv_estimator" for n in names):
        return "verl"
    return "openrlhf" if len(tables.FOREIGN_FLAGS["openrlhf"] & names) > 1 else ""


def _read_commands(args: list[str], from_option: str) -> ForeignRun | None:
    """The first command of one of the two tools, and a note on the others."""
    runs = []
    others = []
    for words in _commands_of(args):
        if other := re.search(OTHER_METHOD, " ".join(words)):
            others.append(other[1] or other[2])
            continue
        tool = from_option if from_option in MODULES else _tool_of_words(words)
        if tool:
            start = _module_index(words, tool)
            read = _flags if tool == "openrlhf" else _hydra_words
            settings, notes = read(words[start:])
            if settings:
                runs.append(ForeignRun(tool, settings, notes))
    if others and not runs:
        what = f"the old run was {others[0]}: of this tool, policies' trainings are converted"
        why = "a training of another kind has other settings"
        raise ConfigError(Problem(what, "the old run", why, "rloo sft, rloo reward-model"))
    if len(runs) > 1:
        note = f"{len(runs)} training commands are in it: this is the first of them"
        runs[0].notes.append(note)
    return runs[0] if runs else None


def _tool_of_words(words: list[str]) -> str:
    text = " ".join(words)
    for tool in MODULES:
        if re.search(tables.FOREIGN_PATTERNS[tool], text):
            return tool
    flags = {w[2:].partition("=")[0] for w in words if w.startswith("--")}
    pairs = {w.lstrip("+~").partition("=")[0] for w in words if "=" in w and w[0] != "-"}
    return _tool_of_settings(dict.fromkeys(flags | pairs))


def _commands_of(args: list[str]) -> Iterator[list[str]]:
    """The words of each command in the arguments, or in the script that they name."""
    path = Path(args[0])
    if len(args) > 1:
        yield args
        return
    text = read_old_file(path) if path.is_file() else args[0]
    if path.suffix == ".py" and path.is_file():
        return
    found = False
    for words, _ in simple_commands(text):
        if _tool_of_words(words):
            found = True
            yield words
    if not found and any(re.search(tables.FOREIGN_PATTERNS[tool], text) for tool in MODULES):
        yield from _here_documents(text)


def _here_documents(text: str) -> Iterator[list[str]]:
    """The commands inside here documents, which the reader of scripts leaves out."""
    pattern = r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n\s*\1\b"
    for match in re.finditer(pattern, text, re.DOTALL):
        words = split_tokens(re.sub(r"\\\r?\n", " ", match[2]))
        if _tool_of_words(words):
            yield words


def _module_index(words: list[str], tool: str) -> int:
    """Where the tool's own words begin: after its module, behind what launches it."""
    matching = [i for i, w in enumerate(words) if re.search(MODULES[tool], w) and w[0] != "-"]
    return matching[0] + 1 if matching else 0


def _flags(words: list[str]) -> tuple[JsonObject, list[str]]:
    """OpenRLHF's flags with their values, and notes on what is not filled in."""
    found: dict[str, list[str]] = {}
    notes, name = [], ""
    for word in words:
        if word in COMMAND_ENDS:
            break
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        elif word.startswith("$"):
            notes.append(f"{word} is not filled in: what it stands for is not read")
    values: JsonObject = {}
    for name, texts in found.items():
        parsed = [parse_argument(text) for text in texts] or [True]
        values[name] = parsed[0] if len(parsed) == 1 else parsed
    return values, notes


def _hydra_words(words: list[str]) -> tuple[JsonObject, list[str]]:
    """verl's words, key=value; a list is read as YAML reads it."""
    values: JsonObject = {}
    notes = []
    for word in words:
        if word in COMMAND_ENDS:
            break
        match = re.fullmatch(r"\+{0,2}([\w./@]+)=(.*)", word, re.DOTALL)
        if match:
            values[match[1]] = _hydra_value(match[2])
        elif word.startswith("$") and word not in ("$@", "$*"):
            notes.append(f"{word} is not filled in: what it stands for is not read")
    return values, notes


def _hydra_value(text: str) -> object:
    if text[:1] in "[{":
        try:
            return load_foreign_yaml(text)
        except YAML_ERRORS:
            return text
    return parse_argument(text.strip("'\""))
