"""What model an old run trained: path, dtype, adapter, quantised weights, a reference that moves.

`make_fit` comes last: what the old tool did together and a check of ours refuses together.
"""

from typing import Any

from rloo_cli.cli.migrate import tables
from rloo_cli.cli.migrate.batch import Dialect, take_number
from rloo_cli.cli.migrate.recipe import Recipe

SHARDED_STRATEGIES = ("zero3", "fsdp2")


def write_model_keys(recipe: Recipe, dialect: Dialect) -> None:
    """Policy, tokenizer, dtype. Old scripts began at sft_model_path, policy and reference both."""
    names = ("sft_model_path", "policy", "model_name_or_path", "model", "base_model")
    given = [(name, recipe.take(name)) for name in names if recipe.flags.get(name)]
    path = ""
    if given:
        name, path = given[0]
        both = ": policy and reference" if name == "sft_model_path" else ""
        recipe.put("model.path", path, recipe.original_text(name) + both)
        for name, other in given[1:2]:
            if other != path:
                recipe.put(
                    "model.tokenizer", other, f"{recipe.original_text(name)}: its tokenizer alone"
                )
    else:
        recipe.notes.append("no model is named in the old settings: set model.path")
    wanted = [n for n in ("torch_dtype", "dtype") if recipe.flags.get(n)]
    asked = [(recipe.original_text(n), str(recipe.take(n))) for n in wanted]
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if recipe.take(flag):
            asked.insert(0, (recipe.original_text(flag), dtype))
    if asked:
        recipe.put("model.dtype", asked[0][1].removeprefix("torch."), asked[0][0])
    _write_adapter(recipe, dialect, str(path))
    _write_quantization(recipe)
    _write_reference_sync(recipe, dialect)


def _write_adapter(recipe: Recipe, dialect: Dialect, path: str) -> None:
    """ms-swift trains LoRA unless told not to, TRL only with use_peft."""
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
    defaults = (
        tables.LORA_PEFT if peft else tables.LORA_SWIFT if dialect.is_swift else tables.LORA_TRL
    )
    whose = "peft" if peft else dialect.title
    said: dict[str, tuple[Any, str]] = {
        key: (value, f"{whose}'s default") for key, value in defaults.items()
    }
    for name, key in tables.LORA_NAMES.items():
        if name in recipe.flags:
            text = recipe.original_text(name)
            value = recipe.take(name)
            said[key] = (_lora_value(key, value), text)
    if said["target_modules"][0] is None:
        said["target_modules"] = _layers_of_peft(path)
    dora = said.get("use_dora", (False,))[0] is True
    recipe.groups["lora"] = ("dora" if dora else "default", why)
    for key, (value, text) in said.items():
        if value is not None:
            recipe.put(f"model.lora.{key}", value, text)


def _lora_value(key: str, value: Any) -> Any:
    """A value of an old flag as our key takes it."""
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
    """The layers that peft chooses by the architecture; a name that is wrong stops at the start."""
    named = (layers for word, layers in tables.PEFT_LAYERS.items() if word in path.lower())
    layers = next(named)  # the empty word comes last
    return layers, "peft's choice where none are named, for most models; all-linear is ours"


def _write_quantization(recipe: Recipe) -> None:
    """bitsandbytes' weights of 4 or 8 bits."""
    bits = next((b for b in (4, 8) if recipe.flags.get(f"load_in_{b}bit")), None)
    why = recipe.original_text(f"load_in_{bits}bit") if bits else ""
    for name in ("load_in_4bit", "load_in_8bit"):
        recipe.take(name)
    nested = recipe.take("use_bnb_nested_quant", False)
    if asked := recipe.take("quant_bits"):
        why, method = recipe.original_text("quant_bits"), recipe.take("quant_method", "bnb")
        if method != "bnb" or asked not in (4, 8):
            recipe.put("model.quantization", f"{method} {asked}", why)
            return
        bits, nested = asked, recipe.take("bnb_4bit_use_double_quant", True)
    if bits is None:
        recipe.drop("bnb_4bit_quant_type", "no weights of 4 bits were asked for")
        return
    recipe.groups["quantization"] = (f"{bits}bit", why)
    kind = recipe.take("bnb_4bit_quant_type")
    if bits == 4:
        recipe.put("model.quantization.double_quant", bool(nested), "use_bnb_nested_quant")
        if kind:
            recipe.put(
                "model.quantization.quant_type", kind, recipe.original_text("bnb_4bit_quant_type")
            )
    for name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"):
        recipe.drop(name, "model.dtype is what is computed in")


def _write_reference_sync(recipe: Recipe, dialect: Dialect) -> None:
    """sync_ref_model -> model.ref_sync; TRL counts updates, as here."""
    on = recipe.take("sync_ref_model")
    said = recipe.original_text("sync_ref_model")
    names = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if not on:
        for name in names:
            recipe.drop(name, "sync_ref_model was off")
        return
    beta = recipe.original_flags.get("beta", dialect.defaults["algorithm.beta"])
    if not beta:
        for name in names:
            recipe.take(name)
        recipe.dropped.append(f"{said}: beta is 0, and then there is no reference")
        return
    every, alpha = take_number(recipe, names[0], 512), take_number(recipe, names[1], 0.6)
    recipe.put("model.ref_sync.every", int(every), f"{said}, {names[0]}; in updates, as here")
    recipe.put("model.ref_sync.alpha", float(alpha), names[1])


def resolve_model_conflicts(recipe: Recipe) -> None:
    """Change what would be refused together, and say so."""
    engine = recipe.written_value("distributed.engine")
    adapter, quantized = "lora" in recipe.groups, "quantization" in recipe.groups
    moving = "model.ref_sync.every" in recipe.lines
    if engine in SHARDED_STRATEGIES and (adapter or quantized or moving):
        new = "ddp" if quantized else "zero2"
        what = "quantised weights" if quantized else "an adapter" if adapter else "model.ref_sync"
        recipe.put("distributed.engine", new, f"{engine} there; {what} needs whole weights here")
    if adapter and recipe.written_value("model.lora.dropout"):
        why = "model.lora.dropout is more than 0, which makes the ratio noise, as there"
        recipe.put("model.disable_dropout", False, why)
    if quantized and not adapter:
        recipe.groups["lora"] = ("default", "quantised weights take no gradient")
        recipe.notes.append("the old run trained quantised weights without an adapter: mind lora")
    _fall_back_to_transformers(recipe, quantized)
    _turn_off_correction(recipe)


def _fall_back_to_transformers(recipe: Recipe, quantized: bool) -> None:
    """What vLLM cannot sample from is sampled by transformers."""
    backend = str(recipe.groups.get("generation", ("",))[0])
    odd = [
        key for key in ("use_dora", "modules_to_save") if recipe.written_value(f"model.lora.{key}")
    ]
    if recipe.written_value("model.lora.bias", "none") != "none":
        odd.append("bias")
    if not backend or not (quantized or odd):
        return
    del recipe.groups["generation"]
    for key in [
        k for k in recipe.lines if k.startswith(("generation.server.", "generation.colocate."))
    ]:
        del recipe.lines[key]
    what = "model.quantization" if quantized else f"model.lora.{odd[0]}"
    recipe.notes.append(f"{backend} cannot sample with {what}: transformers does, more slowly")


def _turn_off_correction(recipe: Recipe) -> None:
    """A correction needs the sampler's own distribution, which top_p and its kin cut."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    cut = [
        n for n, v in off.items() if recipe.written_value(f"generation.{n}", v) not in (v, 0, None)
    ]
    rule = recipe.written_value("algorithm.correction") or {}
    if cut and "generation" in recipe.groups and rule.get("mode") != "none":
        why = f"{', '.join(cut)}: the sampler's log-probabilities are of another distribution"
        recipe.put("algorithm.correction", tables.NO_CORRECTION, why)
