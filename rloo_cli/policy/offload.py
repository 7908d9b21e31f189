"""Moves the tensors that a run keeps on its device to CPU memory and back.

It is for trials of a sweep that share a device (`utils/sweep_time_slices`). Tensors stay the same
objects, only their data moves, since optimizer and modules refer to them. Copies are exact.
Quantized weights stay: bitsandbytes' state for them is bound to the device.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rloo_cli.utils.device_waits import wait_for_device

CPU = torch.device("cpu")


def iter_model_tensors(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Iterate over weights and buffers, each once."""
    seen: set[int] = set()
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in seen and tensor.is_floating_point():
                seen.add(id(tensor))
                yield tensor


def iter_optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over masters that are not the weights themselves, and state such as moments."""
    for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
        if weight is not master:
            yield master
    for state in optimizer.inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@torch.no_grad()
def offload_tensors(tensors: Iterable[Tensor]) -> list[tuple[Tensor, torch.device]]:
    """Move tensors to the CPU. -> those that were elsewhere, with their device"""
    moved = []
    for tensor in tensors:
        if tensor.device != CPU:
            moved.append((tensor, tensor.device))
            # A GPU copies to page-locked memory several times as fast.
            pinned = torch.empty_like(tensor.data, device=CPU, pin_memory=tensor.is_cuda)
            pinned.copy_(tensor.data, non_blocking=True)
            tensor.data = pinned
    if moved:
        wait_for_device()  # the copies must be complete before their sources are freed
        torch.cuda.empty_cache()
    return moved


@torch.no_grad()
def reload_tensors(moved: Iterable[tuple[Tensor, torch.device]]) -> None:
    """Move back what `offload_tensors` moved."""
    for tensor, device in moved:
        tensor.data = tensor.data.to(device, non_blocking=True)
    wait_for_device()
