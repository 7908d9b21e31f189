"""A sampler in this process where no rank has the trainer's weights whole.

It samples with a whole copy of the model, which is given the weights before each step: one copy on
each rank, and no layer that waits for other ranks while it decodes. Large models sample with vLLM.
"""

from collections.abc import Callable
from typing import Any

import torch

from rloo_cli.data.batch import Group
from rloo_cli.generation import Generator, ignore_arrival

GatherWeights = Callable[[], Any]  # all weights, whole, as {name: tensor} unit by unit


class ReplicaGenerator:
    """`inner` samples with `copy`. `pieces` is called by all ranks together."""

    def __init__(self, inner: Generator, copy: Any, gather_weights: GatherWeights):
        self.inner, self.gather_weights = inner, gather_weights
        self.parameters = dict(copy.named_parameters())
        self.metrics, self.tolerance = inner.metrics, inner.tolerance

    @torch.no_grad()
    def load(self, policy: Any, version: int) -> None:
        """Copy the trainer's weights of now."""
        for unit in self.gather_weights():
            for name, tensor in unit.items():
                self.parameters[name].copy_(tensor)
        self.inner.load(policy, version)

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """`Generator.generate`."""
        self.inner.generate(groups, seeds, greedy, temperature, arrived)

    def close(self) -> None:
        """`Generator.close`."""
        self.inner.close()
