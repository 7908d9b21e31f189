"""What a TRL script passes as an object, as files and keys that a recipe can name.

Models, tokenizers and data sets are saved into ROOT/.inputs/NAME, where the run is ROOT/NAME.
Functions stay functions where a run takes them (rewards), and are named module:name elsewhere.
"""

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_cli.compat.migrate.convert import choose_dialect, convert_to_recipe
from rloo_cli.compat.migrate.old_run import OldRun
from rloo_cli.compat.migrate.tables import LAYER_ARGUMENTS, PEFT_CONFIGS
from rloo_cli.compat.trl_settings import GRPOConfig, RLOOConfig, TRLConfig
from rloo_cli.config.old_names import find_old_name
from rloo_cli.config.rules_lora import PEFT_ORIGIN
from rloo_cli.data.exact_values import dataset_of_rows
from rloo_cli.reporting.events import Events
from rloo_cli.reporting.metrics_lines import read_metrics_lines
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject, write_text

LORA_SETTINGS = {  # peft's LoraConfig -> the flag of ModelConfig that means the same
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "target_modules", "exclude_modules": "exclude_modules",
    "modules_to_save": "modules_to_save", "bias": "lora_bias", "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}  # fmt: skip
QUANTIZATION_SETTINGS = (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
)  # fmt: skip


def refuse_arguments(**given: Any) -> None:
    """Raise ConfigError for an argument that would have to be ignored, with what to write."""
    for name, value in given.items():
        if value not in (None, (None, None), [], ()):
            row = find_old_name(name)
            fix = (row.fix or row.note) if row is not None else "leave it out"
            why = f"it would have to be ignored: found {value!r:.60}"
            raise ConfigError(Problem(f"{name} is not taken here", name, why, fix))


def event_listeners(callbacks: Sequence[Any] | None) -> list[Events]:
    """Callbacks, which are objects of `plugin.Events` here: they are told of the run, and cannot
    change it. Raises ConfigError for any other."""
    for callback in callbacks or ():
        if not isinstance(callback, Events):
            why = "a callback of transformers may change the run that it is called by"
            fix = "a subclass of rloo_cli.plugin.Events: on_start, on_step, on_evaluation, on_save,"
            what = f"{callback!r:.60} is not taken as a callback"
            raise ConfigError(Problem(what, "callbacks", why, f"{fix} on_end, on_error"))
    return list(callbacks or ())


def default_config(model: Any, kind: str) -> TRLConfig:
    """The config that TRL makes where a script passes none: its output_dir is the model's name."""
    name = model if isinstance(model, str) else _name_of(model)
    maker = GRPOConfig if kind == "grpo" else RLOOConfig
    return maker(f"{Path(name).name}-{kind.upper()}")


def adapter_settings(peft_config: Any, quantization_config: Any) -> JsonObject:
    """The flags that mean the same as a LoraConfig and a BitsAndBytesConfig."""
    settings: JsonObject = {}
    if peft_config is not None:
        kind = type(peft_config).__name__
        settings = {"use_peft": True, "lora_from": "peft"}
        if kind in PEFT_CONFIGS:
            kwargs = _changed_arguments(peft_config)
            settings |= {"peft_type": PEFT_CONFIGS[kind], "peft_kwargs": kwargs}
        elif kind != "LoraConfig":
            why = f"adapters are LoraConfig, {', '.join(PEFT_CONFIGS)}"
            what, fix = f"peft_config is a {kind}", "peft_config=LoraConfig()"
            raise ConfigError(Problem(what, "peft_config", why, fix))
        names = LAYER_ARGUMENTS if kind in PEFT_CONFIGS else LORA_SETTINGS
        for theirs, flag in {name: LORA_SETTINGS[name] for name in names}.items():
            if (value := getattr(peft_config, theirs, None)) is not None:
                settings[flag] = sorted(value) if isinstance(value, set) else value
    for name in QUANTIZATION_SETTINGS if quantization_config is not None else ():
        settings[name] = getattr(quantization_config, name)
    return settings


def _changed_arguments(peft_config: Any) -> JsonObject:
    """What of a peft config is not its class's default, but for the layers and where it is from."""
    found: JsonObject = {}
    for field in dataclasses.fields(peft_config):
        value = getattr(peft_config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        left_out = field.name in LAYER_ARGUMENTS or field.name in PEFT_ORIGIN
        if not left_out and value != default:
            found[field.name] = sorted(value) if isinstance(value, set) else value
    return found


def last_metric(folder: Path, name: str) -> float | None:
    """The last value of a metric in a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = read_metrics_lines(path) if path.is_file() else []
    values = [value for line in lines if (value := line.get(name)) is not None]
    return values[-1] if values else None


class InputFolder:
    """The folder of what a script passed as objects, and the run's folder beside it."""

    def __init__(self, settings: Mapping[str, Any]):
        target = Path(str(settings.get("output_dir") or "trainer_output"))
        # As `rloo migrate` names a run: root/name, of characters that a name may have.
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", target.name).strip("-._+") or "run"
        self.run_folder = target.parent / name
        self.folder = target.parent / ".inputs" / name

    def model_settings(self, model: Any, tokenizer: Any) -> JsonObject:
        """model and processing_class: their names, or the folders that they are saved to."""
        found: JsonObject = {"model_name_or_path": model}
        if not isinstance(model, str):
            if hasattr(model, "peft_config"):
                why = "it has an adapter in it, and a run makes its own from a config"
                fix = "pass the base model, and the adapter's config as peft_config"
                raise ConfigError(Problem("model is a PeftModel", "model", why, fix))
            found["model_name_or_path"] = self._saved("model", model)
        source = tokenizer
        if source is None and not isinstance(model, str):
            source = _tokenizer_of(model)
        if source is not None:
            found["tokenizer_name_or_path"] = self._saved("tokenizer", source)
        return found

    def rewards(
        self, functions: Any, tokenizers: Any
    ) -> tuple[dict[str, Callable[..., Any]], list[str]]:
        """-> callables by name, and every reward as `rloo migrate` names it"""
        items = _listed(functions)
        given = [*_listed(tokenizers), *[None] * len(items)]
        named: dict[str, Callable[..., Any]] = {}
        specs: list[str] = []
        for index, (item, tokenizer) in enumerate(zip(items, given, strict=False)):
            if isinstance(item, str):
                specs.append(item if not Path(item).is_dir() else str(Path(item).absolute()))
            elif hasattr(item, "save_pretrained"):
                specs.append(self._saved(f"reward_model_{index}", item))
                (tokenizer or _tokenizer_of(item)).save_pretrained(specs[-1])
            else:
                name = _free_name(getattr(item, "__name__", f"reward_{index}"), named)
                named[name] = item
                specs.append(f"python:{name}")
        return named, specs

    def data_settings(
        self, train_dataset: Any, eval_dataset: Any, settings: Mapping[str, Any]
    ) -> JsonObject:
        """The data sets, which are saved; held-out ones only where the script evaluates."""
        found: JsonObject = {}
        if train_dataset is not None:
            found["dataset_name"] = self._saved_data("train", train_dataset, settings)
        wanted = settings.get("eval_strategy", "no")
        if eval_dataset is not None and getattr(wanted, "value", wanted) != "no":
            several = isinstance(eval_dataset, Mapping)
            sets = dict(eval_dataset) if several else {"eval": eval_dataset}
            found["eval_sets"] = {
                name: {"path": self._saved_data(f"eval_{name}", data, settings), "split": "train"}
                for name, data in sets.items()
            }
        return found

    def agent_settings(self, tools: Any, environments: Any, rollout: Any) -> JsonObject:
        """Tools, environments and a rollout function, as module:name or file.py:name."""
        found: JsonObject = {}
        if tools:
            found["tools"] = [self._code_name(tool) for tool in tools]
        if environments is not None:
            several = isinstance(environments, Mapping)
            made = dict(environments) if several else {"environment": environments}
            found["environment_factory"] = {k: self._code_name(v) for k, v in made.items()}
            found["environment_reward"] = any(hasattr(v, "get_reward") for v in made.values())
        if rollout is not None:
            found["rollout_func"] = self._code_name(rollout)
        return found

    def write_recipe(self, settings: JsonObject, kind: str) -> Path:
        """Write the recipe, and print what of the settings is not in it. -> its path"""
        world = environment_number("WORLD_SIZE", 1)
        if world > 1:
            what = f"this script was started as {world} processes"
            fix = "rloo migrate COMMAND > my.yaml; rloo train +recipe=my.yaml"
            why = "a call from Python is one process"
            raise ConfigError(Problem(what, "the launcher", why, fix))
        old_run = OldRun(dict(settings), tool="trl", kind=kind, setting_format="{}={}")
        text = convert_to_recipe(old_run, choose_dialect(old_run, ""), 1)
        path = self.folder / "recipe.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        print(f"{path}: the recipe, with what could not be carried over at its end")
        return path

    def _saved(self, name: str, item: Any) -> str:
        path = self.folder / name
        item.save_pretrained(path)
        return str(path)

    def _saved_data(self, name: str, data: Any, settings: Mapping[str, Any]) -> str:
        """Save a data set: of one that is iterated over, the rows that the run can use."""
        from datasets import Dataset  # lazy: a second of imports

        if isinstance(data, str):
            return data
        if not isinstance(data, Dataset):
            rows = list(itertools.islice(iter(data), _rows_needed(data, settings)))
            data = dataset_of_rows(rows)
        path = self.folder / name
        data.save_to_disk(str(path))
        return str(path)

    def _code_name(self, code: Any) -> str:
        """module:name of a function or class; of one in the script, a copy's file:name."""
        name, module = code.__qualname__, code.__module__
        if "<" in name or "." in name:
            what = f"{name} is inside of a function"
            why, fix = "other processes import it by its name", "define it outside of functions"
            raise ConfigError(Problem(what, "tools", why, fix))
        if module != "__main__":
            return f"{module}:{name}"
        path = self.folder / "code.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Path(inspect.getsourcefile(code) or "")
        write_text(path, definitions_of(source.read_text()))
        return f"{path}:{name}"


def definitions_of(script: str) -> str:
    """The imports, functions, classes and constants of a script, without what it does."""
    kept = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    )  # fmt: skip
    body = [
        node
        for node in ast.parse(script).body
        if isinstance(node, kept) or (isinstance(node, ast.Assign) and _is_literal(node.value))
    ]
    return "\n\n".join(ast.unparse(node) for node in body) + "\n"


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _listed(items: Any) -> list[Any]:
    if items is None:
        return []
    return list(items) if isinstance(items, Sequence) and not isinstance(items, str) else [items]


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    name = name if name.isidentifier() else "reward"
    numbers: Iterator[str] = (f"{name}_{n}" for n in itertools.count(2))
    return name if name not in taken else next(n for n in numbers if n not in taken)


def _name_of(model: Any) -> str:
    """The path or hub's name that a model was loaded from."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if not name:
        what, fix = "the model says of itself no name", "pass its tokenizer as processing_class"
        why = "its config has no _name_or_path, or an empty one"
        raise ConfigError(Problem(what, "model", why, fix))
    return name


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer  # lazy: only for a model that comes without one

    return AutoTokenizer.from_pretrained(_name_of(model))


def _rows_needed(data: Any, settings: Mapping[str, Any]) -> int | None:
    """Rows that a run can use of data that is only iterated over; None: all of them."""
    if isinstance(data, Sequence):
        return None
    steps = int(settings.get("max_steps", -1))
    if steps < 1:
        what = "the data set is iterated over, and max_steps is not set"
        why = "its rows are saved before the run, as many as the steps use"
        raise ConfigError(Problem(what, "train_dataset", why, "max_steps=N in the config"))
    completions = int(settings.get("per_device_train_batch_size", 8))
    completions *= int(settings.get("gradient_accumulation_steps", 1))
    return steps * completions
