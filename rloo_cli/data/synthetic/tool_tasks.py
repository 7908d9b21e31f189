"""Two tasks for episodes of several turns: products that need a calculator, and a guessing game.

Products: "47*38=" has the answer "1786". A tiny model does not multiply; it can call `multiply`.

Guessing: a number lies between two others, and a guess is answered with higher, lower or right.
Four guesses are enough for fifteen numbers, if each halves what is left. Held-out problems never
appear in training. The tools are imported by processes of their own: no torch here.
"""

import hashlib

from rloo_cli.utils.files import JsonObject

HELD_OUT_PRODUCTS = 300
LOWEST, HIGHEST = 11, 99  # factors
RANGE = 15  # numbers of a game
STARTS = 16  # lowest numbers of games: 1 ... 16
SECRETS = RANGE + STARTS - 1  # the largest number of any game
HELD_OUT_GAMES = 60  # of STARTS * RANGE


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
    """A number is to be guessed; the row's column `secret` has it."""

    def reset(self, secret: int, **_: object) -> None:
        """Begin a game."""
        self.secret, self.guesses, self.done = secret, 0, False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The number that is guessed.

        Returns:
            higher or lower, as the secret is, or right.
        """
        self.guesses += 1
        self.done = number == self.secret
        return "right" if self.done else "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        """1 where the number was found."""
        return float(self.done)


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


def game_pairs(split: str) -> list[tuple[int, int]]:
    """(lowest number, secret) of the games of `train` or `test`."""
    starts = range(1, STARTS + 1)
    pairs = _shuffled([(s, s + i) for s in starts for i in range(RANGE)], "game")
    return {"train": pairs[HELD_OUT_GAMES:], "test": pairs[:HELD_OUT_GAMES]}[split]


def game_examples(split: str) -> list[JsonObject]:
    """The games of `train` or `test`, as conversations of one message."""
    return [
        {"prompt": [{"role": "user", "content": f"{s}-{s + RANGE - 1}?"}], "secret": secret}
        for s, secret in game_pairs(split)
    ]
