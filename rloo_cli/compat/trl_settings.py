"""TRL's configs as plain settings: what a script sets, by the names of TRL.

`trl_fields.txt` has every field of TRL 1.16's RLOOConfig and GRPOConfig and its treatment: a
key of the recipe, a value that the trainer's own methods read, a line that is printed, or a
refusal. Our two configs are built from that table and need no TRL; TRL's own configs also work.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from rloo_cli.config.old_names import OLD_NAME_TABLE, find_old_name, nearest_names
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

SOURCES = ("TRL >=0.22", "HF Trainer")  # names used by configs of other versions of TRL
FIELD_TYPES: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "dict": str,  # a dict is JSON there
    "list[str]": list[str], "list[float]": list[float],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TRLField:
    """One line of the table: a field of a config of TRL's, and its treatment."""

    name: str
    type: str  # a key of FIELD_TYPES
    default: Any
    treatment: str  # recipe, trainer, print or refuse
    text: str  # printed: why nothing is lost; refused: what to write instead
    config: str  # RLOOConfig or GRPOConfig


def _read_fields(text: str) -> dict[str, dict[str, TRLField]]:
    """The table: config -> field's name -> its line."""
    found: dict[str, dict[str, TRLField]] = {}
    configs: list[str] = []
    for line in text.splitlines():
        if line.startswith("["):
            configs = line.strip("[]").split()
        elif line and not line.startswith("#"):
            name, kind, default, becomes = (part.strip() for part in line.split("|"))
            treatment, _, why = becomes.partition(": ")
            for config in configs:
                row = TRLField(name, kind, json.loads(default), treatment, why, config)
                found.setdefault(config, {})[name] = row
    return found


FIELDS_FILE = Path(__file__).with_name("trl_fields.txt")
TRL_FIELDS = _read_fields(FIELDS_FILE.read_text(encoding="utf-8"))
CONFIG_OF_KIND = {"rloo": "RLOOConfig", "grpo": "GRPOConfig"}


class TRLValueError(ConfigError, ValueError):
    """An error where TRL raises ValueError, which scripts may catch."""


class TRLConfig:
    """Any setting of TRL's config by its name; an unknown one is an error."""

    config_name: ClassVar[str]

    def __init__(self, output_dir: str | None = None, **settings: Any):
        own = TRL_FIELDS[self.config_name]
        given = {"output_dir": output_dir, **settings} if output_dir is not None else settings
        for name, value in given.items():
            row = find_old_name(name)
            if name not in own and (row is None or row.source not in SOURCES):
                raise TRLValueError(_unknown_setting_problem(self.config_name, name))
            if name in own and own[name].type == "dict" and isinstance(value, str):
                value = json.loads(value) if value.lstrip().startswith("{") else value
            setattr(self, name, value)

    @property
    def world_size(self) -> int:
        """The number of processes, from the launcher."""
        return environment_number("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return environment_number("RANK", 0)

    def to_dict(self) -> JsonObject:
        """Every field of TRL's config, and what else was set."""
        return {name: getattr(self, name) for name in TRL_FIELDS[self.config_name]} | vars(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or find_old_name(name) is None:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return None


def _make_config(name: str) -> Any:
    """A dataclass with the fields of TRL's config, so that a parser of dataclasses accepts it."""
    columns = []
    for row in TRL_FIELDS[name].values():
        kind, default = FIELD_TYPES[row.type], row.default
        if isinstance(default, list):
            field: Any = dataclasses.field(default_factory=default.copy)
        else:
            field = dataclasses.field(default=default, metadata={"help": row.text or row.treatment})
        columns.append((row.name, kind if default is not None else kind | None, field))
    doc = {"__doc__": f"TRL's {name}. What is not said is TRL's default.", "__module__": __name__}
    doc["config_name"] = name
    return dataclasses.make_dataclass(
        name, columns, bases=(TRLConfig,), namespace=doc, init=False, repr=False, eq=False
    )


RLOOConfig = _make_config("RLOOConfig")
GRPOConfig = _make_config("GRPOConfig")


def written_settings(config: Any) -> JsonObject:
    """The settings that a script wrote into its config, ours or TRL's, with attributes set later.

    A parser of command lines sets every field: TRL's default values are then left out. Raises
    ConfigError for another object.
    """
    if isinstance(config, dict):
        return dict(config)
    if isinstance(config, TRLConfig):
        own, found = TRL_FIELDS[config.config_name], dict(vars(config))
        if found.keys() >= own.keys():
            found = {k: v for k, v in found.items() if k not in own or not _is_default(own[k], v)}
        return found
    if not dataclasses.is_dataclass(config):
        what = f"args is a {type(config).__name__}, not a config, a dict or a dataclass"
        raise TRLValueError(f"{what}; give RLOOConfig(...) or GRPOConfig(...)")
    return _settings_of_trl(config)


def _is_default(row: TRLField, value: Any) -> bool:
    """Whether this is a parser's default value for a field."""
    return bool(value == row.default) or (value is None and row.type.startswith("list"))


def _settings_of_trl(config: Any) -> JsonObject:
    """Differences of TRL's own config from one constructed without arguments."""
    on_cpu = {"use_cpu": True} if getattr(config, "use_cpu", False) else {}
    plain = type(config)(config.output_dir, **on_cpu)  # refused without it where there is no GPU
    found: JsonObject = dict(on_cpu)
    for item in dataclasses.fields(config):
        value, default = getattr(config, item.name, None), getattr(plain, item.name, None)
        derived = not item.init or item.name.startswith("_")
        if not derived and (value != default or item.name == "output_dir"):
            found[item.name] = getattr(value, "value", value)  # of an enum
    # The config fills in the one of these two that was not set.
    per_step = config.per_device_train_batch_size * config.world_size
    if config.generation_batch_size == per_step * config.steps_per_generation:
        found.pop("generation_batch_size", None)
        found["steps_per_generation"] = config.steps_per_generation
    return found


def check_fields(settings: JsonObject, kind: str) -> tuple[JsonObject, list[str]]:
    """-> the settings that make the recipe, and a line for each without effect here.

    Raises ConfigError, with a problem for each field that would change the result and cannot.
    """
    own = TRL_FIELDS[CONFIG_OF_KIND[kind]]
    kept, printed, refused = dict(settings), [], []
    for name in [n for n in settings if n not in own and find_old_name(n) is None]:
        del kept[name]  # a field that a script's own config adds
    for row in [own[name] for name in settings if name in own]:
        value, treatment = settings[row.name], row.treatment
        if row.name == "router_aux_loss_coef" and value:
            treatment = "refuse"
        if treatment != "recipe":
            kept.pop(row.name, None)
        if treatment == "trainer" or value == row.default:
            continue
        if treatment == "print":
            printed.append(f"{row.name}={value!r:.60}: {row.text}")
        elif treatment == "refuse":
            refused.append(_refused_field_problem(row, value))
    if refused:
        raise TRLValueError(*refused)
    if isinstance(kept.get("deepspeed"), dict):
        stage = kept["deepspeed"].get("zero_optimization", {}).get("stage", 0)
        kept["deepspeed"] = f"zero{stage}" if stage else "stage 0"
    return kept, printed


ROUTER_FIX = "router_aux_loss_coef=0.0, which trains a mixture of experts without it"


def _refused_field_problem(row: TRLField, value: Any) -> Problem:
    fix = ROUTER_FIX if row.name == "router_aux_loss_coef" else row.text
    why = "it would change the training, and rloo has no equivalent"
    return Problem(f"{row.name}={value!r:.60} is not supported here", row.name, why, fix)


def unconverted_problems(items: Iterable[str]) -> list[Problem]:
    """A problem for each setting that `rloo migrate` could not convert to a key."""
    why = "it would change the training, and this version has no key for it"
    fix = "leave it out; rloo config lists the keys of rloo train"
    return [Problem(f"{item} is not supported here", "args", why, fix) for item in items]


def _unknown_setting_problem(config: str, name: str) -> Problem:
    known = [*TRL_FIELDS[config]]
    known += [n for row in OLD_NAME_TABLE if row.source in SOURCES for n in row.names]
    close = nearest_names(name, known)
    fix = f"write {close[0]}" if close else "rloo config lists all keys"
    why = f"looked among the names of {' and '.join(SOURCES)}"
    return Problem(f"{config} has no setting {name!r}", "args", why, fix)
