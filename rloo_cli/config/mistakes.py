"""Guesses the intention behind an invalid argument of `rloo`: typical first mistakes.

Each `suggest` returns what to write instead, for the `fix` of a refusal; "" without a guess.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rloo_cli.config.old_names import find_old_name, nearest_names
from rloo_cli.utils import paths, redact
from rloo_cli.utils.errors import Problem, refuse

RECIPE_FLAGS = ("config", "config-file", "config-path", "config-name", "recipe", "conf")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
YAML_SUFFIXES = (".yaml", ".yml")


def unknown_flag_problem(
    words: Sequence[str],
    others: Mapping[str, str],
    verb: str,
    flags: Sequence[str],
    takes_keys: bool,
    usage: str,
) -> Problem:
    """The problem of an unknown flag of a verb; `words`: the flag and what follows.

    `others`: flag -> a verb that has it. Raises ConfigError if the flag or its value is a
    secret.
    """
    flag, equals, value = words[0].partition("=")
    following = words[1] if len(words) > 1 and _is_flag_value(*words[:2]) else ""
    where = " ".join(["command line:", words[0], *[following] * bool(following)])
    refuse_secrets(flag.lstrip("-"), f"{words[0]} {following}")
    name = flag.strip("-").replace("_", "-")
    close = nearest_names(f"--{name}", flags) if "." not in name else []
    fix, why = (close or [usage])[0], f"its flags are {', '.join(flags)}"
    if flag in others:
        why = f"it is a flag of {others[flag]}"
    elif takes_keys and name and (not close or name in RECIPE_FLAGS):
        fix = _suggest_key(flag, value if equals else following or None, paths.recipe_files())
        why = "keys are set without dashes, as key=value"
    return Problem(f"{flag} is not a flag of {verb}", where, why, fix)


def _is_flag_value(flag: str, argument: str) -> bool:
    """Whether `argument` is meant as the value of the flag before it, as in `--config my.yaml`."""
    return "=" not in flag + argument and argument[:1] not in ("", "-", "+", "~")


def _suggest_key(flag: str, value: str | None, recipes: Iterable[str]) -> str:
    """`--config my.yaml`, `--learning_rate 1e-6` -> what to write instead."""
    name = flag.strip("-")
    if name.replace("_", "-") in RECIPE_FLAGS:
        return f"+recipe={_as_recipe(value, recipes) if value else 'my.yaml'}"
    old = find_old_name(name)
    new_key = old.new_key if old is not None and not old.fix else None
    key = new_key if new_key and "<" not in new_key else name
    return f"{key}={'VALUE' if value is None else value}"


def refuse_secrets(key: str, override: str) -> None:
    """Raises ConfigError for an argument that holds a secret."""
    secret = redact.find_secret(override)
    if secret or redact.SECRET_KEY.search(key.replace("-", "_")):
        named = secret.isidentifier()
        variable = secret if named else "HF_TOKEN" if "hf" in override.lower() else "NAME"
        key = "an argument" if redact.find_secret(key) else key
        why = f"it holds the value of ${secret}; " if named else ""
        why += "keys cannot hold secrets: a config is written to disk"
        fix = f"export {variable}=... (or use the tool's login file), and remove {key}"
        refuse("command line", f"{key}: this looks like a secret", fix, why)


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
