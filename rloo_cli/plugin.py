"""Names that your own algorithm or reward may import. All others may move between versions.

    from rloo_cli.plugin import AdvantageInputs, Advantages, Algorithm, Problem, Switches, key

Only re-exports; imports no torch, so that your own file is read as fast as a built-in one.
"""

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.family import usable_completions as usable_rows
from rloo_cli.algorithms.common.forward_plan import ForwardPlan
from rloo_cli.algorithms.common.hooks import (
    AdvantageInputs,
    Advantages,
    Loss,
    LossInputs,
    StepTokens,
    TokenAdvantages,
    ValueLoss,
)
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import AlgorithmConfig, RewardConfig, RunConfig, key
from rloo_cli.reporting.events import Events
from rloo_cli.rewards.common.text import Completion, texts
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.errors import Problem

__all__ = [
    "RLOO", "AdvantageInputs", "Advantages", "Algorithm", "AlgorithmConfig", "Completion",
    "Events", "ForwardPlan", "Loss", "LossInputs", "Problem", "RewardConfig", "RunConfig",
    "StepTokens", "Switches", "TokenAdvantages", "TrainerState", "ValueLoss", "in_reward", "key",
    "texts", "usable_rows",
]  # fmt: skip
