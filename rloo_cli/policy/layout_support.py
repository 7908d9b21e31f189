"""Decides, without a forward pass, whether our attention may compute a shared prompt.

Our attention replaces the model's own through transformers' `AttentionInterface`, and gets only
queries, keys and values. So it is wrong if the model's attention uses more
than these (a window, a cap, a sink), if a layer carries a state from token to token past it,
or if the model never calls it. This is the first of three checks: what it misses is found by
counting calls and comparing numbers (`layouts`).
"""

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rloo_cli.policy.vision import family_of_model, language_modules

FULL_ATTENTION_TYPES = {"full_attention", "attention"}  # the second is the older name
SLIDING_WINDOW_TYPE = "sliding_attention"
SETTINGS_SUBCONFIGS = {"attn_config", "ffn_config"}  # of the text model, not of a second model
# Settings that a classifier's head reads, and a language model does not.
UNUSED_DROPOUT_PREFIXES = ("classifier", "summary")


def why_not_shared(
    model: PreTrainedModel, max_length: int | None = None, training: bool = True
) -> str | None:
    """Why our attention function cannot compute a shared prompt for this model, in a few words.

    None if it can, as far as config and classes show. `max_length`: the most positions of a
    sequence; a window that holds them all has no effect. If it is None, every window counts.
    `training`: False in eval mode, where dropout is off.
    """
    config, family = model.config, family_of_model(model)
    if family is not None:
        if family.two_way_images:
            return "image tokens attend to each other bidirectionally"
        config = config.get_text_config()
    return (
        _interface_reason(model)
        or _adapter_reason(model)
        or _input_reason(config, several_axes=family is not None)
        or _layer_reason(model, config)
        or _window_reason(model, config, max_length)
        or _score_reason(model, config)
        or (_dropout_reason(model, config) if training else None)
    )


def _interface_reason(model: PreTrainedModel) -> str | None:
    name = type(model).__name__
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if can_set is None:
        return f"{name} is not a transformers model"
    if getattr(model, "_is_stateful", False):  # mamba has no attention, but would accept it
        return "layers that keep a state (linear attention, state space)"
    if not can_set():  # `set_attn_implementation` would only warn, and change nothing
        return "its attention cannot be set"
    if not getattr(model, "_supports_attention_backend", False):
        return "its layers do not pass arguments on to their attention"
    return None


def _adapter_reason(model: PreTrainedModel) -> str | None:
    """Why an adapter rules it out: one that adds tokens to a prompt, or a second softmax."""
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        prompt = getattr(adapter, "is_prompt_learning", False)
        if prompt or getattr(adapter, "is_adaption_prompt", False):
            kind = getattr(adapter, "peft_type", type(adapter).__name__)
            return f"an adapter that adds to the prompt ({getattr(kind, 'value', kind)})"
    return None


def _input_reason(config: PretrainedConfig, several_axes: bool = False) -> str | None:
    """Why its inputs rule it out. `several_axes`: rows have positions on all of its axes."""
    if any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        return "an encoder"
    names = sorted(set(getattr(config, "sub_configs", {})) - SETTINGS_SUBCONFIGS)
    parts = [name for name in names if getattr(config, name, None)]
    if parts:
        return f"parts beside a text model ({', '.join(parts)})"
    ropes = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    if not several_axes and any("mrope" in str(rope) for rope in ropes):
        return "positions with several axes (mrope)"
    return None


def _layer_reason(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    odd = sorted(set(types or ()) - FULL_ATTENTION_TYPES - {SLIDING_WINDOW_TYPE})
    if odd:
        return f"layers that are not full attention ({', '.join(map(str, odd))})"
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or any(vars(m).get("is_causal") is False for m in _attention_modules(model)):
        return "attention that is not causal"
    return None


def _window_reason(
    model: PreTrainedModel, config: PretrainedConfig, max_length: int | None
) -> str | None:
    """Why a window rules it out: a token attends to the last `window` tokens, itself included."""
    settings = [vars(module) for module in _attention_modules(model)]
    windows = {values["sliding_window"] for values in settings if "sliding_window" in values}
    typed = SLIDING_WINDOW_TYPE in (getattr(config, "layer_types", None) or ())
    off = getattr(config, "use_sliding_window", None) is False
    # Windows in the layers are more reliable than a config, which may name one for some layers.
    if typed or not (windows or off):
        windows.add(getattr(config, "sliding_window", None))
    sizes = [int(window) for window in windows if window]
    if typed and not sizes:
        return "a sliding window of unknown size"
    if sizes and (max_length is None or min(sizes) < max_length):
        return f"a sliding window of {min(sizes)}"
    return None


def _score_reason(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """Why an operation between query times key and the softmax rules it out."""
    for name in ("attn_logit_softcapping", "attention_logit_cap"):
        cap = getattr(config, name, None)
        if cap:
            return f"soft-capped attention ({name} = {cap})"
    if any(name.rpartition(".")[2] in ("sinks", "sink") for name, _ in model.named_parameters()):
        return "attention sinks"
    return None


def _dropout_reason(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """With dropout, a prompt that is computed once differs from one computed K times."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"dropout of {module.p}"
    for holder in (*model.modules(), config):
        for name, value in vars(holder).items():
            if "drop" not in name or name.startswith(UNUSED_DROPOUT_PREFIXES):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return f"dropout ({name} = {value})"
    return None


def _attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules with a layer index: attentions, and in some models the layers themselves."""
    return (module for module in language_modules(model) if "layer_idx" in vars(module))
