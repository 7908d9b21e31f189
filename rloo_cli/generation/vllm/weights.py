"""The trainer's weights in the form an engine needs: checkpoint names, its dtype, in order.

A sender reads them from a `WeightSource` and talks to the engine through a `TransferClient`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rloo_cli.distributed import gather
from rloo_cli.policy import lora, vision
from rloo_cli.policy.model import weight_shape
from rloo_cli.utils.device_waits import wait_for_device, wait_for_stream
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class TensorMeta:
    """One tensor to come. The fields are those of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Weights to send, one tensor at a time. The methods are those of vLLM's `WeightSource`."""

    def metadata(self) -> list[TensorMeta]:
        """The metadata of what iteration yields, in the same order."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class TransferClient(Protocol):
    """The engine's side of a weight update. The methods are those of vLLM's `VLLMWeightSyncClient`;
    each raises when the engine refuses."""

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: JsonObject) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class ModelWeightSource:
    """Every parameter of an unsharded model, each once (a tied head goes with its embedding).

    `dtype`: the engine's; tensors are cast to it one at a time. With
    `leaves_frozen`, parts frozen by `model.freeze`, which the engine has already, are left
    out.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype, self.leaves_frozen = model, dtype, False

    def metadata(self) -> list[TensorMeta]:
        return self._metadata_of(self._parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        left = vision.frozen_names(self.model) if self.leaves_frozen else set[str]()
        return {n: p for n, p in self.model.named_parameters() if n not in left}

    def _metadata_of(self, parameters: Mapping[str, nn.Parameter]) -> list[TensorMeta]:
        # From shapes only: fused experts would otherwise be split twice.
        blank = {
            name: torch.empty(weight_shape(p), dtype=p.dtype, device="meta")
            for name, p in parameters.items()
        }
        named = self._to_checkpoint_names(blank)
        return [TensorMeta(name, self.dtype, tuple(t.shape)) for name, t in named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        named = self._to_checkpoint_names({n: p.detach() for n, p in self._parameters().items()})
        wait_for_stream()  # split experts are packed on other streams too
        for name, tensor in named:
            yield name, tensor.detach().to(self.dtype).contiguous()

    def _to_checkpoint_names(self, parameters: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Tensors by the names of a checkpoint. Experts that transformers fuses are split."""
        with torch.no_grad():
            return list(revert_weight_conversion(self.model, parameters).items())


class GatheredWeightSource(ModelWeightSource):
    """The parameters of a sharded model, gathered unit by unit and never all at once.

    `gather_weights` yields each unit as {parameter: tensor}; all ranks gather together.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype,
        gather_weights: Callable[[], Iterator[dict[str, Tensor]]],
    ):  # fmt: skip
        super().__init__(model, dtype)
        self.gather_weights = gather_weights

    def metadata(self) -> list[TensorMeta]:
        units = gather.parameters_by_unit(self.model)
        return [meta for unit in units for meta in self._metadata_of(unit)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for unit in self.gather_weights():
            # A unit was gathered on whichever of the engine's packing streams was current, and its
            # last tensors may be packed on the next one. So they wait for the unit, each is copied
            # on the stream that packs it, and the unit's memory is free once all copies are made.
            named = self._to_checkpoint_names(unit)
            wait_for_stream()
            for name, tensor in named:
                yield name, _cast_copy(tensor, self.dtype)
            wait_for_device()


def _cast_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype; on a GPU always a copy, whose memory the current stream owns."""
    return tensor.to(dtype, copy=tensor.is_cuda).contiguous()


class AdapterWeightSource:
    """A model's trained adapter and nothing else.

    `gather_weights` yields its tensors, whole, by the names of peft's files; all ranks gather
    together. None = the model has them whole.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype,
        gather_weights: Callable[[], Iterator[dict[str, Tensor]]] | None = None,
    ):  # fmt: skip
        self.model, self.dtype, self.gather_weights = model, dtype, gather_weights
        self.scales = lora.adapter_scales(model)

    def metadata(self) -> list[TensorMeta]:
        whole = self.gather_weights is None
        named = lora.adapter_tensors(self.model) if whole else lora.adapter_parameters(self.model)
        return [TensorMeta(name, self.dtype, weight_shape(t)) for name, t in named.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.gather_weights is None:
            yield from self._scaled(lora.adapter_tensors(self.model))
            return
        for tensors in self.gather_weights():
            wait_for_stream()
            for name, tensor in self._scaled(tensors):
                yield name, _cast_copy(tensor, self.dtype)
            wait_for_device()

    def _scaled(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            whole = tensor.detach().float()
            if "lora_B" in name or "lora_embedding_B" in name:
                layer = name.removeprefix(lora.PEFT_NAME_PREFIX).partition(".lora_")[0]
                whole = whole * self.scales[layer]
            yield name, whole.to(self.dtype).contiguous()
