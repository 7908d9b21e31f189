"""The receiver of an adapter: the base's weights are never touched.

What comes over gloo is written where vLLM looks for the adapter, and vLLM's own loader takes it
from there at the next request. Two traps: a loaded adapter answers on under its number whatever
its files say, so it is removed here; and what a prompt's cache was computed with is known by the
adapter's name alone, so the sender has that cache forgotten, as after every update.
"""

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from vllm.lora.utils import parse_fine_tuned_lora_name

from rloo_cli.generation.vllm import lora_slot, versions
from rloo_cli.generation.vllm.receive import MAX_NAMES_SHOWN
from rloo_cli.generation.vllm.receive.gloo import GlooReceiver, GlooUpdateInfo


class Adapter(GlooReceiver):
    """Registered as `rloo_adapter`."""

    tensors: dict[str, Tensor] | None = None  # of the update that is open

    def start_weight_update(self) -> None:
        self.tensors = {}

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None or self.tensors is None:
            raise RuntimeError("no trainer is connected: init_weight_transfer_engine comes first")
        self.tensors |= {
            name: tensor.clone() for name, tensor in self._receive_tensors(update_info)
        }

    def finish_weight_update(self) -> None:
        """Raises ValueError that lists the layers that the engine cannot adapt, or has half of.

        vLLM keeps an update open whose end was refused: the next call closes it, and the adapter
        stays the one that it was.
        """
        tensors, self.tensors = self.tensors, None
        if tensors is None:
            return
        manager: Any = self.model.lora_manager
        if wrong := adapter_mismatches(manager, tensors):
            more = (
                f" and {len(wrong) - MAX_NAMES_SHOWN} more" if len(wrong) > MAX_NAMES_SHOWN else ""
            )
            raise ValueError(f"weights are missing: {', '.join(wrong[:MAX_NAMES_SHOWN])}{more}")
        folder = Path(os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE])
        part = folder / f".{lora_slot.ADAPTER_WEIGHTS_FILE}.{os.getpid()}"
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, part)
        part.rename(
            folder / lora_slot.ADAPTER_WEIGHTS_FILE
        )  # the workers of one engine write the same file
        manager.remove_adapter(lora_slot.ADAPTER_ID)


def adapter_mismatches(manager: Any, tensors: dict[str, Tensor]) -> list[str]:
    """What is wrong with an adapter's tensors, layer by layer; [] for one that fits."""
    if not tensors:
        return ["all of the adapter"]
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else versions.rename_mapper(mapper)
    packed = {part for parts in manager.packed_modules.values() for part in parts}
    halves: dict[str, set[bool]] = {}
    for name in tensors:
        layer, first = parse_fine_tuned_lora_name(name, mapper)
        halves.setdefault(layer, set()).add(first)
    known = packed | set(manager.modules)
    odd = [f"{layer} (not a layer that vLLM adapts)" for layer in halves if layer not in known]
    most: int = manager.lora_config.max_lora_rank
    ranks = {min(tensor.shape) for tensor in tensors.values()}
    odd += [f"all of rank {rank} (there is room for {most})" for rank in ranks if rank > most]
    half = [f"{layer} (one factor of two)" for layer, own in halves.items() if len(own) < 2]
    return odd + half
