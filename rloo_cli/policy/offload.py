"""What a run keeps on its device between two steps, in the CPU's memory until it goes on.

For members of a sweep that share a device (`turns`). Tensors stay the objects that they are, only
their data moves: optimizer and modules know them by what they are. Copies are exact. Weights that
are quantized stay: what bitsandbytes keeps beside them is bound to the device.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rloo_cli.utils.device_waits import wait_for_device

CPU = torch.device("cpu")


def iter_model_tensors(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights and buffers, each once."""
    seen: set[int] = set()
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in seen and tensor.is_floating_point():
                seen.add(id(tensor))
                yield tensor


def iter_optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Masters that are not the weights, and state: moments, whatever a user's optimizer keeps."""
    for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
        if weight is not master:
            yield master
    for state in optimizer.inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@torch.no_grad()
def offload_tensors(tensors: Iterable[Tensor]) -> list[tuple[Tensor, torch.device]]:
    """Move these to the CPU; those that were elsewhere, and where."""
    moved = []
    for tensor in tensors:
        if tensor.device != CPU:
            moved.append((tensor, tensor.device))
            kept = _pinned_copy_of(tensor)
            kept.copy_(tensor.data, non_blocking=True)
            tensor.data = kept
    if moved:
        wait_for_device()  # the copies are under way, and their sources are let go of
        torch.cuda.empty_cache()
    return moved


def _pinned_copy_of(like: Tensor) -> Tensor:
    """Room for a tensor in memory that a GPU reads and writes by itself, several times as fast."""
    return torch.empty_like(like.data, device=CPU, pin_memory=like.is_cuda)


@torch.no_grad()
def reload_tensors(moved: Iterable[tuple[Tensor, torch.device]]) -> None:
    """Put back what `away` moved."""
    for tensor, device in moved:
        tensor.data = tensor.data.to(device, non_blocking=True)
    wait_for_device()
