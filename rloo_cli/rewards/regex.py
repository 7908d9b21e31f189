"""1.0 if a regular expression is found in the completion's text, else 0.0."""

import re
from typing import Literal

from pydantic import field_validator

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts


class Config(RewardConfig):
    type: Literal["regex"] = key("regex")
    pattern: str = key("Python regular expression", min_length=1)
    where: Literal["anywhere", "start", "whole"] = key("Part of the text that has to match")
    dotall: bool = key("A dot matches newlines too")
    ignore_case: bool = key("Ignore case")

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


def score(completions: list[Completion], config: Config) -> list[float]:
    """(B,) of 1.0 or 0.0.

    >>> keys = {"pattern": "[0-9]+", "dotall": False, "ignore_case": False}
    >>> score(["it is 42", "it is"], Config.model_construct(where="anywhere", **keys))
    [1.0, 0.0]
    >>> score(["it is 42", "42"], Config.model_construct(where="whole", **keys))
    [0.0, 1.0]
    """
    flags = (re.DOTALL if config.dotall else 0) | (re.IGNORECASE if config.ignore_case else 0)
    pattern = re.compile(config.pattern, flags)
    methods = {"anywhere": pattern.search, "start": pattern.match, "whole": pattern.fullmatch}
    return [1.0 if methods[config.where](text) else 0.0 for text in texts(completions)]
