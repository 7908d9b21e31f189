"""The receiver of an adapter: the base model's weights are never touched.

The tensors that arrive over gloo are written where vLLM looks for the adapter, and vLLM's own
loader reads them at the next request. Two traps: vLLM keeps using a loaded adapter even if its
files change, so it is removed here; and the prefix cache identifies an
adapter only by its name, so the sender resets that cache, as after every update.
"""

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from vllm.lora.utils import parse_fine_tuned_lora_name

from rloo_cli.generation.vllm import lora_slot, versions
from rloo_cli.generation.vllm.receive import missing_weights_error
from rloo_cli.generation.vllm.receive.gloo import GlooReceiver, GlooUpdateInfo


class Adapter(GlooReceiver):
    """Registered as `rloo_adapter`."""

    tensors: dict[str, Tensor] | None = None  # of the update that is open

    def start_weight_update(self) -> None:
        self.tensors = {}

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None or self.tensors is None:
            raise RuntimeError("no trainer is connected: init_weight_transfer_engine comes first")
        self.tensors |= {name: t.clone() for name, t in self._receive_tensors(update_info)}

    def finish_weight_update(self) -> None:
        """Raises ValueError that lists layers that the engine cannot adapt, or that lack a factor.

        vLLM then keeps the update open; the next call closes it, and the adapter stays unchanged.
        """
        tensors, self.tensors = self.tensors, None
        if tensors is None:
            return
        manager = self.model.lora_manager
        if wrong := adapter_mismatches(manager, tensors):
            raise missing_weights_error(wrong)
        folder = Path(os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE])
        part = folder / f".{lora_slot.ADAPTER_WEIGHTS_FILE}.{os.getpid()}"
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, part)
        part.rename(
            folder / lora_slot.ADAPTER_WEIGHTS_FILE
        )  # the workers of one engine write the same file
        manager.remove_adapter(lora_slot.ADAPTER_ID)


def adapter_mismatches(manager: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Faults of an adapter's tensors, layer by layer; [] if it fits."""
    if not tensors:
        return ["all of the adapter"]
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else versions.rename_mapper(mapper)
    packed = {part for parts in manager.packed_modules.values() for part in parts}
    halves: dict[str, set[bool]] = {}  # layer -> its factors; True is lora_A
    for name in tensors:
        layer, is_lora_a = parse_fine_tuned_lora_name(name, mapper)
        halves.setdefault(layer, set()).add(is_lora_a)
    layers = packed | set(manager.modules)
    wrong = [f"{layer} (not a layer that vLLM adapts)" for layer in halves if layer not in layers]
    max_rank: int = manager.lora_config.max_lora_rank
    ranks = {min(tensor.shape) for tensor in tensors.values()}
    wrong += [f"all of rank {r} (the limit is {max_rank})" for r in ranks if r > max_rank]
    return wrong + [f"{layer} (one factor of two)" for layer, two in halves.items() if len(two) < 2]
