"""What adapters, quantised weights and moving references forbid each other, found without torch.

An adapter that training goes on from has a config of its own; the keys have to agree with it.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rloo_cli.config.hf_cache import ADAPTER_CONFIG_FILE
from rloo_cli.config.schema import GenerationConfig, LoraConfig, ModelConfig
from rloo_cli.utils.errors import Problem

LAYER_KEYS = {"target_modules", "exclude_modules", "modules_to_save"}
WHOLE_ENGINES = ("single", "ddp")
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 allocates
# Key of model.lora -> the name in an adapter's own config.
PEFT_NAMES = {"r": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}

# Fields of peft's configs that say what an adapter is of, and are no arguments.
PEFT_ORIGIN = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version",
    "revision", "task_type",
}  # fmt: skip


def adapter_problems(
    model: ModelConfig, generation: GenerationConfig, engine: str, needs_reference: bool
) -> Iterator[Problem]:
    """Everything wrong with model.lora, model.quantization and model.ref_*.

    `engine`: distributed.engine. `needs_reference`: the algorithm compares with a reference.
    """
    keys = model.lora
    if keys is not None:
        yield from _adapter(model, keys, needs_reference)
        yield from _saved_adapter_problems(keys)
        yield from _other_kinds(model, keys, engine)
        yield from _engine(generation, keys)
    yield from _quantized(model, generation)
    if keys is not None and needs_reference:
        yield from _reference(model)


def _adapter(model: ModelConfig, keys: LoraConfig, needs_reference: bool) -> Iterator[Problem]:
    if keys.dropout and model.disable_dropout:
        yield Problem(
            f"model.lora.dropout = {keys.dropout} and model.disable_dropout = true",
            "model.lora.dropout",
            "one asks for dropout, the other for none",
            "model.lora.dropout=0, or model.disable_dropout=false",
        )
    if keys.bias != "none" and model.ref_path is None and needs_reference:
        what = f"model.lora.bias = {keys.bias} leaves no reference"
        why = (
            "the reference is the model without its adapter, and biases that are trained are"
            " part of the model itself"
        )
        fix = "model.lora.bias=none, or model.ref_path=... for a model of its own"
        yield Problem(what, "model.lora.bias", why, fix)


def _saved_adapter_problems(keys: LoraConfig) -> Iterator[Problem]:
    """Why training cannot go on from the adapter of model.lora.path with these keys."""
    if keys.path is None:
        return
    where, file = "model.lora.path", Path(keys.path) / ADAPTER_CONFIG_FILE
    if not file.is_file():
        why, fix = f"there is no {file.absolute()}", "a folder that peft or rloo saved"
        yield Problem(f"{keys.path} is not an adapter", where, why, fix)
        return
    try:
        adapter = json.loads(file.read_text())
        kind = adapter["peft_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        why, fix = "expected JSON with a peft_type", "a folder that peft or rloo saved"
        yield Problem(f"{file} is not the config of an adapter", where, why, fix)
        return
    if kind != keys.peft_type:
        why = f"its peft_type is {kind}, and model.lora.peft_type is {keys.peft_type}"
        yield Problem(
            f"{keys.path} is another kind of adapter", where, why, f"model.lora.peft_type={kind}"
        )
        return
    if kind != "LORA":
        return  # `policy/lora.py` compares its arguments, whose defaults are peft's
    for name, theirs in PEFT_NAMES.items():
        ours = getattr(keys, name)
        found = adapter.get(theirs) or type(ours)()
        if ours != found:
            key = f"model.lora.{name}"
            value = str(found).lower() if isinstance(found, bool) else found
            why = f"the adapter in {keys.path} was made with {value}"
            yield Problem(f"{key} = {ours} is not the adapter's", key, why, f"{key}={value}")


def _other_kinds(model: ModelConfig, keys: LoraConfig, engine: str) -> Iterator[Problem]:
    """Arguments that are keys, and what is known of LoRA alone."""
    own = keys.kwargs if keys.peft_type == "LORA" else {*keys.kwargs} & LAYER_KEYS
    for name in sorted(own):
        what = f"model.lora.kwargs has {name}"
        why = "a LoRA's arguments are keys, those that rloo takes" if own is keys.kwargs else ""
        fix = f"model.lora.{name}=..." if name in LoraConfig.model_fields else "leave it out"
        yield Problem(what, "model.lora.kwargs", why or f"model.lora.{name} says it", fix)
    if keys.kwargs.get("bias", "none") != "none":
        why = "biases that are trained are part of the model, and the reference would have them"
        yield Problem("model.lora.kwargs trains biases", "model.lora.kwargs", why, "leave bias out")
    if keys.peft_type == "LORA":
        return
    key = "model.lora.peft_type"
    alone = f"{key}=LORA"
    refused = {  # what it does not go with -> whether it is so, why, the way out
        f"distributed.engine = {engine}": (
            engine not in WHOLE_ENGINES,
            "tensors in shards are put together by rules that are LoRA's",
            "distributed=ddp",
        ),
        "model.quantization": (
            model.quantization is not None,
            "weights of a few bits are merged with LoRA's products alone",
            "model.quantization=null",
        ),
        "model.ref_sync.every": (
            bool(model.ref_sync.every) and model.ref_path is None,
            "the average of two adapters' tensors is defined for LoRA's factors",
            "model.ref_sync.every=0",
        ),
    }
    for where, (is_odd, why, way_out) in refused.items():
        if is_odd:
            what = f"{key} = {keys.peft_type} and {where} do not go together"
            yield Problem(what, where.partition(" ")[0], why, f"{way_out}, or {alone}")


def _engine(generation: GenerationConfig, keys: LoraConfig) -> Iterator[Problem]:
    """Why vLLM cannot sample with an adapter of these keys: it computes plain LoRA only."""
    if not generation.is_engine:
        return
    top, whole = VLLM_LORA_RANKS[-1], "vLLM takes no whole layers from an adapter"
    other = keys.peft_type != "LORA"
    odd = {  # key -> whether vLLM cannot compute it, why, and a value that it can
        "peft_type": (other, "vLLM computes LoRA", "LORA"),
        "use_dora": (keys.use_dora and not other, "vLLM has no DoRA", "false"),
        "modules_to_save": (keys.modules_to_save, whole, "[]"),
        "bias": (keys.bias != "none", "vLLM takes no biases from an adapter", "none"),
        "r": (keys.r > top, f"vLLM makes room for ranks up to {top}", top),
    }
    for name, (is_odd, why, good) in odd.items():
        if is_odd:
            key = f"model.lora.{name}"
            what = f"{key} = {getattr(keys, name)} cannot be sampled by {generation.backend}"
            yield Problem(what, key, why, f"generation=transformers, or {key}={good}")
    section, engine = f"generation.{generation.section}", generation.own_keys
    if engine.transfer in ("nccl", "ipc"):
        key = f"{section}.transfer"
        why = "an adapter is small: it travels as bytes, over a connection of its own"
        yield Problem(f"{key} = {engine.transfer} sends whole models", key, why, f"{key}=auto")


def _quantized(model: ModelConfig, generation: GenerationConfig) -> Iterator[Problem]:
    keys, where = model.quantization, "model.quantization"
    if keys is None:
        return
    if model.lora is None:
        why = "weights of a few bits take no gradient; an adapter over them does"
        yield Problem("model.quantization needs model.lora", where, why, "lora=default")
    if generation.is_engine:
        why = "the engine would sample from weights that are not the trainer's, which are rounded"
        what = f"{where} cannot be sampled by {generation.backend}"
        yield Problem(what, where, why, "generation=transformers, or model.quantization=null")
    if model.ref_offload:
        why, key = "quantised weights stay where they were made", "model.ref_offload"
        yield Problem(f"{key} = true and {where}", key, why, f"{key}=false")


def _reference(model: ModelConfig) -> Iterator[Problem]:
    if model.ref_offload and model.ref_path is None:
        key, why = "model.ref_offload", "the reference is the model itself, without its adapter"
        yield Problem(f"{key} = true: there is no second model", key, why, f"{key}=false")
    if model.ref_sync.every and model.ref_path is not None:
        key = "model.ref_sync.every"
        why = "the reference of model.ref_path has no adapter that could follow the policy's"
        fix = f"{key}=0, or model.ref_path=null"
        yield Problem(f"{key} = {model.ref_sync.every} and an adapter", key, why, fix)


def supervised_adapter_problems(model: ModelConfig, section: str) -> Iterator[Problem]:
    """Adapter keys that a `section` (sft, reward_model) does not take."""
    if model.quantization is not None:
        what, where = f"model.quantization is not for {section}", "model.quantization"
        yield Problem(
            what, where, "it trains an adapter over weights that are whole", f"{where}=null"
        )
    keys = model.lora
    if keys is None:
        return
    yield from _saved_adapter_problems(keys)
    if section == "reward_model" and keys.path is not None:
        what, where = "reward_model begins with a new adapter", "model.lora.path"
        yield Problem(what, where, "the adapter of a language model has no head", f"{where}=null")


def adapter_package_problems(model: ModelConfig) -> Iterator[Problem]:
    """Packages that these keys need and `pip install rloo-cli` does not install."""
    needed = {"lora": ("peft", "peft"), "quantization": ("bitsandbytes", "quantization")}
    for key, (package, extra) in needed.items():
        if getattr(model, key) is not None and find_spec(package) is None:
            what, why = f"model.{key} needs {package}", f"{package} is not installed"
            yield Problem(what, f"model.{key}", why, f"pip install 'rloo-cli[{extra}]'")
