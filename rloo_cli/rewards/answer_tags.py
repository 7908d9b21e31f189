"""1.0 if the whole completion is <think>...</think><answer>...</answer>, else 0.0 (DeepSeek-R1).

The text inside the tags may hold newlines.
"""

import re
from typing import Literal

from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common.text import Completion, texts


class Config(RewardConfig):
    type: Literal["answer_tags"] = key("answer_tags")
    white_space: bool = key("Allow white space around and between the two blocks")


def score(completions: list[Completion], config: Config) -> list[float]:
    """(B,) of 1.0 or 0.0.

    >>> config = Config.model_construct(white_space=True)
    >>> score(["<think>why</think> <answer>4</answer>", "<answer>4</answer>"], config)
    [1.0, 0.0]
    """
    gap = r"\s*" if config.white_space else ""
    pattern = rf"^{gap}<think>.*?</think>{gap}<answer>.*?</answer>{gap}$"
    return [1.0 if re.match(pattern, text, re.DOTALL) else 0.0 for text in texts(completions)]
