"""Problems of settings that compare the completions of a prompt, where there are too few."""

from __future__ import annotations

from collections.abc import Iterator

from rloo_cli.algorithms.common.config import Switches
from rloo_cli.utils.errors import Problem


def sibling_problems(config: Switches) -> Iterator[Problem]:
    """Settings that compare a completion with its siblings mean nothing where it has none."""
    if config.num_generations > 1:
        return
    alone = "a prompt's only completion has no sibling whose score could differ"
    refused = {  # key -> whether it is set so, what it would do, the way out
        "zero_std_groups": (
            config.zero_std_groups != "keep",
            "every group would count as one of equal scores, and none would be trained on",
            "keep",
        ),
        "multi_reward": (
            config.multi_reward == "normalize_then_sum",
            "each reward less its group's mean would be 0, and nothing would be learned",
            "sum",
        ),
        "advantage_scale": (
            config.advantage_scale in ("group", "loo_std"),
            "one score has no std, and nothing would be divided",
            "batch",
        ),
    }
    for name, (odd, what, fix) in refused.items():
        if odd:
            yield Problem(
                f"{name}={getattr(config, name)} needs siblings",
                f"algorithm.{name}",
                f"num_generations=1: {alone}; {what}",
                f"algorithm.{name}={fix}",
            )


def sibling_warnings(config: Switches) -> Iterator[str]:
    """Combinations that are allowed but seldom meant, in one sentence each."""
    minus_group_mean = getattr(config, "minus_group_mean", False)
    compared = minus_group_mean or config.baseline in ("loo", "group_mean")
    if config.zero_std_groups != "keep" and not compared:
        yield (
            f"algorithm.zero_std_groups={config.zero_std_groups} leaves out groups of equal scores,"
            f" which have advantages with baseline={config.baseline}: those in which every"
            " completion is right, or wrong, too"
        )
    if config.advantage_scale == "loo_std" and config.num_generations == 2:
        yield (
            "algorithm.advantage_scale=loo_std divides nothing with num_generations=2: the score of"
            " one sibling has no std"
        )
