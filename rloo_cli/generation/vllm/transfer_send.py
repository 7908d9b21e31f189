"""The sending end of a weight transfer: gloo here, NCCL and CUDA IPC by vLLM's own trainer classes.

A sender is connected when constructed; its `send_weights` runs one whole update (start, tensors,
finish) through a `TransferClient`, the engine's side of it over HTTP or a pipe. All calls block:
the caller makes them on a thread with a deadline (`deadlines`).
"""

import importlib
from math import prod
from socket import socket
from types import ModuleType
from typing import Protocol

from torch.distributed import ProcessGroupGloo

from rloo_cli.generation.vllm import lora_slot, transfer_gloo, versions
from rloo_cli.generation.vllm.deadlines import BackgroundCall
from rloo_cli.generation.vllm.transfer_gloo import TensorSpec
from rloo_cli.generation.vllm.weights import TransferClient, WeightSource
from rloo_cli.utils import device_waits
from rloo_cli.utils.errors import GenerationError, MachineError
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject

# An aborted send's kernels end within milliseconds; anything longer is a hang.
SEND_ABORT_TIMEOUT_S = 60.0
MIN_BUFFER_BYTES = 256 * 2**20  # bytes; a smaller one would be sent in many small messages


class WeightSender(Protocol):
    """A connection that weights are sent over."""

    def send_weights(self) -> None:
        """Send one whole update."""

    def shutdown(self) -> None:
        """Close the connection."""


def connect_weight_sender(
    backend: str, client: TransferClient, source: WeightSource, host: str, peer_host: str,
    num_workers: int, limit_s: float,
) -> WeightSender:  # fmt: skip
    """Connect with an engine of `num_workers` processes that receive weights.

    `host`: our address, `peer_host`: theirs. `limit_s`: how long gloo waits for the other side.
    """
    if backend in ("gloo", lora_slot.ADAPTER_TRANSFER):
        return GlooSender(client, source, host, peer_host, num_workers, limit_s)
    if backend == "nccl":
        return _connect_nccl(client, source, host, num_workers)
    return _connect_ipc(client, source)


def close_lost_sender(weight_sender: WeightSender) -> None:
    """Close a connection whose other side is lost, perhaps in the middle of a send.

    A broadcast that NCCL has begun spins on the GPU until its communicator is aborted, which
    `shutdown` does. Then this waits for the device with a deadline, since the next wait would have
    none. Raises MachineError if the device is still busy after it.
    """
    weight_sender.shutdown()
    if not device_waits.is_device_done(SEND_ABORT_TIMEOUT_S):
        what = f"NCCL did not abort a send within {SEND_ABORT_TIMEOUT_S:g} s: the GPU is still busy"
        raise MachineError(f"{what}; resume=auto continues from the last checkpoint")


class GlooSender:
    """Our own sender: broadcasts buffers of bytes over loopback or a named address."""

    def __init__(
        self, client: TransferClient, source: WeightSource, host: str, peer_host: str,
        num_workers: int, limit_s: float,
    ):  # fmt: skip
        self.client, self.source = client, source
        self.group: ProcessGroupGloo | None = None
        if not num_workers:
            return
        listening = transfer_gloo.listen_on_free_port(host)
        port = listening.getsockname()[1]
        init = {
            "host": host, "port": port, "own_host": peer_host, "world_size": num_workers + 1,
            "rank_offset": 1, "timeout_s": limit_s,
        }  # fmt: skip
        # The engine's call returns only once both sides have met.
        call = BackgroundCall(lambda: client.init_weight_transfer_engine(init))
        self.group = transfer_gloo.join_transfer_group(
            host, port, 0, num_workers + 1, limit_s, host, listening
        )
        call.wait()

    def send_weights(self) -> None:
        """Send one whole update. Raises the engine's own error, not one that follows from it."""
        info = versions.describe_tensors(self.source.metadata(), "dtypes")
        specs = transfer_gloo.tensor_specs(**info)
        self.client.start_weight_update()
        if trigger_fault("sync.update") != "skip":
            info["buffer_bytes"] = transfer_gloo.BUFFER_BYTES
            # A broadcast never ends if the other side is gone, so it runs in the background, and
            # the engine's call, which does end, in the foreground.
            sent = BackgroundCall(lambda: self._broadcast(specs))
            self.client.update_weights(info)
            sent.wait()
        if trigger_fault("sync.finish") != "skip":
            self.client.finish_weight_update()

    def _broadcast(self, specs: list[TensorSpec]) -> None:
        if self.group is None:
            return
        tensors = iter(self.source)
        for run in transfer_gloo.split_into_buffers(specs, transfer_gloo.BUFFER_BYTES):
            buffer = transfer_gloo.pack_tensors([next(tensors)[1] for _ in run])
            transfer_gloo.broadcast_buffer(self.group, buffer)

    def shutdown(self) -> None:
        """Leave the group; the engine leaves it when it joins the next one."""
        self.group = None


def packing_buffer_bytes(source: WeightSource) -> int:
    """Bytes of the buffer that tensors are packed into: no tensor may be larger than it, and both
    sides hold one or two such buffers, beside models that fill the GPU."""
    sizes = (prod(m.shape) * m.dtype.itemsize for m in source.metadata())
    return max(MIN_BUFFER_BYTES, *sizes, 0)


def _connect_nccl(
    client: TransferClient, source: WeightSource, host: str, num_workers: int
) -> WeightSender:
    """vLLM's own sender over NCCL, packed.

    It is constructed as in vLLM's `trainer_init`, except for the socket on which both sides
    meet: vLLM's listens only on IPv4, at a port found free and closed before.
    """
    if versions.is_old_vllm():
        return versions.NcclSender(client, source, host, num_workers + 1)
    engine, common = _vllm_transfer_module("nccl_engine"), _vllm_transfer_module("nccl_common")
    listening = transfer_gloo.listen_on_free_port(host)
    port = listening.getsockname()[1]
    where = {"master_address": host, "master_port": port, "world_size": num_workers + 1}
    sizes = {"packed": True, "packed_buffer_size_bytes": packing_buffer_bytes(source)}
    info = common.NCCLWeightTransferInitInfo(rank_offset=1, **where, **sizes)
    sender = engine.NCCLTrainerWeightTransferEngine(client=client, source=source, **sizes)
    # The engine's call returns only once both sides have met.
    payload = common.worker_init_payload(info)
    call = BackgroundCall(lambda: client.init_weight_transfer_engine(payload))
    sender.model_update_group = _nccl_communicator(listening, where)
    call.wait()
    weight_sender: WeightSender = sender
    return weight_sender


def _nccl_communicator(listening: socket, init_info: JsonObject) -> object:
    """NCCL's communicator, as its rank 0; the group's store takes over the socket `listening`."""
    utils = importlib.import_module("vllm.distributed.utils")
    pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    nccl = importlib.import_module("vllm.utils.nccl")
    group = utils.StatelessProcessGroup.create(
        init_info["master_address"], init_info["master_port"], 0, init_info["world_size"],
        listen_socket=listening,
    )  # fmt: skip
    with nccl.unpinned_nccl_env():
        return pynccl.PyNcclCommunicator(group, device=device_waits.current_gpu())


def _connect_ipc(client: TransferClient, source: WeightSource) -> WeightSender:
    """vLLM's own sender of CUDA IPC handles, packed, to a child on the same GPU."""
    if versions.is_old_vllm():
        return versions.HandleSender(client, source, packing_buffer_bytes(source))
    factory, engine = _vllm_transfer_module("factory"), _vllm_transfer_module("ipc_engine")
    size = packing_buffer_bytes(source)
    info = engine.IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    trainer = factory.WeightTransferTrainerFactory
    weight_sender: WeightSender = trainer.trainer_init(info, client=client, source=source)
    return weight_sender


def _vllm_transfer_module(name: str) -> ModuleType:
    """A module of vLLM's weight transfer. Raises GenerationError if vLLM is not installed."""
    try:
        return importlib.import_module(f"vllm.distributed.weight_transfer.{name}")
    except ImportError as error:
        what = f"cannot import vLLM, whose code sends a GPU's weights: {error}"
        fix = "pip install 'rloo-cli[vllm]' also where the trainer runs"
        raise GenerationError(f"{what}; {fix}") from None
