"""Opens the images of a data set, and rejects those that a model cannot use.

An image is given as a path, as bytes (alone, or as the hub's {bytes, path}), as a PIL image, as a
`data:` URL, or as a URL of the web, which is read only with data.allow_remote_images. The result
is RGB, on white where it was transparent: trainer and sampler get the same pixels, and neither
converts them by its own rules. Nothing here needs torch.
"""

import base64
import binascii
import hashlib
import io
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli.data.web_files import FetchLimits, FetchRefused, fetch_web_file

if TYPE_CHECKING:
    from PIL.Image import Image

# Larger images are refused before they are decoded: a small file can declare any size.
MOST_PIXELS = 64 * 2**20
MOST_REMOTE_BYTES, REMOTE_TIMEOUT_S = 32 * 2**20, 30.0
MOST_LOCAL_BYTES = 256 * 2**20
LONGEST_RATIO = 200  # of the sides: Qwen's processors refuse more
# Modes that PIL turns into RGB without visible loss.
CONVERTED_MODES = frozenset(("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr"))
WITH_ALPHA = frozenset(("RGBA", "LA", "PA"))
THUMBNAIL_SIDE, THUMBNAIL_PREFIX = 64, "data:image/jpeg;base64,"
REMOTE_PREFIXES = ("http://", "https://")


class BadImage(ValueError):
    """An image cannot be read, or is not one; the text says why."""


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of one data set."""

    folder: Path  # where relative paths begin
    allow_remote: bool = False  # data.allow_remote_images
    max_pixels: int | None = None  # data.max_pixels: larger ones are scaled down
    allow_private: bool = False  # data.allow_private_addresses

    def read_image(self, source: object) -> "Image":
        """The image as RGB, scaled down to `max_pixels`. Raises BadImage."""
        return self.read_with_digest(source)[0]

    def read_with_digest(self, source: object) -> "tuple[Image, str]":
        """The image, and a digest of its source. Raises BadImage."""
        from PIL import Image  # lazy: a run without images does not need Pillow

        source = getattr(source, "value", source)  # a `ColumnImage` reads its row here
        if isinstance(source, Image.Image):
            _check_header(source)
            image = _to_rgb(source)
            content = repr(image.size).encode() + image.tobytes()
        else:
            content = self._content(source)
            try:
                image = _decode(content)
            except BadImage as error:
                raise BadImage(f"{_name_of(source)}{error}") from None
        return self._scaled(image), hashlib.blake2b(content, digest_size=16).hexdigest()

    def _content(self, source: object) -> bytes:
        """The bytes of an image file."""
        if isinstance(source, dict):
            source = source.get("bytes") or source.get("path")
        if isinstance(source, bytes | bytearray):
            return bytes(source)
        if not isinstance(source, str | Path) or not str(source):
            raise BadImage(f"missing: found {str(source)[:80]!r}")
        text = str(source)
        if text.startswith("data:"):
            return _data_url_bytes(text)
        if text.startswith(REMOTE_PREFIXES):
            return self._remote_bytes(text)
        path = Path(text).expanduser()
        path = path if path.is_absolute() else self.folder / path
        return _file_bytes(path)

    def _remote_bytes(self, url: str) -> bytes:
        if not self.allow_remote:
            raise BadImage(f"{url[:80]} is a URL, and data.allow_remote_images is false")
        limits = FetchLimits(MOST_REMOTE_BYTES, REMOTE_TIMEOUT_S, self.allow_private)
        try:
            return fetch_web_file(url, limits)
        except FetchRefused as error:
            raise BadImage(f"{url[:80]} cannot be fetched: {error}") from None

    def _scaled(self, image: "Image") -> "Image":
        """The image with at most `max_pixels`, with the same aspect ratio."""
        width, height = image.size
        if self.max_pixels is None or width * height <= self.max_pixels:
            return image
        factor = (self.max_pixels / (width * height)) ** 0.5
        return image.resize((max(1, int(width * factor)), max(1, int(height * factor))))


def _name_of(source: object) -> str:
    """`path: ` of an image from a file or the web; "" of one stored in its row."""
    found = source.get("path") if isinstance(source, dict) and not source.get("bytes") else source
    text = str(found) if isinstance(found, str | Path) else ""
    return f"{text[:200]}: " if text and not text.startswith("data:") else ""


def encode_png(image: "Image") -> str:
    """An image as a base64 PNG file, which is lossless."""
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return base64.b64encode(out.getvalue()).decode()


def decode_png(text: str) -> "Image":
    """The image of `encode_png`. Raises BadImage."""
    return _decode(base64.b64decode(text))


def encode_thumbnail(image: "Image") -> str:
    """A thumbnail as the `data:` URL of a JPEG file, a kilobyte or two."""
    small, out = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    small.save(out, "JPEG", quality=70)
    return THUMBNAIL_PREFIX + base64.b64encode(out.getvalue()).decode()


def read_thumbnail(url: str) -> "Image":
    """The image of `encode_thumbnail`. Raises BadImage, ImportError without Pillow."""
    return _decode(_data_url_bytes(url))


def _file_bytes(path: Path) -> bytes:
    """The content of a file that the data names, if it is a regular file: pipes have no end."""
    try:
        if not stat.S_ISREG((status := path.stat()).st_mode):
            raise BadImage(f"{path} cannot be read: it is not a file")
        if status.st_size > MOST_LOCAL_BYTES:
            raise BadImage(f"{path} has more than {MOST_LOCAL_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a character that no path has
        if isinstance(error, BadImage):
            raise
        why = getattr(error, "strerror", None) or error
        raise BadImage(f"{path} cannot be read: {why}") from None


def _data_url_bytes(url: str) -> bytes:
    head, _, encoded = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadImage(f"a data: URL cannot be decoded: {error}") from None


def _decode(content: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError  # lazy: as above

    if not content:
        raise BadImage("it is empty: 0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MOST_PIXELS is lower
            image: Image.Image = Image.open(io.BytesIO(content))
            _check_header(image)
            image.load()
            return _to_rgb(image)
    except UnidentifiedImageError:
        begins = content[:24]
        raise BadImage(f"it is not an image: its {len(content)} bytes begin {begins!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage(str(error)) from None
    except BadImage:
        raise
    except Exception as error:  # a decoder may raise anything for damaged bytes
        raise BadImage(f"it cannot be decoded: {error or type(error).__name__}") from None


def _check_header(image: "Image") -> None:
    """Raise BadImage for what the header shows, before pixels are decoded."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise BadImage(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}")
    if not width or not height or max(width, height) > LONGEST_RATIO * min(width, height):
        raise BadImage(f"it has {width} x {height} pixels: its aspect ratio is too high")
    frames: Any = getattr(image, "n_frames", 1)
    if frames > 1:
        raise BadImage(f"it is animated: {frames} frames; a prompt takes one frame")
    if image.mode not in CONVERTED_MODES:
        raise BadImage(f"its mode is {image.mode}, which is not supported; RGB or L is")


def _to_rgb(image: "Image") -> "Image":
    """RGB, on white where it was transparent."""
    from PIL import Image  # lazy: as above

    if image.mode in WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")
