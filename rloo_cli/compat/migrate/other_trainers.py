"""Refuses by name what `rloo migrate` does not convert, and suggests an alternative.

A trainer is recognized by its command, its modules, its scripts and the names of its settings,
never by a value: a path or a data set may have the name of any trainer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rloo_cli.utils.errors import ConfigError, Problem

PAGE = "rloo docs migrate"
PASTE = "rloo migrate -- COMMAND"
START = "rloo train algorithm=rloo model.path=MODEL data.path=DATA reward=NAME"
# A trainer -> a regular expression for names that only its commands and configs have.
OTHER_TRAINERS = {
    "OpenRLHF": r"\bopenrlhf\b|\btrain_ppo_(ray|llama)|\balgo\.advantage\.estimator\b",
    "verl": r"\bverl\.trainer\b|\bmain_ppo\b|\bactor_rollout_ref\b|\badv_estimator\b",
    "ms-swift's Megatron": r"(^|\s)megatron\s+(rlhf|sft|pt)\b|\btensor_model_parallel_size\b",
    "slime": r"\bslime\b|--rollout-num-gpus\b|--num-rollout\b",
    "open-instruct": r"\bopen[-_]instruct\b|\bmason\.py\b|\bgrpo_fast\b",
    "LLaMA-Factory": r"(?i)\bllama-?_?factory\b|\bfinetuning_type\b",
    "axolotl": r"\baxolotl\b|\bsequence_len\b",
    "NeMo-RL": r"\bnemo[-_]rl\b|\bexamples/run_grpo|\bnum_prompts_per_step\b",
    "SkyRL": r"(?i)\bskyrl",
    "prime-rl": r"\bprime[-_]rl\b|(^|\s)rl\s+(@|--trainer\b)|--orchestrator\b",
}
DIALECT_OF = {"OpenRLHF": "openrlhf", "verl": "verl", "ms-swift's Megatron": "ms_swift"}
CHANGED_IMPORT = (
    "write `from rloo_cli.compat.trl import ...` for `from trl import ...`, and launch it as before"
)


def refuse_other_trainer(names: Iterable[str], where: str) -> None:
    """Raise ConfigError if a command or settings belong to another trainer."""
    text = " ".join(names)
    for title, pattern in OTHER_TRAINERS.items():
        if re.search(pattern, text):
            raise other_trainer_error(title, where)


def other_trainer_error(title: str, where: str) -> ConfigError:
    """The answer to a run of a trainer of the table."""
    what = f"this is a run of {title}, which rloo migrate does not convert"
    why = "it converts runs of TRL's RLOO and GRPO, and of ms-swift"
    dialect = f" algorithm.dialect={DIALECT_OF[title]}" if title in DIALECT_OF else ""
    return ConfigError(Problem(what, where, why, START + dialect, more=PAGE))


def names_in_command(words: list[str]) -> Iterator[str]:
    """The words before the first flag, names of settings, scripts and modules: no values.

    Only the last two parts of a path: a home or an environment may have any trainer's name, too.
    """
    in_head = True
    for before, word in zip(["", *words], words, strict=False):
        in_head = in_head and not word.startswith("-")
        name, equals, _ = word.partition("=")
        if word.startswith("--") or equals:
            yield name
        elif in_head or word.endswith(".py") or before in ("-m", "--module"):
            yield "/".join(Path(word).parts[-2:])


def names_of_settings(settings: Mapping[str, object]) -> Iterator[str]:
    """The names of settings, including nested ones."""
    for name, value in settings.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from names_of_settings(value)


def other_file_error(path: Path) -> ConfigError:
    """The answer to a file that is not YAML or JSON: a script of TRL's trainer runs unchanged."""
    if path.suffix == ".py":
        return python_script_error(str(path), "its settings are Python code, which is not parsed")
    kinds = {".ipynb": "notebook", ".sh": "shell script"}
    what = f"{path} is a {kinds.get(path.suffix, 'file of another kind')}"
    why = "it converts one command, or one YAML or JSON file of settings"
    fix = f"paste its training command: {PASTE}"
    return ConfigError(Problem(what, str(path), why, fix, more=PAGE))


def python_script_error(script: str, why: str) -> ConfigError:
    """The answer to a script of TRL: it runs here with another import."""
    what = f"{script} is a Python script: rloo migrate cannot make a recipe of it"
    fix = f"if it calls TRL's RLOOTrainer or GRPOTrainer, in {script} {CHANGED_IMPORT}"
    return ConfigError(Problem(what, script, why, fix, more=PAGE))
