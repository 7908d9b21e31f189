"""Choices that do not go together: loss types and their switches, baselines of one algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from rloo_cli.algorithms.common import config as common_config
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.utils.errors import Problem

OWN_BASELINES = {"greedy": "remax", "value": "ppo"}  # which other algorithms cannot have


def problems(config: Switches) -> Iterator[Problem]:
    """Conflicts of one algorithm's own choices; `where` is the dotted key."""
    yield from _loss_problems(config)
    yield from _baseline_problems(config)


def whitened_alone(config: Switches) -> Iterator[Problem]:
    """Of an algorithm that whitens all tokens' advantages: what else would centre or divide."""
    plain = {"advantage_scale": "none", "normalize_advantages": False, "kl_in_baseline": False}
    for name, value in plain.items():
        found = getattr(config, name)
        if found != value:
            yield Problem(
                f"{config.name} whitens the advantages of the step's tokens, and nothing else does",
                f"algorithm.{name}",
                f"found {str(found).lower()}; it would do nothing",
                f"algorithm.{name}={str(value).lower()}",
            )


def _loss_problems(config: Switches) -> Iterator[Problem]:
    for part in common_config.PARTS:
        if getattr(config, part) is None:
            yield Problem(
                f"{part} is open",
                f"algorithm.{part}",
                "it is null, and so is algorithm.loss_type, which would say it",
                "algorithm.loss_type=dapo",
            )
    if config.policy_loss == "cispo" and (config.epsilon_high or 0) < 1:
        yield Problem(
            "CISPO's epsilon_high is the cap of its weights, not what 1 is exceeded by",
            "algorithm.epsilon_high",
            f"found {config.epsilon_high}: every weight of 1 and more would be cut",
            "algorithm.epsilon_high=5.0",
        )
    if config.policy_loss == "luspo" and config.ratio_level == "token":
        yield Problem(
            "LUSPO weighs a completion's one ratio by its length",
            "algorithm.ratio_level",
            "ratio_level=token with policy_loss=luspo",
            "algorithm.ratio_level=geometric",
        )


def _baseline_problems(config: Switches) -> Iterator[Problem]:
    for baseline, name in OWN_BASELINES.items():
        if (config.baseline == baseline) != (config.name == name):
            own = {v: k for k, v in OWN_BASELINES.items()}.get(config.name)
            yield Problem(
                f"baseline={config.baseline} is not one of algorithm={config.name}",
                "algorithm.baseline",
                f"baseline={baseline} is what {name} is",
                f"algorithm.baseline={own or 'loo'}",
            )
