"""What `debug` replaces in a recipe: models, data and services that may be missing here."""

from rloo_cli.config.schema import RewardConfig
from rloo_cli.utils.files import JsonObject

# Rewards that need more than this machine has: a sandbox, a service.
EXTERNAL_REWARDS = ("code_tests", "http", "judge")
TAUGHT_ALGORITHMS = ("opd",)  # model.ref_path is the teacher, unless a server has it
TEACHER_URL = "algorithm.teacher.base_url"
# Rewards of an environment, or of columns that the made prompts lack; a reward without columns
# replaces them.
COLUMN_REWARDS = ("environment", "ifeval", "reasoning_gym")
RESET_REWARD_MODEL_KEYS: JsonObject = {  # the values with which keys fit debug's reward model
    "tokenizer": None, "revision": None, "model_kwargs": {}, "dtype": "auto",
    "trust_remote_code": False, "input": "auto", "max_length": None, "device": "auto",
    "offload": False,
}  # fmt: skip

BACKEND_SECTIONS = {
    "transformers": "transformers", "vllm_server": "server", "vllm_colocate": "colocate",
}  # fmt: skip


def apply_debug_rewards(entries: JsonObject, debug: JsonObject) -> JsonObject:
    """The entries of `reward` as a debug run has them; unchanged where debug sets no key for it."""
    model, simple = debug.get("reward_model_path"), debug.get("simple_rewards")
    applied = {}
    for name, entry in entries.items():
        kind = entry.get("type") if isinstance(entry, dict) else None
        if simple and kind in EXTERNAL_REWARDS:
            continue
        if simple and kind in COLUMN_REWARDS:
            common = {k: v for k, v in entry.items() if k in RewardConfig.model_fields}
            applied[name] = common | {"type": "length_chars", "only": {}}
            continue
        if kind is not None:
            own = RESET_REWARD_MODEL_KEYS | {"path": model} if model and kind == "model" else {}
            entry = entry | own | ({"only": {}} if simple else {})
        applied[name] = entry
    return applied


def apply_debug_model(section: object, debug: JsonObject, algorithm: object) -> object:
    """The section `model`, without the path of an adapter to a model that debug has replaced.

    Where `algorithm`, the section, needs a teacher, the model that debug trains is one.
    """
    if not isinstance(section, dict) or not debug.get("own_columns"):
        return section
    if isinstance(keys := section.get("lora"), dict):
        section = section | {"lora": keys | {"path": None}}
    taught = isinstance(algorithm, dict) and algorithm.get("name") in TAUGHT_ALGORITHMS
    if taught and section.get("ref_path") is None and not _teacher_url(algorithm):
        section = section | {"ref_path": section.get("path")}
    return section


def apply_debug_teacher(section: object, debug: JsonObject, overrides: list[str]) -> object:
    """The section `algorithm`, without a recipe's address of a teacher server.

    `overrides`: of the command line; an address that they set stays.
    """
    if not debug.get("own_columns") or any(w.startswith(f"{TEACHER_URL}=") for w in overrides):
        return section
    if not isinstance(section, dict) or not _teacher_url(section):
        return section
    return section | {"teacher": section["teacher"] | {"base_url": None}}


def _teacher_url(algorithm: object) -> object:
    """`teacher.base_url` of the section `algorithm`; None where it has none."""
    keys = algorithm.get("teacher") if isinstance(algorithm, dict) else None
    return keys.get("base_url") if isinstance(keys, dict) else None


def apply_debug_generation(section: object, debug: JsonObject, overrides: list[str]) -> object:
    """The section `generation`, without a recipe's keys of a backend that debug has replaced.

    `overrides`: of the command line; keys of such a backend that they set stay, and are refused.
    """
    if not isinstance(section, dict) or not debug.get("own_columns"):
        return section
    own = BACKEND_SECTIONS.get(str(section.get("backend")))
    others = [n for n in BACKEND_SECTIONS.values() if n != own]
    gone = [n for n in others if not any(w.startswith(f"generation.{n}") for w in overrides)]
    return {k: v for k, v in section.items() if k not in gone}


def apply_debug_data(section: object, debug: JsonObject) -> object:
    """The section `data`, without a recipe's column names of the data that debug has replaced."""
    if isinstance(section, dict) and debug.get("own_columns"):
        return section | {"columns": {}}
    return section
