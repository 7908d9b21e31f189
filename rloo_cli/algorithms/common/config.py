"""Every switch that algorithms share, in one class, and a run's own set of them."""

from __future__ import annotations

from typing import Literal, TypeVar

from rloo_cli.algorithms.common import (
    advantage,
    aggregate,
    importance_weights,
    kl,
    policy_loss,
    score,
)
from rloo_cli.config.schema import AlgorithmConfig, RunConfig, key


class Switches(
    score.Config,
    kl.Config,
    advantage.Config,
    policy_loss.Config,
    aggregate.Config,
    importance_weights.Config,
    AlgorithmConfig,
):
    """Every switch that algorithms share (docs/OBJECTIVES.md)."""

    loss_type: (
        Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"] | None
    ) = key("Fills policy_loss, ratio_level and loss_agg where they are null; null = they stand")


S = TypeVar("S", bound=Switches)
# A loss type is three switches: policy_loss, ratio_level and loss_agg. GSPO: arXiv 2507.18071;
# DAPO: arXiv 2503.14476; Dr. GRPO: arXiv 2503.20783; CISPO, SAPO: loss_types.py; LUSPO: TRL 1.16.
TRIPLES = {
    "grpo": ("clip", "token", "sequence_mean"),
    "dr_grpo": ("clip", "token", "constant"),
    "bnpo": ("clip", "token", "token_mean_local"),
    "dapo": ("clip", "token", "token_mean"),
    "gspo": ("clip", "geometric", "sequence_mean"),
    "cispo": ("cispo", "token", "token_mean"),
    "sapo": ("sapo", "token", "sequence_mean"),
    "luspo": ("luspo", "geometric", "sequence_sum"),
    "vespo": ("vespo", "token", "token_mean"),
}
PARTS = ("policy_loss", "ratio_level", "loss_agg")


def written_out(config: S) -> S:
    """The config with what `loss_type` says in those of its three switches that are null."""
    if config.loss_type is None:
        return config
    told = zip(PARTS, TRIPLES[config.loss_type], strict=True)
    found = {part: value for part, value in told if getattr(config, part) is None}
    return config.model_copy(update=found)


def resolved(config: S, backend: str) -> S:
    """The config to train with: what stands for something else written out."""
    return importance_weights.resolved(written_out(config), backend)


def switches(run: RunConfig) -> Switches:
    """The run's algorithm section, as one that has every shared switch; loss_type written out."""
    if not isinstance(run.algorithm, Switches):
        raise TypeError(f"{type(run.algorithm).__name__} is not made of the shared switches")
    return written_out(run.algorithm)


def updates(config: AlgorithmConfig) -> int:
    """Optimizer steps per rollout batch."""
    return config.num_iterations * config.num_minibatches
