"""Guesses what an argument that `rloo` does not accept was meant to be: typical first mistakes.

Each function returns what to write instead, for the `fix` of a refusal; "" where it has no guess.
"""

from collections.abc import Iterable
from pathlib import Path

from rloo_cli.config.old_names import find_old_name, nearest_names

# Flags that `rloo train` and the verbs that compose a config take.
FLAGS = ("--dry-run", "--multirun", "--cfg", "--config-dir", "--debug", "--errors", "--resolve")
RECIPE_FLAGS = ("config", "config-file", "config-path", "config-name", "recipe", "conf")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
YAML_SUFFIXES = (".yaml", ".yml")


def is_flag_value(flag: str, argument: str) -> bool:
    """Whether `argument` is meant as the value of the flag before it, as in `--config my.yaml`."""
    bare = flag.startswith("-") and "=" not in flag and flag.lstrip("-") != ""
    return bare and argument != "" and "=" not in argument and argument[0] not in "-+~"


def suggest_for_flag(flag: str, value: str | None, recipes: Iterable[str]) -> str:
    """`--dry_run`, `--config my.yaml`, `--learning_rate 1e-6` -> what to write instead."""
    name = flag.strip("-")
    if not name:
        return ""
    if name.replace("_", "-") in RECIPE_FLAGS:
        return f"+recipe={_as_recipe(value, recipes) if value else 'my.yaml'}"
    close = nearest_names(f"--{name.replace('_', '-')}", FLAGS)
    if close and "." not in name:
        return close[0]
    old = find_old_name(name)
    new_key = old.new_key if old is not None and not old.fix else None
    key = new_key if new_key and "<" not in new_key else name
    return f"{key}={'VALUE' if value is None else value}"


def suggest_for_bare_argument(argument: str, recipes: Iterable[str]) -> str:
    """`my.yaml`, `quickstart`, `key` -> what to write instead."""
    names = list(recipes)
    if argument.lstrip("+") in names or argument.endswith(YAML_SUFFIXES):
        return f"+recipe={_as_recipe(argument.lstrip('+'), names)}"
    return f"{argument}=VALUE"


def suggest_for_choice(group: str, choice: str, value: str) -> str:
    """`model=org/name`, `data=rows.jsonl`, `reward=my.py:score`, `+recipe=my` beside my.yaml.

    `value` is the whole value of the override, `choice` the part of it that the group lacks.
    """
    is_path = "/" in choice or ":" in choice or Path(choice).exists()
    if group == "recipe":
        files = [f"{choice}{end}" for end in YAML_SUFFIXES if Path(f"{choice}{end}").is_file()]
        return f"+recipe={files[0]}" if files else ""
    if group == "model" and is_path:
        return f"model.path={choice}"
    if group == "data" and (is_path or choice.endswith(DATA_SUFFIXES)):
        return f"data.path={choice}"
    if group == "reward" and ":" in choice:
        return f"reward={value.replace(choice, 'function')} reward.function.path={choice}"
    if group == "reward" and choice.endswith(".py"):
        return f"reward={value.replace(choice, 'function')} reward.function.path={choice}:NAME"
    if group == "reward" and is_path:
        return f"reward={value.replace(choice, 'model')} reward.model.path={choice}"
    if group == "algorithm" and choice.endswith(".py"):
        return f"algorithm.name={choice}"
    gone = find_old_name(f"{group}={choice}")
    return gone.fix if gone is not None else ""


def _as_recipe(value: str, recipes: Iterable[str]) -> str:
    """A recipe's name or file as `+recipe=` takes it."""
    if value in recipes or value.endswith(YAML_SUFFIXES):
        return value
    return f"{value}.yaml" if Path(f"{value}.yaml").is_file() else value
