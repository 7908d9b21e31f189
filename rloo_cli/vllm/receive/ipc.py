"""vLLM's CUDA IPC receiver, accounted."""

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from rloo_cli.vllm.receive import Accounted


class Ipc(Accounted, IPCWeightTransferEngine):
    """Registered as `rloo_ipc`."""
