"""Which groups share an update, and which share a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rloo_cli.parts import Run
from rloo_cli.rollout import Batch


@dataclass(frozen=True)
class Plan:
    """One optimizer update."""

    micros: list[list[int]]  # groups of each micro-batch
    tokens: int  # unmasked tokens of rows that have an advantage; 0 = nothing to learn from
    denominator: float  # what the summed loss is divided by (OBJECTIVE 2.11)


def slices(index: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive runs of at most `size`."""
    return [list(index[i : i + size]) for i in range(0, len(index), size)]


def plan_updates(run: Run, batch: Batch, iteration: int) -> list[Plan]:
    """Cut a step's groups into num_minibatches updates, permuted anew in each iteration.

    Groups that are not trained on still count in the denominator (loss_denominator=all).
    """
    settings = run.config.algorithm
    order = np.arange(len(batch.groups))
    if settings.num_minibatches > 1:
        seed = [run.config.seed, batch.step, iteration]
        order = np.random.Generator(np.random.PCG64(seed)).permutation(order)
    active = set(batch.active)
    lengths = batch.table("length") * ~batch.masked
    # A masked row still is its siblings' baseline: only what has no score leaves a row alone.
    enough = min(2, settings.num_generations)
    valid = batch.scorable & (batch.scorable.sum(1, keepdim=True) >= enough) & ~batch.masked
    whole = getattr(settings, "loss_denominator", "all") == "all"
    counted = torch.ones_like(valid) if whole else valid
    plans = []
    for part in np.array_split(order, settings.num_minibatches):
        groups = sorted(int(i) for i in part)
        used = [i for i in groups if i in active]
        micros = slices(used, run.micro_groups)
        denominator = run.algorithm.denominator(
            settings,
            int(counted[groups].sum()),
            int((lengths * counted)[groups].sum()),
            len(micros),
            run.config.generation.max_completion_length,
        )
        plans.append(Plan(micros, int((lengths * valid)[used].sum()), denominator))
    return plans
