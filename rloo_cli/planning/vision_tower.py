"""The vision tower of a model, as a plan sees it: its parameters, and the memory of an image.

It is counted from config.json's `vision_config`. Each prompt's images pass the tower once, however
many completions the prompt has, and no prompt has more image tokens than it may have tokens: a
plan takes that bound.
"""

from dataclasses import dataclass

from rloo_cli.config.vision_models import vision_family
from rloo_cli.planning import model_families
from rloo_cli.planning.model_families import ModelFamily, ModelSizes
from rloo_cli.utils.files import JsonObject

COLOURS = 3


@dataclass(frozen=True)
class TowerSpec:
    """A vision tower and what joins it to the language model. Parameters are counted."""

    sizes: ModelSizes
    family: ModelFamily  # of its layers
    layer_params: int
    other_params: int  # patch embedding, positions, the last norm
    projector_params: int
    patches_per_token: int  # patches that become one token of the language model
    pixels_per_token: int

    @property
    def tower_params(self) -> int:
        """Parameters of the tower itself, which `model.freeze=[vision]` keeps as they are."""
        return self.sizes.layers * self.layer_params + self.other_params

    @property
    def total_params(self) -> int:
        """All of them."""
        return self.tower_params + self.projector_params

    def saved_bytes(self, bytes_per_weight: int) -> float:
        """Bytes that its backward pass keeps for one token of an image."""
        each = model_families.saved_bytes_per_token(self.family, self.sizes, bytes_per_weight)
        return self.patches_per_token * self.sizes.layers * each


def parse_tower_spec(values: JsonObject, text_hidden: int) -> TowerSpec | None:
    """The tower in a config.json; None for a model of text, or one whose tower is not counted.

    `text_hidden`: the language model's width. Raises KeyError for a missing number.
    """
    if vision_family(values) is None:
        return None
    c, kind = values["vision_config"], str(values["model_type"])
    is_qwen = kind.startswith("qwen2")
    merge = _number(c, "spatial_merge_size", default=2) if is_qwen else 1
    patch = _number(c, "patch_size", default=14)
    if kind == "qwen2_vl":  # its `hidden_size` is the language model's
        hidden = _number(c, "embed_dim", default=1280)
        mlp = int(hidden * c.get("mlp_ratio", 4))
    else:
        hidden = _number(c, "hidden_size", default=1280 if is_qwen else 1152)
        mlp = _number(c, "intermediate_size", default=3420 if is_qwen else 4304)
    layers = _number(c, "depth", "num_hidden_layers", default=32 if is_qwen else 27)
    heads = _number(c, "num_heads", "num_attention_heads", default=16)
    gated = kind == "qwen2_5_vl"
    sizes = ModelSizes(layers, hidden, heads, heads, hidden // heads, mlp, 0, 0, 0, 0, 0)
    family = model_families.VISION_GATED if gated else model_families.VISION_PLAIN
    layer, _ = model_families.layer_param_counts(family, sizes, False, False)
    frames = _number(c, "temporal_patch_size", default=2) if is_qwen else 1
    side = _number(c, "image_size", default=0)
    patches = merge**2
    other = COLOURS * frames * patch**2 * hidden
    joined = hidden * merge**2
    projector = joined * joined + joined + joined * text_hidden + text_hidden + hidden * (2 - gated)
    if not is_qwen:
        tokens = _tokens_of_tile(values, side, patch)
        patches = max(1, round((side // patch) ** 2 / tokens))
        other += hidden * (1 + (side // patch) ** 2) + 4 * hidden
        if kind == "gemma3":  # SigLIP's pooling head, which nothing reads
            other += layer + 4 * hidden
        projector = _projector_params(kind, values, hidden, text_hidden)
    return TowerSpec(sizes, family, layer, other, projector, patches, patches * patch * patch)


def _tokens_of_tile(values: JsonObject, side: int, patch: int) -> int:
    """Tokens that one square tile becomes."""
    whole = (side // patch) ** 2
    if "mm_tokens_per_image" in values:
        return int(values["mm_tokens_per_image"])
    if "scale_factor" in values:
        return whole // int(values["scale_factor"]) ** 2
    if "downsample_ratio" in values:
        return int(whole * float(values["downsample_ratio"]) ** 2)
    return whole


def _projector_params(kind: str, values: JsonObject, hidden: int, text: int) -> int:
    """Parameters between tower and language model."""
    if kind == "gemma3":
        return hidden * text + hidden
    if kind in ("idefics3", "smolvlm"):
        return hidden * int(values["scale_factor"]) ** 2 * text
    if kind == "internvl":
        wide = int(hidden / float(values["downsample_ratio"]) ** 2)
        return 2 * wide + wide * text + text + text * text + text
    return hidden * text + text + text * text + text + text  # LLaVA-NeXT, and its new line


def _number(values: JsonObject, *names: str, default: int) -> int:
    """The first of these keys that is there. A pair is square."""
    for name in names:
        found = values.get(name)
        if isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, int):
            return found
    return default
