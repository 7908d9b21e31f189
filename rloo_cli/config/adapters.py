"""The keys of adapters (`model.lora`) and of the quantized weights below them. Imports no torch.

They are peft's and bitsandbytes' arguments under their original names, if the name is unambiguous;
`rules_lora` has the conflicts.
"""

from typing import ClassVar, Literal

from rloo_cli.config.key_types import Frozen, NotEmpty, PathText, Positive, key
from rloo_cli.utils.files import JsonObject


class LoraConfig(Frozen):
    """peft's LoRA (arXiv 2106.09685), DoRA (2402.09353), and its other kinds of adapters."""

    only_with: ClassVar = {
        ".peft_type=LORA": ("r", "alpha", "dropout", "bias", "use_rslora", "use_dora")
    }

    peft_type: Literal["LORA", "LOHA", "LOKR", "IA3", "OFT", "HRA", "MISS", "ROAD"] = key(
        "peft adapter type; types other than LORA take their arguments from kwargs"
    )
    r: Positive = key("Rank of the adapters")
    alpha: float = key("Scale: adapters are multiplied by alpha / r", gt=0)
    dropout: float = key(
        "Dropout before the adapters; more than 0 adds noise to the ratio", ge=0, lt=1
    )
    target_modules: list[NotEmpty] | Literal["all-linear"] = key("Layers with an adapter")
    exclude_modules: list[NotEmpty] = key("Layers without an adapter")
    modules_to_save: list[NotEmpty] = key("Layers to train fully")
    bias: Literal["none", "all", "lora_only"] = key("Biases to train")
    use_rslora: bool = key("Scale by alpha / sqrt(r) instead (arXiv 2312.03732)")
    use_dora: bool = key("Train magnitudes too: DoRA")
    path: PathText | None = key("Adapter to continue training; null = a new one")
    kwargs: JsonObject = key(
        "Further arguments of that type's peft config, e.g. {r: 8, alpha: 16} of LOHA"
    )


class QuantizationConfig(Frozen):
    """bitsandbytes' 8-bit or 4-bit weights under an adapter (QLoRA, arXiv 2305.14314)."""

    only_with: ClassVar = {".bits!=8": ("quant_type", "double_quant")}

    bits: Literal[4, 8] = key("Bits of a frozen weight")
    quant_type: Literal["nf4", "fp4"] = key("Kind of 4-bit numbers")
    double_quant: bool = key("Quantize the scales of 4-bit numbers too")
