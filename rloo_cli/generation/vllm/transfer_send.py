"""The sending end of a weight transfer: gloo here, NCCL and CUDA IPC by vLLM's own trainer halves.

A link is made connected; `send_weights` drives one whole update (start, tensors, finish) through
a `Control`, which is the engine's side of it over HTTP or a pipe. Everything here blocks: the
caller puts it on a thread and keeps the deadline (`waiting`).
"""

import importlib
from math import prod
from socket import socket
from typing import Any, Protocol

from rloo_cli.generation.vllm import lora_slot, transfer_gloo, versions
from rloo_cli.generation.vllm.deadlines import BackgroundCall
from rloo_cli.generation.vllm.transfer_gloo import TensorSpec
from rloo_cli.generation.vllm.weights import ModelWeightSource
from rloo_cli.utils import device_waits
from rloo_cli.utils.errors import GenerationError, MachineError, Problem
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject

SEND_ABORT_TIMEOUT_S = (
    60.0  # for an aborted send's kernels to end: milliseconds, once they are aborted
)
MIN_BUFFER_BYTES = 256 * 2**20  # bytes; a smaller one would be sent in many small messages


class TransferClient(Protocol):
    """What an engine does about weights. The four methods are those of vLLM's
    `VLLMWeightSyncClient`; each raises when the engine refuses."""

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender(Protocol):
    """A connection that weights are sent over."""

    def send_weights(self) -> None:
        """One whole update."""

    def shutdown(self) -> None:
        """Let go of the connection."""


def connect_weight_sender(
    backend: str,
    client: TransferClient,
    source: ModelWeightSource,
    host: str,
    peer_host: str,
    num_workers: int,
    limit_s: float,
) -> WeightSender:
    """Connect with an engine of `workers` processes. `host`: our address, `peer`: theirs."""
    if backend in ("gloo", lora_slot.ADAPTER_TRANSFER):
        return GlooSender(client, source, host, peer_host, num_workers, limit_s)
    if backend == "nccl":
        return _connect_nccl(client, source, host, num_workers)
    return _connect_ipc(client, source)


def close_lost_sender(weight_sender: WeightSender) -> None:
    """Let go of a connection whose other side is lost, perhaps in the middle of a send.

    A broadcast that NCCL has begun spins on the GPU until its communicator is aborted, which
    `shutdown` does. Whether that was enough is seen here, with a deadline: the next wait for the
    device would have none. Raises MachineError where it was not.
    """
    weight_sender.shutdown()
    if not device_waits.is_device_done(SEND_ABORT_TIMEOUT_S):
        raise MachineError(
            Problem(
                "the GPU is still busy with a send whose other side is gone",
                "generation",
                f"NCCL was told to abort it, and it did not end within {SEND_ABORT_TIMEOUT_S:g} s",
                "resume=auto goes on from the last checkpoint, in a new process",
            )
        )


class GlooSender:
    """Our own sender, of bytes in buffers over loopback or a named address."""

    def __init__(
        self,
        client: TransferClient,
        source: ModelWeightSource,
        host: str,
        peer_host: str,
        num_workers: int,
        limit_s: float,
    ):
        self.client, self.source = client, source
        self.group: Any = None
        if not num_workers:
            return
        listening = transfer_gloo.listen_on_free_port(host)
        port = listening.getsockname()[1]
        init = {
            "host": host,
            "port": port,
            "own_host": peer_host,
            "world_size": num_workers + 1,
            "rank_offset": 1,
            "timeout_s": limit_s,
        }
        # The engine's call returns only once both sides have met.
        call = BackgroundCall(lambda: client.init_weight_transfer_engine(init))
        self.group = transfer_gloo.join_transfer_group(
            host, port, 0, num_workers + 1, limit_s, host, listening
        )
        call.wait()

    def send_weights(self) -> None:
        """One whole update. Raises what the engine says, before anything that follows from it."""
        shapes = [
            TensorSpec(m.name, str(m.dtype).removeprefix("torch."), m.shape)
            for m in self.source.metadata()
        ]
        self.client.start_weight_update()
        if trigger_fault("sync.update") != "skip":
            info = {
                "names": [s.name for s in shapes],
                "dtypes": [s.dtype for s in shapes],
                "shapes": [list(s.shape) for s in shapes],
                "buffer_bytes": transfer_gloo.BUFFER_BYTES,
            }
            # A broadcast has no end of its own when the other side is gone: the engine's call,
            # which has one, stands in front.
            sent = BackgroundCall(lambda: self._broadcast(shapes))
            self.client.update_weights(info)
            sent.wait()
        if trigger_fault("sync.finish") != "skip":
            self.client.finish_weight_update()

    def _broadcast(self, specs: list[TensorSpec]) -> None:
        if self.group is None:
            return
        tensors = iter(self.source)
        for run in transfer_gloo.split_into_buffers(specs, transfer_gloo.BUFFER_BYTES):
            transfer_gloo.broadcast_buffer(
                self.group, transfer_gloo.pack_tensors([next(tensors)[1] for _ in run])
            )

    def shutdown(self) -> None:
        """Leave the group; the engine's side notices when it meets the next one."""
        self.group = None


def packing_buffer_bytes(source: ModelWeightSource) -> int:
    """Bytes of the buffer that tensors are packed into: no tensor may be larger, and both sides
    hold one or two of it, beside models that fill the GPU."""
    sizes = (prod(m.shape) * m.dtype.itemsize for m in source.metadata())
    return max(MIN_BUFFER_BYTES, *sizes, 0)


def _connect_nccl(
    client: TransferClient, source: ModelWeightSource, host: str, num_workers: int
) -> WeightSender:
    """vLLM's own sender over NCCL, packed.

    Put together here as its `trainer_init` does it, but for the socket on which both sides meet:
    that one listens on IPv4 alone, at a port that must have been found, and closed, before.
    """
    if versions.is_old_vllm():
        return versions.NcclSender(client, source, host, num_workers + 1)
    engine, common = _vllm_transfer_module("nccl_engine"), _vllm_transfer_module("nccl_common")
    listening = transfer_gloo.listen_on_free_port(host)
    where = {
        "master_address": host,
        "master_port": listening.getsockname()[1],
        "world_size": num_workers + 1,
    }
    sizes = {"packed": True, "packed_buffer_size_bytes": packing_buffer_bytes(source)}
    told = common.NCCLWeightTransferInitInfo(rank_offset=1, **where, **sizes)
    sender = engine.NCCLTrainerWeightTransferEngine(client=client, source=source, **sizes)
    # The engine's call returns only once both sides have met.
    payload = common.worker_init_payload(told)
    call = BackgroundCall(lambda: client.init_weight_transfer_engine(payload))
    sender.model_update_group = _nccl_communicator(listening, where)
    call.wait()
    link: WeightSender = sender
    return link


def _nccl_communicator(listening: socket, init_info: JsonObject) -> Any:
    """NCCL's group, as its rank 0. `listening` is the store's from here on."""
    utils = importlib.import_module("vllm.distributed.utils")
    pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    nccl = importlib.import_module("vllm.utils.nccl")
    group = utils.StatelessProcessGroup.create(
        init_info["master_address"], init_info["master_port"], 0, init_info["world_size"],
        listen_socket=listening,
    )  # fmt: skip
    with nccl.unpinned_nccl_env():
        return pynccl.PyNcclCommunicator(group, device=device_waits.current_gpu())


def _connect_ipc(client: TransferClient, source: ModelWeightSource) -> WeightSender:
    """vLLM's own sender of CUDA IPC handles, packed, to a child on the same GPU."""
    if versions.is_old_vllm():
        return versions.HandleSender(client, source, packing_buffer_bytes(source))
    factory, engine = _vllm_transfer_module("factory"), _vllm_transfer_module("ipc_engine")
    info = engine.IPCTrainerInitInfo(
        rank=0, packed=True, packed_buffer_size_bytes=packing_buffer_bytes(source)
    )
    trainer = factory.WeightTransferTrainerFactory
    link: WeightSender = trainer.trainer_init(info, client=client, source=source)
    return link


def _vllm_transfer_module(name: str) -> Any:
    """A module of vLLM's weight transfer. Raises GenerationError where vLLM is not here."""
    try:
        return importlib.import_module(f"vllm.distributed.weight_transfer.{name}")
    except ImportError as error:
        why = f"a GPU's weights are sent by vLLM's own code: {error}"
        fix = "pip install 'rloo-cli[vllm]' beside the trainer too"
        raise GenerationError(Problem("weights cannot be sent", "generation", why, fix)) from None
