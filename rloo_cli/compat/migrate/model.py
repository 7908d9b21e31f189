"""Writes the model of an old run: path, adapter, quantized weights, a moving reference.

`resolve_model_conflicts` comes last: it changes settings that the old tool allowed together but
that are refused together here.
"""

from rloo_cli.compat.migrate.recipe import Recipe
from rloo_cli.compat.migrate.versions import NO_CORRECTION
from rloo_cli.config.rules_model import LOADING_ARGUMENTS
from rloo_cli.utils.files import JsonObject

# Names of the model; if two differ, the second one was only used for its tokenizer.
MODEL_NAMES = ("sft_model_path", "policy", "model_name_or_path", "model", "base_model")
ADAPTER_FLAGS = ("train_type", "tuner_type", "use_peft")
ADAPTER_DEFAULTS: dict[str, JsonObject] = {  # peft's are those of 0.17
    "TRL": {"r": 16, "alpha": 32.0, "dropout": 0.05},
    "ms-swift": {"r": 8, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"},
    "LoraConfig()": {"r": 8, "alpha": 8.0, "dropout": 0.0},
}
# The layers that peft chooses if none are named, by a part of the model's name.
PEFT_LAYERS = {part: ["query_key_value"] for part in ("pythia", "neox", "falcon", "bloom")}
PEFT_LAYERS |= {"phi-3": ["qkv_proj"], "phi-4": ["qkv_proj"], "gpt2": ["c_attn"]}
USUAL_LAYERS = ["q_proj", "v_proj"]
# peft's class of another kind of adapter -> model.lora.peft_type
PEFT_CONFIGS = {
    "LoHaConfig": "LOHA", "LoKrConfig": "LOKR", "IA3Config": "IA3", "OFTConfig": "OFT",
    "HRAConfig": "HRA", "MissConfig": "MISS", "RoadConfig": "ROAD",
}  # fmt: skip
LAYER_ARGUMENTS = ("target_modules", "exclude_modules", "modules_to_save")  # of all of them
QUANTIZED = {"load_in_4bit": 4, "load_in_8bit": 8, "quant_bits": 0}  # 0: given by its value
FOUR_BIT_SETTINGS = (
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant",
    "use_bnb_nested_quant",
)  # fmt: skip
# Keys with which the sampler's log-probabilities are of another distribution, and their defaults.
SAMPLER_FILTERS: JsonObject = {
    "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "kwargs": {}
}  # fmt: skip


def write_model(recipe: Recipe) -> JsonObject:
    """Write policy, tokenizer, quantization and reference. -> the defaults of the adapter."""
    models = [(n, recipe.take(n)) for n in MODEL_NAMES if recipe.flags.get(n)]
    if not models:
        recipe.notes.append("no model is named in the old settings: set model.path")
    for (name, path), key in zip(models, ("model.path", "model.tokenizer"), strict=False):
        if key == "model.path" or path != models[0][1]:
            recipe.put(key, path, recipe.original_text(name))
    _write_quantization(recipe)
    _write_reference_sync(recipe)
    return _write_adapter(recipe, str(models[0][1]) if models else "")


def _write_adapter(recipe: Recipe, path: str) -> JsonObject:
    """Choose the adapter: ms-swift trains a LoRA by default, TRL only with use_peft."""
    is_swift = recipe.dialect.is_swift
    kinds = [name for name in ADAPTER_FLAGS if name in recipe.original_flags]
    why = recipe.original_text(kinds[0]) if kinds else "ms-swift's default"
    kind = [*(recipe.take(name) for name in kinds), "lora" if is_swift else None][0]
    whose = "LoraConfig()" if recipe.take("lora_from") == "peft" else "TRL"
    if kind in ("full", None, False):
        recipe.drop(recipe.names_of("model.lora."), "every weight was trained")
        if kinds:
            recipe.dropped.append(f"{why}: every weight is trained")
        return {"train.learning_rate": 1e-5} if is_swift else {}
    if kind not in ("lora", "dora", True):
        recipe.put("model.lora", kind, why)
        recipe.notes.append(f"the old run trained {kind}; this version has LoRA, DoRA or all")
        return {}
    defaults = ADAPTER_DEFAULTS["ms-swift" if is_swift else whose]
    choice = "dora" if recipe.flags.get("use_dora") is True else "default"
    if peft_type := recipe.take("peft_type"):
        defaults, choice = {"peft_type": peft_type}, "peft"
        if kwargs := recipe.take("peft_kwargs"):
            defaults |= {"kwargs": kwargs}
    recipe.groups["lora"] = (choice, why)
    layers = next((names for part, names in PEFT_LAYERS.items() if part in path.lower()), None)
    defaults = {"target_modules": layers or USUAL_LAYERS} | defaults  # as peft chooses
    return {f"model.lora.{key}": value for key, value in defaults.items()}


def _write_quantization(recipe: Recipe) -> None:
    """Write bitsandbytes' quantization to 4 or 8 bits."""
    name = next((n for n in QUANTIZED if recipe.flags.get(n)), "")
    bits = QUANTIZED[name] or recipe.flags.get(name) if name else None
    method = recipe.take("quant_method", "bnb") if bits else None
    for flag in QUANTIZED:
        recipe.take(flag)
    if method == "bnb" and bits in (4, 8):
        recipe.groups["quantization"] = (f"{bits}bit", recipe.original_text(name))
        twice = [recipe.take(n) for n in ("use_bnb_nested_quant", "bnb_4bit_use_double_quant")]
        nested = next((given for given in twice if given is not None), name == "quant_bits")
        if bits == 4:
            recipe.put("model.quantization.double_quant", bool(nested), "use_bnb_nested_quant")
    elif bits:
        text = recipe.original_text(name)
        recipe.put("model.quantization", f"{method} {bits}", text)
    own = () if "model.quantization.double_quant" in recipe.lines else ("bnb_4bit_quant_type",)
    recipe.drop((*own, *FOUR_BIT_SETTINGS), "no weights of 4 bits, or model.dtype says it")


def _write_reference_sync(recipe: Recipe) -> None:
    """Write model.ref_sync from sync_ref_model: TRL counts updates, as we do."""
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    beta = recipe.original_flags.get("beta", recipe.dialect.defaults["algorithm.beta"])
    if not recipe.flags.get("sync_ref_model"):
        recipe.drop(names, "sync_ref_model was off")
    elif not beta:
        recipe.drop(("sync_ref_model", *names), "beta is 0, so no reference is used")
    else:
        recipe.take("sync_ref_model")
        text = f"{recipe.original_text('sync_ref_model')}, {names[0]}; in updates, as here"
        recipe.put("model.ref_sync.every", int(recipe.take_number(names[0], 512)), text)
        recipe.put("model.ref_sync.alpha", float(recipe.take_number(names[1], 0.6)), names[1])


def resolve_model_conflicts(recipe: Recipe) -> None:
    """Change settings that would be refused together, with a note."""
    engine = recipe.written_value("distributed.engine")
    quantized = "quantization" in recipe.groups
    moving = "model.ref_sync.every" in recipe.lines
    if engine in ("zero3", "fsdp2") and (quantized or moving):
        what = "quantized weights" if quantized else "model.ref_sync"
        why = f"{engine} there; {what} needs whole weights here"
        recipe.put("distributed.engine", "ddp" if quantized else "zero2", why)
    if "lora" in recipe.groups and recipe.written_value("model.lora.dropout"):
        why = "model.lora.dropout is more than 0, which makes the ratio noise, as there"
        recipe.put("model.disable_dropout", False, why)
    if quantized and "lora" not in recipe.groups:
        recipe.groups["lora"] = ("default", "quantized weights take no gradient")
        recipe.notes.append("the old run trained quantized weights without an adapter: mind lora")
    if "generation" in recipe.groups:
        _resolve_vllm_conflicts(recipe, str(recipe.groups["generation"][0]), quantized)


def _resolve_vllm_conflicts(recipe: Recipe, backend: str, quantized: bool) -> None:
    """Use transformers if vLLM cannot sample; else give vLLM the settings that it reads itself."""
    keys = {"use_dora": False, "modules_to_save": None, "bias": "none"}
    lora = [
        k for k, plain in keys.items() if recipe.written_value(f"model.lora.{k}", plain) != plain
    ]
    if quantized or lora:
        del recipe.groups["generation"]
        sections = ("generation.server.", "generation.colocate.")
        recipe.lines = {k: v for k, v in recipe.lines.items() if not k.startswith(sections)}
        what = "model.quantization" if quantized else f"model.lora.{lora[0]}"
        recipe.notes.append(f"{backend} cannot sample with {what}: transformers does, more slowly")
        return
    init = recipe.written_value("model.init_kwargs", {})
    assert isinstance(init, dict)
    if values := {k: v for k, v in init.items() if k not in LOADING_ARGUMENTS}:
        key = f"generation.{backend.removeprefix('vllm_')}.extra"
        recipe.put(key, {"hf_overrides": values}, "the values of model.init_kwargs, for vLLM")
    written = {n: recipe.written_value(f"generation.{n}", v) for n, v in SAMPLER_FILTERS.items()}
    filters = [n for n, v in SAMPLER_FILTERS.items() if written[n] not in (v, 0, None)]
    correction = recipe.written_value("algorithm.correction")
    mode = correction.get("mode") if isinstance(correction, dict) else None
    if filters and mode != "none":
        why = f"{', '.join(filters)}: the sampler's log-probabilities are of another distribution"
        recipe.put("algorithm.correction", NO_CORRECTION, why)
