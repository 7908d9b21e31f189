"""A sampler in this process for weights that are sharded (large models sample with vLLM).

Each rank's whole copy receives the weights before each step: decoding waits for no other rank.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.generation import Generator, GeneratorWrapper
from rloo_cli.policy import lora
from rloo_cli.policy.model import Policy

GatherWeights = Callable[[], Iterator[dict[str, Tensor]]]  # all weights, whole, unit by unit


class ReplicaGenerator(GeneratorWrapper):
    """`inner` samples with `copy`. All ranks call `gather_weights` together.

    Of a model with an adapter the adapter alone is gathered, by the names of peft's files.
    """

    def __init__(self, inner: Generator, copy: PreTrainedModel, gather_weights: GatherWeights):
        super().__init__(inner)
        self.gather_weights = gather_weights
        adapted = lora.has_adapter(copy)
        self.parameters: dict[str, Tensor] = (
            {**lora.adapter_tensors(copy)} if adapted else {**dict(copy.named_parameters())}
        )

    @torch.no_grad()
    def load(self, policy: Policy, version: int) -> None:
        """Copy the trainer's current weights."""
        for unit in self.gather_weights():
            for name, tensor in unit.items():
                self.parameters[name].copy_(tensor)
        self.inner.load(policy, version)
