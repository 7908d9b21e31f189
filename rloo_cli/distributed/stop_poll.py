"""How often ranks ask each other whether one of them was told to end: about once a second.

A micro-batch may take milliseconds, and each question lets all ranks wait for the slowest. Ranks
have to skip the same questions without a word about it: they count them, and at each meeting all
hear how long the slowest rank's slowest piece of work took, from which all compute alike how many
pieces come before the next one.
"""

import time
from collections.abc import Callable

STOP_POLL_INTERVAL_S = 1.0
# Pieces of work without a question, however short they were: should one take a hundred times as
# long all of a sudden, the signal of a scheduler is still heard in time.
MAX_POLLS_SKIPPED = 32


class StopPoll:
    """Counts what all ranks do alike. `clock`: in seconds, each rank's own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.remaining = 0  # pieces of work before the next meeting
        self.slowest_s = 0.0  # s, of a piece of work since the last meeting, on this rank
        self.started_at: float | None = (
            None  # of the piece that is under way; None = none was begun
        )

    def is_due(self) -> bool:
        """A piece of work ends and another begins; whether the ranks meet in between."""
        now = self.clock()
        if self.started_at is not None:
            self.slowest_s = max(self.slowest_s, now - self.started_at)
        self.started_at = now
        self.remaining -= 1
        return self.remaining < 0

    def record_poll(self, slowest_s: float, frequent: bool) -> None:
        """All ranks have met; `slowest`: s, the largest of all ranks' own.

        `again`: small pieces of work follow. Else the next question is asked in any case, since
        nobody knows how long what comes will take.
        """
        fits = int(STOP_POLL_INTERVAL_S / slowest_s) if slowest_s > 0 else 1
        self.remaining = (
            max(0, min(fits, MAX_POLLS_SKIPPED) - 1)
            if frequent and self.started_at is not None
            else 0
        )
        self.slowest_s, self.started_at = 0.0, self.clock() if frequent else None
