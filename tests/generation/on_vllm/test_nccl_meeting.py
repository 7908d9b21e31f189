"""Where NCCL's members meet, with the installed vLLM's own store; NCCL itself is a stand-in."""

import contextlib
import socket
from typing import Any

import pytest
import torch
from policy_cases import fresh

from rloo_cli.generation.vllm import transfer_gloo, transfer_send, versions
from rloo_cli.generation.vllm.weights import ModelWeightSource

vllm = pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(versions.is_old_vllm(), reason="an older vLLM meets in its own way"),
]


def can_listen(host: str) -> bool:
    with contextlib.suppress(OSError), transfer_gloo.listen_on_free_port(host):
        return True
    return False


class Communicator:
    """vLLM's PyNcclCommunicator as far as the meeting goes: rank 0 tells the others an id."""

    def __init__(self, group: Any, device: Any):
        self.group = group  # with the store, as vLLM's keeps it
        self.rank, self.size, self.device = group.rank, group.world_size, device
        self.id = group.broadcast_obj("an id" if group.rank == 0 else None, src=0)


class Engine:
    """One worker of an engine, which meets the trainer as vLLM's own does."""

    def __init__(self) -> None:
        self.met: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer import nccl_common

        self.info = nccl_common.NCCLWeightTransferInitInfo(**init_info)
        with (
            pytest.raises(OSError),
            socket.create_server(
                ("::1" if ":" in self.info.master_address else "127.0.0.1", self.info.master_port),
                family=socket.AF_INET6 if ":" in self.info.master_address else socket.AF_INET,
            ),
        ):
            pass  # nobody else can have the port: it was never closed
        self.met.append(
            nccl_common.stateless_init_process_group(
                self.info.master_address, self.info.master_port, 1, 2, device=5
            )
        )


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "::1"])
def test_trainer_and_engine_meet_on_either_family_at_a_port_that_is_never_let_go(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_listen(host):
        pytest.skip(f"this machine has no {host}")
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(transfer_send.device_waits, "current_gpu", lambda: 3)
    engine, source = Engine(), ModelWeightSource(fresh(), torch.float32)
    sender: Any = transfer_send.connect_weight_sender("nccl", engine, source, host, host, 1, 20.0)  # type: ignore[arg-type]
    ours, (theirs,) = sender.model_update_group, engine.met
    assert (ours.rank, theirs.rank, ours.size, theirs.size) == (0, 1, 2, 2)
    assert ours.id == theirs.id == "an id" and ours.device == 3
    agreed = (engine.info.packed, engine.info.packed_buffer_size_bytes)
    assert agreed == (sender.packed, sender.packed_buffer_size_bytes)
    assert agreed == (True, transfer_send.packing_buffer_bytes(source))
    assert engine.info.packed_num_buffers == sender.packed_num_buffers


def test_a_reserved_port_is_free_for_one_who_asks_as_vllm_does_and_for_nobody_else() -> None:
    with transfer_gloo.reserve_free_port("127.0.0.1") as kept:
        address = kept.getsockname()
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(address)
        with socket.socket() as vllms:
            vllms.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            vllms.bind(address)
            vllms.listen()
            socket.create_connection(address, 5).close()
