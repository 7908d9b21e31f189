"""Smaller brothers of our models: some layers are left out, everything else is as it was.

Such a model still speaks, badly: what its missing layers did, it can learn back from the whole
one (`algorithm=opd`, docs/algorithms.md). Every six neighbours of SmolLM2's thirty layers were
left out once: without the six from the thirteenth on, its answers to three questions change least
(a KL of the whole model to the cut one of 1.2 nats a token).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.data.synthetic.addition import addition_model_folder
from rloo_cli.data.synthetic.smollm2 import smollm2_model_folder

ADDITION_LAYERS = (0, 2)  # of 3
SMOLLM2_LAYERS = (*range(12), *range(18, 30))  # of 30


def shallow_addition_folder() -> Path:
    """The folder of `make:addition` without its second layer."""
    return _shallow_folder("addition_shallow", addition_model_folder(), ADDITION_LAYERS)


def shallow_smollm2_folder() -> Path:
    """The folder of `make:smollm2` with 24 of its 30 layers: 113 of its 135 million parameters."""
    return _shallow_folder("smollm2_shallow", smollm2_model_folder(), SMOLLM2_LAYERS)


def _shallow_folder(name: str, whole: Path, kept: Sequence[int]) -> Path:
    def make(folder: Path) -> None:
        report_progress(f"{len(kept)} layers are taken out of {whole.name}")
        leave_out_layers(whole, folder, kept)

    return cached_folder(name, f"{whole.name}-{list(kept)}", make)


def leave_out_layers(whole: Path, folder: Path, kept: Sequence[int]) -> None:
    """Write the model of the folder `whole` into `folder` with these of its layers, in this order.

    Tensors are copied under their new names; no model is built.
    """
    from safetensors.torch import load_file, save_file

    numbers = {str(old): str(new) for new, old in enumerate(kept)}
    tensors = {}
    for name, tensor in load_file(whole / "model.safetensors").items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if parts[2] not in numbers:
                continue
            parts[2] = numbers[parts[2]]
        tensors[".".join(parts)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for path in whole.iterdir():
        if path.is_file() and path.name not in ("model.safetensors", "config.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((whole / "config.json").read_text())
    config["num_hidden_layers"] = len(kept)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][i] for i in kept]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
