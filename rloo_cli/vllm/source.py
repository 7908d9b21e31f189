"""The trainer's weights as an engine wants them: checkpoint names, the serving dtype, in order.

Sharded parameters and adapters will be other sources with the same two methods (vLLM's own
`WeightSource`): `metadata` says what will come, iteration brings it, one tensor at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class Meta:
    """One tensor to come. The fields are those of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Whole:
    """Every parameter of an unsharded model, each once (a tied head goes with its embedding).

    `dtype`: what the engine computes in; weights are cast on the way, one at a time.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype

    def metadata(self) -> list[Meta]:
        """What iteration brings, in the same order."""
        return [Meta(name, self.dtype, tuple(t.shape)) for name, t in self._named()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named():
            yield name, tensor.detach().to(self.dtype).contiguous()

    def _named(self) -> list[tuple[str, Tensor]]:
        """Parameters under the names that a checkpoint gives them. Experts that transformers
        fuses are taken apart again."""
        named: dict[str, Any] = {n: p.detach() for n, p in self.model.named_parameters()}
        with torch.no_grad():
            return list(revert_weight_conversion(self.model, named).items())
