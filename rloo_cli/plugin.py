"""What your own algorithm or reward may import. Everything else may move between two versions.

    from rloo_cli.plugin import Advantages, Problem, RunConfig, Switches, key

Only re-exports; imports no torch, so that a file of yours is read as fast as one of ours.
"""

from rloo_cli.algorithms.common.advantage import Advantages, Known
from rloo_cli.algorithms.common.advantage import usable as usable_rows
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.kl import in_reward
from rloo_cli.algorithms.common.rules import problems as shared_problems
from rloo_cli.config.schema import AlgorithmConfig, RewardConfig, RunConfig, key
from rloo_cli.rewards.common.text import Completion, texts
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.errors import Problem

__all__ = [
    "Advantages", "AlgorithmConfig", "Completion", "Known", "Problem", "RewardConfig", "RunConfig",
    "Switches", "TrainerState", "in_reward", "key", "shared_problems", "texts", "usable_rows",
]  # fmt: skip
