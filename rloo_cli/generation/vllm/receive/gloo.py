"""The gloo receiver: our own engine for machines without GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rloo_cli.generation.vllm import transfer_gloo, versions
from rloo_cli.generation.vllm.receive import Accounted
from rloo_cli.generation.vllm.transfer_gloo import Shape

if TYPE_CHECKING:
    Base = object
else:
    Base = versions.shape()


@dataclass
class Where(WeightTransferInitInfo):
    """How to meet the sender."""

    host: str
    port: int
    own_host: str  # the address this side listens on
    world_size: int
    rank_offset: int
    timeout_s: float


@dataclass
class What(WeightTransferUpdateInfo):
    """What is coming, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    buffer_bytes: int


class Receiver(Base, WeightTransferEngine[Where, What]):
    """Takes each buffer as it comes and gives its tensors to the model."""

    init_info_cls = Where
    update_info_cls = What
    group: Any = None

    def init_transfer_engine(self, init_info: Where) -> None:
        self.shutdown()  # a trainer that vanished left one
        parallel = self.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = transfer_gloo.join(
            init_info.host,
            init_info.port,
            init_info.rank_offset + index,
            init_info.world_size,
            init_info.timeout_s,
            init_info.own_host,
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: What) -> None:
        if self.group is None:
            raise RuntimeError("no trainer is connected: init_weight_transfer_engine comes first")
        self.model.load_weights(self._tensors(update_info))

    def _tensors(self, info: What) -> Iterator[tuple[str, Tensor]]:
        rows = zip(info.names, info.dtypes, info.shapes, strict=True)
        shapes = [Shape(name, dtype, tuple(shape)) for name, dtype, shape in rows]
        for run in transfer_gloo.buffers(shapes, info.buffer_bytes):
            # A new buffer each time: the loader may keep a tensor until its layer is complete.
            buffer = torch.empty(sum(s.room for s in run), dtype=torch.uint8)
            transfer_gloo.broadcast(self.group, buffer)
            yield from ((name, t.to(self.device)) for name, t in transfer_gloo.unpack(buffer, run))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


class Gloo(Accounted, Receiver):
    """Registered as `rloo_gloo`."""
