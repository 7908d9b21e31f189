"""vLLM's NCCL receiver, with complete updates."""

from typing import TYPE_CHECKING

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rloo_cli.generation.vllm import versions
from rloo_cli.generation.vllm.receive import CompleteUpdateMixin

if TYPE_CHECKING:
    Base = object
else:
    Base = versions.transfer_engine_shim()


class Nccl(CompleteUpdateMixin, Base, NCCLWeightTransferEngine):
    """Registered as `rloo_nccl`."""

    def init_transfer_engine(self, init_info: object) -> None:
        self.shutdown()  # left by a trainer that vanished
        super().init_transfer_engine(init_info)
