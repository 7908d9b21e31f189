"""Every switch that algorithms share, in one class, and a run's own set of them."""

from __future__ import annotations

from typing import Literal, TypeVar

from rloo_cli.algorithms import advantage, aggregate, correction, kl, losses, ratio, shaping
from rloo_cli.schema import AlgorithmConfig, RunConfig, key


class Switches(
    shaping.Config,
    kl.Config,
    advantage.Config,
    ratio.Config,
    aggregate.Config,
    correction.Config,
    AlgorithmConfig,
):
    """Every switch that algorithms share (OBJECTIVE 2)."""

    loss_type: (
        Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"] | None
    ) = key("Fills policy_loss, ratio_level and loss_agg where they are null; null = they stand")


S = TypeVar("S", bound=Switches)


def resolved(config: S, backend: str) -> S:
    """The config to train with: what stands for something else written out."""
    return correction.resolved(losses.resolved(config), backend)


def switches(run: RunConfig) -> Switches:
    """The run's algorithm section, as one that has every shared switch; loss_type written out."""
    if not isinstance(run.algorithm, Switches):
        raise TypeError(f"{type(run.algorithm).__name__} is not made of the shared switches")
    return losses.resolved(run.algorithm)


def updates(config: AlgorithmConfig) -> int:
    """Optimizer steps per rollout batch."""
    return config.num_iterations * config.num_minibatches
