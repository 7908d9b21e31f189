"""Share of a prompt's verifiable instructions that the completion follows. (arXiv 2311.07911)

The columns are IFEval's: a list of instructions such as `length_constraints:number_words`, and for
each its arguments. `rewards/common/instructions.py` has the checks. An empty completion follows
none; None if a row has no instructions.
"""

import json
from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common import instructions
from rloo_cli.rewards.common.text import Columns, Completion, gold_texts, texts
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject


class Config(RewardConfig):
    type: Literal["ifeval"] = key("ifeval")
    column: str = key("Data column with the list of instructions")
    arguments_column: str = key("Data column with their arguments: as many dicts, or JSON of them")
    strict: bool = key("1 if all are followed, else 0; false = the followed share")


def needs(config: Config) -> list[str]:
    return [config.column, config.arguments_column]


def score(completions: list[Completion], columns: Columns, config: Config) -> list[float | None]:
    """(B,) of shares from 0 to 1, or None."""
    rows = zip(
        texts(completions), columns[config.column], columns[config.arguments_column], strict=True
    )
    return [_followed_share(text, names, given, config) for text, names, given in rows]


def _followed_share(text: str, names: object, given: object, config: Config) -> float | None:
    if not gold_texts(names):
        return None
    named, arguments = _instructions(names, given, config)
    if not named:
        return None
    followed = [
        instructions.is_followed(name, text, values)
        for name, values in zip(named, arguments, strict=True)
    ]
    return float(all(followed)) if config.strict else sum(followed) / len(followed)


def _instructions(
    names: object, given: object, config: Config
) -> tuple[list[str], list[JsonObject]]:
    """A row's instructions and their arguments. Raises DataError if they cannot be checked."""
    named = json.loads(names) if isinstance(names, str) else names
    arguments = json.loads(given) if isinstance(given, str) else given
    if (
        not isinstance(named, list)
        or not isinstance(arguments, list)
        or len(named) != len(arguments)
    ):
        what = f"{config.column} and {config.arguments_column} are not lists of one length"
        why = f"found {named!r}, {arguments!r}"
        fix = "correct those rows, or remove them: data.map, or data.filter"
        refuse(f"reward.{config.type}", what, fix, why, error=DataError)
    unknown = [name for name in named if name not in instructions.CHECKS]
    if unknown:
        what = f"the instruction {unknown[0]!r} cannot be checked"
        why = f"one of: {', '.join(instructions.CHECKS)}"
        fix = f"remove those rows: data.filter, or data.map; column {config.column}"
        refuse(f"reward.{config.type}", what, fix, why, error=DataError)
    # Arrow gives every dict the keys of all; a null argument is absent.
    return named, [{k: v for k, v in (a or {}).items() if v is not None} for a in arguments]
