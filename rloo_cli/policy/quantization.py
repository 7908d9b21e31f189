"""A frozen base in 8 or 4 bits (QLoRA, arXiv 2305.14314), by transformers and bitsandbytes.

Only the base is quantized: adapters, norms and embeddings keep their dtype, and products are
computed in the model's. transformers chooses which layers stay whole: the output embedding.
"""

import importlib
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import QuantizationConfig
from rloo_cli.utils.errors import MachineError, refuse
from rloo_cli.utils.files import JsonObject


def quantized_load_options(
    keys: QuantizationConfig, dtype: torch.dtype, device: torch.device
) -> JsonObject:
    """Arguments of `from_pretrained`. `dtype`: the dtype that products are computed in.

    Raises MachineError if bitsandbytes is not installed, or does not work here.
    """
    try:
        importlib.import_module("bitsandbytes")
        settings = importlib.import_module("transformers").BitsAndBytesConfig
    except Exception as error:  # its libraries fail to load in many ways
        what, fix = "model.quantization needs bitsandbytes", "pip install 'rloo-cli[quantization]'"
        refuse("model.quantization", what, fix, error, error=MachineError)
    options: JsonObject = {"load_in_8bit": True}
    if keys.bits == 4:
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": keys.quant_type,
            "bnb_4bit_use_double_quant": keys.double_quant,
            "bnb_4bit_compute_dtype": dtype,
        }
    # A quantized model cannot be moved afterwards: it is created on its device.
    return {"quantization_config": settings(**options), "device_map": {"": str(device)}}


def disable_avx512_kernel(model: PreTrainedModel) -> None:
    """Make training and sampling compute the same without a GPU.

    bitsandbytes' inference kernel there reorders the weights in place, and rounds to bfloat16.
    """
    for module in model.modules():
        quantized = is_quantized(module)
        if quantized and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(module: object) -> TypeGuard[nn.Linear]:
    """Whether a layer's weights are quantized."""
    kind = type(module)  # peft's own layers have the same names
    return kind.__module__.startswith("bitsandbytes.") and kind.__name__.startswith("Linear")


def dequantized_weight(layer: nn.Linear) -> Tensor:
    """A quantized layer's weights in float32. -> (out, in)"""
    integrations = importlib.import_module("peft.utils.integrations")
    return integrations.dequantize_module_weight(layer).detach().float()


def dequantized_linear(layer: nn.Linear, value: Tensor | None = None) -> nn.Linear:
    """A plain linear layer with the weights of `layer`, or with `value`, in its compute dtype."""
    weight = dequantized_weight(layer) if value is None else value
    dtype = getattr(layer, "compute_dtype", None) or _bias_dtype(layer)
    has_bias = layer.bias is not None
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    plain.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    if has_bias:
        plain.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return plain


def merged_linear(layer: Any, adapter_name: str) -> nn.Linear:
    """A plain layer for an adapted quantized one: W + s B A; DoRA sets the norm of each row."""
    base = layer.base_layer
    weight = dequantized_weight(base) + layer.get_delta_weight(adapter_name).detach().float()
    if layer.use_dora[adapter_name]:
        magnitude = layer.lora_magnitude_vector[adapter_name].weight.detach().float()
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
    return dequantized_linear(base, weight)


def _bias_dtype(layer: nn.Linear) -> torch.dtype:
    bias = getattr(layer, "bias", None)
    return torch.float32 if bias is None else bias.dtype
