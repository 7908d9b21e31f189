"""Fills and gathers a sharded model unit by unit: the parts around the layers, then each layer.

A model that is to be sharded is loaded only on rank 0, in CPU memory; the other ranks have
it on torch's `meta` device. Its weights are then sent unit by unit, and each rank keeps its share:
no rank ever holds more than one whole unit beside its shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo_cli.distributed.world import World
from rloo_cli.policy import lora, vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
Rank0Tensors = dict[str, Tensor] | None  # rank 0: every tensor of the real model by its name


class WeightGatherer(Protocol):
    """An engine that can gather its weights."""

    def gathered_parameters(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> AbstractContextManager[list[Tensor]]: ...


def decoder_layers(model: "PreTrainedModel") -> list[nn.Module]:
    """The decoder layers, in order: the modules of the list that is as long as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    modules = vision.language_modules(model)  # a tower may have the same number of layers
    lists = [m for m in modules if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


def parameters_by_unit(model: "PreTrainedModel") -> list[dict[str, nn.Parameter]]:
    """Parameters by name, in the model's order of units: those outside layers, then by layer."""
    of_layer = {
        id(p): n for n, layer in enumerate(decoder_layers(model)) for p in layer.parameters()
    }
    found: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(of_layer.get(id(parameter), -1), {})[name] = parameter
    return [found[n] for n in sorted(found)]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that belongs to a model, by the path of its attribute: parameters, buffers and
    other tensors in modules. A tied one has several names."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in _module_tensors(module):
            found[f"{path}.{name}".lstrip(".")] = value
    return found


def _module_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for holder in (module._parameters, module._buffers, vars(module)):
        yield from ((n, t) for n, t in holder.items() if isinstance(t, Tensor))


@torch.no_grad()
def materialize_unit(
    unit: nn.Module, meta_weights: "MetaWeights | None", world: World, dtype: torch.dtype | None
) -> None:
    """Give a unit on the meta device its weights, from rank 0, on this rank's device.

    Trained weights are stored in `dtype` if given. Tensors that are filled already stay.
    """
    if meta_weights is None:
        return
    filled: dict[int, Tensor] = {}  # of this unit: a tied weight stays one
    shells = []  # kept alive so that their ids stay unique
    for path, module in meta_weights.modules_of(unit):
        for name, shell in list(_module_tensors(module)):
            if not shell.is_meta:
                continue
            known = filled.get(id(shell))
            if known is None:
                known = _broadcast_tensor(
                    meta_weights.rank0_tensors, f"{path}.{name}".lstrip("."), shell, world
                )
                if isinstance(shell, nn.Parameter):
                    own = dtype if dtype and shell.requires_grad else known.dtype
                    known = nn.Parameter(known.to(own), requires_grad=shell.requires_grad)
                filled[id(shell)] = known
                shells.append(shell)
            _set_tensor(module, name, known)


def _broadcast_tensor(
    tensors: Rank0Tensors, name: str, meta_tensor: Tensor, world: World
) -> Tensor:
    if tensors is not None:
        known = tensors.pop(name).detach().to(world.device)  # sent once
        if known.shape != meta_tensor.shape:
            raise RuntimeError(
                f"{name} is {tuple(known.shape)}, its shell {tuple(meta_tensor.shape)}"
            )
        known = known.to(meta_tensor.dtype).contiguous()
    else:
        known = torch.empty(meta_tensor.shape, dtype=meta_tensor.dtype, device=world.device)
    if world.size > 1:
        dist.broadcast(known, 0)
    return known


def _set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    for holder in (module._parameters, module._buffers):
        if name in holder:
            holder[name] = value  # type: ignore[assignment]
            return
    vars(module)[name] = value


class MetaWeights:
    """A model without weights, and on rank 0 the weights that it will get."""

    def __init__(self, meta_model: nn.Module, model: nn.Module | None):
        self.module_paths = {
            id(module): path for path, module in meta_model.named_modules(remove_duplicate=False)
        }
        self.rank0_tensors = None if model is None else named_tensors(model)

    def modules_of(self, unit: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules of a unit by their path in the model; those around the model have none."""
        for module in unit.modules():
            if id(module) in self.module_paths:
                yield self.module_paths[id(module)], module


def iter_gathered_adapter(
    engine: "WeightGatherer", model: "PreTrainedModel"
) -> Iterator[dict[str, Tensor]]:
    """The trained adapter of a model, whole, by the names of peft's files: in one piece, since an
    adapter is small. In the trained dtype."""
    parameters = lora.adapter_parameters(model)
    with engine.gathered_parameters(list(parameters.values())) as tensors:
        yield dict(zip(parameters, tensors, strict=True))


def iter_gathered_weights(
    engine: "WeightGatherer", model: "PreTrainedModel", dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """All weights, whole, unit by unit; each is freed when the next one comes.

    `dtype`: they may be cast to it before they are sent.
    """
    for unit in parameters_by_unit(model):
        with engine.gathered_parameters(list(unit.values()), dtype) as tensors:
            yield dict(zip(unit, tensors, strict=True))
