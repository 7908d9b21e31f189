"""Images in a forward pass: the tower runs once per prompt, its vectors are used in every row.

The tower is not run by the model's own forward, which would run it for every row. transformers'
vision models accept its output as `mm_encoder_outputs`, and put these vectors in place of the image
tokens, in order. Gradients of all rows add up in the prompt's vectors, and pass the tower once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rloo_cli.config.vision_models import VISION_FAMILIES, VisionFamily
from rloo_cli.data.media import MediaInputs
from rloo_cli.utils.errors import NumbersError, refuse
from rloo_cli.utils.files import JsonObject


def family_of_model(model: PreTrainedModel) -> VisionFamily | None:
    """How this model reads images; None for a text model."""
    config = getattr(model, "config", None)  # not every part of a model has one
    if getattr(config, "vision_config", None) is None:
        return None
    return VISION_FAMILIES.get(str(model.config.model_type))


def image_token_ids(config: PretrainedConfig) -> set[int]:
    """The ids that stand for images and videos, which completions must not have."""
    if getattr(config, "vision_config", None) is None:
        return set()
    found = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
    size = config.get_text_config().vocab_size
    return {i for i in found if isinstance(i, int) and 0 <= i < size}


def media_arguments(
    model: PreTrainedModel, media: MediaInputs, vectors: Tensor | None = None
) -> JsonObject:
    """The arguments of a forward that show the model these images.

    `vectors`: the images' own, if already computed (F, H).
    """
    vectors = image_vectors(model, media) if vectors is None else vectors
    vectors = vectors.index_select(0, media.feature_index)
    shown = BaseModelOutputWithPooling(pooler_output=_as_model_reads(model, vectors))
    arguments: JsonObject = {"mm_encoder_outputs": {"image": shown}}
    if media.token_type_ids is not None:
        arguments["token_type_ids"] = media.token_type_ids
    return arguments


def image_vectors(model: PreTrainedModel, media: MediaInputs) -> Tensor:
    """The outputs of tower and projector for the images, one after the other. -> (F, H)

    Raises NumbersError unless there is one vector per image token.
    """
    made: Any = model.get_image_features(**media.tensors, return_dict=True).pooler_output
    parts = made if isinstance(made, list | tuple) else [made]
    vectors = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    if len(vectors) != media.num_features:
        what = f"the vision tower makes {len(vectors)} vectors for {media.num_features} tokens"
        why = "the processor and the model's config.json do not match"
        fix = "use a model whose processor and config.json were saved together, or fetch it again"
        refuse("model.path", what, fix, why, error=NumbersError)
    return vectors


def _as_model_reads(model: PreTrainedModel, vectors: Tensor) -> Any:
    """Vectors in the form that the model's own tower returns."""
    config = model.config
    if config.model_type == "smolvlm":  # it inserts whole tiles, and needs their length
        side = config.vision_config.image_size // config.vision_config.patch_size
        length = side**2 // config.scale_factor**2
        return vectors.view(len(vectors) // length, length, vectors.shape[-1])
    listed = config.model_type in ("qwen2_vl", "qwen2_5_vl", "llava_next")
    return [vectors] if listed else vectors[None]


def freeze_parts(model: PreTrainedModel, parts: Sequence[str]) -> int:
    """Freeze the parts in `model.freeze`. -> the number of frozen parameters

    Raises ConfigError if the model has no such part.
    """
    frozen = 0
    for part in parts:
        found = [*_weights_of(model, part).values()]
        if not found:
            what = f"model.freeze names {part}, but the model has no such part"
            why = f"{type(model).__name__} has {', '.join(n for n, _ in model.named_children())}"
            refuse("model.freeze", what, "model.freeze=[]", why)
        for weight in found:
            weight.requires_grad_(False)
            frozen += weight.numel()
    return frozen


def _weights_of(model: PreTrainedModel, part: str) -> dict[str, nn.Parameter]:
    """The weights of a part in `model.freeze`; empty for a model without it."""
    family = family_of_model(model)
    attribute = {"vision": "towers", "projector": "projectors"}[part]
    modules = {*getattr(family, attribute)} if family is not None else set()
    return {n: w for n, w in model.named_parameters() if modules & {*n.split(".")}}


def frozen_names(model: PreTrainedModel) -> set[str]:
    """The weights of parts that are completely frozen (`model.freeze`)."""
    if all(w.requires_grad for w in model.parameters()):
        return set()
    parts = [_weights_of(model, part) for part in ("vision", "projector")]
    return {n for part in parts if not any(w.requires_grad for w in part.values()) for n in part}


def modules_beside_language(model: PreTrainedModel) -> set[str]:
    """Names of the modules that process images, or connect them to the language model."""
    family = family_of_model(model)
    return set() if family is None else {*family.towers, *family.projectors}


def language_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that compute text: all of them without a tower."""
    apart = modules_beside_language(model)
    if not apart:
        yield from model.modules()
        return
    for name, module in model.named_modules():
        if not apart & {*name.split(".")}:
            yield module
