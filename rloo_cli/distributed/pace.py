"""How often ranks ask each other whether one of them was told to end: about once a second.

A micro-batch may take milliseconds, and each question lets all ranks wait for the slowest. Ranks
have to skip the same questions without a word about it: they count them, and at each meeting all
hear how long the slowest rank's slowest piece of work took, from which all compute alike how many
pieces come before the next one.
"""

import time
from collections.abc import Callable

EVERY_S = 1.0
# Pieces of work without a question, however short they were: should one take a hundred times as
# long all of a sudden, the signal of a scheduler is still heard in time.
MOST = 32


class Pace:
    """Counts what all ranks do alike. `clock`: in seconds, each rank's own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.left = 0  # pieces of work before the next meeting
        self.slowest = 0.0  # s, of a piece of work since the last meeting, on this rank
        self.began: float | None = None  # of the piece that is under way; None = none was begun

    def due(self) -> bool:
        """A piece of work ends and another begins; whether the ranks meet in between."""
        now = self.clock()
        if self.began is not None:
            self.slowest = max(self.slowest, now - self.began)
        self.began = now
        self.left -= 1
        return self.left < 0

    def met(self, slowest: float, again: bool) -> None:
        """All ranks have met; `slowest`: s, the largest of all ranks' own.

        `again`: small pieces of work follow. Else the next question is asked in any case, since
        nobody knows how long what comes will take.
        """
        fits = int(EVERY_S / slowest) if slowest > 0 else 1
        self.left = max(0, min(fits, MOST) - 1) if again and self.began is not None else 0
        self.slowest, self.began = 0.0, self.clock() if again else None
