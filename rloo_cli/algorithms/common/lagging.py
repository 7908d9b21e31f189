"""Sampling with older weights than those that are trained (generation.overlap): its rules.

The importance weight is what makes such an update right, so it cannot be off; and what the policy
was when it sampled is known from the sampler alone (docs/overlap.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rloo_cli.algorithms.common import importance_weights
from rloo_cli.utils.errors import Problem

if TYPE_CHECKING:
    from rloo_cli.algorithms.common.config import Switches
    from rloo_cli.config.schema import RunConfig


def lagging_problems(run: RunConfig, config: Switches) -> Iterator[Problem]:
    """What an algorithm's settings cannot do with completions that older weights sampled."""
    generation = run.generation
    if generation.overlap == "none":
        return
    asked = f"generation.overlap={generation.overlap}"
    passes, parts = config.num_iterations, config.num_minibatches
    updates = passes * parts
    if updates > 1:
        yield Problem(
            f"{asked} makes one update of each step's completions",
            f"algorithm.{'num_iterations' if passes > 1 else 'num_minibatches'}",
            f"num_iterations * num_minibatches = {passes} * {parts} = {updates}: the next"
            f" completions would be {updates} updates old, and not one",
            "algorithm.num_iterations=1 algorithm.num_minibatches=1, or generation.overlap=none",
        )
    if config.by_token or config.baseline == "value":
        yield Problem(
            f"{asked} knows no advantages of single tokens",
            "generation.overlap",
            f"algorithm={config.name} computes them from the trainer's own log-probabilities and"
            " values, which older weights did not have",
            "generation.overlap=none",
        )
    if config.needs_greedy and generation.overlap == "carry":
        yield Problem(
            f"{asked} samples no greedy completions",
            "generation.overlap",
            f"algorithm={config.name} compares a prompt's completions with its greedy one, which"
            " would be of other weights than they are",
            "generation.overlap=ahead",
        )
    measured = config.needs_reference or config.teacher_server is not None
    if measured and config.kl_temperature == "one" and generation.temperature != 1:
        yield Problem(
            f"{asked} measures the KL where the completions were sampled",
            "algorithm.kl_temperature",
            f"the sampler's log-probabilities are at temperature {generation.temperature:g}, and"
            " kl_temperature=one asks for those at 1",
            "algorithm.kl_temperature=sampling, or generation.temperature=1",
        )
    mode = importance_weights.correction_mode(config, generation.backend, generation.overlap)
    if mode == "none" and not generation.allow_uncorrected:
        yield Problem(
            f"{asked} without algorithm.correction",
            "algorithm.correction.mode",
            "the completions are of older weights than those that are trained: without a weight"
            " the gradient is of another objective",
            "algorithm.correction.mode=auto, or generation.allow_uncorrected=true for a comparison",
        )
