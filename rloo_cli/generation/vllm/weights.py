"""The trainer's weights as an engine wants them: checkpoint names, the serving dtype, in order.

A source has two methods (vLLM's own `WeightSource`): `metadata` says what will come, iteration
brings it, one tensor at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rloo_cli.distributed import gather
from rloo_cli.policy import lora
from rloo_cli.policy.model import weight_shape
from rloo_cli.utils.device_waits import wait_for_device, wait_for_stream
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class TensorMeta:
    """One tensor to come. The fields are those of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ModelWeightSource:
    """Every parameter of an unsharded model, each once (a tied head goes with its embedding).

    `dtype`: what the engine computes in; weights are cast on the way, one at a time.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype

    def metadata(self) -> list[TensorMeta]:
        """What iteration brings, in the same order. Of shapes alone: experts that are taken apart
        would else be made twice."""
        blank = {
            n: torch.empty(weight_shape(p), dtype=p.dtype, device="meta")
            for n, p in self.model.named_parameters()
        }
        return [
            TensorMeta(n, self.dtype, tuple(t.shape)) for n, t in self._to_checkpoint_names(blank)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        named = self._checkpoint_tensors()
        wait_for_stream()  # experts that were taken apart are packed on other streams too
        for name, tensor in named:
            yield name, tensor.detach().to(self.dtype).contiguous()

    def _checkpoint_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters under the names that a checkpoint gives them. Experts that transformers
        fuses are taken apart again."""
        return self._to_checkpoint_names({n: p.detach() for n, p in self.model.named_parameters()})

    def _to_checkpoint_names(self, parameters: JsonObject) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            return list(revert_weight_conversion(self.model, parameters).items())


class GatheredWeightSource(ModelWeightSource):
    """The same of a model whose weights are spread: gathered layer by layer, never all at once.

    `units`: brings them, as {parameter: tensor}; all ranks gather together.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        gather_weights: Callable[[], Iterator[dict[str, Tensor]]],
    ):
        super().__init__(model, dtype)
        self.gather_weights = gather_weights

    def metadata(self) -> list[TensorMeta]:
        """What iteration brings, in the same order."""
        found = []
        for unit in gather.parameters_by_unit(self.model):
            blank = {
                n: torch.empty(weight_shape(p), dtype=p.dtype, device="meta")
                for n, p in unit.items()
            }
            found += [
                TensorMeta(n, self.dtype, tuple(t.shape))
                for n, t in self._to_checkpoint_names(blank)
            ]
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for unit in self.gather_weights():
            # It was gathered on whichever of the engine's packing streams was the current one, and
            # its last tensors may be packed on the next. So they wait for it, each is copied on
            # the stream that packs it, and the unit's memory is free once all copies are made.
            named = self._to_checkpoint_names(unit)
            wait_for_stream()
            for name, tensor in named:
                yield name, _cast_copy(tensor, self.dtype)
            wait_for_device()


def _cast_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype; on a GPU always memory of its own, which the current stream owns."""
    return tensor.to(dtype, copy=tensor.is_cuda).contiguous()


class AdapterWeightSource:
    """An adapted model's adapter and nothing else; `gather` makes a sharded tensor whole."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        gather: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ):
        self.model, self.dtype, self.gather = model, dtype, gather
        self.scales = lora.adapter_scales(model)

    def metadata(self) -> list[TensorMeta]:
        """What iteration brings, in the same order."""
        named = lora.adapter_tensors(self.model)
        return [TensorMeta(name, self.dtype, tuple(t.shape)) for name, t in named.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in lora.adapter_tensors(self.model).items():
            whole = self.gather(tensor.detach()).float()
            if "lora_B" in name or "lora_embedding_B" in name:
                layer = name.removeprefix(lora.PEFT_NAME_PREFIX).partition(".lora_")[0]
                whole = whole * self.scales[layer]
            yield name, whole.to(self.dtype).contiguous()
