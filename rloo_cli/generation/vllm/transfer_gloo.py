"""Weights over gloo, for machines without GPUs: what sender and receiver have in common.

The sender is rank 0, an engine's processes are the ranks from 1 on. Tensors travel as bytes, many
to a buffer: both sides cut the same list of shapes into the same buffers. Everything listens on
one named address: a TCPStore left to itself listens on every interface, and gloo on whichever
the host's name stands for.
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

BUFFER_BYTES = 64 * 2**20  # bytes of a full buffer
ALIGNMENT_BYTES = 16  # a tensor begins where any dtype may


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor."""

    name: str
    dtype: str  # torch's name, e.g. bfloat16
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        kind: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * kind.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Its bytes, rounded up so that the next one is aligned."""
        return -(-self.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def split_into_buffers(
    specs: Sequence[TensorSpec], max_bytes: int = BUFFER_BYTES
) -> Iterator[list[TensorSpec]]:
    """Cut into runs that fill a buffer; a tensor that is larger has its own."""
    run: list[TensorSpec] = []
    for shape in specs:
        if run and sum(s.aligned_bytes for s in run) + shape.aligned_bytes > max_bytes:
            yield run
            run = []
        run.append(shape)
    if run:
        yield run


def pack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one after another. -> (bytes,) uint8"""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-flat.numel() % ALIGNMENT_BYTES)]
    return torch.cat(parts)


def unpack_tensors(buffer: Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a buffer; they share its memory. (bytes,) uint8"""
    start = 0
    for shape in specs:
        part = buffer[start : start + shape.num_bytes]
        yield shape.name, part.view(getattr(torch, shape.dtype)).view(shape.shape)
        start += shape.aligned_bytes


def listen_on_free_port(host: str) -> socket.socket:
    """A socket that listens on `host` alone, at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    heard = socket.socket(family, socket.SOCK_STREAM)
    heard.bind((host, 0))
    heard.listen(128)
    return heard


def reserve_free_port(host: str) -> socket.socket:
    """A socket that keeps a free port of an IPv4 `host` for somebody who binds it again.

    It does not listen: of two sockets that both allow it Linux then lets the second one bind and
    listen, while no other process is given the port.
    """
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, 0))
    return kept


def join_transfer_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    own_host: str,
    listening: socket.socket | None = None,
) -> Any:
    """A process group of `world` members; returns once all are there. Raises RuntimeError.

    `listening`: the sender's socket; it stays the store's from here on.
    """
    limit = timedelta(seconds=timeout_s)
    given: Any = {}
    if listening is not None:
        given = {"master_listen_fd": listening.detach()}
    store = TCPStore(
        host, port, world_size, listening is not None, limit, wait_for_workers=False, **given
    )
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = limit
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)


def broadcast_buffer(group: Any, buffer: Tensor) -> None:
    """From rank 0 to all; blocks. (bytes,) uint8"""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()
