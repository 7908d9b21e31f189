"""Pictures of coloured squares, for a task that needs them: which colour do the squares have?

A picture is gray noise with one to three squares of one colour, at places and of sizes that are
drawn. `noise` asks the same of pictures without squares, where guessing is the best strategy.
A picture is drawn from its number alone, by numpy, so it is the same everywhere.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = {
    "red": (210, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (220, 210, 50)
}  # fmt: skip
QUESTION = "colour?"
SIDE = 24  # pixels
SPLITS = {"train": (0, 1024), "test": (1024, 128)}  # first number, how many
MOST_SQUARES, SMALLEST, LARGEST = 3, 6, 12  # squares, and their sides in pixels


def picture_examples(split: str) -> list[JsonObject]:
    """Pictures of `train` or `test`, with the colour of their squares."""
    return _examples(split, with_squares=True)


def noise_examples(split: str) -> list[JsonObject]:
    """The same questions and answers, with pictures that show nothing."""
    return _examples(split, with_squares=False)


def _examples(split: str, with_squares: bool) -> list[JsonObject]:
    first, count = SPLITS[split]
    return [_example(number, with_squares) for number in range(first, first + count)]


def _example(number: int, with_squares: bool) -> JsonObject:
    names = list(COLOURS)
    colour = names[hashlib.sha256(f"picture {number}".encode()).digest()[0] % len(names)]
    return {
        "prompt": [{"role": "user", "content": QUESTION}],
        "image": draw_picture(number, colour if with_squares else None),
        "answer": colour,
    }


def draw_picture(number: int, colour: str | None) -> Image:
    """The picture of this number, with squares of a colour; None = without squares."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(number)
    pixels = draw.integers(96, 160, (SIDE, SIDE, 3))
    for _ in range(int(draw.integers(1, MOST_SQUARES + 1)) if colour is not None else 0):
        side = int(draw.integers(SMALLEST, LARGEST + 1))
        top, left = draw.integers(0, SIDE - side + 1, 2)
        pixels[top : top + side, left : left + side] = COLOURS[str(colour)]
    return Image.fromarray(pixels.astype(np.uint8))
