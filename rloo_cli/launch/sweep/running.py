"""The state of a sweep that runs: its members, who trains where, and what it was asked."""

import time
from pathlib import Path

from rloo_cli.launch.sweep import member as sweep_member
from rloo_cli.launch.sweep.member import Live, Turns
from rloo_cli.launch.sweep.state import OPEN, Book, Member
from rloo_cli.launch.sweep.table import Show

SAVE_S = 0.5  # sweep.json is written at most this often for what only shows how it goes


class Sweep:
    """A sweep that runs. `gpus`: names of the devices that members are spread over; `fit`: how many
    members those can hold."""

    def __init__(
        self, book: Book, show: Show, gpus: list[str] | None = None, fit: int | None = None
    ):
        self.book, self.show, self.gpus, self.fit = book, show, gpus or [], fit
        self.lives: list[Live] = []
        self.room = sweep_member.places(book.jobs, max(1, min(book.jobs, len(self.gpus))))
        self.heard: list[int] = []  # signals
        self.socket = Path()
        self.saved = 0.0
        for member in book.members:
            if member.state in (*OPEN, "failed"):
                member.state, member.code, member.why = "waiting", None, ""
                self.add(member)

    def add(self, member: Member) -> Live:
        """A member more that is to be trained; its turns count from now on."""
        known = [live.fair for live in self.lives if live.open]
        device = sweep_member.spread(known, self.book.jobs, len(self.gpus))
        had = min((turns.had for turns in known), default=0.0)
        turns = Turns(member.number, member.share, had, device)
        self.lives.append(Live(self.book, member, turns))
        return self.lives[-1]

    def save(self, now: bool = True) -> None:
        """Write sweep.json, at once or when it is time."""
        if now or time.monotonic() - self.saved > SAVE_S:
            self.book.save()
            self.saved = time.monotonic()
