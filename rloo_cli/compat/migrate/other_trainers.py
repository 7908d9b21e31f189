"""Refuses by its name what `rloo migrate` does not convert, and says what to do instead.

A trainer is known by its command, its modules, its scripts and the names of its settings, never by
a value: a path or a data set may be called like any trainer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

from rloo_cli.utils.errors import ConfigError, Problem, refuse

PAGE = "docs/migrate.md"
PASTE = "rloo migrate -- COMMAND"
RLOO = "rloo train algorithm=rloo model.path=MODEL data.path=DATA reward=NAME"
SFT = "rloo sft model.path=MODEL data.path=DATA"


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer whose runs are not converted."""

    title: str
    pattern: str  # a regular expression for what only its commands, configs and scripts say
    instead: str  # the command that does the same here


OTHER_TRAINERS = (
    OtherTrainer(
        "OpenRLHF",
        r"\bopenrlhf\b|\btrain_ppo_(ray|llama)|\b(init_kl_coef|actor_num_gpus_per_node)\b"
        r"|\balgo\.advantage\.estimator\b",
        f"{RLOO} algorithm.dialect=openrlhf",
    ),
    OtherTrainer(
        "verl",
        r"\bverl\.trainer\b|\bmain_ppo\b|\bactor_rollout_ref\b|\badv_estimator\b"
        r"|\brecipe\.\w+\.main_",
        f"{RLOO} algorithm.dialect=verl",
    ),
    OtherTrainer(
        "ms-swift's Megatron",
        r"(^|\s)megatron\s+(rlhf|sft|pt)\b|\b(global_batch_size|tensor_model_parallel_size)\b",
        f"{RLOO} algorithm.dialect=ms_swift",
    ),
    OtherTrainer("slime", r"\bslime\b|--rollout-num-gpus\b|--num-rollout\b", RLOO),
    OtherTrainer("open-instruct", r"\bopen[-_]instruct\b|\bmason\.py\b|\bgrpo_fast\b", RLOO),
    OtherTrainer("LLaMA-Factory", r"(?i)\bllama-?_?factory\b|\bfinetuning_type\b", SFT),
    OtherTrainer("axolotl", r"\baxolotl\b|\bsequence_len\b", RLOO),
    OtherTrainer("NeMo-RL", r"\bnemo[-_]rl\b|\bexamples/run_grpo|\bnum_prompts_per_step\b", RLOO),
    OtherTrainer("SkyRL", r"(?i)\bskyrl", RLOO),
    OtherTrainer("prime-rl", r"\bprime[-_]rl\b|(^|\s)rl\s+(@|--trainer\b)|--orchestrator\b", RLOO),
)
CHANGED_IMPORT = (
    "write `from rloo_cli.compat.trl import ...` for `from trl import ...`, and launch it as before"
)


def refuse_trainer_command(words: list[str]) -> None:
    """Raise ConfigError for a command of a trainer that is not converted."""
    _refuse_by_names(_telling_words(words), "the command")


def refuse_trainer_settings(settings: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for the settings of a trainer that is not converted."""
    _refuse_by_names(_names_of_settings(settings), where)


def refuse_trainer_name(name: str) -> None:
    """Raise ConfigError if `--from` names a trainer that is not converted."""
    for trainer in OTHER_TRAINERS:
        if name.lower() == trainer.title.lower():
            raise _trainer_error(trainer, "command line")


def refuse_other_file(path: Path, text: str) -> NoReturn:
    """Raise ConfigError for a file that is not YAML or JSON, with what to do instead."""
    if path.suffix == ".py":
        imports = re.findall(r"^\s*(?:import|from)\s.*", text, re.MULTILINE)
        _refuse_by_names([path.name, *imports], str(path))
        if re.search(r"\b(RLOO|GRPO)(Config|Trainer)\b", text):
            raise python_script_error(str(path), "its settings are Python code, which is not read")
        what, why = f"{path} is a Python script", "it has no RLOOTrainer or GRPOTrainer of TRL"
        refuse(str(path), what, f"{PASTE} that runs it, with its flags", why)
    if path.suffix == ".ipynb":
        what = f"{path} is a notebook"
        fix = f"{PASTE} for a command in it; where it calls TRL's trainer, {CHANGED_IMPORT}"
    else:
        lines = (_telling_words(line.split()) for line in text.splitlines())
        _refuse_by_names(chain.from_iterable(lines), str(path))
        what, fix = f"{path} is a shell script", f"paste its training command: {PASTE}"
    why = "one command, or one YAML or JSON file of settings, is converted"
    refuse(str(path), what, fix, why, more=PAGE)


def python_script_error(script: str, why: str) -> ConfigError:
    """The answer to a script of TRL: it runs here with another import."""
    what = f"{script} is a Python script: rloo migrate cannot make a recipe of it"
    return ConfigError(Problem(what, script, why, f"in {script} {CHANGED_IMPORT}", more=PAGE))


def _telling_words(words: list[str]) -> Iterator[str]:
    """The words before the first flag, names of settings, scripts and modules: no values.

    Of a path the last two parts: a home or an environment may be called like any trainer, too.
    """
    in_head = True
    for before, word in zip(["", *words], words, strict=False):
        in_head = in_head and not word.startswith("-")
        name, equals, _ = word.partition("=")
        if word.startswith("--") or equals:
            yield name
        elif in_head or word.endswith(".py") or before in ("-m", "--module"):
            yield "/".join(Path(word).parts[-2:])


def _names_of_settings(settings: Mapping[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from _names_of_settings(value)


def _refuse_by_names(names: Iterable[str], where: str) -> None:
    text = " ".join(names)
    for trainer in OTHER_TRAINERS:
        if re.search(trainer.pattern, text):
            raise _trainer_error(trainer, where)


def _trainer_error(trainer: OtherTrainer, where: str) -> ConfigError:
    what = f"this is a run of {trainer.title}, which rloo migrate does not convert"
    why = "it converts runs of TRL's RLOO and GRPO, and of ms-swift"
    return ConfigError(Problem(what, where, why, trainer.instead, more=PAGE))
