"""What `rloo migrate` is given -> the old settings, by name.

A command line (typed, or in a shell script), a YAML or JSON config, or a Python script whose
`RLOOConfig(...)` holds literals (`migrate_python`). Nothing is ever executed or imported.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.cli.migrate import tables
from rloo_cli.cli.migrate.foreign import refuse_foreign
from rloo_cli.cli.migrate.given import Given
from rloo_cli.cli.migrate.python import read_python
from rloo_cli.cli.migrate.shell import simple_commands
from rloo_cli.config.old_names import old_name
from rloo_cli.utils.errors import ConfigError, Problem

ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>"}  # shell words that end a command
STARTERS = ("accelerate", "torchrun", "python", "python3", "deepspeed")
TOOLS = ("swift", "trl", "rloo", "grpo")


def read(words: list[str]) -> Given:
    """The words after `rloo migrate`: one file, or an old command.

    Raises ConfigError for a file that is missing or holds nothing to migrate, and for a trainer
    that is not migrated.
    """
    if len(words) == 1 and re.search(r"\s", words[0].strip()):
        return read_script(words[0], "the command")
    if len(words) > 1:
        return read_command(words)
    path = Path(words[0])
    if not path.is_file():
        raise _missing(path)
    text = path.read_text(errors="replace")
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_config(path)
    if path.suffix == ".py":
        return read_python(text, str(path))
    return read_script(text, str(path))


def _read_config(path: Path) -> Given:
    """A YAML or JSON file of settings; the launcher's may be among them."""
    given = Given(mapping(path), said_as="{}: {}", file=path.name)
    if "config" in given.flags:
        given.flags.pop("config")
    refuse_foreign([], given.flags)
    _processes(given)
    if not any(old_name(name) for name in given.flags):
        why = f"none of its names is known: {', '.join(list(given.flags)[:5]) or 'there are none'}"
        raise ConfigError(Problem(f"{path} holds no settings of a training", why=why))
    return given


def read_script(text: str, where: str) -> Given:
    """The first training command of a shell script, its variables filled in."""
    found, foreign = [], []
    for words, variables in simple_commands(text):
        flags = [w[2:].partition("=")[0].replace("-", "_") for w in words if w.startswith("--")]
        known = [f for f in flags if f == "config" or (old_name(f) and f not in tables.LAUNCHER)]
        scripts = [w for w in words if w.endswith(".py") and Path(w).is_file()]
        if tables.SERVES & set(words):
            continue
        try:
            refuse_foreign(words, dict.fromkeys(flags))
        except ConfigError as error:
            foreign.append(error)
            continue
        trains = scripts or any(w in TOOLS or w.endswith(".py") for w in words)
        trains = trains or words[0].startswith("--") or any("trl.scripts." in w for w in words)
        if (known and trains) or (scripts and words[0] in STARTERS):
            for name in ("NNODES", "NPROC_PER_NODE"):
                if name in variables:
                    words = [f"{name}={' '.join(variables[name])}", *words]
            found.append(words)
    if not found and foreign:
        raise foreign[0]
    if not found:
        refuse_foreign([text], {})
        raise ConfigError(Problem(f"no training command in {where}", why="none has known flags"))
    found.sort(key=_trains_otherwise)  # SFT first, then RLOO: the second is the one
    given = read_command(found[0])
    if len(found) > 1:
        given.notes.append(f"{len(found)} training commands in {where}: this is the first of them")
    return given


def _trains_otherwise(words: list[str]) -> bool:
    """Whether a command is another method's: `trl sft`, `swift pt`, dpo.py."""
    scripts = {Path(w).stem for w in words if w.endswith(".py")}
    tools = [w for w in TOOLS if w in words]
    methods = {words[words.index(t) + 1] for t in tools if words.index(t) + 1 < len(words)}
    return bool((scripts | methods) & tables.OTHER_METHODS)


def read_command(words: list[str]) -> Given:
    """An old command line, from its launcher (or its first flag) on."""
    stop = next((i for i, w in enumerate(words) if w in ENDS), len(words))
    words = words[:stop]
    given = Given({})
    script = _take_words(given, words)
    refuse_foreign(words, given.flags)
    given.flags = {k: _values(v) for k, v in given.flags.items()}
    _processes(given)
    if script.is_file() and given.tool != "swift":
        given = _with_script(given, script)
    elif not given.flags:
        what = f"{script} is not a file here" if given.script else "no flags in this command"
        why = " ".join(words)[:200]
        raise ConfigError(Problem(what, why=why, fix="rloo migrate FILE, where the file is"))
    elif given.script and given.script != "-":
        given.notes.append(
            f"{script} is not a file here: what it sets by itself (data, rewards, defaults of its"
            " own) is not in this recipe"
        )
    if config := given.flags.pop("config", None):
        path = Path(str(config))
        if not path.is_file():
            raise _missing(path, "named by --config")
        inside = Given(mapping(path), said_as="{}: {}")
        _processes(inside)
        given.flags = inside.flags | given.flags
        given.file = path.name
        if given.processes is None:
            given.processes, given.processes_from = inside.processes, inside.processes_from
            given.launcher_file = given.launcher_file or inside.launcher_file
    return given


def _take_words(given: Given, words: list[str]) -> Path:
    """Sort words into flags, the tool, its method and the script; returns the script's path."""
    name, script, extras = "", Path("-"), []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given.flags[name] = [value] if equals else []
        elif word.endswith(".py") and not given.script and given.tool != "swift":
            script = Path(word)
            given.script, name = script.name, ""
            _drop_launcher_flags(given)
        elif word.startswith("trl.scripts.") and not given.script:
            given.script, name = f"{word.rpartition('.')[2]}.py", ""
            _drop_launcher_flags(given)
        elif name:
            given.flags[name].append(word.rstrip(",") if word.endswith('",') else word)
        elif variable := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            if variable[1] in ("NPROC_PER_NODE", "NNODES"):
                given.flags[variable[1].lower()] = [variable[2]]
        elif word in TOOLS and not given.tool:
            given.tool = word
        elif given.tool and not given.method and not given.flags.keys() - tables.LAUNCHER:
            given.method = word
        else:
            extras.append(word)
    if unread := [w for w in extras if w.startswith("$")]:
        given.notes.append(f"{' '.join(unread)} is not filled in: what it stands for is not read")
    for name, values in given.flags.items():
        if rest := [w for w in values[1:] if re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", w)]:
            values[:] = [w for w in values if w not in rest]
            said = " ".join(rest)
            given.notes.append(f"{said} after --{name} is not filled in: it is not read")
    return script


def _with_script(given: Given, script: Path) -> Given:
    """A command whose script is here: what the script says, and the flags before that."""
    inside = read_python(script.read_text(errors="replace"), str(script), given.flags)
    inside.processes, inside.processes_from = given.processes, given.processes_from
    inside.launcher_file = given.launcher_file
    inside.notes = given.notes + inside.notes
    return inside


def _drop_launcher_flags(given: Given) -> None:
    """Flags before the script are the launcher's own; only the number of processes matters."""
    others = [name for name in given.flags if name not in tables.LAUNCHER]
    precision = given.flags.get("mixed_precision") or [""]
    given.flags = {k: v for k, v in given.flags.items() if k in tables.LAUNCHER}
    if precision[0] in ("bf16", "fp16"):
        given.flags[precision[0]] = []
    if others:
        given.notes.append(f"the launcher's own flags: --{', --'.join(others)}")


def _processes(given: Given) -> None:
    """How many processes the launcher started, by its flags or its file."""
    launcher = {k: given.flags.pop(k) for k in tables.LAUNCHER if k in given.flags}
    file = str(launcher.get("config_file") or launcher.get("accelerate_config") or "")
    as_flag = given.said_as.startswith("--")
    prefix = "--" if as_flag else ""
    counts = ((launcher[k], prefix + k) for k in tables.COUNTS if k in launcher)
    count, whence = next(counts, (None, ""))
    given.launcher_file = file
    if count is None and file and Path(file).is_file():
        count, whence = mapping(Path(file)).get("num_processes"), file
    if count is None and Path(file).stem in tables.TRL_LAUNCHERS:
        count, whence = tables.TRL_LAUNCHERS[Path(file).stem], f"TRL's {file}"
    if count is None:
        return
    nodes = launcher.get("nnodes", 1) if whence == f"{prefix}nproc_per_node" else 1
    if not isinstance(count, int) or not isinstance(nodes, int):
        given.notes.append(f"{whence} {count} is not a number of processes")
        return
    given.processes, given.processes_from = count * nodes, whence


def mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that must be a mapping of names to values."""
    try:
        values = yaml.safe_load(path.read_text())  # JSON is YAML
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(Problem(f"{path} is not YAML", f"{path}{line}", str(error))) from None
    if not isinstance(values, dict):
        raise ConfigError(Problem(f"{path} holds no settings", why="expected name: value"))
    return {str(k): _value(v) if isinstance(v, str) else v for k, v in values.items()}


def _values(words: list[str]) -> Any:
    """What stood after a flag: nothing is true, one word a value, several a list."""
    return True if not words else _value(words[0]) if len(words) == 1 else [*map(_value, words)]


def _value(word: str) -> Any:
    """A word as bool, null, number, JSON or text; `3e-6` is a number here (YAML says text)."""
    plain = {"true": True, "false": False, "none": None, "null": None}
    if word.lower() in plain:
        return plain[word.lower()]
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    if word[:1] in "[{":
        try:
            return json.loads(word)
        except ValueError:
            return word
    return word


def _missing(path: Path, why: str = "") -> ConfigError:
    where = f"looked at {path.absolute()}"
    fix = "rloo migrate FILE, or rloo migrate -- OLD COMMAND"
    return ConfigError(Problem(f"{path} is not a file", why, where, fix))
