"""The engine's slot for the one trained adapter: its name, its folder, vLLM's arguments.

vLLM loads the base itself, and it never changes. An update sends only an adapter's tensors:
each worker writes them where vLLM looks for the adapter (`receive.adapter`), and drops the old
one. Until the first update the folder has an adapter with no effect. Imports neither torch
nor vLLM.
"""

import json
from math import prod
from pathlib import Path

from rloo_cli.config.rules_lora import VLLM_LORA_RANKS
from rloo_cli.config.schema import LoraConfig
from rloo_cli.utils.files import JsonObject, write_text

ADAPTER_NAME, ADAPTER_ID = (
    "rloo",
    1,
)  # of the adapter; requests without it go to the base
ADAPTER_TRANSFER = "adapter"  # the name of its weight transfer
ADAPTER_FOLDER_VARIABLE = "RLOO_ADAPTER"  # its folder, for the engine's processes
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# vLLM 0.32 rejects an adapter without layers, but ignores a layer of this name.
UNUSED_LAYER_NAME = "base_model.model.base_layer.lora_{}.weight"


def lora_engine_arguments(lora: LoraConfig | None) -> JsonObject:
    """vLLM's EngineArgs of a run that trains an adapter; {} for others."""
    if lora is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(lora)}


def slot_rank(lora: LoraConfig) -> int:
    """The rank for which vLLM allocates the slot."""
    return next(rank for rank in VLLM_LORA_RANKS if rank >= lora.r)


def write_zero_adapter(folder: Path, lora: LoraConfig) -> None:
    """Write an adapter with no effect, for vLLM to start with.

    Its scale is 1, since the sent tensors include each layer's scale.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = slot_rank(lora)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
    write_text(folder / "adapter_config.json", json.dumps(about) + "\n")
    (folder / ADAPTER_WEIGHTS_FILE).write_bytes(
        _zero_safetensors(
            {UNUSED_LAYER_NAME.format("A"): [1, 1], UNUSED_LAYER_NAME.format("B"): [1, 1]}
        )
    )


def _zero_safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A safetensors file of float32 zeros: the length of its header, the header, the numbers."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(end)
