"""A vision-language model's processor: from images and text to token ids and tensors.

Without torchvision, transformers' PIL processors are used, and a processor class with a video part
is built without it: only that part needs torchvision.

How many tokens an image becomes depends only on its size, so the text that represents an image is
cached by size: prompts are tokenized at the start without computing tensors. When a prompt is
sampled its images are really processed, and must give the same ids.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.schema import ModelConfig
from rloo_cli.config.vision_models import VisionFamily, text_model_problem, vision_family
from rloo_cli.utils.errors import DataError, MachineError, refuse

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

# What a processor may return beside its family's tensors.
OTHER_OUTPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
BLANK_SIZE = (32, 32)  # pixels; processors scale it up where a tower needs more
VIDEO_ATTRIBUTE = "video_processor"
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class VisionProcessor:
    """The processor of one model, with the tokenizer that the run uses."""

    def __init__(
        self,
        processor: Any,
        tokenizer: "PreTrainedTokenizerBase",
        family: VisionFamily,
        image_token_id: int,
    ):
        self.processor, self.family, self.image_token_id = processor, family, image_token_id
        self.tokenizer = processor.tokenizer = tokenizer
        self._text_by_size: dict[tuple[int, int], str] = {}

    @property
    def merge_size(self) -> int:
        """Patches along each side that become one token (families with several axes)."""
        return int(self.processor.image_processor.merge_size)

    def plain_ids(self, text: str) -> list[int]:
        """The ids of a rendered prompt, one placeholder for each image."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def expand_prompt(self, text: str, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a rendered prompt with images of these sizes (width, height).

        Raises DataError if the template wrote another number of placeholders.
        """
        count = text.count(self.processor.image_token)
        if count != len(sizes):
            what = f"the chat template renders {count} images, but the prompt has {len(sizes)}"
            why = f"{self.processor.image_token!r} stands for an image in {text[:200]!r}"
            fix = "model.chat_template=FILE.jinja, one that renders parts of type image"
            refuse("model.chat_template", what, fix, why, error=DataError)
        if not sizes:
            return self.plain_ids(text)
        texts = [self._text_of(size) for size in sizes]
        expanded, _ = self.processor.get_text_with_replacements([text], texts)
        return self.plain_ids(expanded[0])

    def _text_of(self, size: tuple[int, int]) -> str:
        """The text that represents an image of this size."""
        if size not in self._text_by_size:
            from PIL import Image  # lazy: a run without images does not need Pillow

            process = self.processor
            kwargs = process._merge_kwargs(
                type(process).valid_processor_kwargs,
                tokenizer_init_kwargs=self.tokenizer.init_kwargs,
                return_tensors="pt",
            )["images_kwargs"]
            blank = [[Image.new("RGB", size)]]
            images, *_ = process.prepare_inputs_layout(images=blank, text=[process.image_token])
            (text,) = process._process_images(images, **kwargs)[1]
            self._text_by_size[size] = str(text)
        return self._text_by_size[size]

    def num_tokens(self, size: tuple[int, int]) -> int:
        """The tokens of an image of this size (width, height) that stand for its parts."""
        return self.plain_ids(self._text_of(size)).count(self.image_token_id)

    def tensors_of(self, images: "Sequence[Image]") -> tuple[dict[str, Tensor], int]:
        """The tower's inputs for images without a prompt, and their tokens."""
        text = self.processor.image_token * len(images)
        ids = self.expand_prompt(text, [image.size for image in images])
        return self.image_tensors(text, images, ids), ids.count(self.image_token_id)

    @cached_property
    def blank_image(self) -> tuple[dict[str, Tensor], int]:
        """`tensors_of` a small black image."""
        from PIL import Image  # lazy: a run without images does not need Pillow

        return self.tensors_of([Image.new("RGB", BLANK_SIZE)])

    def image_tensors(
        self, text: str, images: "Sequence[Image]", prompt_ids: Sequence[int]
    ) -> dict[str, Tensor]:
        """The tower's inputs for the images of a prompt, by the names of the family.

        Raises DataError if the images give other ids than `prompt_ids`, or unknown tensors.
        """
        made = self.processor(
            images=[list(images)], text=[text], return_tensors="pt", add_special_tokens=False
        )
        odd = sorted({*made} - OTHER_OUTPUTS - {*self.family.tensor_names})
        if odd:
            what = f"{type(self.processor).__name__} returns {', '.join(odd)} for images"
            why = f"rloo knows {', '.join(self.family.tensor_names)} for this kind of model"
            fix = "use another model.path, and please report the model's name"
            refuse("model.path", what, fix, why, error=DataError)
        if made["input_ids"][0].tolist() != list(prompt_ids):
            why = f"{len(prompt_ids)} then, {made['input_ids'].shape[1]} tokens now"
            what = "a prompt's images have changed since it was tokenized"
            refuse("data.path", what, "do not change the files during a run", why, error=DataError)
        return {name: made[name] for name in self.family.tensor_names}


def load_vision_processor(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerBase"
) -> VisionProcessor:
    """Load the processor of the policy's model.

    Raises DataError for a model without image input, ConfigError for a processor that cannot be
    loaded, MachineError for a missing package.
    """
    import transformers  # lazy: only runs with images
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # lazy: as above

    path = synthetic.resolve_model_path(config.path)
    values = hf_cache.read_model_config(path, config.revision)
    family = vision_family(values)
    if family is None:
        raise DataError(text_model_problem(config.path, values))
    name = family.processor or PROCESSOR_MAPPING_NAMES[str(values["model_type"])]
    processor_class = getattr(transformers, str(name))
    if VIDEO_ATTRIBUTE in processor_class.get_attributes():
        processor_class = without_video_part(processor_class)
    options: dict[str, object] = {"trust_remote_code": config.trust_remote_code}
    options |= {"revision": config.revision} if config.revision else {}
    try:
        processor = processor_class.from_pretrained(path, **options)
    except ImportError as error:
        what = f"{name} cannot be loaded"
        fix = "pip install 'rloo-cli[images]', or the named package"
        refuse("model.path", what, fix, error, error=MachineError)
    except Exception as error:  # libraries may raise anything for a damaged file
        what = f"the processor of {config.path} cannot be loaded"
        fix = "model.path=FOLDER or NAME with complete processor files"
        refuse("model.path", what, fix, error)
    token_id = transformers.AutoConfig.from_pretrained(path, **options).image_token_id
    return VisionProcessor(processor, tokenizer, family, int(token_id))


def without_video_part(processor_class: Any) -> Any:
    """The processor's class without its video part, which needs torchvision."""
    names = [n for n in processor_class.get_attributes() if n != VIDEO_ATTRIBUTE]
    members = {"get_attributes": classmethod(lambda cls: names)}
    return type(processor_class.__name__, (processor_class,), members)


def merge_image_tensors(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several prompts as those of one, in order.

    Idefics' tensors (1, tiles, ...) are of a whole prompt: their tiles are joined. LLaVA-NeXT's
    pixels (images, tiles, 3, H, W) are padded to the most tiles, of which the tower uses as many
    as the image's size says.
    """
    of_whole_prompts = "pixel_attention_mask" in parts[0]
    merged = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if tensors[0].dim() == 5 and not of_whole_prompts:
            tiles = max(t.shape[1] for t in tensors)
            tensors = [_with_tiles(t, tiles) for t in tensors]
        merged[name] = torch.cat(tensors, dim=1 if of_whole_prompts else 0)
    return merged


def _with_tiles(pixels: Tensor, tiles: int) -> Tensor:
    """Pixels with zeros for the tiles that are missing. (I, t, ...) -> (I, tiles, ...)"""
    missing = pixels.new_zeros(pixels.shape[0], tiles - pixels.shape[1], *pixels.shape[2:])
    return torch.cat([pixels, missing], dim=1)


def copy_processor_files(source: str, folder: Path) -> None:
    """Put the files of a model's processor beside its trained weights."""
    from transformers.utils import cached_file  # lazy: only models with a tower

    for name in PROCESSOR_FILES:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if found is not None and not (folder / name).exists():
            (folder / name).write_bytes(Path(found).read_bytes())
