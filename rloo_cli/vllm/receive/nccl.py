"""vLLM's NCCL receiver, accounted."""

from typing import Any

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rloo_cli.vllm.receive import Accounted


class Nccl(Accounted, NCCLWeightTransferEngine):
    """Registered as `rloo_nccl`."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()  # a trainer that vanished left one
        super().init_transfer_engine(init_info)
