"""Keys of `model`: what is loaded, what of it is trained, and what it is compared with."""

from typing import Literal

from rloo_cli.config.schema_keys import Frozen, NotEmpty, Positive, Text, key


class RefSyncConfig(Frozen):
    """The reference follows the policy (TR-DPO, arXiv 2404.09656)."""

    every: int = key("Optimizer updates between two moves of the reference; 0 = it stands", ge=0)
    alpha: float = key(
        "Share of the policy in each: ref = alpha policy + (1 - alpha) ref", ge=0, le=1
    )


class LoraConfig(Frozen):
    """peft's LoRA (arXiv 2106.09685) and DoRA (2402.09353)."""

    r: Positive = key("Rank of the adapters")
    alpha: float = key("Scale: adapters are multiplied by alpha / r", gt=0)
    dropout: float = key(
        "Dropout before the adapters; more than 0 makes the ratio noise", ge=0, lt=1
    )
    target_modules: list[NotEmpty] | Literal["all-linear"] = key("Layers that get an adapter")
    exclude_modules: list[NotEmpty] = key("Layers that get none")
    modules_to_save: list[NotEmpty] = key("Layers that are trained whole")
    bias: Literal["none", "all", "lora_only"] = key("Biases that are trained")
    use_rslora: bool = key("Scale by alpha / sqrt(r) instead (arXiv 2312.03732)")
    use_dora: bool = key("Train magnitudes too: DoRA")
    path: Text | None = key("Adapter to go on from; null = a new one")


class QuantizationConfig(Frozen):
    """bitsandbytes' weights of 8 or 4 bits under an adapter (QLoRA, arXiv 2305.14314)."""

    bits: Literal[4, 8] = key("Bits of a frozen weight")
    quant_type: Literal["nf4", "fp4"] = key("Kind of 4-bit numbers")
    double_quant: bool = key("Quantise the scales of 4-bit numbers too")


class ValueConfig(Frozen):
    """The value model of algorithm=ppo (`value_start`)."""

    path: Text | None = key(
        "Hub name or folder of a reward or language model that the value model begins as; null ="
        " the one reward model whose backbone is the policy's, else the policy with a new head"
    )
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")


class ModelConfig(Frozen):
    path: Text = key("Hub name or folder of a causal language model, or make:NAME (made here)")
    tokenizer: Text | None = key("Hub name or folder of the tokenizer; null = model.path")
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Weights' dtype; auto = bfloat16 on a GPU that has it, else float32"
    )
    attn_implementation: Text | None = key("transformers' attention; null = its own choice")
    trust_remote_code: bool = key("Run Python code that comes with the model (dangerous)")
    gradient_checkpointing: bool | Literal["auto"] = key(
        "Recompute activations in the backward pass; auto = only where memory is short"
    )
    disable_dropout: bool = key("Set every dropout to 0, so that the ratio is 1 on-policy")
    lm_head_fp32: bool = key("Compute logits in float32, in trainer and sampler alike")
    chat_template: Text | None = key("Jinja file to use as chat template; null = the tokenizer's")
    ref_path: Text | None = key(
        "Reference model; null = a frozen copy of model.path, or the model without its adapter"
    )
    ref_offload: bool = key("Keep the reference in the CPU's memory between its passes")
    ref_sync: RefSyncConfig
    value: ValueConfig
    lora: LoraConfig | None = key("Train adapters only; null = all weights")
    quantization: QuantizationConfig | None = key(
        "Frozen weights in 8 or 4 bits; null = as they are"
    )
