"""Writes the model of an old run: path, dtype, adapter, quantised weights, a moving reference.

`resolve_model_conflicts` comes last: it changes settings that the old tool allowed together and
that are refused together here.
"""

from collections.abc import Mapping

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.batch import take_number
from rloo_cli.compat.migrate.recipe import Recipe
from rloo_cli.compat.migrate.tables import Dialect
from rloo_cli.config.rules_model import LOADING_ARGUMENTS
from rloo_cli.utils.files import JsonObject

SHARDED_STRATEGIES = ("zero3", "fsdp2")


def write_model_keys(recipe: Recipe, dialect: Dialect) -> None:
    """Write policy, tokenizer and dtype.

    Old scripts loaded both policy and reference from sft_model_path.
    """
    names = ("sft_model_path", "policy", "model_name_or_path", "model", "base_model")
    models = [(name, recipe.take(name)) for name in names if recipe.flags.get(name)]
    path = ""
    if models:
        name, path = models[0]
        both = ": policy and reference" if name == "sft_model_path" else ""
        recipe.put("model.path", path, recipe.original_text(name) + both)
        for name, other in models[1:2]:
            if other != path:
                why = f"{recipe.original_text(name)}: its tokenizer alone"
                recipe.put("model.tokenizer", other, why)
    else:
        recipe.notes.append("no model is named in the old settings: set model.path")
    flags = [n for n in ("torch_dtype", "dtype") if recipe.flags.get(n)]
    dtypes = [(str(recipe.take(n)), recipe.original_text(n)) for n in flags]
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if recipe.take(flag):
            dtypes.insert(0, (dtype, recipe.original_text(flag)))
    if dtypes:
        dtype, why = dtypes[0]
        recipe.put("model.dtype", dtype.removeprefix("torch."), why)
    _write_adapter(recipe, dialect, str(path))
    _write_quantization(recipe)
    _write_reference_sync(recipe, dialect)


def _write_adapter(recipe: Recipe, dialect: Dialect, path: str) -> None:
    """Write the adapter: ms-swift trains a LoRA unless told not to, TRL only with use_peft."""
    kinds = [n for n in ("train_type", "tuner_type", "use_peft") if n in recipe.original_flags]
    why = recipe.original_text(kinds[0]) if kinds else "ms-swift's default"
    taken = [recipe.take(name) for name in kinds]
    kind = taken[0] if kinds else "lora" if dialect.is_swift else None
    peft = recipe.take("lora_from") == "peft"
    if kind in (*tables.FULL_TRAINING, None, False):
        for name in [n for n in tables.LORA_NAMES if n in recipe.flags]:
            recipe.drop(name, "every weight was trained")
        if kinds:
            recipe.dropped.append(f"{why}: every weight is trained")
        return
    if kind not in tables.ADAPTERS:
        recipe.put("model.lora", kind, why)
        recipe.notes.append(f"the old run trained {kind}; this version has LoRA, DoRA or all")
        return
    why = "peft_config=LoraConfig(...)" if peft else why
    defaults: Mapping[str, object] = tables.LORA_SWIFT if dialect.is_swift else tables.LORA_TRL
    defaults = tables.LORA_PEFT if peft else defaults
    if peft_type := recipe.take("peft_type"):
        why = f"peft_config of the kind {peft_type}"
        defaults = {"target_modules": None}
    whose = f"{'peft' if peft else dialect.title}'s default"
    values = {key: (value, whose) for key, value in defaults.items()}  # key -> value, why
    for name, key in tables.LORA_NAMES.items():
        if name in recipe.flags:
            values[key] = (_lora_value(key, recipe.take(name)), recipe.original_text(name))
    if values["target_modules"][0] is None:
        values["target_modules"] = _layers_of_peft(path)
    dora = "use_dora" in values and values["use_dora"][0] is True
    recipe.groups["lora"] = ("peft" if peft_type else "dora" if dora else "default", why)
    if peft_type:
        values["peft_type"] = (peft_type, why)
        values["kwargs"] = (recipe.take("peft_kwargs") or None, "its arguments")
    for key, (value, text) in values.items():
        if value is not None:
            recipe.put(f"model.lora.{key}", value, text)


def _lora_value(key: str, value: object) -> object:
    """The value of an old flag in the form that our key takes."""
    if key in ("alpha", "dropout") and isinstance(value, int | float):
        return float(value)
    lists = key in ("target_modules", "exclude_modules", "modules_to_save")
    if lists and isinstance(value, str | tuple):
        value = [value] if isinstance(value, str) else list(value)
    if lists and isinstance(value, list):
        value = [str(v).strip("\"',") for v in value]
        return "all-linear" if key == "target_modules" and value == ["all-linear"] else value
    return value


def _layers_of_peft(path: str) -> tuple[list[str], str]:
    """The layers that peft chooses, guessed by the path: a wrong guess fails when a run starts."""
    matching = (layers for part, layers in tables.PEFT_LAYERS.items() if part in path.lower())
    layers = next(matching)  # the empty part, which is in every path, comes last
    return layers, "peft's choice where none are named, for most models; all-linear is ours"


def _write_quantization(recipe: Recipe) -> None:
    """Write bitsandbytes' quantisation to 4 or 8 bits."""
    bits = next((b for b in (4, 8) if recipe.flags.get(f"load_in_{b}bit")), None)
    why = recipe.original_text(f"load_in_{bits}bit") if bits else ""
    for name in ("load_in_4bit", "load_in_8bit"):
        recipe.take(name)
    nested = recipe.flags.get("use_bnb_nested_quant", False)
    if asked := recipe.take("quant_bits"):
        why, method = recipe.original_text("quant_bits"), recipe.take("quant_method", "bnb")
        if method != "bnb" or asked not in (4, 8):
            recipe.put("model.quantization", f"{method} {asked}", why)
            return
        bits, nested = asked, recipe.take("bnb_4bit_use_double_quant", True)
    if bits is None:
        for name in tables.QUANTIZATION_SETTINGS:
            recipe.drop(name, "no quantised weights were asked for")
        return
    recipe.groups["quantization"] = (f"{bits}bit", why)
    recipe.take("use_bnb_nested_quant")
    kind = recipe.take("bnb_4bit_quant_type")
    if bits == 4:
        recipe.put("model.quantization.double_quant", bool(nested), "use_bnb_nested_quant")
        if kind:
            text = recipe.original_text("bnb_4bit_quant_type")
            recipe.put("model.quantization.quant_type", kind, text)
    for name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"):
        recipe.drop(name, "model.dtype is the dtype of the computation")


def _write_reference_sync(recipe: Recipe, dialect: Dialect) -> None:
    """Write model.ref_sync from sync_ref_model: TRL counts updates, as we do."""
    on, text = recipe.take("sync_ref_model"), recipe.original_text("sync_ref_model")
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if not on:
        for name in names:
            recipe.drop(name, "sync_ref_model was off")
        return
    beta = recipe.original_flags.get("beta", dialect.defaults["algorithm.beta"])
    if not beta:
        why = "beta is 0, and then there is no reference"
        recipe.dropped.append(f"{text}: {why}")
        for name in names:
            recipe.drop(name, why)
        return
    every, alpha = take_number(recipe, names[0], 512), take_number(recipe, names[1], 0.6)
    recipe.put("model.ref_sync.every", int(every), f"{text}, {names[0]}; in updates, as here")
    recipe.put("model.ref_sync.alpha", float(alpha), names[1])


def resolve_model_conflicts(recipe: Recipe) -> None:
    """Change settings that would be refused together, and note it."""
    engine = recipe.written_value("distributed.engine")
    adapter, quantized = "lora" in recipe.groups, "quantization" in recipe.groups
    moving = "model.ref_sync.every" in recipe.lines
    if engine in SHARDED_STRATEGIES and (quantized or moving):
        new = "ddp" if quantized else "zero2"
        what = "quantised weights" if quantized else "model.ref_sync"
        recipe.put("distributed.engine", new, f"{engine} there; {what} needs whole weights here")
    if adapter and recipe.written_value("model.lora.dropout"):
        why = "model.lora.dropout is more than 0, which makes the ratio noise, as there"
        recipe.put("model.disable_dropout", False, why)
    if quantized and not adapter:
        recipe.groups["lora"] = ("default", "quantised weights take no gradient")
        recipe.notes.append("the old run trained quantised weights without an adapter: mind lora")
    _tell_vllm_of_init_kwargs(recipe)
    _fall_back_to_transformers(recipe, quantized)
    _turn_off_correction(recipe)


def _tell_vllm_of_init_kwargs(recipe: Recipe) -> None:
    """Let vLLM know the values of model.init_kwargs, for it reads config.json by itself."""
    backend = str(recipe.groups.get("generation", ("",))[0])
    values = recipe.written_value("model.init_kwargs")
    if not backend or not isinstance(values, dict):
        return
    told = {k: v for k, v in values.items() if k not in LOADING_ARGUMENTS}
    if told:
        key = f"generation.{backend.removeprefix('vllm_')}.extra"
        recipe.put(key, {"hf_overrides": told}, "the values of model.init_kwargs, for vLLM")


def _fall_back_to_transformers(recipe: Recipe, quantized: bool) -> None:
    """Let transformers sample what vLLM cannot."""
    backend = str(recipe.groups.get("generation", ("",))[0])
    lora = ("use_dora", "modules_to_save")
    unsupported = [key for key in lora if recipe.written_value(f"model.lora.{key}")]
    if recipe.written_value("model.lora.bias", "none") != "none":
        unsupported.append("bias")
    if not backend or not (quantized or unsupported):
        return
    del recipe.groups["generation"]
    sections = ("generation.server.", "generation.colocate.")
    recipe.lines = {k: line for k, line in recipe.lines.items() if not k.startswith(sections)}
    what = "model.quantization" if quantized else f"model.lora.{unsupported[0]}"
    recipe.notes.append(f"{backend} cannot sample with {what}: transformers does, more slowly")


def _turn_off_correction(recipe: Recipe) -> None:
    """Turn the correction off if the sampler truncates: its log-probabilities are then others."""
    off: JsonObject = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "kwargs": {},
    }
    written = {n: recipe.written_value(f"generation.{n}", v) for n, v in off.items()}
    filters = [n for n, v in off.items() if written[n] not in (v, 0, None)]
    correction = recipe.written_value("algorithm.correction")
    mode = correction.get("mode") if isinstance(correction, dict) else None
    if filters and "generation" in recipe.groups and mode != "none":
        why = f"{', '.join(filters)}: the sampler's log-probabilities are of another distribution"
        recipe.put("algorithm.correction", tables.NO_CORRECTION, why)
