"""What `rloo migrate` is given -> the old settings, by name.

A command line (typed, or in a shell script), a YAML or JSON config, or a Python script whose
`RLOOConfig(...)` holds literals. Nothing is ever executed or imported.
"""

import ast
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rloo_cli.errors import ConfigError, Problem
from rloo_cli.names import old_name

COUNTS = ("num_processes", "nproc_per_node", "num_gpus")  # processes, as launchers call them
LAUNCHER = {*COUNTS, "nnodes", "num_machines", "config_file", "accelerate_config"}
ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>"}  # shell words that end a command
CONFIGS = {"RLOOConfig", "GRPOConfig"}
TRAINERS = {"RLOOTrainer", "GRPOTrainer"}
# TRL's own launcher files; each says 8 processes except the first.
EIGHT = "multi_gpu deepspeed_zero1 deepspeed_zero2 deepspeed_zero3 fsdp1 fsdp2 zero1 zero2 zero3"
TRL_LAUNCHERS = {"single_gpu": 1} | dict.fromkeys(EIGHT.split(), 8)


@dataclass
class Given:
    """Old settings by name, and how they were launched."""

    flags: dict[str, Any]
    tool: str = ""  # trl, grpo or swift where the command or class says so
    script: str = ""  # file name of the training script
    said_as: str = "--{} {}"
    processes: int | None = None
    processes_from: str = ""
    notes: list[str] = field(default_factory=list)


def read(words: list[str]) -> Given:
    """The words after `rloo migrate`: one file, or an old command.

    Raises ConfigError for a file that is missing or holds nothing to migrate.
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
        return Given(_mapping(path), said_as="{}: {}")
    if path.suffix == ".py":
        return read_python(text, str(path))
    return read_script(text, str(path))


def read_script(text: str, where: str) -> Given:
    """The first training command of a shell script, its variables filled in."""
    variables: dict[str, str] = {}
    found = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an open quote: prose, or a string over several lines
            continue
        words = [_fill(word, variables) for word in words]
        plain = [re.fullmatch(r"(\w+)=(.*)", w) for w in words if w != "export"]
        if plain and all(plain):
            variables |= {m[1]: m[2] for m in plain if m}
        flags = [w[2:].partition("=")[0] for w in words if w.startswith("--")]
        if per_node := variables.get("NPROC_PER_NODE"):
            words = [f"NPROC_PER_NODE={per_node}", *words]
        serves = {"vllm-serve", "rollout", "eval"} & set(words)
        known = [f for f in flags if f == "config" or (old_name(f) and f not in LAUNCHER)]
        if known and not serves:
            found.append(words)
    if not found:
        raise ConfigError(Problem(f"no training command in {where}", why="none has known flags"))
    given = read_command(found[0])
    if len(found) > 1:
        given.notes.append(f"{len(found)} training commands in {where}: this is the first of them")
    return given


def read_command(words: list[str]) -> Given:
    """An old command line, from its launcher (or its first flag) on."""
    given = Given({})
    stop = next((i for i, w in enumerate(words) if w in ENDS), len(words))
    name = ""
    for word in words[:stop]:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given.flags[name] = [value] if equals else []
        elif word.endswith(".py") and not given.script and given.tool != "swift":
            given.script, name = Path(word).name, ""
            _drop_launcher_flags(given)
        elif name:
            given.flags[name].append(word)
        elif variable := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            if variable[1] == "NPROC_PER_NODE":
                given.flags["nproc_per_node"] = [variable[2]]
        elif word in ("swift", "trl", "rloo", "grpo"):
            given.tool = word if word != "rloo" else given.tool or "trl"
    if not given.flags:
        raise ConfigError(
            Problem("no flags in this command", why=" ".join(words), fix="rloo migrate FILE")
        )
    given.flags = {k: _values(v) for k, v in given.flags.items()}
    _processes(given)
    if config := given.flags.pop("config", None):
        if not Path(str(config)).is_file():
            raise _missing(Path(str(config)), "named by --config")
        given.flags = _mapping(Path(str(config))) | given.flags
    return given


def _drop_launcher_flags(given: Given) -> None:
    """Flags before the script are the launcher's own; only the number of processes matters."""
    others = [name for name in given.flags if name not in LAUNCHER]
    precision = given.flags.get("mixed_precision") or [""]
    given.flags = {k: v for k, v in given.flags.items() if k in LAUNCHER}
    if precision[0] in ("bf16", "fp16"):
        given.flags[precision[0]] = []
    if others:
        given.notes.append(f"the launcher's own flags: --{', --'.join(others)}")


def read_python(text: str, where: str) -> Given:
    """Literal settings of the first RLOOConfig or GRPOConfig, and what is literal around it."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(Problem(f"{where} is not Python", f"{where}:{error.lineno}")) from None
    given = Given({}, "trl", Path(where).name, "{}={}")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _called(call) in CONFIGS]
    if not configs:
        raise ConfigError(Problem(f"no RLOOConfig(...) or GRPOConfig(...) in {where}"))
    given.tool = "grpo" if _called(configs[0]) == "GRPOConfig" else "trl"
    _keywords(configs[0], given)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = {n.name for n in tree.body if isinstance(n, kinds)}
    inner = {n.name for n in ast.walk(tree) if isinstance(n, kinds)} - functions
    for call in calls:
        _surroundings(call, given, functions | inner, where)
    for reward in given.flags.get("reward_funcs") or []:
        if ":" in reward:
            inside = ", out of the function it is defined in" * (reward.rpartition(":")[2] in inner)
            given.notes.append(
                f"{reward}: importing the training script may start the training; move the reward"
                f" to a file of its own{inside}"
            )
    for name, value in (given.flags.pop("model_init_kwargs", None) or {}).items():
        given.flags.setdefault(name, value)
    return given


def _keywords(call: ast.Call, given: Given) -> None:
    """`f(a=1, b=args.b)` -> {a: 1}, and a note about b."""
    if call.args and isinstance(call.args[0], ast.Constant):
        given.flags["output_dir"] = call.args[0].value  # the only one people give by position
    for keyword in call.keywords:
        try:
            given.flags[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            value = ast.unparse(keyword.value)
            given.notes.append(f"{keyword.arg}={value} is not a literal: set it yourself")


def _surroundings(call: ast.Call, given: Given, functions: set[str], where: str) -> None:
    """Model, data set and rewards, where the script names them by a literal."""
    name = _called(call)
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    keywords = {k.arg: k.value for k in call.keywords}
    if name == "AutoModelForCausalLM.from_pretrained" and first:
        given.flags.setdefault("model_name_or_path", first)
    elif name == "AutoModelForSequenceClassification.from_pretrained" and first:
        given.flags.setdefault("reward_model_path", first)
    elif name == "load_dataset" and first:
        given.flags.setdefault("dataset_name", first)
        if isinstance(split := keywords.get("split"), ast.Constant):
            given.flags.setdefault("dataset_train_split", split.value)
    elif name in TRAINERS:
        if isinstance(model := keywords.get("model"), ast.Constant):
            given.flags["model_name_or_path"] = model.value
        funcs = keywords.get("reward_funcs")
        items = funcs.elts if isinstance(funcs, ast.List | ast.Tuple) else [funcs] if funcs else []
        rewards = [_reward(item, functions, where) for item in items]
        given.flags |= {"reward_funcs": [r for r in rewards if r]} if any(rewards) else {}
        for item, reward in zip(items, rewards, strict=True):
            if reward is None and "reward_model_path" not in given.flags:
                what = ast.unparse(item)
                given.notes.append(f"reward {what}: add it, type function with path module:{what}")


def _reward(node: ast.expr, functions: set[str], where: str) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = ast.unparse(node)
    return f"{where}:{name}" if name in functions else name if name.endswith("_reward") else None


def _called(call: ast.Call) -> str:
    """`trl.RLOOConfig(...)` -> RLOOConfig; `X.from_pretrained(...)` keeps its class."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:] if parts[-1] == "from_pretrained" else parts[-1:])


def _processes(given: Given) -> None:
    """How many processes the launcher started, by its flags or its file."""
    launcher = {k: given.flags.pop(k) for k in LAUNCHER if k in given.flags}
    file = str(launcher.get("config_file") or launcher.get("accelerate_config") or "")
    count, whence = next(((launcher[k], f"--{k}") for k in COUNTS if k in launcher), (None, ""))
    if count is None and file and Path(file).is_file():
        count, whence = _mapping(Path(file)).get("num_processes"), file
    if count is None and Path(file).stem in TRL_LAUNCHERS:
        count, whence = TRL_LAUNCHERS[Path(file).stem], f"TRL's {file}"
    if count is None:
        return
    nodes = launcher.get("nnodes", 1) if whence == "--nproc_per_node" else 1
    if not isinstance(count, int) or not isinstance(nodes, int):
        given.notes.append(f"{whence} {count} is not a number of processes")
        return
    given.processes, given.processes_from = count * nodes, whence


def _mapping(path: Path) -> dict[str, Any]:
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


def _fill(word: str, variables: dict[str, str]) -> str:
    """$NAME, ${NAME} and ${NAME:-default}; what the script does not set stays as it is."""
    pattern = r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))"
    return re.sub(pattern, lambda m: variables.get(m[1] or m[3], m[2] or m[0]), word)


def _missing(path: Path, why: str = "") -> ConfigError:
    where = f"looked at {path.absolute()}"
    fix = "rloo migrate FILE, or rloo migrate -- OLD COMMAND"
    return ConfigError(Problem(f"{path} is not a file", why, where, fix))
