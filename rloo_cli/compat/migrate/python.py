"""Reads the old settings in a Python training script, as far as they are literals.

The script is parsed and never run. The config, the trainer and the data are followed through the
names they are assigned to; what is found and cannot be carried over becomes a note.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.old_run import OldRun
from rloo_cli.config.old_names import find_old_name
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

MAX_FOLLOWED_NAMES = 20  # names that are followed one after the other
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CARRIED_OVER = "is not carried over"
LORA_ARGUMENTS = {"r": "lora_r", "bias": "lora_bias", "task_type": "lora_task_type"}


class Script:
    """A parsed script: its calls, its functions, and what each name was assigned to."""

    def __init__(self, text: str, where: str):
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            what, fix = f"{where} is not Python", f"correct line {error.lineno}"
            raise ConfigError(Problem(what, f"{where}:{error.lineno}", error.msg, fix)) from None
        self.where = where
        nodes = list(ast.walk(self.tree))
        self.calls = sorted((n for n in nodes if isinstance(n, ast.Call)), key=_position)
        self.top_level_functions = {n.name for n in self.tree.body if isinstance(n, FUNCTION_NODES)}
        functions = {n.name for n in nodes if isinstance(n, FUNCTION_NODES)}
        self.nested_functions = functions - self.top_level_functions
        self.classes = {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}
        self.imported = {  # name -> module:name, of `from module import name`
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        self.assigned: dict[str, list[ast.expr]] = {}
        self.attributes: list[tuple[ast.expr, str, ast.expr]] = []
        for node in sorted((n for n in nodes if isinstance(n, ast.Assign)), key=_position):
            for target in node.targets:
                self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Attribute):
            self.attributes.append((target.value, target.attr, value))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for element, part in zip(target.elts, value.elts, strict=False):
                self._assign(element, part)
        elif isinstance(target, ast.Tuple):
            for index, element in enumerate(target.elts):
                item = ast.Subscript(value, ast.Constant(index), ast.Load())
                self._assign(element, ast.copy_location(item, value))

    def resolve_name(self, node: ast.expr | None) -> ast.expr | None:
        """What a name stands for, followed through single assignments."""
        for _ in range(MAX_FOLLOWED_NAMES):
            values = self.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(values) != 1:
                break
            node = values[0]
        return node

    def literal_value(self, node: ast.expr) -> object:
        """The value of a literal, or of a name for one. Raises ValueError for others and `...`."""
        value = ast.literal_eval(self.resolve_name(node) or node)
        if value is ...:
            raise ValueError("an ellipsis")
        return value

    def class_methods(self, name: str) -> set[str]:
        """The methods of a class of the script, and of those of its bases that are there, too."""
        found, waiting, seen = set(), [name], set()
        while waiting:
            if (one := waiting.pop()) in seen or one not in self.classes:
                continue
            seen.add(one)
            node = self.classes[one]
            found |= {n.name for n in node.body if isinstance(n, FUNCTION_NODES)}
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        return found


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def called_name(call: ast.Call) -> str:
    """`trl.RLOOConfig(...)` -> RLOOConfig; `X.from_pretrained(...)` keeps its class."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:] if parts[-1] == "from_pretrained" else parts[-1:])


def read_python(text: str, where: str, flags: JsonObject | None = None) -> OldRun:
    """Read the first RLOO or GRPO trainer or config, and what is literal around it.

    `flags` are those of the command that ran the script, if it is known. Raises ConfigError for a
    script without such a trainer, and if all settings come from a command that is not known.
    """
    script = Script(text, where)
    configs = [c for c in script.calls if called_name(c) in tables.CONFIG_CLASSES]
    trainers = [c for c in script.calls if called_name(c) in tables.TRAINER_CLASSES]
    called = {called_name(c).partition("[")[0] for c in script.calls}
    has_parser = bool(called & tables.PARSER_CLASSES)
    names = {n.id for n in ast.walk(script.tree) if isinstance(n, ast.Name)}
    if not configs and not trainers and not (has_parser and names & tables.CONFIG_CLASSES.keys()):
        what = f"no RLOOConfig(...) or GRPOConfig(...), and no trainer of theirs, in {where}"
        others = sorted(c for c in called if c.endswith(("Config", "Arguments", "Trainer")))
        why = f"found {', '.join(others[:5]) or 'no call of any config or trainer'}"
        raise ConfigError(Problem(what, where, why, "rloo migrate -- OLD COMMAND, for its flags"))
    old_run = OldRun({}, "trl", script=Path(where).name, setting_format="{}={}")
    first = (configs + trainers)[:1]
    class_name = called_name(first[0]) if first else min(names & tables.CONFIG_CLASSES.keys())
    old_run.kind = (tables.CONFIG_CLASSES | tables.TRAINER_CLASSES)[class_name]
    if has_parser and not configs and not flags:
        what = f"the settings of {where} come from its command line"
        why = f"{min(called & tables.PARSER_CLASSES)} reads them there, and none is given"
        raise ConfigError(Problem(what, where, why, f"rloo migrate python {where} --its_flags ..."))
    if configs:
        _read_config_call(script, configs[0], old_run)
        if len(configs) > 1:
            old_run.notes.append(f"{len(configs)} configs in {where}: this is the first of them")
    elif not has_parser:
        what = f"{class_name} has no config in {where}"
        old_run.notes.append(f"{what}: all its settings are the defaults")
    for of, name, value in script.attributes if has_parser else ():
        if _is_parsed(script.resolve_name(of)):
            _read_setting(script, name, value, old_run)
    for trainer in trainers[:1]:
        _read_trainer_call(script, trainer, old_run)
    if not configs and not has_parser and (path := old_run.flags.get("model_name_or_path")):
        name = f"{Path(str(path)).name}-{old_run.kind.upper()}"  # as TRL does
        old_run.flags["output_dir"] = name
    if not trainers:
        _read_without_trainer(script, old_run)
    _read_trainer_methods(script, old_run)
    _note_rewards_in_script(old_run, script)
    if flags:
        old_run.flags |= flags
        old_run.setting_format = "{} {}"
        if configs and not has_parser:
            old_run.notes.append(f"{where} reads its own flags: {', '.join(flags)}")
    return old_run


def _read_config_call(script: Script, call: ast.Call, old_run: OldRun) -> None:
    """Read the arguments of the config, and the attributes that are set on it later."""
    for node in call.args:
        value = script.resolve_name(node)
        if isinstance(value, ast.Constant) and value.value is ...:
            what = "what the dots stand for is not in the script"
            old_run.notes.append(f"{called_name(call)}(...): {what}")
        elif isinstance(value, ast.Constant):
            old_run.flags["output_dir"] = value.value  # the only one people give by position
    for keyword in call.keywords:
        _read_setting(script, keyword.arg, keyword.value, old_run)
    for of, name, value in script.attributes:
        if script.resolve_name(of) is call:
            _read_setting(script, name, value, old_run)


def _read_setting(script: Script, name: str | None, node: ast.expr, old_run: OldRun) -> None:
    text = ast.unparse(node)
    try:
        if name is not None:
            old_run.flags[name] = _literal_with_dtypes(script, node)
        elif isinstance(settings := script.literal_value(node), dict):  # **settings
            old_run.flags |= settings
        else:
            raise TypeError
    except (ValueError, TypeError):
        what = f"**{text} is not a literal: set what is in it yourself"
        if name is not None:
            what = f"{name}={text} is not a literal: set it yourself"
        old_run.notes.append(what)


def _literal_with_dtypes(script: Script, node: ast.expr) -> object:
    """The value of a literal in which `torch.bfloat16` may stand for its name."""
    value = script.resolve_name(node) or node
    text = ast.unparse(value)
    if text.startswith("torch.") and isinstance(value, ast.Attribute):
        return value.attr
    if isinstance(value, ast.Dict) and all(isinstance(k, ast.Constant) for k in value.keys):
        pairs = [(k, v) for k, v in zip(value.keys, value.values, strict=True) if k is not None]
        return {ast.literal_eval(k): _literal_with_dtypes(script, v) for k, v in pairs}
    return script.literal_value(value)


def _read_trainer_call(script: Script, call: ast.Call, old_run: OldRun) -> None:
    """Read model, data, rewards and adapter of the trainer; note each other argument."""
    old = any(k.arg in ("config", "policy", "reward_model") for k in call.keywords)
    positions = tables.OLD_TRAINER_ARGUMENTS if old else tables.TRAINER_ARGUMENTS
    parts = dict(zip(positions, call.args, strict=False))
    parts |= {k.arg: k.value for k in call.keywords if k.arg}
    if any(isinstance(a, ast.Constant) and a.value is ... for a in call.args):
        parts = {k: v for k, v in parts.items() if ast.unparse(v) != "..."}
    for name, node in parts.items():
        if name in ("model", "policy"):
            _read_model(script, node, old_run, "model_name_or_path")
        elif name == "reward_funcs":
            _read_reward_funcs(script, node, old_run)
        elif name == "reward_model":
            _read_model(script, node, old_run, "reward_model_path")
        elif name in ("train_dataset", "eval_dataset"):
            _read_dataset(script, node, old_run, evaluation=name == "eval_dataset")
        elif name == "peft_config":
            _read_adapter(script, node, old_run)
        elif name in ("processing_class", "tokenizer"):
            _read_tokenizer(script, node, old_run)
        elif name in ("tools", "environment_factory", "rollout_func"):
            _read_agent_code(script, name, node, old_run)
        elif name not in ("args", "config", "ref_policy"):
            old_run.notes.append(f"{name}={_short_source(node)} {NOT_CARRIED_OVER}{_instead(name)}")
    if "environment_factory" in parts and "train_dataset" not in parts:
        what = "rows are needed here, without a prompt: data.path, a file with as many lines as"
        what += " there are tasks (a seed on each, say), and data.prompt_column=null"
        old_run.notes.append(f"the environment made its own rows; {what}")
    elif not script.resolve_name(parts.get("train_dataset")):
        _read_load_dataset_calls(script, old_run)


def _instead(name: str) -> str:
    """What is written here in place of an argument or a method of a trainer."""
    row = find_old_name(name)
    return f": {row.note or row.fix}" if row is not None and (row.note or row.fix) else ""


def _read_trainer_methods(script: Script, old_run: OldRun) -> None:
    """Read what the script asks of its trainer before and after the training."""
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute):
            continue
        name = call.func.attr
        if name in tables.TRAINER_METHODS:
            source = f".{name}({', '.join(_short_source(a) for a in call.args)})"
            old_run.notes.append(f"{source}: {tables.TRAINER_METHODS[name]}")
        elif name == "train":
            for keyword in call.keywords:
                if keyword.arg == "resume_from_checkpoint":
                    _read_setting(script, keyword.arg, keyword.value, old_run)
                elif keyword.arg is not None:
                    argument = f"train({keyword.arg}={_short_source(keyword.value)})"
                    old_run.notes.append(f"{argument} {NOT_CARRIED_OVER}{_instead(keyword.arg)}")


def _read_without_trainer(script: Script, old_run: OldRun) -> None:
    """Read what a script without a trainer loads."""
    for call in script.calls:
        if called_name(call).endswith("CausalLM.from_pretrained") and call.args:
            _read_model(script, call, old_run, "model_name_or_path")
    _read_load_dataset_calls(script, old_run)


def _read_load_dataset_calls(script: Script, old_run: OldRun) -> None:
    for call in script.calls:
        if called_name(call) == "load_dataset" and "dataset_name" not in old_run.flags:
            _read_dataset(script, call, old_run, evaluation=False)


def _read_model(script: Script, node: ast.expr, old_run: OldRun, flag: str) -> None:
    """Read a name, or `from_pretrained("name", dtype=...)`, as far as it is literal."""
    value = script.resolve_name(node)
    called = called_name(value) if isinstance(value, ast.Call) else ""
    if isinstance(value, ast.Call) and value.args and called.endswith("from_pretrained"):
        for keyword in value.keywords if flag == "model_name_or_path" else []:
            if keyword.arg in tables.MODEL_ARGUMENTS:
                _read_setting(script, keyword.arg, keyword.value, old_run)
            else:
                argument = f"{keyword.arg}={_short_source(keyword.value)}"
                old_run.notes.append(f"{argument} of {called} {NOT_CARRIED_OVER}")
        value = script.resolve_name(value.args[0])
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        old_run.flags.setdefault(flag, value.value)
    elif not _is_from_command_line(value):
        old_run.notes.append(f"the model {_short_source(node)} is not a literal: set model.path")


def _is_from_command_line(node: ast.expr | None) -> bool:
    """Whether it is an attribute like `model_args.x`, which the command's flags set."""
    return node is not None and "args." in ast.unparse(node)


def _is_parsed(node: ast.expr | None) -> bool:
    """Whether it is one of the settings that a parser made of the command line."""
    call = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(call, ast.Call) and called_name(call).startswith("parse_args")


def _read_tokenizer(script: Script, node: ast.expr, old_run: OldRun) -> None:
    value = script.resolve_name(node)
    if isinstance(value, ast.Call) and value.args:
        path = script.resolve_name(value.args[0])
        if isinstance(path, ast.Constant) and isinstance(path.value, str):
            if path.value != old_run.flags.get("model_name_or_path", path.value):
                old_run.notes.append(f"the tokenizer is {path.value}'s: set model.tokenizer")
            return
    if not _is_from_command_line(value):
        old_run.notes.append(f"processing_class={_short_source(node)} {NOT_CARRIED_OVER}")


def _read_adapter(script: Script, node: ast.expr, old_run: OldRun) -> None:
    """Read `LoraConfig(...)` into the flags of a LoRA; the other defaults are peft's."""
    value = script.resolve_name(node)
    if isinstance(value, ast.Call) and called_name(value) in tables.PEFT_CONFIGS:
        old_run.flags |= {"use_peft": True, "lora_from": "peft", "peft_kwargs": {}}
        old_run.flags["peft_type"] = tables.PEFT_CONFIGS[called_name(value)]
        for keyword in value.keywords:
            name = str(keyword.arg)
            if name in tables.LAYER_ARGUMENTS:
                _read_setting(script, name, keyword.value, old_run)
            elif name != "task_type":
                _read_setting(script, "peft_argument", keyword.value, old_run)
                old_run.flags["peft_kwargs"][name] = old_run.flags.pop("peft_argument", None)
        return
    if isinstance(value, ast.Call) and called_name(value) == "LoraConfig":
        old_run.flags |= {"use_peft": True, "lora_from": "peft"}
        for keyword in value.keywords:
            name = str(keyword.arg)
            _read_setting(script, LORA_ARGUMENTS.get(name, name), keyword.value, old_run)
    elif isinstance(value, ast.Constant) and value.value is None:
        return
    elif not (isinstance(value, ast.Call) and called_name(value) == "get_peft_config"):
        argument = f"peft_config={_short_source(node)}"
        old_run.notes.append(f"{argument} {NOT_CARRIED_OVER}: choose lora=default")


def _read_dataset(script: Script, node: ast.expr, old_run: OldRun, evaluation: bool) -> None:
    """Follow a data set to where it is loaded; note every change on the way."""
    part: object = None
    for step in _dataset_chain(script, node):
        if isinstance(step, ast.Subscript):
            part = _subscript_index(step)
        elif isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute):
            name = step.func.attr
            if name in tables.DATASET_METHODS:
                whose = "eval_dataset" if evaluation else "the data"
                change = f".{name}({', '.join(map(_short_source, step.args))}) {NOT_CARRIED_OVER}"
                old_run.notes.append(f"{whose}: {change}: rows are used as they are loaded")
            elif name in ("from_list", "from_dict", "from_generator", "from_pandas"):
                source = f"{_short_source(step.func)}(...)"
                old_run.notes.append(f"{source} {NOT_CARRIED_OVER}: write the rows to a file")
        if isinstance(step, ast.Call) and called_name(step) in ("load_dataset", "load_from_disk"):
            _read_load_dataset(script, step, old_run, part, evaluation)
            return
    if not _is_from_command_line(node) and not isinstance(script.resolve_name(node), ast.Constant):
        name = "eval_dataset" if evaluation else "train_dataset"
        argument = f"{name}={_short_source(node)}"
        old_run.notes.append(f"{argument} {NOT_CARRIED_OVER}: it is not loaded by a literal")


def _dataset_chain(script: Script, node: ast.expr) -> Iterator[ast.expr]:
    """Walk from a data set back to its source: x.map(f) -> x -> load_dataset(...)."""
    current: ast.expr | None = node
    seen: set[int] = set()
    for _ in range(MAX_FOLLOWED_NAMES):
        if isinstance(current, ast.Name):
            values = [v for v in script.assigned.get(current.id, []) if id(v) not in seen]
            current = values[-1] if values else None
        if current is None:
            return
        seen.add(id(current))
        yield current
        if isinstance(current, ast.Subscript):
            current = current.value
        elif isinstance(current, ast.Call) and isinstance(current.func, ast.Attribute):
            current = current.func.value
        elif not isinstance(current, ast.Name):
            return


def _subscript_index(node: ast.Subscript) -> object:
    return node.slice.value if isinstance(node.slice, ast.Constant) else None


def _read_load_dataset(
    script: Script, call: ast.Call, old_run: OldRun, split_part: object, evaluation: bool
) -> None:
    """Read path, name and split of one load_dataset(...); `split_part` is its subscript."""
    parts = dict(zip(("path", "name"), call.args, strict=False))
    parts |= {k.arg: k.value for k in call.keywords if k.arg}
    values: JsonObject = {}
    for name, node in parts.items():
        try:
            values[name] = script.literal_value(node)
        except (ValueError, TypeError):
            if not _is_from_command_line(node):
                old_run.notes.append(f"load_dataset: {name}={_short_source(node)} is not a literal")
    split = values.pop("split", None)
    if isinstance(split, list | tuple):
        index = split_part if isinstance(split_part, int) else 0
        split = split[index if index < len(split) else 0]
    elif isinstance(split_part, str):
        split = split_part
    path, name = values.pop("path", None), values.pop("name", None)
    streaming, revision = values.pop("streaming", None), values.pop("revision", None)
    if evaluation:
        trained_on = [old_run.flags.get(flag) for flag in ("dataset_name", "dataset_config")]
        if trained_on == [path, name] and isinstance(split, str):
            old_run.flags["dataset_test_split"] = split
        else:
            source = ", ".join(str(v) for v in (path, name, split) if v is not None)
            fix = "eval.sets.NAME={path: ..., ...}"
            old_run.notes.append(f"eval_dataset: {source} {NOT_CARRIED_OVER}: {fix}")
        return
    flags = {"dataset_name": path, "dataset_config": name, "dataset_train_split": split,
             "dataset_streaming": streaming, "dataset_revision": revision}  # fmt: skip
    for flag, value in flags.items():
        if value is not None:
            old_run.flags.setdefault(flag, value)
    for name, value in values.items():
        old_run.notes.append(f"load_dataset: {name}={value!r} {NOT_CARRIED_OVER}")


def _read_reward_funcs(script: Script, node: ast.expr, old_run: OldRun) -> None:
    value = script.resolve_name(node)
    if isinstance(value, ast.Name):
        value = node  # a function, or a name that is assigned several times
    items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value] if value else []
    rewards = [_reward_spec(script, item) for item in items]
    if any(rewards):
        old_run.flags["reward_funcs"] = [r for r in rewards if r]
    for item, reward in zip(items, rewards, strict=True):
        if reward is None and not _is_from_command_line(item):
            what = _short_source(item)
            old_run.notes.append(f"reward {what}: add it, type function with path module:{what}")


def _reward_spec(script: Script, node: ast.expr) -> str | None:
    """How a reward is named in a recipe: TRL's own, a model, or file.py:name; None = it cannot be.

    A function within another one cannot be imported: one named as TRL's is taken for that.
    """
    value = script.resolve_name(node)
    if isinstance(value, ast.Constant):
        return str(value.value)
    called = called_name(value) if isinstance(value, ast.Call) else ""
    if isinstance(value, ast.Call) and called.endswith("Classification.from_pretrained"):
        path = script.resolve_name(value.args[0]) if value.args else None
        return str(path.value) if isinstance(path, ast.Constant) else None
    if called == "get_soft_overlong_punishment":
        return None  # its lengths are arguments of its own
    name = ast.unparse(node)
    is_trl_reward = name.rpartition(".")[2] in tables.TRL_REWARDS
    functions = script.top_level_functions | script.nested_functions
    if is_trl_reward and name not in script.top_level_functions:
        return name
    return f"{script.where}:{name}" if name in functions else None


def _read_agent_code(script: Script, name: str, node: ast.expr, old_run: OldRun) -> None:
    """Read the functions and classes that a trainer got, as file.py:name or module:name."""
    value = script.resolve_name(node) or node
    if isinstance(value, ast.Constant) and value.value is None:
        return
    if name == "tools":
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        specs = [_code_spec(script, item, name, old_run) for item in items]
        if found := [spec for spec in specs if spec]:
            old_run.flags[name] = found
    elif name == "rollout_func":
        if spec := _code_spec(script, value, name, old_run):
            old_run.flags[name] = spec
    else:
        pairs: list[tuple[str, ast.expr]] = [("environment", value)]
        if isinstance(value, ast.Dict):
            keys = [k.value if isinstance(k, ast.Constant) else "?" for k in value.keys]
            pairs = list(zip(map(str, keys), value.values, strict=True))
        made = {key: _code_spec(script, item, name, old_run) for key, item in pairs}
        old_run.flags[name] = {key: spec for key, spec in made.items() if spec} or None
        _read_environment_rewards(script, [item for _, item in pairs], old_run)


def _code_spec(script: Script, node: ast.expr, name: str, old_run: OldRun) -> str | None:
    """How a function or class is named in a recipe; what cannot be named is noted."""
    source = _short_source(node)
    if isinstance(node, ast.Name) and node.id in script.imported:
        return script.imported[node.id]
    if isinstance(node, ast.Name) and node.id in script.classes.keys() | script.top_level_functions:
        moved = "importing the training script may start the training; move it to its own file"
        old_run.notes.append(f"{name}: {source} is in the training script; {moved}")
        return f"{script.where}:{node.id}"
    what = f"{name}: {source} {NOT_CARRIED_OVER}: name a function or class at the top of a file"
    old_run.notes.append(what)
    return None


def _read_environment_rewards(script: Script, made: list[ast.expr], old_run: OldRun) -> None:
    """Whether the environments score themselves; of imported ones the script does not say it."""
    names = [node.id for node in made if isinstance(node, ast.Name)]
    methods = [script.class_methods(name) for name in names if name in script.classes]
    if any("get_reward" in found for found in methods):
        old_run.flags["environment_reward"] = True
    elif len(methods) < len(made):
        what = "where it has get_reward, its reward is reward=environment"
        old_run.notes.append(f"environment_factory: {what}")


def _note_rewards_in_script(old_run: OldRun, script: Script) -> None:
    """Note each reward that is a function of the training script itself."""
    for reward in old_run.flags.get("reward_funcs") or []:
        if reward.startswith(f"{script.where}:"):
            inner = reward.rpartition(":")[2] in script.nested_functions
            inside = ", out of the function it is defined in" * inner
            old_run.notes.append(
                f"{reward}: importing the training script may start the training; move the reward"
                f" to a file of its own{inside}"
            )


def _short_source(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
