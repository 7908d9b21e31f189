"""Which images belong to which prompt: the columns `image` and `images`, and parts of messages.

A prompt with images is a conversation whose contents are lists of parts, as in TRL. An image's part
is `{type: image}` there; the image itself is kept beside the prompt, in the order of the parts.
Images of a column fill the parts that name none; where there are none, they come before the text of
the first user's message. Every image is read once before any weights load, so that a bad one is
found then; a data set's pixels are not kept.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.config.pasted import rename_column
from rloo_cli.config.schema import DataConfig
from rloo_cli.data.batch import Prompt
from rloo_cli.data.images import BadImage, ImageReader, require_pillow
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_cli.data.vision_processor import VisionProcessor

LoadVision = Callable[[], "VisionProcessor"]
IMAGE_COLUMNS = ("image", "images")
IMAGE_PART_TYPES = ("image", "image_url")
IMAGE_PART: JsonObject = {"type": "image"}
SOURCE_KEYS = ("image", "path", "url", "base64", "image_url")  # of a part: where its image is
READING_THREADS = 8  # decoders release Python's lock


@dataclass(frozen=True)
class ColumnImage:
    """An image of a column, read from the data set's file each time that it is needed."""

    data: "Dataset" = field(repr=False)  # the one column, not decoded
    column: str
    row: int
    index: int | None  # in the row's list; None = the row has one image

    @property
    def value(self) -> object:
        """Path, bytes, or what else the data holds."""
        value = self.data[self.row][self.column]
        return value if self.index is None else value[self.index]


@dataclass
class PromptImages:
    """The images of a split's prompts."""

    config: DataConfig
    column: str | None
    reader: ImageReader
    rows: list[int]  # the data's row of each prompt: those with bad images are left out
    prompts: list[Prompt]  # with every content a list of parts
    sources: list[list[object]]
    sizes: list[list[tuple[int, int]]] = field(default_factory=list)  # width, height
    digests: list[str] = field(default_factory=list)  # of what a prompt's images were read from
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    vision: "VisionProcessor | None" = None
    bad_images: int = 0  # rows that were left out

    def read_all(self) -> None:
        """Read every image once. Raises DataError for a bad one, or leaves its row out."""

        def read(sources: list[object]) -> tuple[list[tuple[int, int]], str] | BadImage:
            try:
                found = [self.reader.read_with_digest(source) for source in sources]
            except BadImage as error:
                return error
            return [image.size for image, _ in found], " ".join(digest for _, digest in found)

        require_pillow()
        with ThreadPoolExecutor(READING_THREADS) as pool:
            results = list(pool.map(read, self.sources))
        bad = [
            (row, r) for row, r in zip(self.rows, results, strict=True) if not isinstance(r, tuple)
        ]
        if bad and (self.config.on_bad_image == "error" or len(bad) == len(results)):
            raise DataError(self._bad_problem(bad, len(results)))
        kept = [(i, r) for i, r in enumerate(results) if isinstance(r, tuple)]
        self.rows = [self.rows[i] for i, _ in kept]
        self.prompts = [self.prompts[i] for i, _ in kept]
        self.sources = [self.sources[i] for i, _ in kept]
        self.sizes, self.digests = [r[0] for _, r in kept], [r[1] for _, r in kept]
        self.bad_images = len(bad)

    def _bad_problem(self, bad: list[tuple[int, BadImage]], count: int) -> Problem:
        place = f"column {self.column!r}" if self.column else f"column {self.config.prompts_in!r}"
        fix = "data.on_bad_image=filter leaves such rows out, and counts them"
        if len(bad) == count:
            fix = f"put images that can be read into {place}"
        what = f"{len(bad)} of {count} prompts have an image that cannot be used"
        return Problem(
            what, f"data.path={self.config.path}, row {bad[0][0]}, {place}", str(bad[0][1]), fix
        )

    def tokenize(self, texts: list[str], load_vision: LoadVision | None) -> list[list[int]]:
        """The ids of the rendered prompts. Raises DataError, ConfigError."""
        if load_vision is None:
            what, why = "the prompts have images", "they are for training and evaluation alone"
            fix = f"{rename_column(self.column or 'image', 'picture')} takes the column for another"
            raise DataError(Problem(what, "data.path", why, fix))
        self.vision, self.texts = load_vision(), texts
        self.token_ids = [
            self.vision.expand_prompt(text, sizes)
            for text, sizes in zip(texts, self.sizes, strict=True)
        ]
        return self.token_ids


def collect_images(
    data: "Dataset", prompts: list[Prompt], conversational: bool, config: DataConfig
) -> PromptImages | None:
    """The images of rendered prompts, each read once; None if no prompt has one.

    Raises DataError: plain text with images, images and their places that do not match, a bad
    image.
    """
    column = image_column(data, config)
    if column is None and not any(has_image_parts(prompt) for prompt in prompts):
        return None
    if not conversational:
        what, where = "prompts of plain text have images", f"data.path={config.path}"
        why = "only a chat template says where a model looks for an image"
        fix = f"data.chat=true; or, without them, {rename_column(str(column), 'picture')}"
        raise DataError(Problem(what, where, why, fix))
    alone = None if column is None else undecoded(data, column)
    structured: list[Prompt] = []
    sources = []
    for row, prompt in enumerate(prompts):
        given: list[object] = []
        if alone is not None:
            value = alone[row][column]
            several = isinstance(value, list | tuple)
            given = [
                ColumnImage(alone, str(column), row, i if several else None)
                for i, one in enumerate(value if several else [value])
                if one is not None
            ]
        assert isinstance(prompt, list)
        messages, images = take_images(prompt, given, f"data.path={config.path}, row {row}")
        structured.append(messages)
        sources.append(images)
    found = PromptImages(
        config, column, image_reader(config), list(range(len(prompts))), structured, sources
    )
    found.read_all()
    return found


def image_column(data: "Dataset", config: DataConfig) -> str | None:
    """The column that holds images of the prompts; None if there is none, or it is empty.

    Raises DataError for two such columns.
    """
    names = [
        name for name in IMAGE_COLUMNS
        if name in data.column_names and name != config.prompts_in
        and any(bool(value) for value in undecoded(data, name)[name])
    ]  # fmt: skip
    if len(names) > 1:
        what, why = "the data has two columns of images", "one of them is to be shown"
        fix = f"{rename_column('images', 'pictures')} takes the second for any other column"
        raise DataError(Problem(what, "data.columns", why, fix))
    return names[0] if names else None


def shows_images(data: "Dataset", config: DataConfig) -> bool:
    """Whether a prompt of these rows has an image, which is not read. Raises DataError."""
    prompts = data.select_columns([config.prompts_in])[:][config.prompts_in]
    return image_column(data, config) is not None or any(map(has_image_parts, prompts))


def undecoded(data: "Dataset", column: str) -> "Dataset":
    """The data with this one column, whose images stay the bytes or paths that they are."""
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
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
    )


def image_reader(config: DataConfig) -> ImageReader:
    """The reader of a split's images: relative paths begin at the data's own folder."""
    path = Path(config.path or ".").expanduser().absolute()  # user code may change folder
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
        what = f"a prompt has {len(empty)} places for images, and {len(given)} images"
        why = "each part {type: image} without an image of its own takes one of the column's"
        fix = f"give the row {len(empty)} images, or {len(given)} such parts"
        raise DataError(Problem(what, where, why, fix))
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
    """Put places for images before the text of the first user's message."""
    for message in messages:
        if message["role"] == "user":
            message["content"] = [*(dict(IMAGE_PART) for _ in range(count)), *message["content"]]
            return
    what, why = "a prompt has images and no user's message", "they come before the text of one"
    fix = "add a message of role user, or a part {type: image} for each image"
    raise DataError(Problem(what, where, why, fix))


def _source_of(part: JsonObject) -> object | None:
    """The image that a part names; None if it is a place for one of the column's."""
    for key in SOURCE_KEYS:
        value = part.get(key)
        if isinstance(value, dict) and "url" in value:  # OpenAI's {image_url: {url: ...}}
            value = value["url"]
        if isinstance(value, dict) and not any(value.values()):
            value = None  # the data set's form has the key in every part
        if value is not None:
            return f"data:image;base64,{value}" if key == "base64" else value
    return None
