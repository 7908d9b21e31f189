"""Which images belong to which prompt: the columns `image` and `images`, and parts of messages.

A prompt with images is a conversation whose contents are lists of parts, as in TRL. An image's part
is `{type: image}` there; the image itself is kept separately, in the order of the parts.
Images of a column fill the parts that name none; without such parts they come before the text of
the first user message. Every image is read once before any weights load, so that a bad one is
found then; pixels are not kept.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rloo_cli.config.pasted import rename_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data.batch import Prompt
from rloo_cli.data.exact_values import JsonText, iter_rows
from rloo_cli.data.fingerprint import iter_tables
from rloo_cli.data.images import BadImage, ImageReader
from rloo_cli.data.order import IndexArray
from rloo_cli.utils.errors import DataError, Problem, refuse, require_package
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_cli.data.vision_processor import VisionProcessor

LoadVision = Callable[[], "VisionProcessor"]
IMAGE_COLUMNS = ("image", "images")
IMAGE_PART_TYPES = ("image", "image_url")
IMAGE_PART: JsonObject = {"type": "image"}
SOURCE_KEYS = ("image", "path", "url", "base64", "image_url")  # a part's keys for its image
READING_THREADS = 8  # decoders release Python's lock
ROWS_AT_ONCE = 1_000  # whose images are read


@dataclass(frozen=True)
class ColumnImage:
    """An image of a column, read from the data set's file on each access."""

    data: "Dataset" = field(repr=False)  # the one column, not decoded
    column: str
    row: int
    index: int | None  # in the row's list; None = the row has one image

    @property
    def value(self) -> object:
        """Path, bytes, or whatever else the data holds."""
        value = self.data[self.row][self.column]
        return value if self.index is None else value[self.index]


class PromptImages:
    """The images of a split's prompts: counts and sizes of all, and where each is read from.

    `read_all` comes before `expand`.
    """

    def __init__(self, data: "Dataset", config: DataConfig, vision: "VisionProcessor"):
        self.config, self.vision = config, vision
        self.column = image_column(data, config)
        self.reader = image_reader(config)
        self._alone = None if self.column is None else undecoded(data, self.column)
        self.counts: IndexArray = np.zeros(len(data), np.int64)  # images of each row
        self.sizes: IndexArray = np.zeros((0, 2), np.int64)  # width and height of each image
        self.digests: list[str] = []  # of each used row: of its images' sources
        self.bad_rows: list[int] = []  # rows that are left out

    def structure(self, prompt: Prompt, row: int) -> tuple[list[JsonObject], list[object]]:
        """A prompt with every content a list of parts, and where its images are read from.

        Raises DataError if the images do not match the image parts.
        """
        given: list[object] = []
        if self._alone is not None:
            value = self._alone[row][self.column]
            several = isinstance(value, list | tuple)
            given = [
                ColumnImage(self._alone, str(self.column), row, i if several else None)
                for i, one in enumerate(value if several else [value])
                if one is not None
            ]
        assert isinstance(prompt, list)
        return take_images(prompt, given, f"data.path={self.config.path}, row {row}")

    def read_all(self, sources_of: Callable[[range], list[Sequence[object]]]) -> None:
        """Read every image once. `sources_of`: where the images of some rows are read from.

        Raises DataError for a bad image, unless its row is left out.
        """
        why = "it decodes the data's images"
        require_package("data.path", "Pillow", "images", why, module="PIL")
        sizes: list[tuple[int, int]] = []
        bad: list[tuple[int, BadImage]] = []
        count = len(self.counts)
        with ThreadPoolExecutor(READING_THREADS) as pool:
            for start in range(0, count, ROWS_AT_ONCE):
                rows = range(start, min(count, start + ROWS_AT_ONCE))
                for row, found in zip(rows, pool.map(self._read, sources_of(rows)), strict=True):
                    if isinstance(found, BadImage):
                        bad.append((row, found))
                        continue
                    sizes += [image_size for image_size, _ in found]
                    self.counts[row] = len(found)
                    self.digests.append(" ".join(digest for _, digest in found))
        if bad and (self.config.on_bad_image == "error" or len(bad) == count):
            raise DataError(self._bad_problem(bad, count))
        self.sizes = np.array(sizes, np.int64).reshape(-1, 2)
        self.bad_rows = [row for row, _ in bad]
        self._ends = np.cumsum(self.counts)

    def _read(self, sources: Sequence[object]) -> list[tuple[tuple[int, int], str]] | BadImage:
        try:
            found = [self.reader.read_with_digest(source) for source in sources]
        except BadImage as error:
            return error
        return [(image.size, digest) for image, digest in found]

    def expand(self, text: str, row: int) -> list[int]:
        """The ids of a rendered prompt. Raises DataError."""
        return self.vision.expand_prompt(text, self._sizes_of(row))

    def tokens_of_rows(self, rows: Iterable[int]) -> int:
        """The tokens that stand for parts of these rows' images."""
        return sum(self.vision.num_tokens(size) for row in rows for size in self._sizes_of(row))

    def _sizes_of(self, row: int) -> list[tuple[int, int]]:
        end = int(self._ends[row])
        sizes = self.sizes[end - int(self.counts[row]) : end].tolist()
        return [(width, height) for width, height in sizes]

    def _bad_problem(self, bad: list[tuple[int, BadImage]], count: int) -> Problem:
        where = f"column {self.column!r}" if self.column else f"column {self.config.prompts_in!r}"
        fix = "data.on_bad_image=filter leaves such rows out, and counts them"
        if len(bad) == count:
            fix = f"put readable images into {where}"
        what = f"{len(bad)} of {count} prompts have an invalid image"
        return Problem(
            what, f"data.path={self.config.path}, row {bad[0][0]}, {where}", str(bad[0][1]), fix
        )


def find_images(
    data: "Dataset", config: DataConfig, conversational: bool, load_vision: LoadVision | None
) -> PromptImages | None:
    """The images of a split's prompts, none of which is read yet; None if no prompt has one.

    Raises DataError: plain text with images, or images that are not allowed here.
    """
    if not shows_images(data, config):
        return None
    column = image_column(data, config)
    if not conversational:
        what, where = "the prompts are plain text and have images", f"data.path={config.path}"
        why = "only a chat template marks where an image belongs"
        fix = f"data.chat=true; or, to ignore them, {rename_column(str(column), 'picture')}"
        refuse(where, what, fix, why, error=DataError)
    if load_vision is None:
        what, why = "the prompts have images", "only training and evaluation support images"
        fix = f"{rename_column(column or 'image', 'picture')} ignores the column"
        refuse("data.path", what, fix, why, error=DataError)
    return PromptImages(data, config, load_vision())


def image_column(data: "Dataset", config: DataConfig) -> str | None:
    """The column that holds images of the prompts; None if there is none, or it is empty.

    Raises DataError for two such columns.
    """
    names = [
        name for name in IMAGE_COLUMNS
        if name in data.column_names and name != config.prompts_in
        and any(_has_value(table.column(0)) for table in iter_tables(undecoded(data, name)))
    ]  # fmt: skip
    if len(names) > 1:
        what, why = "the data has two image columns", "only one of them can be used"
        fix = f"{rename_column('images', 'pictures')} ignores the second"
        refuse("data.columns", what, fix, why, error=DataError)
    return names[0] if names else None


def _has_value(column: Any) -> bool:
    """Whether an Arrow column has a value that is neither None nor empty."""
    return column.null_count < len(column) and any(bool(value.as_py()) for value in column)


def _may_have_parts(feature: Any) -> bool:
    """Whether a column of this type can hold messages with parts."""
    if isinstance(feature, JsonText):
        return True
    message = getattr(feature, "feature", None)  # of a list
    return isinstance(message, dict) and not is_text(message.get("content"))


def shows_images(data: "Dataset", config: DataConfig) -> bool:
    """Whether a prompt of these rows has an image; no image is read. Raises DataError."""
    if image_column(data, config) is not None:
        return True
    prompts = data.select_columns([config.prompts_in])
    if not _may_have_parts(prompts.features[config.prompts_in]):
        return False
    return any(has_image_parts(row[config.prompts_in]) for row in iter_rows(prompts))


def is_text(feature: Any) -> bool:
    """Whether a column of this type holds only text."""
    return getattr(feature, "dtype", None) in ("string", "large_string") and not isinstance(
        feature, JsonText
    )


def undecoded(data: "Dataset", column: str) -> "Dataset":
    """The data with only this column, whose images stay bytes or paths."""
    from datasets import Image, List  # lazy: `rloo --help` does without

    alone, kind = data.select_columns([column]), data.features[column]
    if isinstance(kind, Image):
        return alone.cast_column(column, Image(decode=False))
    inner: Any = getattr(kind, "feature", None)
    if isinstance(inner, Image):
        return alone.cast_column(column, List(Image(decode=False)))
    return alone


def has_image_parts(value: object) -> bool:
    """Whether a prompt has a part that is an image."""
    return isinstance(value, list) and any(
        isinstance(part, dict) and part.get("type") in IMAGE_PART_TYPES
        for message in value
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def image_reader(config: DataConfig) -> ImageReader:
    """The reader of a split's images: paths are relative to the data's own folder."""
    path = Path(config.path or ".").expanduser().absolute()  # user code may call chdir
    folder = path if path.is_dir() else path.parent if path.is_file() else Path.cwd()
    private = config.allow_private_addresses
    return ImageReader(folder, config.allow_remote_images, config.max_pixels, private)


def take_images(
    messages: Sequence[JsonObject], given: Sequence[object], where: str
) -> tuple[list[JsonObject], list[object]]:
    """The conversation with every content a list of parts, and its images in the parts' order.

    `given`: the row's images of the column. Raises DataError where parts and images do not match.
    """
    structured = [_with_parts(message) for message in messages]
    parts = [part for m in structured for part in m["content"] or () if _is_image(part)]
    empty = [part for part in parts if _source_of(part) is None]
    if given and not empty:
        _put_first(structured, len(given), where)
        parts = [part for m in structured for part in m["content"] or () if _is_image(part)]
        empty = [part for part in parts if _source_of(part) is None]
    if len(empty) != len(given):
        what = f"a prompt has {len(empty)} image parts, but {len(given)} images"
        why = "each part {type: image} without its own image takes one from the column"
        fix = f"give the row {len(empty)} images, or {len(given)} such parts"
        refuse(where, what, fix, why, error=DataError)
    waiting = iter(given)
    images = [next(waiting) if _source_of(part) is None else _source_of(part) for part in parts]
    for message in structured:
        if message["content"] is not None:
            message["content"] = [
                dict(IMAGE_PART) if _is_image(part) else part for part in message["content"]
            ]
    return structured, images


def _is_image(part: JsonObject) -> bool:
    return part.get("type") in IMAGE_PART_TYPES


def _with_parts(message: JsonObject) -> JsonObject:
    """A copy of the message whose content is a list of parts, without keys that hold None."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    parts = [{k: v for k, v in part.items() if v is not None} for part in content or ()]
    return message | {"content": parts if content is not None else None}


def _put_first(messages: list[JsonObject], count: int, where: str) -> None:
    """Put image parts before the text of the first user message."""
    for message in messages:
        if message["role"] == "user":
            message["content"] = [*(dict(IMAGE_PART) for _ in range(count)), *message["content"]]
            return
    what, why = "a prompt has images but no user message", "images go before its text"
    fix = "add a message of role user, or a part {type: image} for each image"
    refuse(where, what, fix, why, error=DataError)


def _source_of(part: JsonObject) -> object | None:
    """The image that a part names; None if it takes one from the column."""
    for key in SOURCE_KEYS:
        value = part.get(key)
        if isinstance(value, dict) and "url" in value:  # OpenAI's {image_url: {url: ...}}
            value = value["url"]
        if isinstance(value, dict) and not any(value.values()):
            value = None  # Arrow gives every part the key
        if value is not None:
            return f"data:image;base64,{value}" if key == "base64" else value
    return None
