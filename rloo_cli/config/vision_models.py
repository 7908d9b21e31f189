"""The families of vision-language models that are known, and how each is computed.

A family is a `model_type` of config.json. Other vision models are refused by name: their tower may
return more than one vector per image token (Qwen3-VL does), and such a model would train without an
error on the wrong numbers.
"""

from dataclasses import dataclass, replace

from rloo_cli.config.pasted import rename_column
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class VisionFamily:
    """How the models of one family take images."""

    # What the processor makes of images besides ids, and the tower takes.
    tensor_names: tuple[str, ...]
    towers: tuple[str, ...]  # names of the modules that see the images
    projectors: tuple[str, ...] = ()  # of those between tower and language model, if apart
    axes: int = 1  # of a token's rotary position: 3 = time, height, width
    two_way_images: bool = False  # the tokens of an image attend to each other both ways
    # The processor's class, if transformers' own needs more packages for the same result.
    processor: str | None = None


_QWEN = VisionFamily(("pixel_values", "image_grid_thw"), ("visual",), axes=3)
_IDEFICS = VisionFamily(
    ("pixel_values", "pixel_attention_mask"), ("vision_model",), ("connector",)
)  # fmt: skip
VISION_FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "gemma3": VisionFamily(
        ("pixel_values",), ("vision_tower",), ("multi_modal_projector",), two_way_images=True
    ),
    "llava_next": VisionFamily(
        ("pixel_values", "image_sizes"), ("vision_tower",), ("multi_modal_projector",)
    ),
    "idefics3": _IDEFICS,
    "smolvlm": replace(_IDEFICS, processor="Idefics3Processor"),  # its own needs num2words
    "internvl": VisionFamily(("pixel_values",), ("vision_tower",), ("multi_modal_projector",)),
}


def vision_family(values: JsonObject) -> VisionFamily | None:
    """The family of the model of this config.json; None for a model without a vision tower."""
    return VISION_FAMILIES.get(str(values.get("model_type"))) if has_tower(values) else None


def has_tower(values: JsonObject) -> bool:
    """Whether config.json describes a model with a vision tower."""
    return isinstance(values.get("vision_config"), dict)


def text_model_problem(path: str, values: JsonObject) -> Problem:
    """Prompts with images for the model of this config.json, which only takes text."""
    why = f"{path} only takes text (model_type {values.get('model_type')!r})"
    fix = f"a model of {', '.join(VISION_FAMILIES)}; or {rename_column('image', 'picture')}, to"
    what = "the prompts have images, but the model takes none"
    return Problem(what, "model.path", why, f"{fix} train without the images")


def unknown_vision_reason(values: JsonObject) -> str:
    """Why a model with a vision tower is refused; "" = no tower, or a known one."""
    if not has_tower(values) or vision_family(values) is not None:
        return ""
    known = ", ".join(VISION_FAMILIES)
    kind = values.get("model_type")
    return f"it has a vision tower of the unsupported model_type {kind!r}; supported: {known}"
