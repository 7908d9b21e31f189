"""The CUDA IPC receiver, accounted: vLLM's, or ours where that one needs ray."""

from typing import TYPE_CHECKING, Any

from rloo_cli.generation.vllm import versions
from rloo_cli.generation.vllm.receive import CompleteUpdateMixin

if TYPE_CHECKING:
    Base = Any
else:
    Base = versions.ipc_engine_class()


class Ipc(CompleteUpdateMixin, Base):
    """Registered as `rloo_ipc`."""
