"""The images of an episode's row: the prompt's, and those shown by its tools and environment.

Such a row has its own `Media`, which continues the prompt's: the tower sees the prompt's
images once for the whole group, and the row's own once. A turn stores only files
(`Turn.images`), so records, checkpoints and other ranks hold neither tensors nor a processor.
"""

from collections.abc import Sequence
from pathlib import Path

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.images import ImageReader, decode_png
from rloo_cli.data.media import ImagePart, Media
from rloo_cli.data.vision_processor import VisionProcessor, merge_image_tensors
from rloo_cli.utils.errors import refuse


def extended_media(
    base: Media | None,
    files: Sequence[str],
    ids: list[int],
    plain_ids: list[int],
    vision: VisionProcessor,
) -> Media:
    """The images of a row that continues `base`: of its `ids` so far, up to the last image.

    `files`: the images that are not in `base`, as base64 PNG files. `plain_ids`: the ids with
    one placeholder for each image.
    """
    images = [decode_png(text) for text in files]
    reader = ImageReader(Path())
    found = Media([], None, "", ids, reader, vision)
    found.images = [*([] if base is None else base.images), *images]
    found.png_files = [*([] if base is None else base.png_files), *files]
    found.plain_ids = plain_ids
    found.parts = [*([] if base is None else base.parts)]
    if images:
        tensors, count = vision.tensors_of(images)
        found.parts.append(ImagePart(tensors, count))
    found.tensors = merge_image_tensors([part.tensors for part in found.parts])
    return found


def row_media(group: Group, rollout: Rollout, vision: VisionProcessor | None) -> Media | None:
    """The images that a completion's row shows: the prompt's, and those of an episode's turns.

    Raises ConfigError if a turn has images and no processor is loaded: their tokens would be read
    as text.
    """
    turns = rollout.turns or []
    if rollout.media is None and any(turn.images for turn in turns):
        if vision is None:
            what, why = "an episode has images", "this run does not accept images from tools"
            fix = "agent, model and algorithm as in the run that recorded it (docs/images.md)"
            refuse("agent", what, fix, why)
        media, ids = group.media, list(group.prompt_ids)
        for turn in turns:
            ids += turn.prompt_ids
            if turn.images:  # sampling does not continue here: placeholders are not needed
                media = extended_media(media, turn.images, list(ids), [], vision)
            ids += turn.sampled_ids
        rollout.media = media
    return rollout.media or group.media
