"""Images for an engine: sent as files with the prompt, and expanded by the engine itself.

The engine gets the prompt's ids with one placeholder per image, processes the images with its
own processor, and must arrive at the trainer's ids: `check_expanded_ids` compares them with
those that it reports, in every request. Imports neither torch nor, before it is called, vLLM.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_cli.data.images import decode_png
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.data.media import Media

# Processors of transformers with a video part, which needs torchvision.
VIDEO_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
# Modules of transformers whose image processors need torchvision, and have a PIL twin.
PIL_FAMILIES = ("qwen2_vl", "pixtral")
# A weight of a tower whose name leaves out the tower's one module.
FLAT_TOWER = re.compile(r"\bvision_tower\.(?!vision_model\.)")
TOWER_NAME = "vision_tower.vision_model."
NEVER_SAMPLED = -100.0  # vLLM's least bias: exp(-100) is 0 beside any other token


def images_to_send(media: "Media | None", prompt_ids: list[int]) -> JsonObject | None:
    """The images of a prompt as JSON; None without images."""
    if media is None:
        return None
    return {"plain_ids": media.plain_ids_of(prompt_ids), "files": media.png_files}


def engine_prompt(token_ids: list[int], images: JsonObject | None) -> Any:
    """vLLM's prompt of these ids, with images if there are any."""
    from vllm.inputs import TokensPrompt  # lazy: slow

    if images is None:
        return TokensPrompt(prompt_token_ids=token_ids)
    shown = [decode_png(text) for text in images["files"]]
    return TokensPrompt(prompt_token_ids=images["plain_ids"], multi_modal_data={"image": [*shown]})


def check_expanded_ids(found: Sequence[int] | None, token_ids: Sequence[int]) -> None:
    """Raise RuntimeError if an engine's prompt differs from the trainer's in any token."""
    found = list(found or [])
    if found == list(token_ids):
        return
    pairs = zip(found, token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(token_ids)))
    raise RuntimeError(
        f"the engine expands the prompt's images to {len(found)} tokens, the trainer to"
        f" {len(token_ids)}; they differ from token {at} on"
    )


def ban_image_tokens(params: JsonObject, image_ids: Sequence[int]) -> JsonObject:
    """Sampling parameters that never sample these ids: such a token would need an image."""
    if not image_ids:
        return params
    bias = {str(i): NEVER_SAMPLED for i in image_ids}
    return params | {"logit_bias": bias | (params.get("logit_bias") or {})}


def use_pil_processors() -> None:
    """Give vLLM the PIL processors of transformers, without video parts, if torchvision is
    missing: vLLM imports the other modules only for names that the PIL ones have too."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    transformers = importlib.import_module("transformers")
    for name in PIL_FAMILIES:
        package = f"transformers.models.{name}"
        module = importlib.import_module(f"{package}.image_processing_pil_{name}")
        for kind in [n for n in vars(module) if n.endswith("ImageProcessorPil")]:
            setattr(module, kind.removesuffix("Pil"), getattr(module, kind))
        sys.modules[f"{package}.image_processing_{name}"] = module
    kwargs = importlib.import_module("transformers.processing_utils").VideosKwargs
    for name in VIDEO_PROCESSORS:
        kind = getattr(transformers, name)
        kind.video_processor = SimpleNamespace(valid_kwargs=kwargs)  # vLLM asks for their names
        kept = [part for part in kind.get_attributes() if part != "video_processor"]
        kind.get_attributes = classmethod(lambda cls, kept=kept: list(kept))


def take_flat_towers() -> None:
    """Let vLLM's models load a SigLIP or CLIP tower under transformers 5's names: Gemma 3's and
    LLaVA-NeXT's weights are `vision_tower.embeddings...`, in files that it saves and in updates,
    where vLLM's module is `vision_tower.vision_model`."""
    loader = importlib.import_module("vllm.model_executor.models.utils").AutoWeightsLoader
    load = loader.load_weights
    if load.__module__ == __name__:
        return  # already replaced

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]], **more: Any) -> Any:
        if hasattr(getattr(self.module, "vision_tower", None), "vision_model"):
            weights = ((FLAT_TOWER.sub(TOWER_NAME, name), tensor) for name, tensor in weights)
        return load(self, weights, **more)

    loader.load_weights = load_weights
