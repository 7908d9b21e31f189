"""What a tool or an environment answered, as the model sees it: texts and images.

An answer is a text, or a list of content parts `{type: text, text: ...}` and `{type: image, file:
BASE64, size: [width, height]}`. The chat template gets the parts without their files; the turn
carries the files.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.data.image_prompts import IMAGE_PART
from rloo_cli.data.images import BadImage, ImageReader, encode_png
from rloo_cli.utils.files import JsonObject

Content = str | list[JsonObject]
IMAGE_MARK = "[image]"  # in texts that stand for what was shown


@dataclass(frozen=True)
class ToolImages:
    """Whether tools may answer with images, and how large these may be.

    `why_not`: the reason given to the tool, a clause that continues "it returned an image";
    None = allowed. `max_pixels`: larger images are scaled down (`data.max_pixels`).
    """

    why_not: str | None = None
    max_pixels: int | None = None

    def read_answer(self, answer: JsonObject) -> JsonObject:
        """An answer whose images have been decoded, converted and measured.

        An invalid image turns the answer into an error of the tool.
        """
        if "parts" not in answer:
            return answer
        reader, parts = ImageReader(Path(), max_pixels=self.max_pixels), []
        try:
            for part in answer["parts"]:
                if part["type"] == "image":
                    image = reader.read_image(base64.b64decode(part["file"], validate=True))
                    size = [*image.size]
                    parts.append({"type": "image", "file": encode_png(image), "size": size})
                else:
                    parts.append({"type": "text", "text": str(part["text"])})
        except BadImage as error:
            return {"error": f"it returned an invalid image: {error}"}
        except (TypeError, KeyError, ValueError):  # the tool can write to its process's pipe
            return {"error": "unexpected response format from its process"}
        return answer | {"parts": parts}


@dataclass
class Observation:
    """The observation before a turn, message by message, with its images."""

    messages: list[JsonObject] = field(default_factory=list)  # as chat templates take them
    files: list[str] = field(default_factory=list)  # of the images: the base64 of PNG files
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width, height

    @property
    def text_messages(self) -> list[JsonObject]:
        """The messages with a mark in place of each image: what samples and records show."""
        return [m | {"content": content_text(m["content"])} for m in self.messages]


class ObservationLimit:
    """Cuts the observation before one turn to `max_tokens` in total."""

    def __init__(self, renderer: TurnRenderer, max_tokens: int):
        self.renderer, self.left = renderer, max_tokens

    def shown(self, content: Content, observation: Observation) -> Content:
        """The content as the model sees it; its images are added to `observation`.

        Text is cut at the limit; an image that does not fit is left out whole.
        """
        if isinstance(content, str):
            return self._text(content)
        parts = []
        for part in content:
            if part["type"] == "text":
                parts.append({"type": "text", "text": self._text(part["text"])})
                continue
            width, height = part["size"]
            need = self.renderer.image_tokens((width, height))
            if need > self.left:
                text = f"[image left out: it has {need} tokens, {self.left} are left]"
                parts.append({"type": "text", "text": text})
                continue
            self.left -= need
            parts.append(dict(IMAGE_PART))
            observation.files.append(part["file"])
            observation.sizes.append((width, height))
        return parts

    def _text(self, text: str) -> str:
        shown, used = self.renderer.clean_observation(text, self.left)
        self.left -= used
        return shown


def answer_content(answer: JsonObject) -> Content:
    """The content of an answer without error."""
    found: Content = answer["parts"] if "parts" in answer else answer["text"]
    return found


def content_text(content: Content) -> str:
    """A content as one text, with a mark in place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else IMAGE_MARK for part in content)


def as_parts(content: Content) -> list[JsonObject]:
    """A content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def joined_content(first: Content, second: Content) -> Content:
    """Two contents, concatenated."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts: Sequence[JsonObject] = [*as_parts(first), *as_parts(second)]
    return [part for part in parts if part["type"] != "text" or part["text"]]
