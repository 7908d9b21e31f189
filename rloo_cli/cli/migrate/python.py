"""A Python training script -> the old settings in it, as far as they are literals.

The script is parsed and never run. The config, the trainer and the data are followed through the
names they are assigned to; what is found and cannot be carried over becomes a note.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_cli.cli.migrate import tables
from rloo_cli.cli.migrate.old_run import OldRun
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

MAX_FOLLOWED_NAMES = 20  # names that are followed one after the other
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CARRIED_OVER = "is not carried over"


class Script:
    """A parsed script: its calls, its functions, and what each name was assigned to."""

    def __init__(self, text: str, where: str):
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            what = f"{where} is not Python"
            raise ConfigError(Problem(what, f"{where}:{error.lineno}")) from None
        self.where = where
        nodes = list(ast.walk(self.tree))
        self.calls = sorted((n for n in nodes if isinstance(n, ast.Call)), key=_position)
        self.top_level_functions = {n.name for n in self.tree.body if isinstance(n, FUNCTION_NODES)}
        self.nested_functions = {
            n.name for n in nodes if isinstance(n, FUNCTION_NODES)
        } - self.top_level_functions
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
            for one, part in zip(target.elts, value.elts, strict=False):
                self._assign(one, part)
        elif isinstance(target, ast.Tuple):
            for index, one in enumerate(target.elts):
                item = ast.Subscript(value, ast.Constant(index), ast.Load())
                self._assign(one, ast.copy_location(item, value))

    def resolve_name(self, node: ast.expr | None) -> ast.expr | None:
        """What a name stands for, followed through single assignments."""
        for _ in range(MAX_FOLLOWED_NAMES):
            known = self.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(known) != 1:
                break
            node = known[0]
        return node

    def literal_value(self, node: ast.expr) -> Any:
        """A literal, or a name for one. Raises ValueError for anything else, `...` too."""
        value = ast.literal_eval(self.resolve_name(node) or node)
        if value is ...:
            raise ValueError("an ellipsis")
        return value


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def called_name(call: ast.Call) -> str:
    """`trl.RLOOConfig(...)` -> RLOOConfig; `X.from_pretrained(...)` keeps its class."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:] if parts[-1] == "from_pretrained" else parts[-1:])


def read_python(text: str, where: str, flags: JsonObject | None = None) -> OldRun:
    """Settings of the first RLOO or GRPO trainer or config, and what is literal around it.

    `flags`: of the command that ran the script, where it is known. Raises ConfigError for a script
    without such a trainer, and for one whose settings all come from a command that is not given.
    """
    script = Script(text, where)
    configs = [c for c in script.calls if called_name(c) in tables.CONFIG_CLASSES]
    trainers = [c for c in script.calls if called_name(c) in tables.TRAINER_CLASSES]
    parsed = any(called_name(c).partition("[")[0] in tables.PARSER_CLASSES for c in script.calls)
    names = {n.id for n in ast.walk(script.tree) if isinstance(n, ast.Name)}
    if not configs and not trainers and not (parsed and names & tables.CONFIG_CLASSES.keys()):
        what = f"no RLOOConfig(...) or GRPOConfig(...), and no trainer of theirs, in {where}"
        raise ConfigError(Problem(what, fix="rloo migrate -- OLD COMMAND, for its flags"))
    given = OldRun({}, "trl", script=Path(where).name, setting_format="{}={}")
    first = (configs + trainers)[:1]
    used = called_name(first[0]) if first else min(names & tables.CONFIG_CLASSES.keys())
    given.kind = (tables.CONFIG_CLASSES | tables.TRAINER_CLASSES)[used]
    if parsed and not configs and not flags:
        what = f"the settings of {where} come from its command line"
        raise ConfigError(Problem(what, fix=f"rloo migrate python {where} --its_flags ..."))
    if configs:
        _read_config_call(script, configs[0], given)
        if len(configs) > 1:
            given.notes.append(f"{len(configs)} configs in {where}: this is the first of them")
    elif not parsed:
        given.notes.append(f"{used} has no config in {where}: all its settings are the defaults")
    for trainer in trainers[:1]:
        _read_trainer_call(script, trainer, given)
    if not configs and not parsed and (path := given.flags.get("model_name_or_path")):
        given.flags["output_dir"] = f"{Path(str(path)).name}-{given.kind.upper()}"  # as TRL does
    if not trainers:
        _read_without_trainer(script, given)
    _note_rewards_in_script(given, script)
    for name, value in (given.flags.pop("model_init_kwargs", None) or {}).items():
        given.flags.setdefault(name, value)
    if flags:
        given.flags |= flags
        given.setting_format = "{} {}"
        if configs and not parsed:
            given.notes.append(f"{where} reads its own flags: {', '.join(flags)}")
    return given


def _read_config_call(script: Script, call: ast.Call, old_run: OldRun) -> None:
    """Settings of the config, and those that are set on it later."""
    for node in call.args:
        value = script.resolve_name(node)
        if isinstance(value, ast.Constant) and value.value is ...:
            old_run.notes.append(
                f"{called_name(call)}(...): what the dots stand for is not in the script"
            )
        elif isinstance(value, ast.Constant):
            old_run.flags["output_dir"] = value.value  # the only one people give by position
    for keyword in call.keywords:
        _read_setting(script, keyword.arg, keyword.value, old_run)
    for of, name, value in script.attributes:
        if script.resolve_name(of) is call:
            _read_setting(script, name, value, old_run)


def _read_setting(script: Script, name: str | None, node: ast.expr, old_run: OldRun) -> None:
    text = ast.unparse(node)
    if name is None:  # **settings
        try:
            old_run.flags |= script.literal_value(node)
        except (ValueError, TypeError):
            old_run.notes.append(f"**{text} is not a literal: set what is in it yourself")
        return
    try:
        old_run.flags[name] = _literal_with_dtypes(script, node)
    except (ValueError, TypeError):
        old_run.notes.append(f"{name}={text} is not a literal: set it yourself")


def _literal_with_dtypes(script: Script, node: ast.expr) -> Any:
    """A literal in which `torch.bfloat16` may stand for its name."""
    value = script.resolve_name(node) or node
    text = ast.unparse(value)
    if text.startswith("torch.") and isinstance(value, ast.Attribute):
        return value.attr
    if isinstance(value, ast.Dict) and all(isinstance(k, ast.Constant) for k in value.keys):
        pairs = zip(value.keys, value.values, strict=True)
        return {
            ast.literal_eval(k): _literal_with_dtypes(script, v) for k, v in pairs if k is not None
        }
    return script.literal_value(value)


def _read_trainer_call(script: Script, call: ast.Call, old_run: OldRun) -> None:
    """Model, data, rewards and adapter of the trainer; a note for each other argument."""
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
        elif name not in ("args", "config", "ref_policy"):
            old_run.notes.append(f"{name}={_short_source(node)} {NOT_CARRIED_OVER}")
    if not any(script.resolve_name(parts.get(n)) for n in ("train_dataset",)):
        _read_load_dataset_calls(script, old_run)


def _read_without_trainer(script: Script, old_run: OldRun) -> None:
    """A script without a trainer: what it loads."""
    for call in script.calls:
        if called_name(call).endswith("CausalLM.from_pretrained") and call.args:
            _read_model(script, call, old_run, "model_name_or_path")
    _read_load_dataset_calls(script, old_run)


def _read_load_dataset_calls(script: Script, old_run: OldRun) -> None:
    for call in script.calls:
        if called_name(call) == "load_dataset" and "dataset_name" not in old_run.flags:
            _read_dataset(script, call, old_run, evaluation=False)


def _read_model(script: Script, node: ast.expr, old_run: OldRun, flag: str) -> None:
    """A name, or `from_pretrained("name", dtype=...)`, as far as it is literal."""
    value = script.resolve_name(node)
    if (
        isinstance(value, ast.Call)
        and value.args
        and called_name(value).endswith("from_pretrained")
    ):
        for keyword in value.keywords if flag == "model_name_or_path" else []:
            if keyword.arg in ("torch_dtype", "dtype", "attn_implementation", "revision",
                               "trust_remote_code"):  # fmt: skip
                _read_setting(script, keyword.arg, keyword.value, old_run)
            else:
                said = f"{keyword.arg}={_short_source(keyword.value)}"
                old_run.notes.append(f"{said} of {called_name(value)} {NOT_CARRIED_OVER}")
        value = script.resolve_name(value.args[0])
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        old_run.flags.setdefault(flag, value.value)
    elif not _is_from_command_line(value):
        old_run.notes.append(f"the model {_short_source(node)} is not a literal: set model.path")


def _is_from_command_line(node: ast.expr | None) -> bool:
    """Whether it is `model_args.something`, which the command's flags say."""
    return node is not None and "args." in ast.unparse(node)


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
    """`LoraConfig(...)` -> the flags of a LoRA, peft's defaults where it says nothing."""
    value = script.resolve_name(node)
    if isinstance(value, ast.Call) and called_name(value) == "LoraConfig":
        old_run.flags |= {"use_peft": True, "lora_from": "peft"}
        for keyword in value.keywords:
            name = str(keyword.arg)
            name = {"r": "lora_r", "bias": "lora_bias", "task_type": "lora_task_type"}.get(
                name, name
            )
            _read_setting(script, name, keyword.value, old_run)
    elif isinstance(value, ast.Constant) and value.value is None:
        return
    elif not (isinstance(value, ast.Call) and called_name(value) == "get_peft_config"):
        old_run.notes.append(
            f"peft_config={_short_source(node)} {NOT_CARRIED_OVER}: choose lora=default"
        )


def _read_dataset(script: Script, node: ast.expr, old_run: OldRun, evaluation: bool) -> None:
    """Follow a data set to where it is loaded; a note for every change on the way."""
    part: Any = None
    for step in _dataset_chain(script, node):
        if isinstance(step, ast.Subscript):
            part = _subscript_index(step)
        elif isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute):
            name = step.func.attr
            if name in tables.DATASET_METHODS:
                said = f".{name}({', '.join(map(_short_source, step.args))})"
                whose = "eval_dataset" if evaluation else "the data"
                old_run.notes.append(
                    f"{whose}: {said} {NOT_CARRIED_OVER}: rows are used as they are loaded"
                )
            elif name in ("from_list", "from_dict", "from_generator", "from_pandas"):
                old_run.notes.append(
                    f"{_short_source(step.func)}(...) {NOT_CARRIED_OVER}: write the rows to a file"
                )
        if isinstance(step, ast.Call) and called_name(step) in ("load_dataset", "load_from_disk"):
            _read_load_dataset(script, step, old_run, part, evaluation)
            return
    if not _is_from_command_line(node) and not isinstance(script.resolve_name(node), ast.Constant):
        which = "eval_dataset" if evaluation else "train_dataset"
        old_run.notes.append(
            f"{which}={_short_source(node)} {NOT_CARRIED_OVER}: it is not loaded by a literal"
        )


def _dataset_chain(script: Script, node: ast.expr) -> Iterator[ast.expr]:
    """From a data set back to its source: x.map(f) -> x -> load_dataset(...)."""
    current: ast.expr | None = node
    seen: set[int] = set()
    for _ in range(MAX_FOLLOWED_NAMES):
        if isinstance(current, ast.Name):
            known = [v for v in script.assigned.get(current.id, []) if id(v) not in seen]
            current = known[-1] if known else None
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


def _subscript_index(node: ast.Subscript) -> Any:
    return node.slice.value if isinstance(node.slice, ast.Constant) else None


def _read_load_dataset(
    script: Script, call: ast.Call, old_run: OldRun, split_part: Any, evaluation: bool
) -> None:
    """path, name and split of one load_dataset(...)."""
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
        split = (
            split[split_part]
            if isinstance(split_part, int) and split_part < len(split)
            else split[0]
        )
    elif isinstance(split_part, str):
        split = split_part
    path, name = values.pop("path", None), values.pop("name", None)
    streaming, revision = values.pop("streaming", None), values.pop("revision", None)
    if evaluation:
        same = path == old_run.flags.get("dataset_name") and name == old_run.flags.get(
            "dataset_config"
        )
        if same and isinstance(split, str):
            old_run.flags["dataset_test_split"] = split
        else:
            said = ", ".join(str(v) for v in (path, name, split) if v is not None)
            old_run.notes.append(
                f"eval_dataset: {said} {NOT_CARRIED_OVER}: eval.sets.NAME={{path: ..., ...}}"
            )
        return
    found = {"dataset_name": path, "dataset_config": name, "dataset_train_split": split,
             "dataset_streaming": streaming, "dataset_revision": revision}  # fmt: skip
    for flag, value in found.items():
        if value is not None:
            old_run.flags.setdefault(flag, value)
    for name, value in values.items():
        old_run.notes.append(f"load_dataset: {name}={value!r} {NOT_CARRIED_OVER}")


def _read_reward_funcs(script: Script, node: ast.expr, old_run: OldRun) -> None:
    value = script.resolve_name(node)
    if isinstance(value, ast.Name):
        value = node  # a function, or a name that is assigned several times
    items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value] if value else []
    functions = script.top_level_functions | script.nested_functions
    rewards = [_reward_spec(script, item, functions) for item in items]
    if any(rewards):
        old_run.flags["reward_funcs"] = [r for r in rewards if r]
    for item, reward in zip(items, rewards, strict=True):
        if reward is None and not _is_from_command_line(item):
            what = _short_source(item)
            old_run.notes.append(f"reward {what}: add it, type function with path module:{what}")


def _reward_spec(script: Script, node: ast.expr, functions: set[str]) -> str | None:
    value = script.resolve_name(node)
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Call) and called_name(value).endswith(
        "Classification.from_pretrained"
    ):
        path = script.resolve_name(value.args[0]) if value.args else None
        return str(path.value) if isinstance(path, ast.Constant) else None
    if isinstance(value, ast.Call) and called_name(value) == "get_soft_overlong_punishment":
        return None  # its lengths are arguments of its own
    name = ast.unparse(node)
    known = name.rpartition(".")[2] in tables.TRL_REWARDS
    return f"{script.where}:{name}" if name in functions else name if known else None


def _note_rewards_in_script(old_run: OldRun, script: Script) -> None:
    """Where a reward is a function of the training script itself."""
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
