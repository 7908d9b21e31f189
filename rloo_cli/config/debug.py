"""What `debug` puts in the place of a recipe's own: models, data and services that are not here."""

from typing import Any

from rloo_cli.utils.files import JsonObject

# Rewards that need more than this machine: a sandbox, a service.
EXTERNAL_REWARDS = ("code_tests", "http", "judge")
RESET_REWARD_MODEL_KEYS: JsonObject = {  # keys of a reward model that would not fit another one
    "tokenizer": None, "revision": None, "model_kwargs": {}, "dtype": "auto",
    "trust_remote_code": False, "input": "auto", "max_length": None, "device": "auto",
    "offload": False,
}  # fmt: skip

BACKEND_SECTIONS = {
    "transformers": "transformers",
    "vllm_server": "server",
    "vllm_colocate": "colocate",
}


def apply_debug_rewards(entries: JsonObject, debug: JsonObject) -> JsonObject:
    """The entries of `reward` as a debug run has them; as they are where debug says nothing."""
    model, simple = debug.get("reward_model_path"), debug.get("simple_rewards")
    found = {}
    for name, entry in entries.items():
        kind = entry.get("type") if isinstance(entry, dict) else None
        if simple and kind in EXTERNAL_REWARDS:
            continue
        if kind is not None:
            own = RESET_REWARD_MODEL_KEYS | {"path": model} if model and kind == "model" else {}
            entry = entry | own | ({"only": {}} if simple else {})
        found[name] = entry
    return found


def apply_debug_model(section: Any, debug: JsonObject) -> Any:
    """The section `model`, without the adapter of a model that is not there."""
    keys = section.get("lora") if isinstance(section, dict) else None
    if not (isinstance(keys, dict) and debug.get("own_columns")):
        return section
    return section | {"lora": keys | {"path": None}}


def apply_debug_generation(section: Any, debug: JsonObject, overrides: list[str]) -> Any:
    """The section `generation`, without what a recipe says of a backend that debug has replaced.

    `said`: words of the command line; what they say of one stays, and is refused.
    """
    if not isinstance(section, dict) or not debug.get("own_columns"):
        return section
    own = BACKEND_SECTIONS.get(str(section.get("backend")))
    others = [n for n in BACKEND_SECTIONS.values() if n != own]
    gone = [n for n in others if not any(w.startswith(f"generation.{n}") for w in overrides)]
    return {k: v for k, v in section.items() if k not in gone}


def apply_debug_data(section: Any, debug: JsonObject) -> Any:
    """The section `data`, without the names that a recipe gave to other data's columns."""
    renamed = isinstance(section, dict) and debug.get("own_columns")
    return section | {"columns": {}} if renamed else section
