"""Share of the wanted strings that the completion contains: 0 to 1.

The column has one string or a list of them. If all are white space the reward does not apply
(None).
"""

from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Columns, Completion, gold_texts, texts


class Config(RewardConfig):
    type: Literal["contains"] = key("contains")
    column: str = key("Data column with the wanted string, or a list of them")
    ignore_case: bool = key("Ignore case")


def needs(config: Config) -> list[str]:
    return [config.column]


def score(completions: list[Completion], columns: Columns, config: Config) -> list[float | None]:
    """(B,) shares, or None.

    >>> config = Config.model_construct(column="words", ignore_case=True)
    >>> score(["The cat", "A dog"], {"words": [["cat", "mat"], None]}, config)
    [0.5, None]
    """
    pairs = zip(texts(completions), columns[config.column], strict=True)
    return [_contained_share(text, wanted, config.ignore_case) for text, wanted in pairs]


def _contained_share(text: str, wanted_strings: object, ignore_case: bool) -> float | None:
    strings = gold_texts(wanted_strings)
    if ignore_case:
        text, strings = text.lower(), [s.lower() for s in strings]
    return sum(s in text for s in strings) / len(strings) if strings else None
