"""Answers calls in a worker process of tools: functions, or the methods of one environment.

Messages come from the run and are trusted. Answers are JSON, because nothing that a model makes a
tool do may reach the run as code. A worker has at most one environment, for one episode.
"""

import asyncio
import base64
import inspect
import io
import json
import math
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.config import registry
from rloo_cli.utils.files import JsonObject

ERROR_CHARACTERS = 2000  # of an error's text
IMAGE_KEYS = ("image", "image_url", "url", "bytes")  # of a content part: where its image is
NO_IMAGES = "and the model takes only text"


@dataclass
class ToolWorker:
    """Answers one message after the other. `seeds`: whether it may seed this process.

    `specs`: the user's functions and classes, imported before workers are forked.
    """

    specs: list[str] = field(default_factory=list)
    seeds: bool = True
    environment: Any = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Import the user's code; calls that need a failed import return its error."""
        for spec in self.specs:
            try:
                registry.load_code(spec)
            except BaseException:  # the run has imported it already
                traceback.print_exc()

    def start(self) -> None:
        """Do nothing: forks of it are imported and ready."""

    def answer(self, message: JsonObject) -> bytes:
        """The JSON of `answer_object`."""
        return json.dumps(self.answer_object(message)).encode()

    def answer_object(self, message: JsonObject) -> JsonObject:
        """Do what a message asks; an exception becomes an answer with `error`."""
        try:
            if self.seeds and message.get("seed") is not None:
                seed_process(message["seed"])
            answers = {
                "reset": self._reset, "call": self._call, "turn": self._turn, "end": self._end,
            }  # fmt: skip
            return answers[message["do"]](message)
        except BaseException as error:  # sys.exit() in a tool is an error of the tool
            text = f"{type(error).__name__}: {error}"
            return {"error": text[:ERROR_CHARACTERS]}

    def _reset(self, message: JsonObject) -> JsonObject:
        self.environment = registry.load_code(message["spec"])()
        row = message["row"] | {"seed": message["row"].get("seed", message["seed"])}
        taken = inspect.signature(self.environment.reset).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            row = {n: v for n, v in row.items() if n in taken}
        elif "seed" not in taken:  # it would not expect a seed
            row = message["row"]
        raw = _run(self.environment.reset, row)
        return {"text": None} | ({} if raw is None else _as_text(raw, message)) | self._state()

    def _call(self, message: JsonObject) -> JsonObject:
        if self.environment is not None:
            tool = getattr(self.environment, message["name"])
        else:
            tool = self.functions.get(message["spec"]) or registry.load_code(message["spec"])
            self.functions[message["spec"]] = tool
        raw = _run(tool, message["arguments"])
        return _as_text(raw, message) | self._state()

    def _state(self) -> JsonObject:
        return {"done": bool(getattr(self.environment, "done", False))}

    def _turn(self, message: JsonObject) -> JsonObject:
        """The reward of the turn whose calls have just been made."""
        return self._reward("get_turn_reward")

    def _end(self, message: JsonObject) -> JsonObject:
        """The environment's own reward, if it has one, and its public attributes."""
        answer = self._reward("get_reward")
        return answer if "error" in answer else answer | {"state": _public_values(self.environment)}

    def _reward(self, method: str) -> JsonObject:
        """The number returned by a method without arguments; None if missing or returned."""
        if not hasattr(self.environment, method):
            return {"reward": None}
        raw = _run(getattr(self.environment, method), {})
        if raw is None and method == "get_turn_reward":
            return {"reward": None}
        value = float(raw)
        if not math.isfinite(value):
            return {"error": f"it is {value}, not a finite number"}
        return {"reward": value}


def _run(code: Callable[..., Any], arguments: JsonObject) -> Any:
    result = code(**arguments)
    if inspect.isawaitable(result):
        return asyncio.run(_wait_for(result))
    return result


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _as_text(raw: object, message: JsonObject) -> JsonObject:
    """What a tool returned: `text`, as TRL has it: str(); or `parts` of texts and images."""
    parts = _content_parts(raw)
    if parts is None:
        return {"text": _clean_text(raw if isinstance(raw, str) else str(raw), message)}
    if all(isinstance(part, str) for part in parts):
        return {"text": _clean_text("".join(map(str, parts)), message)}
    if not message.get("images"):
        raise ValueError(f"it returned an image, {message.get('no_images') or NO_IMAGES}")
    return {"parts": [
        {"type": "text", "text": _clean_text(part, message)} if isinstance(part, str)
        else {"type": "image", "file": base64.b64encode(_image_file(part.value)).decode()}
        for part in parts
    ]}  # fmt: skip


def _clean_text(text: str, message: JsonObject) -> str:
    """Text cut to a length that can be sent; lone surrogates are replaced."""
    return text[: message["max_characters"]].encode("utf-8", errors="replace").decode()


@dataclass(frozen=True)
class _Picture:
    """A content part that is an image; `value` as the tool gave it."""

    value: Any


def _content_parts(content: object) -> list[str | _Picture] | None:
    """The parts of an image, or of a list of content parts; None for anything else."""
    if _is_picture(content):
        return [_Picture(content)]
    if not isinstance(content, list) or not content:
        return None
    found: list[str | _Picture] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            found.append(str(part.get("text", "")))
        elif isinstance(kind, str) and "image" in kind:
            found.append(_Picture(next((part[k] for k in IMAGE_KEYS if part.get(k)), None)))
        elif _is_picture(part):
            found.append(_Picture(part))
        else:
            return None
    return found


def _is_picture(value: object) -> bool:
    """Whether it is a PIL image; PIL is imported only if there could be one."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _image_file(value: Any) -> bytes:
    """An image as the bytes of a file: an image of PIL, bytes, or a `data:` URL in base64."""
    if isinstance(value, dict):  # OpenAI's {image_url: {url: ...}}
        value = value.get("url")
    if _is_picture(value):
        out = io.BytesIO()
        value.save(out, "PNG" if value.mode != "CMYK" else "TIFF")
        return out.getvalue()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:") and ";base64," in value:
        return base64.b64decode(value.partition(",")[2], validate=True)
    raise ValueError("a part of type image holds an image of PIL, bytes or a data: URL")


def _public_values(environment: object) -> JsonObject:
    """The environment's JSON-serializable public attributes, for rewards to read."""
    values: JsonObject = {}
    for name, value in vars(environment).items() if hasattr(environment, "__dict__") else ():
        if name.startswith("_"):
            continue
        try:
            values[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            continue
    return values


def seed_process(seed: int) -> None:
    """Seed the random sources that a tool may use, so that an episode can be repeated."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
