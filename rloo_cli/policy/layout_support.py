"""May rows that share a prompt be computed by an attention function of our own? Read, not run.

Such a function takes the place of the model's own one through transformers' `AttentionInterface`,
and gets queries, keys and values and nothing else. So it is wrong wherever the model's attention
looks at more than these (a window, a cap, a sink), wherever a layer carries a state from row to row
past it, and wherever the model never asks it. What reading cannot find, a count of the calls and a
comparison of numbers must (this is the first gate of three).
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

FULL_ATTENTION_TYPES = {"full_attention", "attention"}  # the second is the older name
SLIDING_WINDOW_TYPE = "sliding_attention"
SETTINGS_SUBCONFIGS = {"attn_config", "ffn_config"}  # settings kept apart that are no second model
# Read by a classifier's head and by no language model's.
UNUSED_DROPOUT_PREFIXES = ("classifier", "summary")


def why_not_shared(model: Any, max_length: int | None = None, training: bool = True) -> str | None:
    """A short reason why rows of this transformers model that share a prompt cannot be computed by
    an attention function of our own, or None: as far as its config and its classes tell, they can.

    `longest`: the most positions that a row will have; a window that holds them all does nothing.
    None: not known, every window counts. `training` False: in eval mode, where dropout is off.
    """
    config = model.config
    return (
        _interface_reason(model)
        or _adapter_reason(model)
        or _input_reason(config)
        or _layer_reason(model, config)
        or _window_reason(model, config, max_length)
        or _score_reason(model, config)
        or (_dropout_reason(model, config) if training else None)
    )


def _interface_reason(model: Any) -> str | None:
    name = type(model).__name__
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if can_set is None:
        return f"{name} is no transformers model"
    if getattr(model, "_is_stateful", False):  # mamba has no attention at all, and could "set" it
        return "layers that keep a state (linear attention, state space)"
    if not can_set():  # `set_attn_implementation` would only warn, and change nothing
        return "its attention cannot be set"
    if not getattr(model, "_supports_attention_backend", False):
        return "its layers do not pass arguments on to their attention"
    return None


def _adapter_reason(model: Any) -> str | None:
    """Adapters that add places to a prompt, or a second softmax."""
    found = getattr(model, "peft_config", None)
    for adapter in found.values() if isinstance(found, dict) else ():
        prompt = getattr(adapter, "is_prompt_learning", False)
        if prompt or getattr(adapter, "is_adaption_prompt", False):
            kind = getattr(adapter, "peft_type", type(adapter).__name__)
            return f"an adapter that adds to the prompt ({getattr(kind, 'value', kind)})"
    return None


def _input_reason(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return "an encoder"
    held = getattr(config, "sub_configs", {})
    parts = sorted(
        name for name in held if name not in SETTINGS_SUBCONFIGS and getattr(config, name, None)
    )
    if parts:
        return f"parts beside a text model ({', '.join(parts)})"
    ropes = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    if any("mrope" in str(rope) for rope in ropes):
        return "positions with several axes (mrope)"
    return None


def _layer_reason(model: Any, config: Any) -> str | None:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    odd = sorted(set(types or ()) - FULL_ATTENTION_TYPES - {SLIDING_WINDOW_TYPE})
    if odd:
        return f"layers that are not full attention ({', '.join(map(str, odd))})"
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or any(vars(m).get("is_causal") is False for m in _attention_modules(model)):
        return "attention that is not causal"
    return None


def _window_reason(model: Any, config: Any, max_length: int | None) -> str | None:
    """A row sees the last `window` places, its own among them."""
    windows = {
        vars(m)["sliding_window"] for m in _attention_modules(model) if "sliding_window" in vars(m)
    }
    typed = SLIDING_WINDOW_TYPE in (getattr(config, "layer_types", None) or ())
    off = getattr(config, "use_sliding_window", None) is False
    # Layers that hold a window of their own know better than a config that names one for some.
    if typed or not (windows or off):
        windows.add(getattr(config, "sliding_window", None))
    found = [int(window) for window in windows if window]
    if typed and not found:
        return "a sliding window of unknown size"
    if found and (max_length is None or min(found) < max_length):
        return f"a sliding window of {min(found)}"
    return None


def _score_reason(model: Any, config: Any) -> str | None:
    """What is done to scores between query times key and the softmax."""
    for name in ("attn_logit_softcapping", "attention_logit_cap"):
        cap = getattr(config, name, None)
        if cap:
            return f"soft-capped attention ({name} = {cap})"
    if any(name.rpartition(".")[2] in ("sinks", "sink") for name, _ in model.named_parameters()):
        return "attention sinks"
    return None


def _dropout_reason(model: Any, config: Any) -> str | None:
    """With dropout, a prompt that is computed once is not a prompt computed K times."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"dropout of {module.p}"
    for holder in (*model.modules(), config):
        for name, value in vars(holder).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if (
                "drop" in name
                and not name.startswith(UNUSED_DROPOUT_PREFIXES)
                and number
                and value > 0
            ):
                return f"dropout ({name} = {value})"
    return None


def _attention_modules(model: Any) -> Iterator[Any]:
    """Modules that know their layer: the attentions, and in some models the layers around them."""
    return (module for module in model.modules() if "layer_idx" in vars(module))
