"""TRL's configs as plain settings: what a script sets, by the names of TRL.

Ours need no TRL; TRL's own configs are taken, too, and then only what differs from their defaults.
"""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from rloo_cli.config.old_names import OLD_NAME_TABLE, find_old_name, nearest_names
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

SOURCES = ("TRL >=0.22", "HF Trainer")  # whose names a config of TRL has


class TRLConfig:
    """Any setting of TRL's config by its name; one that TRL does not have is an error."""

    def __init__(self, output_dir: str | None = None, **settings: Any):
        if output_dir is not None:
            settings = {"output_dir": output_dir, **settings}
        for name in settings:
            row = find_old_name(name)
            if row is None or row.source not in SOURCES:
                raise ConfigError(_unknown_setting_problem(type(self).__name__, name))
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "settings":
            raise AttributeError(name)
        if name not in self.settings and find_old_name(name) is None:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return self.settings.get(name)


class RLOOConfig(TRLConfig):
    """TRL's RLOOConfig. What is not said is TRL's default."""


class GRPOConfig(TRLConfig):
    """TRL's GRPOConfig. What is not said is TRL's default."""


def written_settings(config: Any) -> JsonObject:
    """The settings that a script wrote into its config, ours or TRL's, with attributes set later.

    Raises ConfigError for another object.
    """
    if isinstance(config, TRLConfig):
        later = {k: v for k, v in vars(config).items() if k != "settings"}
        return {**config.settings, **later}
    if isinstance(config, dict):
        return dict(config)
    if not is_dataclass(config):
        what = f"args is a {type(config).__name__}"
        why = "a config, a dict or a dataclass was expected"
        raise ConfigError(Problem(what, "args", why, "RLOOConfig(...) or GRPOConfig(...)"))
    found: JsonObject = {}
    for item in fields(config):
        value, default = getattr(config, item.name, None), item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        derived = not item.init or item.name.startswith("_") or item.name in DERIVED
        if not derived and default is not MISSING and value != default and value is not None:
            found[item.name] = getattr(value, "value", value)  # of an enum
    return found


# What transformers derives when a config is made: no setting of a script's.
DERIVED = frozenset(
    {"logging_dir", "run_name", "deepspeed_plugin", "bf16", "local_rank", "generation_batch_size"}
)


def _unknown_setting_problem(config: str, name: str) -> Problem:
    known = [n for row in OLD_NAME_TABLE if row.source in SOURCES for n in row.names]
    close = nearest_names(name, known)
    fix = f"write {close[0]}" if close else "rloo config: every key that there is"
    why = f"looked among the names of {' and '.join(SOURCES)}"
    return Problem(f"{config} has no setting {name!r}", "args", why, fix)
