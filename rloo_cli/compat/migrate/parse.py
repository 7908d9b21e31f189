"""Reads the old settings from what `rloo migrate` is given.

It is a command line (typed, or in a shell script), a YAML or JSON config, or a Python script whose
`RLOOConfig(...)` holds literals (`python.py`). Nothing is ever executed or imported.
"""

import re
from pathlib import Path

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.commands import server_command
from rloo_cli.compat.migrate.foreign import refuse_foreign_trainer
from rloo_cli.compat.migrate.old_run import OldRun, read_old_file
from rloo_cli.compat.migrate.python import read_python
from rloo_cli.compat.migrate.shell import parse_argument, simple_commands
from rloo_cli.config.old_names import find_old_name
from rloo_cli.config.provenance import YAML_ERRORS, load_foreign_yaml
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

COMMAND_ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>"}  # tokens that end a command
STARTERS = ("accelerate", "torchrun", "python", "python3", "deepspeed")
TOOLS = ("swift", "trl", "rloo", "grpo")
USAGE = "rloo migrate FILE, or rloo migrate -- OLD COMMAND"


def read_old_run(args: list[str]) -> OldRun:
    """Read the arguments of `rloo migrate`: one file, or an old command.

    Raises ConfigError for a file that is missing or holds nothing to migrate, and for a trainer
    that is not migrated.
    """
    if len(args) == 1 and re.search(r"\s", args[0].strip()):
        return read_shell_script(args[0], "the command")
    if len(args) > 1:
        return read_command_line(args)
    path = Path(args[0])
    if not path.is_file():
        raise _missing_file_error(path)
    text = read_old_file(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_config(path)
    if path.suffix == ".py":
        return read_python(text, str(path))
    return read_shell_script(text, str(path))


def _read_config(path: Path) -> OldRun:
    """Read a YAML or JSON file of settings; the launcher's may be among them."""
    old_run = OldRun(read_settings_file(path), setting_format="{}: {}", file=path.name)
    old_run.flags.pop("config", None)
    refuse_foreign_trainer([], old_run.flags)
    _read_process_count(old_run)
    if not any(find_old_name(name) for name in old_run.flags):
        names = ", ".join(list(old_run.flags)[:5]) or "there are none"
        why = f"none of its names is known: {names}"
        what = f"{path} holds no settings of a training"
        raise ConfigError(Problem(what, str(path), why, USAGE))
    return old_run


def read_shell_script(text: str, where: str) -> OldRun:
    """Read the first training command of a shell script, its variables filled in."""
    commands, foreign, servers = [], [], []
    for args, variables in simple_commands(text):
        flags = [w[2:].partition("=")[0].replace("-", "_") for w in args if w.startswith("--")]
        has_settings = any(
            f == "config" or (find_old_name(f) and f not in tables.LAUNCHER_FLAGS) for f in flags
        )
        scripts = [w for w in args if w.endswith(".py") and Path(w).is_file()]
        if tables.NON_TRAINING_COMMANDS & set(args):
            servers += [command] if (command := server_command(args)) else []
            continue
        try:
            refuse_foreign_trainer(args, dict.fromkeys(flags))
        except ConfigError as error:
            foreign.append(error)
            continue
        trains = scripts or any(w in TOOLS or w.endswith(".py") for w in args)
        trains = trains or args[0].startswith("--") or any("trl.scripts." in w for w in args)
        if (has_settings and trains) or (scripts and {*STARTERS} & {*args}):
            for name in ("NNODES", "NPROC_PER_NODE"):
                if name in variables:
                    args = [f"{name}={' '.join(variables[name])}", *args]
            commands.append(args)
    if not commands and foreign:
        raise foreign[0]
    if not commands:
        refuse_foreign_trainer([text], {})
        what, why = f"no training command in {where}", "none has known flags"
        raise ConfigError(Problem(what, where, why, USAGE))
    commands.sort(key=_is_other_method)  # of SFT and then RLOO, the second is the one to migrate
    old_run = read_command_line(commands[0])
    if len(commands) > 1:
        note = f"{len(commands)} training commands in {where}: this is the first of them"
        old_run.notes.append(note)
    old_run.notes += [f"its server: {c} (or with +recipe=my.yaml alone)" for c in servers]
    if servers:  # it is asked by the training beside it
        old_run.flags.setdefault("vllm_mode", "server")
    return old_run


def _is_other_method(args: list[str]) -> bool:
    """Whether a command is of another method, like `trl sft`, `swift pt` and dpo.py."""
    scripts = {Path(w).stem for w in args if w.endswith(".py")}
    tools = [w for w in TOOLS if w in args]
    methods = {args[args.index(t) + 1] for t in tools if args.index(t) + 1 < len(args)}
    return bool((scripts | methods) & tables.OTHER_METHODS)


def read_command_line(args: list[str]) -> OldRun:
    """Read an old command line, from its launcher (or its first flag) on."""
    stop = next((i for i, w in enumerate(args) if w in COMMAND_ENDS), len(args))
    args = args[:stop]
    old_run = OldRun({})
    script = _sort_arguments(old_run, args)
    refuse_foreign_trainer(args, old_run.flags)
    old_run.flags = {k: _flag_value(v) for k, v in old_run.flags.items()}
    _read_process_count(old_run)
    if script.is_file() and old_run.tool != "swift":
        old_run = _with_script(old_run, script)
    elif not old_run.flags:
        what = f"{script} is not a file here" if old_run.script else "no flags in this command"
        why = " ".join(args)[:200]
        fix = "rloo migrate FILE, where the file is"
        raise ConfigError(Problem(what, "the old run", why, fix))
    elif old_run.script in tables.AGENT_SCRIPTS:
        what, why = f"{script} is not a file here", "its tools and rewards are in it alone"
        raise ConfigError(Problem(what, "the old run", why, f"put it at {script}"))
    elif old_run.script and old_run.script not in ("-", *tables.VISION_SCRIPTS):
        old_run.notes.append(
            f"{script} is not a file here: what it sets by itself (data, rewards, its own defaults)"
            " is not in this recipe"
        )
    if config := old_run.flags.pop("config", None):
        path = Path(str(config))
        if not path.is_file():
            raise _missing_file_error(path, "named by --config")
        file_run = OldRun(read_settings_file(path), setting_format="{}: {}")
        _read_process_count(file_run)
        old_run.flags = file_run.flags | old_run.flags
        old_run.file = path.name
        if old_run.processes is None:
            old_run.processes, old_run.processes_from = file_run.processes, file_run.processes_from
            old_run.nodes = file_run.nodes
            old_run.launcher_file = old_run.launcher_file or file_run.launcher_file
    return old_run


def _sort_arguments(old_run: OldRun, args: list[str]) -> Path:
    """Sort arguments into flags, the tool, its method and the script. Returns the script's path."""
    name, script, extras = "", Path("-"), []
    for word in args:
        if word == "...":
            old_run.notes.append("what the dots stand for is not in the command")
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            old_run.flags[name] = [value] if equals else []
        elif word.endswith(".py") and not old_run.script and old_run.tool != "swift":
            script = Path(word)
            old_run.script, name = script.name, ""
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
        elif (
            old_run.tool and not old_run.method and not old_run.flags.keys() - tables.LAUNCHER_FLAGS
        ):
            old_run.method = word
        else:
            extras.append(word)
    if unread := [w for w in extras if w.startswith("$")]:
        old_run.notes.append(f"{' '.join(unread)} is not filled in: what it stands for is not read")
    for name, values in old_run.flags.items():
        if unset := [w for w in values[1:] if re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", w)]:
            values[:] = [w for w in values if w not in unset]
            note = f"{' '.join(unset)} after --{name} is not filled in: it is not read"
            old_run.notes.append(note)
    return script


def _with_script(old_run: OldRun, script: Path) -> OldRun:
    """The settings of a command's script, with the command's flags over them."""
    script_run = read_python(read_old_file(script), str(script), old_run.flags)
    script_run.processes, script_run.processes_from = old_run.processes, old_run.processes_from
    script_run.launcher_file, script_run.nodes = old_run.launcher_file, old_run.nodes
    script_run.notes = old_run.notes + script_run.notes
    return script_run


def _drop_launcher_flags(old_run: OldRun) -> None:
    """Drop the flags before the script: of the launcher's only the number of processes matters."""
    others = [name for name in old_run.flags if name not in tables.LAUNCHER_FLAGS]
    precision = old_run.flags.get("mixed_precision") or [""]
    old_run.flags = {k: v for k, v in old_run.flags.items() if k in tables.LAUNCHER_FLAGS}
    if precision[0] in ("bf16", "fp16"):
        old_run.flags[precision[0]] = []
    if others:
        old_run.notes.append(f"the launcher's own flags: --{', --'.join(others)}")


def _read_process_count(old_run: OldRun) -> None:
    """Read how many processes the launcher started, from its flags or its file."""
    launcher = {k: old_run.flags.pop(k) for k in tables.LAUNCHER_FLAGS if k in old_run.flags}
    file = str(launcher.get("config_file") or launcher.get("accelerate_config") or "")
    prefix = "--" if old_run.setting_format.startswith("--") else ""
    counts = ((launcher[k], prefix + k) for k in tables.PROCESS_COUNT_FLAGS if k in launcher)
    count, source = next(counts, (None, ""))
    old_run.launcher_file = file
    if count is None and file and Path(file).is_file():
        count, source = read_settings_file(Path(file)).get("num_processes"), file
    if count is None and Path(file).stem in tables.TRL_LAUNCHERS:
        count, source = tables.TRL_LAUNCHERS[Path(file).stem], f"TRL's {file}"
    if count is None:
        return
    nodes = launcher.get("nnodes", launcher.get("num_machines", 1))
    if not isinstance(count, int) or not isinstance(nodes, int):
        old_run.notes.append(f"{source} {count} is not a number of processes")
        return
    per_node = source == f"{prefix}nproc_per_node"  # else it counts those of all nodes
    old_run.processes, old_run.processes_from = count * (nodes if per_node else 1), source
    old_run.nodes = max(1, nodes)


def read_settings_file(path: Path) -> JsonObject:
    """Read a YAML or JSON file. Raises ConfigError unless it maps names to values."""
    try:
        values = load_foreign_yaml(read_old_file(path, errors="strict"))  # JSON is YAML
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what, fix = f"{path} is not YAML", f"correct {path}{line}"
        raise ConfigError(Problem(what, f"{path}{line}", str(error), fix)) from None
    if not isinstance(values, dict):
        what, fix = f"{path} holds no settings", "give a file with a name: value on each line"
        raise ConfigError(Problem(what, str(path), "expected name: value", fix))
    return {str(k): parse_argument(v) if isinstance(v, str) else v for k, v in values.items()}


def _flag_value(args: list[str]) -> object:
    """The value after a flag: true without arguments, a list of several."""
    values = [parse_argument(text) for text in args] or [True]
    return values[0] if len(values) == 1 else values


def _missing_file_error(path: Path, why: str = "") -> ConfigError:
    where = f"looked at {path.absolute()}"
    return ConfigError(Problem(f"{path} is not a file", why, where, USAGE))
