"""Conflicts between adapters, quantized weights and moving references, found without torch.

An adapter to continue training has its own config, which the keys must match.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rloo_cli.config.hf_cache import ADAPTER_CONFIG_FILE
from rloo_cli.config.schema import GenerationConfig, LoraConfig, ModelConfig
from rloo_cli.utils.errors import Problem, clash_problems, value_problem

LAYER_KEYS = {"target_modules", "exclude_modules", "modules_to_save"}
WHOLE_ENGINES = ("single", "ddp")
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # allocated by vLLM 0.32
# Key of model.lora -> the name in an adapter's own config.
PEFT_NAMES = {"r": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}

# Fields of peft's configs that describe the adapter and are not arguments.
PEFT_ORIGIN = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version",
    "revision", "task_type",
}  # fmt: skip


def adapter_problems(
    model: ModelConfig, generation: GenerationConfig, engine: str, needs_reference: bool
) -> Iterator[Problem]:
    """Problems of model.lora, model.quantization and model.ref_*.

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
    dropout = model.disable_dropout and keys.dropout > 0
    key, found = "model.lora.dropout", f"model.lora.dropout={keys.dropout}"
    fix = f"{key}=0, or model.disable_dropout=false"
    clash = (dropout, key, found, "one enables dropout, the other disables it", fix)
    yield from clash_problems("model.disable_dropout=true", [clash])
    if keys.bias != "none" and model.ref_path is None and needs_reference:
        why = (
            "the reference is the model without its adapter, but trained biases change the"
            " model itself"
        )
        fix = "none, or model.ref_path=... for a separate model"
        yield value_problem("model.lora.bias", keys.bias, "changes the reference", fix, why)


def _saved_adapter_problems(keys: LoraConfig) -> Iterator[Problem]:
    """Why training cannot continue the adapter of model.lora.path with these keys."""
    if keys.path is None:
        return
    where, file = "model.lora.path", Path(keys.path) / ADAPTER_CONFIG_FILE
    try:
        adapter = json.loads(file.read_text()) if file.is_file() else {}
        kind = adapter["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        why = f"expected JSON with a peft_type in {file.absolute()}"
        fix = "FOLDER, saved by peft or rloo"
        yield value_problem(where, keys.path, "is not an adapter", fix, why)
        return
    if kind != keys.peft_type:
        why = f"its peft_type is {kind}, and model.lora.peft_type is {keys.peft_type}"
        fix = f"model.lora.peft_type={kind}"
        yield Problem(f"{keys.path} is another type of adapter", where, why, fix)
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
            yield value_problem(key, ours, "does not match the adapter", value, why)


def _other_kinds(model: ModelConfig, keys: LoraConfig, engine: str) -> Iterator[Problem]:
    """Arguments that are keys, and what only applies to LoRA."""
    own = keys.kwargs if keys.peft_type == "LORA" else {*keys.kwargs} & LAYER_KEYS
    for name in sorted(own):
        what = f"model.lora.kwargs cannot have {name}"
        why = "rloo has keys for LoRA's arguments" if own is keys.kwargs else ""
        fix = f"model.lora.{name}=..." if name in LoraConfig.model_fields else "remove it"
        yield Problem(what, "model.lora.kwargs", why or f"model.lora.{name} sets it", fix)
    if keys.kwargs.get("bias", "none") != "none":
        why = "trained biases are part of the model, so the reference would change too"
        yield Problem("model.lora.kwargs trains biases", "model.lora.kwargs", why, "remove bias")
    if keys.peft_type == "LORA":
        return
    key = "model.lora.peft_type"
    clashes = [
        (
            engine not in WHOLE_ENGINES,
            "distributed.engine",
            f"distributed.engine={engine}",
            "sharded tensors are only gathered for LoRA",
            f"distributed=ddp, or {key}=LORA",
        ),
        (
            model.quantization is not None,
            "model.quantization",
            "model.quantization",
            "quantized weights can only be merged with LoRA",
            f"model.quantization=null, or {key}=LORA",
        ),
        (
            bool(model.ref_sync.every) and model.ref_path is None,
            "model.ref_sync.every",
            f"model.ref_sync.every={model.ref_sync.every}",
            "averaging adapters is only defined for LoRA's factors",
            f"model.ref_sync.every=0, or {key}=LORA",
        ),
    ]
    yield from clash_problems(f"{key}={keys.peft_type}", clashes)


def _engine(generation: GenerationConfig, keys: LoraConfig) -> Iterator[Problem]:
    """Why vLLM cannot sample with an adapter of these keys: it computes plain LoRA only."""
    if not generation.is_engine:
        return
    top, whole = VLLM_LORA_RANKS[-1], "vLLM cannot load full layers from an adapter"
    other = keys.peft_type != "LORA"
    odd = {  # key -> whether vLLM lacks support, why, and a supported value
        "peft_type": (other, "vLLM only supports LoRA", "LORA"),
        "use_dora": (keys.use_dora and not other, "vLLM does not support DoRA", "false"),
        "modules_to_save": (keys.modules_to_save, whole, "[]"),
        "bias": (keys.bias != "none", "vLLM cannot load biases from an adapter", "none"),
        "r": (keys.r > top, f"vLLM supports ranks up to {top}", top),
    }
    backend = f"generation={generation.backend}"
    for name, (is_odd, why, good) in odd.items():
        key, fix = f"model.lora.{name}", f"generation=transformers, or model.lora.{name}={good}"
        clash = (bool(is_odd), key, f"{key}={getattr(keys, name)}", why, fix)
        yield from clash_problems(backend, [clash])
    key, transfer = f"generation.{generation.section}.transfer", generation.own_keys.transfer
    if transfer in ("nccl", "ipc"):
        why = "an adapter is small and is sent as bytes over its own connection"
        yield value_problem(key, transfer, "sends whole models", "auto", why)


def _quantized(model: ModelConfig, generation: GenerationConfig) -> Iterator[Problem]:
    keys, where = model.quantization, "model.quantization"
    if keys is None:
        return
    if model.lora is None:
        why = "quantized weights have no gradient; an adapter on them does"
        yield Problem("model.quantization needs model.lora", where, why, "lora=default")
    key, rounded = "model.ref_offload", "its weights are quantized, but the engine's would not be"
    clashes = [
        (
            generation.is_engine,
            where,
            f"generation={generation.backend}",
            rounded,
            f"generation=transformers, or {where}=null",
        ),
        (
            model.ref_offload,
            key,
            f"{key}=true",
            "quantized weights cannot be moved",
            f"{key}=false",
        ),
    ]
    yield from clash_problems(where, clashes)


def _reference(model: ModelConfig) -> Iterator[Problem]:
    if model.ref_offload and model.ref_path is None:
        why = "the reference is the model without its adapter"
        what = "has no second model to update"
        yield value_problem("model.ref_offload", "true", what, "false", why)
    if (every := model.ref_sync.every) and model.ref_path is not None:
        why = "the reference of model.ref_path has no adapter to update"
        what, fix = "does not go with model.lora", "0, or model.ref_path=null"
        yield value_problem("model.ref_sync.every", every, what, fix, why)


def supervised_adapter_problems(model: ModelConfig, section: str) -> Iterator[Problem]:
    """Adapter keys that a `section` (sft, reward_model) does not support."""
    setting, where, bits = (
        f"rloo {section.replace('_', '-')}",
        "model.lora.path",
        "model.quantization",
    )
    if model.quantization is not None:
        why = "it trains an adapter on unquantized weights"
        yield from clash_problems(setting, [(True, bits, bits, why, f"{bits}=null")])
    keys = model.lora
    if keys is None:
        return
    yield from _saved_adapter_problems(keys)
    headless = section == "reward_model" and keys.path is not None
    why = "a language model's adapter has no head, but a reward model needs one"
    yield from clash_problems(setting, [(headless, where, where, why, f"{where}=null")])


def adapter_package_problems(model: ModelConfig) -> Iterator[Problem]:
    """Packages that these keys need and `pip install rloo-cli` does not install."""
    needed = {"lora": ("peft", "peft"), "quantization": ("bitsandbytes", "quantization")}
    for key, (package, extra) in needed.items():
        if getattr(model, key) is not None and find_spec(package) is None:
            what, why = f"model.{key} needs {package}", f"{package} is not installed"
            yield Problem(what, f"model.{key}", why, f"pip install 'rloo-cli[{extra}]'")
