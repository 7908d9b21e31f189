"""The gloo receiver: our own engine for machines without GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
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
from rloo_cli.generation.vllm.receive import CompleteUpdateMixin

if TYPE_CHECKING:
    Base = object
else:
    Base = versions.transfer_engine_shim()


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How to connect with the sender; `GlooSender` fills it in."""

    host: str
    port: int
    own_host: str  # the address this side listens on
    world_size: int
    rank_offset: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    buffer_bytes: int


class GlooReceiver(Base, WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Loads the tensors of each buffer into the model as the buffer arrives."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()  # left by a trainer that vanished
        parallel = self.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        info, rank = init_info, init_info.rank_offset + index
        self.group = transfer_gloo.join_transfer_group(
            info.host, info.port, rank, info.world_size, info.timeout_s, info.own_host
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("no trainer is connected: init_weight_transfer_engine comes first")
        self.model.load_weights(self._receive_tensors(update_info))

    def _receive_tensors(self, update_info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        names, dtypes, shapes = update_info.names, update_info.dtypes, update_info.shapes
        specs = transfer_gloo.tensor_specs(names, dtypes, shapes)
        for run in transfer_gloo.split_into_buffers(specs, update_info.buffer_bytes):
            # A new buffer each time: the loader may keep a tensor until its layer is complete.
            buffer = torch.empty(sum(s.aligned_bytes for s in run), dtype=torch.uint8)
            transfer_gloo.broadcast_buffer(self.group, buffer)
            for name, tensor in transfer_gloo.unpack_tensors(buffer, run):
                yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


class Gloo(CompleteUpdateMixin, GlooReceiver):
    """Registered as `rloo_gloo`."""
