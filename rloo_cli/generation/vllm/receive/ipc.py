"""The CUDA IPC receiver with complete updates: vLLM's, or ours where that one needs ray."""

from typing import TYPE_CHECKING

from rloo_cli.generation.vllm import versions
from rloo_cli.generation.vllm.receive import CompleteUpdateMixin

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Base
else:
    Base = versions.ipc_engine_class()


class Ipc(CompleteUpdateMixin, Base):
    """Registered as `rloo_ipc`."""
