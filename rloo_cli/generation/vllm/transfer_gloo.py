"""Weights over gloo, for machines without GPUs: code shared by sender and receiver.

The sender is rank 0, an engine's processes are the ranks from 1 on. Tensors travel as bytes, many
to a buffer: both sides split the same list of specs into the same buffers. All sockets listen on
one named address: by default a TCPStore listens on every interface, and gloo on the one that the
host's name resolves to.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rloo_cli.utils.files import JsonObject

BUFFER_BYTES = 64 * 2**20  # bytes of a full buffer
ALIGNMENT_BYTES = 16  # tensors begin at multiples of it, which suits every dtype


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor."""

    name: str
    dtype: str  # torch's name, e.g. bfloat16
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Bytes in a buffer, rounded up so that the next tensor is aligned."""
        return -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tensor_specs(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[TensorSpec]:
    """The specs of an update, whose fields are sent as three lists."""
    fields = zip(names, dtypes, shapes, strict=True)
    return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in fields]


def split_into_buffers(
    specs: Sequence[TensorSpec], max_bytes: int = BUFFER_BYTES
) -> Iterator[list[TensorSpec]]:
    """Split into runs that fill a buffer; a larger tensor gets its own buffer."""
    run: list[TensorSpec] = []
    for spec in specs:
        if run and sum(s.aligned_bytes for s in run) + spec.aligned_bytes > max_bytes:
            yield run
            run = []
        run.append(spec)
    if run:
        yield run


def pack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Put the bytes of these tensors one after another, aligned. -> (bytes,) uint8"""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-flat.numel() % ALIGNMENT_BYTES)]
    return torch.cat(parts)


def unpack_tensors(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a buffer, (bytes,) uint8; they share its memory."""
    start = 0
    for spec in specs:
        part = buffer[start : start + spec.num_bytes]
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.aligned_bytes


def listen_on_free_port(host: str) -> socket.socket:
    """A socket that listens only on `host`, at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(128)
    return listening


def reserve_free_port(host: str) -> socket.socket:
    """A socket that reserves a free port of an IPv4 `host` for another one that binds it.

    It does not listen, so Linux lets a second socket with SO_REUSEADDR bind the port and listen;
    meanwhile no process that requests a free port gets this one.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def join_transfer_group(
    host: str, port: int, rank: int, world_size: int, timeout_s: float, own_host: str,
    listening: socket.socket | None = None,
) -> ProcessGroupGloo:  # fmt: skip
    """Join a process group of `world_size` processes; returns once all have joined. `host`, `port`:
    the sender's, whose socket `listening` the group's store takes over; `own_host`: the address of
    this process. Raises RuntimeError."""
    limit, is_master = timedelta(seconds=timeout_s), listening is not None
    given: JsonObject = {}
    if listening is not None:
        given = {"master_listen_fd": listening.detach()}
    store = TCPStore(host, port, world_size, is_master, limit, wait_for_workers=False, **given)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = limit
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)


def broadcast_buffer(group: Any, buffer: Tensor) -> None:
    """Send a buffer, (bytes,) uint8, from rank 0 to all others; returns once that is done."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()
