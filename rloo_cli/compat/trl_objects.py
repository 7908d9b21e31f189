"""Objects that a TRL script passes, as files and keys that a recipe can name.

Models, tokenizers and data sets are saved into ROOT/.inputs/NAME, where the run is ROOT/NAME.
Functions stay functions if a run accepts them (rewards), and are named module:name otherwise.
"""

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from rloo_cli.api import is_rank
from rloo_cli.compat.migrate.convert import build_recipe
from rloo_cli.compat.migrate.model import LAYER_ARGUMENTS, PEFT_CONFIGS
from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.compat.migrate.versions import choose_dialect
from rloo_cli.compat.trl_settings import (
    ROUTER_FIX,
    GRPOConfig,
    RLOOConfig,
    TRLConfig,
    TRLValueError,
    unconverted_problems,
)
from rloo_cli.config.old_names import find_old_name
from rloo_cli.config.rules_lora import PEFT_ORIGIN
from rloo_cli.data.exact_values import dataset_of_rows
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import Problem, refuse
from rloo_cli.utils.files import JsonObject, write_text

LORA_SETTINGS = {  # peft's LoraConfig -> the equivalent flag of ModelConfig
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "target_modules": "target_modules", "exclude_modules": "exclude_modules",
    "modules_to_save": "modules_to_save", "bias": "lora_bias", "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}  # fmt: skip
# Entries of these that have no key are refused.
SPREAD_PREFIXES = ("generation_kwargs.", "model_init_kwargs.")
QUANTIZATION_SETTINGS = (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
)  # fmt: skip


def refuse_arguments(**given: Any) -> None:
    """Raise ConfigError for an argument that would have to be ignored, with an alternative."""
    for name, value in given.items():
        if value not in (None, (None, None), [], ()):
            row = find_old_name(name)
            fix = (row.fix or row.note) if row is not None else "leave it out"
            why = f"it would have to be ignored: found {value!r:.60}"
            refuse(name, f"{name} is not supported here", fix, why, error=TRLValueError)


def default_config(model: Any, kind: str) -> TRLConfig:
    """The config that TRL uses by default: its output_dir is the model's name."""
    name = model if isinstance(model, str) else _name_of(model)
    maker = GRPOConfig if kind == "grpo" else RLOOConfig
    return maker(f"{Path(name).name}-{kind.upper()}")


def adapter_settings(peft_config: Any, quantization_config: Any) -> JsonObject:
    """The flags equivalent to a LoraConfig and a BitsAndBytesConfig."""
    settings: JsonObject = {}
    if peft_config is not None:
        kind = type(peft_config).__name__
        settings = {"use_peft": True, "lora_from": "peft"}
        if kind in PEFT_CONFIGS:
            kwargs = _changed_arguments(peft_config)
            settings |= {"peft_type": PEFT_CONFIGS[kind], "peft_kwargs": kwargs}
        elif kind != "LoraConfig":
            kinds = f"LoraConfig, {', '.join(PEFT_CONFIGS)}"
            raise TRLValueError(f"peft_config is a {kind}, which is not one of {kinds}")
        names = LAYER_ARGUMENTS if kind in PEFT_CONFIGS else LORA_SETTINGS
        for theirs, flag in {name: LORA_SETTINGS[name] for name in names}.items():
            if (value := getattr(peft_config, theirs, None)) is not None:
                settings[flag] = sorted(value) if isinstance(value, set) else value
    for name in QUANTIZATION_SETTINGS if quantization_config is not None else ():
        settings[name] = getattr(quantization_config, name)
    return settings


def in_words_of_trl(problems: Sequence[Problem]) -> list[Problem]:
    """Problems of a recipe, with TRL's argument names for keys that have other names."""
    return [
        dataclasses.replace(p, fix=p.fix.replace("generation.allow_moe=true", ROUTER_FIX))
        for p in problems
    ]


def take_quantization(settings: JsonObject, given: Any, printed: list[str]) -> Any:
    """The quantization config: the trainer's argument, or that of model_init_kwargs, where scripts
    put it together with a device_map, which is removed with it."""
    sampling = settings.get("generation_kwargs")
    if isinstance(sampling, Mapping) and sampling.get("do_sample") is True:  # as it is here
        settings["generation_kwargs"] = {k: v for k, v in sampling.items() if k != "do_sample"}
    kwargs = settings.get("model_init_kwargs")
    if not isinstance(kwargs, Mapping):
        return given
    kwargs = dict(kwargs)
    inside = kwargs.pop("quantization_config", None)
    if (device_map := kwargs.pop("device_map", None)) is not None:
        printed.append(f"device_map={device_map!r:.60}: each process has one device")
    settings["model_init_kwargs"] = {k: v for k, v in kwargs.items() if v is not None}
    return given if given is not None else inside


def _changed_arguments(peft_config: Any) -> JsonObject:
    """Settings of a peft config that are not its class's defaults, except layers and origin."""
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


class InputFolder:
    """The folder of objects that a script passed, and the run's folder next to it."""

    def __init__(self, settings: Mapping[str, Any], writes: bool = True):
        """`writes`: whether this is the rank that writes the files; the others only name them."""
        self.writes = writes
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
                what = "model is a PeftModel, but a run creates its adapter from a config"
                raise TRLValueError(f"{what}; pass the base model, and peft_config=CONFIG")
            found["model_name_or_path"] = self._saved("model", model)
        source = tokenizer
        if source is None and not isinstance(model, str):
            source = _tokenizer_of(model)
        if source is not None:
            found["tokenizer_name_or_path"] = self._saved("tokenizer", source)
        return found

    def rewards(
        self, functions: Any, tokenizers: Any, weights: Sequence[float] | None
    ) -> tuple[dict[str, Callable[..., Any]], JsonObject]:
        """-> callables by name, and the settings that name every reward as `rloo migrate` does

        Raises ConfigError for more or fewer tokenizers or weights than rewards.
        """
        items = listed(functions)
        given = listed(tokenizers) if tokenizers is not None else [None] * len(items)
        _check_count("reward_processing_classes", len(given), len(items))
        if weights is not None:
            _check_count("reward_weights", len(listed(weights)), len(items))
        named: dict[str, Callable[..., Any]] = {}
        specs: list[str] = []
        saved: list[str | None] = [None] * len(items)
        for index, (item, tokenizer) in enumerate(zip(items, given, strict=True)):
            if isinstance(item, str):
                specs.append(item if not Path(item).is_dir() else str(Path(item).absolute()))
                if tokenizer is not None:
                    saved[index] = self._saved(f"reward_tokenizer_{index}", tokenizer)
            elif hasattr(item, "save_pretrained"):
                specs.append(self._saved(f"reward_model_{index}", item))
                if self.writes:
                    (tokenizer or _tokenizer_of(item)).save_pretrained(specs[-1])
            else:
                name = _free_name(getattr(item, "__name__", f"reward_{index}"), named)
                named[name] = item
                specs.append(f"python:{name}")
        return named, {"reward_funcs": specs, "reward_tokenizers": saved}

    def data_settings(
        self, train_dataset: Any, eval_dataset: Any, settings: Mapping[str, Any]
    ) -> JsonObject:
        """The data sets, which are saved; held-out ones only if the script evaluates."""
        found: JsonObject = {}
        if train_dataset is not None:
            found["dataset_name"] = self._saved_data("train", train_dataset, settings)
            if isinstance(train_dataset, Sized):
                found["train_rows"] = len(train_dataset)  # for a warm-up that is a share of them
        wanted = settings.get("eval_strategy", "no")
        if eval_dataset is not None and getattr(wanted, "value", wanted) != "no":
            found["eval_sets"] = self.eval_sets(eval_dataset, settings)
        return found

    def eval_sets(self, eval_dataset: Any, settings: Mapping[str, Any]) -> JsonObject:
        """Save held-out data. -> the sets of eval.sets, by name; one data set is called eval"""
        several = isinstance(eval_dataset, Mapping)
        sets = dict(eval_dataset) if several else {"eval": eval_dataset}
        return {
            name: {"path": self._saved_data(f"eval_{name}", data, settings), "split": "train"}
            for name, data in sets.items()
        }

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

    def write_recipe(self, settings: JsonObject, kind: str, printed: Sequence[str]) -> Path:
        """Write the recipe, and print the settings that are not in it. -> its path

        `printed`: lines on settings without effect. Raises ConfigError for each setting that
        would change the result but has no key.
        """
        old_run = OldRun(dict(settings), tool="trl", kind=kind, setting_format="{}={}")
        world = environment_number("WORLD_SIZE", 1) if is_rank() else 1
        recipe = build_recipe(old_run, choose_dialect(old_run, ""), world)
        lost = [text for text in recipe.dropped if text.startswith(SPREAD_PREFIXES)]
        if problems := unconverted_problems([*recipe.unsupported, *recipe.unknown, *lost]):
            raise TRLValueError(*problems)
        recipe.put("logging.trl_aliases", True, "the trainer's state has TRL's names")
        path = self.folder / "recipe.yaml"
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, recipe.render())
            print(f"{path}: the recipe of this training")
            for text in [*printed, *recipe.dropped, *recipe.notes]:
                print(f"note: {text}")
        return path

    def _saved(self, name: str, item: Any) -> str:
        path = self.folder / name
        if self.writes:
            item.save_pretrained(path)
        return str(path)

    def _saved_data(self, name: str, data: Any, settings: Mapping[str, Any]) -> str:
        """Save a data set: of an iterable one, the rows that the run can use."""
        from datasets import Dataset  # lazy: a second of imports

        if isinstance(data, str):
            return data
        path = self.folder / name
        if not self.writes:
            return str(path)
        if not isinstance(data, Dataset):
            rows = list(itertools.islice(iter(data), _rows_needed(data, settings)))
            data = dataset_of_rows(rows)
        data.save_to_disk(str(path))
        return str(path)

    def _code_name(self, code: Any) -> str:
        """module:name of a function or class; of one in the script, a copy's file:name."""
        name, module = code.__qualname__, code.__module__
        if "<" in name or "." in name:
            what = f"tools: {name} is inside a function, but other processes import it by name"
            raise TRLValueError(f"{what}; define it outside of functions")
        if module != "__main__":
            return f"{module}:{name}"
        path = self.folder / "code.py"
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            source = Path(inspect.getsourcefile(code) or "")
            write_text(path, definitions_of(source.read_text()))
        return f"{path}:{name}"


def definitions_of(script: str) -> str:
    """The imports, functions, classes and constants of a script, without its other statements."""
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


def _check_count(name: str, count: int, rewards: int) -> None:
    if count != rewards:
        what = f"the number of {name} ({count}) must match the number of reward_funcs ({rewards})"
        raise TRLValueError(f"{what}, one for each; or leave {name} out")


def listed(items: Any) -> list[Any]:
    """A list of the objects that a script gave as one or several."""
    if items is None:
        return []
    return list(items) if isinstance(items, Sequence) and not isinstance(items, str) else [items]


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    name = name if name.isidentifier() else "reward"
    numbers: Iterator[str] = (f"{name}_{n}" for n in itertools.count(2))
    return name if name not in taken else next(n for n in numbers if n not in taken)


def _name_of(model: Any) -> str:
    """The path or hub name that a model was loaded from."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if not name:
        what = "the model's config has no _name_or_path, needed to find its tokenizer"
        raise TRLValueError(f"{what}; pass the tokenizer as processing_class")
    return name


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer  # lazy: only for a model that comes without one

    return AutoTokenizer.from_pretrained(_name_of(model))


def _rows_needed(data: Any, settings: Mapping[str, Any]) -> int | None:
    """Rows that a run can use of an iterable data set; None: all of them."""
    if isinstance(data, Sequence):
        return None
    steps = int(settings.get("max_steps", -1))
    if steps < 1:
        what = "train_dataset is iterable, and its rows are saved before the run"
        raise TRLValueError(f"{what}; set max_steps=N in the config, which limits them")
    completions = int(settings.get("per_device_train_batch_size", 8))
    completions *= int(settings.get("gradient_accumulation_steps", 1))
    return steps * completions
