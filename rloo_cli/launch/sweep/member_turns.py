"""Whose turn it is. A turn is one chunk; who has had the least, for its share, is next."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Turns:
    """What one member has had, and may have."""

    number: int
    share: int = 1
    had: float = 0.0  # chunks, divided by the share at that time
    device: int = 0
    due: bool = False  # it was let in and has not yet had its chunk: it comes before all others

    def take(self) -> None:
        """It gets a chunk."""
        if not self.due:
            self.had += 1 / self.share
        self.due = False


def rank(turns: Turns) -> tuple[bool, float, int]:
    """The order in which they are next."""
    return not turns.due, round(turns.had, 9), turns.number


def next_ones(waiting: Sequence[Turns], room: Sequence[int]) -> list[Turns]:
    """Those who go on now: `room` more on each device."""
    left, found = list(room), []
    for turns in sorted(waiting, key=rank):
        if left[turns.device] > 0:
            left[turns.device] -= 1
            found.append(turns)
    return found


def places(jobs: int, devices: int) -> list[int]:
    """How many train at the same time on each device: as evenly as it goes."""
    return [jobs // devices + (d < jobs % devices) for d in range(devices)]


def spread(members: Sequence[Turns], jobs: int, devices: int) -> int:
    """The device for one more member: the one with the fewest, among those that are used."""
    counts = [sum(m.device == d for m in members) for d in range(min(jobs, max(1, devices)))]
    return counts.index(min(counts))
