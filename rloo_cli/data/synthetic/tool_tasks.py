"""Two tasks for episodes of several turns: products that need a calculator, and a guessing game.

Products: "47*38=" has the answer "1786". A tiny model does not multiply; it can call `multiply`.

Guessing: a number lies between two others, and a guess is answered with higher, lower or right.
Three guesses are enough for seven numbers, if each halves what is left. Held-out problems never
appear in training: products by their factors, games by their range, since a model that has seen a
range only with some of its numbers learns that the others are never right. The tools are imported
by processes of their own: no torch here.
"""

import hashlib

from rloo_cli.utils.files import JsonObject

HELD_OUT_PRODUCTS = 300
LOWEST, HIGHEST = 11, 99  # factors
SIZES = (6, 7, 8)  # how many numbers a game's range has
STARTS = 10  # lowest numbers of games: 1 ... 10
HIGHEST_SECRET = STARTS + SIZES[-1] - 1  # the largest number of any game
GUESSES = 3
HELD_OUT_RANGES = 6  # of STARTS * len(SIZES); with each of their numbers a game


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class GuessingGame:
    """A number is to be guessed in three guesses; the row's column `secret` has it."""

    def reset(self, secret: int, **_: object) -> None:
        """Begin a game."""
        self.secret, self.guesses, self.found, self.done = secret, 0, False, False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The number that is guessed.

        Returns:
            higher or lower, as the secret is, or right.
        """
        self.guesses += 1
        self.found = number == self.secret
        self.done = self.found or self.guesses == GUESSES
        return "right" if self.found else "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        """1 where the number was found."""
        return float(self.found)


def _shuffled(pairs: list[tuple[int, int]], name: str) -> list[tuple[int, int]]:
    """In an order that is the same everywhere."""
    key = lambda pair: hashlib.sha256(f"{name} {pair[0]} {pair[1]}".encode()).digest()  # noqa: E731
    return sorted(pairs, key=key)


def product_pairs(split: str) -> list[tuple[int, int]]:
    """The factors of `train` or `test`."""
    numbers = range(LOWEST, HIGHEST + 1)
    pairs = _shuffled([(a, b) for a in numbers for b in numbers], "product")
    return {"train": pairs[HELD_OUT_PRODUCTS:], "test": pairs[:HELD_OUT_PRODUCTS]}[split]


def product_examples(split: str) -> list[JsonObject]:
    """The products of `train` or `test`, as conversations of one message."""
    return [
        {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)}
        for a, b in product_pairs(split)
    ]


def game_ranges(split: str) -> list[tuple[int, int]]:
    """(lowest, highest number) of the games of `train` or `test`."""
    starts = range(1, STARTS + 1)
    ranges = _shuffled([(low, low + size - 1) for low in starts for size in SIZES], "game")
    return {"train": ranges[HELD_OUT_RANGES:], "test": ranges[:HELD_OUT_RANGES]}[split]


def game_examples(split: str) -> list[JsonObject]:
    """The games of `train` or `test`, as conversations of one message."""
    return [
        {"prompt": [{"role": "user", "content": f"{low}-{high}?"}], "secret": secret}
        for low, high in game_ranges(split)
        for secret in range(low, high + 1)
    ]
