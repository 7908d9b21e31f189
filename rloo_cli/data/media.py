"""The images of a prompt, from their files to the inputs of a forward pass.

`Group.media` holds those of one group. They are read and processed once, when the group is first
computed, and are released with the group: the pixels of a data set are never in memory together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rloo_cli.data.images import BadImage, ImageReader, encode_png, encode_thumbnail
from rloo_cli.data.vision_processor import VisionProcessor, merge_image_tensors
from rloo_cli.utils.errors import DataError, refuse

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(eq=False)
class ImagePart:
    """Images that belong together: the tower sees them once, whatever rows show them."""

    tensors: dict[str, Tensor]  # the tower's inputs, by the names of the model's family
    num_features: int  # their number of tokens


@dataclass
class Media:
    """The images of one prompt, in the order in which it shows them."""

    sources: list[object]  # what `ImageReader` reads
    column: str | None  # their data column; None = parts of messages
    text: str  # the rendered prompt, with a placeholder for each image
    prompt_ids: list[int]  # with all tokens of each image
    reader: ImageReader = field(repr=False)
    vision: VisionProcessor = field(repr=False)

    def copy_unread(self) -> "Media":
        """The same, before its images were read."""
        return Media(
            self.sources, self.column, self.text, self.prompt_ids, self.reader, self.vision
        )

    @cached_property
    def images(self) -> "list[Image]":
        """The images themselves. Raises DataError if one has changed."""
        try:
            return [self.reader.read_image(source) for source in self.sources]
        except BadImage as error:
            what = "an image can no longer be read"
            fix = "restore the image, then run again (training: resume=auto)"
            refuse("data.path", what, fix, error, error=DataError)

    @cached_property
    def png_files(self) -> list[str]:
        """The images in the form that an engine gets: base64 PNG files, which are lossless."""
        return [encode_png(image) for image in self.images]

    @cached_property
    def thumbnails(self) -> list[str]:
        """Thumbnails, as `data:` URLs of JPEG files, for samples."""
        return [encode_thumbnail(image) for image in self.images]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tower's inputs, by the names of the model's family."""
        return self.vision.image_tensors(self.text, self.images, self.prompt_ids)

    @cached_property
    def parts(self) -> list[ImagePart]:
        """The tower's images, in the order in which they are shown."""
        return [ImagePart(self.tensors, int(self.is_image_token.sum()))]

    @cached_property
    def plain_ids(self) -> list[int]:
        """The prompt's ids with one placeholder for each image, as an engine expands them."""
        return self.vision.plain_ids(self.text)

    @cached_property
    def is_image_token(self) -> Tensor:
        """Which of the prompt's ids stand for a part of an image. (L,) bool"""
        return torch.tensor(self.prompt_ids) == self.vision.image_token_id

    @cached_property
    def positions(self) -> Tensor:
        """The rotary positions of the prompt's ids. (axes, L), axes 1 or 3

        Of Qwen's three, time is constant within an image, and height and width count its rows and
        columns; after it all three continue from the largest (arXiv 2409.12191, section 2.1).
        """
        length = len(self.prompt_ids)
        if self.vision.family.axes == 1:
            return torch.arange(length)[None]
        merge, columns = self.vision.merge_size, []
        position, at = 0, 0  # the next position, and the next id
        of_image = self.is_image_token.tolist()
        for time, height, width in self.tensors["image_grid_thw"].tolist():
            start = of_image.index(True, at)
            columns.append(position + torch.arange(start - at).expand(3, -1))
            position += start - at
            grid = (torch.arange(n) for n in (time, height // merge, width // merge))
            axes = torch.stack(torch.meshgrid(*grid, indexing="ij")).flatten(1)
            columns.append(position + axes)
            position += max(height, width) // merge
            at = start + axes.shape[1]
        columns.append(position + torch.arange(length - at).expand(3, -1))
        return torch.cat(columns, dim=1)

    @property
    def next_position(self) -> int:
        """The position of the first token after `prompt_ids`, on every axis."""
        return int(self.positions.max()) + 1

    @property
    def position_shift(self) -> int:
        """How far later tokens' positions exceed their index: an image takes fewer positions."""
        return self.next_position - len(self.prompt_ids)

    def plain_ids_of(self, ids: list[int]) -> list[int]:
        """The same for ids that begin with `prompt_ids` and have no image after them."""
        return self.plain_ids + ids[len(self.prompt_ids) :]


@dataclass
class MediaInputs:
    """The images of a micro-batch, and where its rows show them.

    The tower sees each prompt's images once, however many rows show them.
    """

    tensors: dict[str, Tensor]
    # (F,) for each image token of the rows, in order: the index of its vector from the tower
    feature_index: Tensor
    token_type_ids: Tensor | None  # as input_ids, 1 on image tokens; for bidirectional attention
    num_features: int  # vectors that the tower must make

    def move_to(self, device: torch.device | str) -> "MediaInputs":
        """The same on a device."""
        types = self.token_type_ids
        return MediaInputs(
            {n: t.to(device, non_blocking=True) for n, t in self.tensors.items()},
            self.feature_index.to(device, non_blocking=True),
            None if types is None else types.to(device, non_blocking=True),
            self.num_features,
        )


def media_of_rows(
    shown: Sequence[Sequence[ImagePart]], vision: VisionProcessor | None, input_ids: Tensor
) -> MediaInputs | None:
    """The images of rows. None if no row shows one.

    `shown`: the images of each row, in the order of the rows' tokens in `input_ids`, (rows, L), or
    (1, R) with all of them. A part that several rows show is the same object in each.
    """
    parts = list({id(part): part for row in shown for part in row}.values())
    if not parts or vision is None:
        return None
    counts = [part.num_features for part in parts]
    vectors = torch.split(torch.arange(sum(counts)), counts)
    of_part = {id(part): own for part, own in zip(parts, vectors, strict=True)}
    types = None
    if vision.family.two_way_images:
        types = (input_ids == vision.image_token_id).long()
    return MediaInputs(
        merge_image_tensors([part.tensors for part in parts]),
        torch.cat([of_part[id(part)] for row in shown for part in row]),
        types,
        sum(counts),
    )


def unseen_image(vision: VisionProcessor, input_ids: Tensor) -> MediaInputs:
    """A dummy image that the tower sees and no row shows, for text rows. `input_ids`: (rows, L)

    Ranks gather a tower's shards, and add up its gradients, together: a rank without images has to
    run the tower too. No row gets the vectors, so the gradients are 0.
    """
    tensors, count = vision.blank_image
    types = torch.zeros_like(input_ids) if vision.family.two_way_images else None
    inputs = MediaInputs(tensors, torch.zeros(0, dtype=torch.long), types, count)
    return inputs.move_to(input_ids.device)


def parts_of(media: Media | None) -> list[ImagePart]:
    """The images of a row; empty for a text row."""
    return [] if media is None else media.parts


def vision_of(media: "Sequence[Media | None]") -> VisionProcessor | None:
    """The processor that read these images; None if there are none."""
    return next((one.vision for one in media if one is not None), None)


def axis_positions(media: "Sequence[Media | None]", positions: Sequence[Tensor]) -> list[Tensor]:
    """Rotary positions of rows on each axis, from their plain ones. (n,) each -> (axes, n) each

    `media`: of each row, None without images; `positions` count from the first token of its
    `prompt_ids`.
    """
    axes = max(one.vision.family.axes for one in media if one is not None)
    found = []
    for one, plain in zip(media, positions, strict=True):
        if one is None or axes == 1:
            found.append(plain.expand(axes, -1))
            continue
        length = len(one.prompt_ids)
        of_prompt = one.positions[:, plain.clamp(max=length - 1)]
        found.append(torch.where(plain < length, of_prompt, plain + one.position_shift))
    return found
