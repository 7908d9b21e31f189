"""A frozen base in 8 or 4 bits (QLoRA, arXiv 2305.14314), by transformers and bitsandbytes.

Only the base is quantised: adapters, norms and embeddings keep their dtype, and what is computed is
computed in the model's. Which layers stay whole is transformers' choice: the output embedding.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from rloo_cli.config.schema import QuantizationConfig
from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.utils.files import JsonObject


def quantized_load_options(
    keys: QuantizationConfig, dtype: torch.dtype, device: torch.device
) -> JsonObject:
    """Arguments of `from_pretrained`. `dtype`: what products are computed in.

    Raises MachineError where bitsandbytes is not installed, or cannot work here.
    """
    try:
        importlib.import_module("bitsandbytes")
        settings = importlib.import_module("transformers").BitsAndBytesConfig
    except Exception as error:  # its libraries fail to load in many ways
        why, fix = str(error), "pip install 'rloo-cli[quantization]'"
        what = "model.quantization needs bitsandbytes"
        raise MachineError(Problem(what, "model.quantization", why, fix)) from None
    given: JsonObject = {"load_in_8bit": True}
    if keys.bits == 4:
        given = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": keys.quant_type,
            "bnb_4bit_use_double_quant": keys.double_quant,
            "bnb_4bit_compute_dtype": dtype,
        }
    # A quantised model cannot be moved afterwards: it is made where it stays.
    return {"quantization_config": settings(**given), "device_map": {"": str(device)}}


def disable_avx512_kernel(model: Any) -> None:
    """Let training and sampling compute alike where there is no GPU: bitsandbytes' kernel for
    inference there orders the weights anew in place, and rounds to bfloat16."""
    for module in model.modules():
        if is_quantized(module) and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(module: Any) -> bool:
    """Whether a layer's weights are quantised."""
    kind = type(module)  # peft's own layers have the same names
    return kind.__module__.startswith("bitsandbytes.") and kind.__name__.startswith("Linear")


def dequantized_weight(layer: Any) -> Tensor:
    """A quantised layer's weights as numbers, in float32. -> (out, in)"""
    integrations = importlib.import_module("peft.utils.integrations")
    found: Tensor = integrations.dequantize_module_weight(layer)
    return found.detach().float()


def dequantized_linear(layer: Any, value: Tensor | None = None) -> nn.Linear:
    """A plain linear layer with its weights, or `value` in their place, in its compute dtype."""
    whole = dequantized_weight(layer) if value is None else value
    dtype = getattr(layer, "compute_dtype", None) or _bias_dtype(layer)
    made = nn.Linear(whole.shape[1], whole.shape[0], bias=layer.bias is not None, device="meta")
    made.weight = nn.Parameter(whole.to(dtype), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return made


def merged_linear(layer: Any, adapter_name: str) -> nn.Linear:
    """A plain layer of an adapted quantised one: W + s B A; DoRA sets the length of each row."""
    base = layer.base_layer
    found = dequantized_weight(base) + layer.get_delta_weight(adapter_name).detach().float()
    if layer.use_dora[adapter_name]:
        magnitude = layer.lora_magnitude_vector[adapter_name].weight.detach().float()
        found = found * (magnitude / found.norm(dim=1))[:, None]
    return dequantized_linear(base, found)


def _bias_dtype(layer: Any) -> torch.dtype:
    bias = getattr(layer, "bias", None)
    return torch.float32 if bias is None else bias.dtype
