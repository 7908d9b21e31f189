"""Decides how often ranks ask each other whether one of them was told to stop: about once a second.

A micro-batch may take milliseconds, and each poll lets all ranks wait for the slowest. Ranks have
to skip the same polls without talking about it: they count them, and at each poll all learn how
long the slowest rank's slowest piece of work took, from which all compute alike how many pieces of
work come before the next poll.
"""

import time
from collections.abc import Callable

STOP_POLL_INTERVAL_S = 1.0
# Pieces of work without a question, however short they were: should one take a hundred times as
# long all of a sudden, the signal of a scheduler is still heard in time.
MAX_POLLS_SKIPPED = 32


class StopPoll:
    """Counts pieces of work, alike on all ranks. `clock`: in seconds, each rank's own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.remaining = 0  # pieces of work before the next poll
        self.slowest_s = 0.0  # of a piece of work since the last poll, on this rank
        self.started_at: float | None = None  # of the current piece of work

    def is_due(self) -> bool:
        """Whether the ranks poll now, between two pieces of work."""
        now = self.clock()
        if self.started_at is not None:
            self.slowest_s = max(self.slowest_s, now - self.started_at)
        self.started_at = now
        self.remaining -= 1
        return self.remaining < 0

    def record_poll(self, slowest_s: float, frequent: bool) -> None:
        """Note a poll. `slowest_s`: the largest of all ranks.

        `frequent`: small pieces of work follow. If not, the next poll is not skipped, since nobody
        knows how long the next piece of work takes.
        """
        fits = int(STOP_POLL_INTERVAL_S / slowest_s) if slowest_s > 0 else 1
        self.remaining = (
            max(0, min(fits, MAX_POLLS_SKIPPED) - 1)
            if frequent and self.started_at is not None
            else 0
        )
        self.slowest_s, self.started_at = 0.0, self.clock() if frequent else None
