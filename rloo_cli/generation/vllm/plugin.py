"""What vLLM runs in each of its processes, because pyproject.toml names it as a plug-in.

It registers our receivers of weights by name, and sees to it that no process of a server of ours
outlives the one that started it.
"""

import os

from rloo_cli.generation.vllm import process_group

RECEIVERS = {
    "rloo_gloo": "Gloo", "rloo_nccl": "Nccl", "rloo_ipc": "Ipc", "rloo_adapter": "Adapter",
}  # fmt: skip


def register() -> None:
    """The entry point of the group `vllm.general_plugins`; it may be called more than once."""
    if os.environ.get("RLOO_SERVER"):
        process_group.die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for name, kind in RECEIVERS.items():
        if name not in Factory._registry:
            Factory.register_engine(name, f"rloo_cli.generation.vllm.receive.{kind.lower()}", kind)
