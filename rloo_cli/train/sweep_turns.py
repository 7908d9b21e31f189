"""A member of a sweep waits here for its turn, between two steps. Imports no torch.

`rloo sweep` starts each member as an ordinary run with RLOO_TURNS in its environment: the socket on
which turns are given, and the member's number there. Without it nothing here does anything. At the
end of its turn a member says which step it has done, does as it is told (saves, makes room on the
device, ends) and goes on when it is told up to which step. Lines of JSON, both ways.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo_cli.utils import files
from rloo_cli.utils.environment import TURNS
from rloo_cli.utils.errors import ConfigError, Problem, Stopped

PLACE = TURNS  # <socket>:<number>
LOOK_S = 0.2  # how often one that waits looks whether it was asked to end

Message = dict[str, Any]


class Line:
    """One end of a connection that carries one JSON object a line."""

    def __init__(self, end: socket.socket):
        self.end, self.rest = end, b""

    def send(self, **values: Any) -> None:
        """Send one. Raises OSError where nobody is there any more."""
        self.end.sendall(json.dumps(values).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, once something has; None where the other side is gone."""
        try:
            found = self.end.recv(65536)
        except ConnectionError:
            return None
        if not found:
            return None
        *lines, self.rest = (self.rest + found).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Hooks:
    """What a member can be told to do while it waits."""

    save: Callable[[], str | None]  # a checkpoint of where it stands: its path
    away: Callable[[], None]  # leave the device
    back: Callable[[], None]
    check: Callable[[], None]  # raises Stopped where a signal has come


class Member:
    """This process as the sweep knows it."""

    def __init__(self, place: str):
        path, _, number = place.rpartition(":")
        self.until, self.orders = -1, list[Message]()
        try:
            end = socket.socket(socket.AF_UNIX)
            end.connect(path)
            self.number = int(number)
        except (OSError, ValueError) as error:
            why = f"it names the socket of a sweep that runs, and its number there: {error}"
            what = f"{PLACE} = {place!r} is no place in a sweep"
            raise ConfigError(Problem(what, "environment", why, f"unset {PLACE}")) from None
        self.line = Line(end)

    def wait(self, step: int, hooks: Hooks) -> float:
        """Wait until the step after `step` is ours to do; the seconds that took.

        Raises Stopped where the member is to end, or the sweep is gone.
        """
        if step < self.until:
            return 0.0
        began, parked = time.perf_counter(), False
        self._say(step=step)
        while True:
            order = self._order(hooks.check)
            match order["do"]:
                case "go":
                    if parked:
                        hooks.back()
                    self.until = int(order["until"])
                    return time.perf_counter() - began
                case "park":
                    hooks.away()
                    parked = True
                    self._say(parked=True)
                case "save":
                    self._say(saved=hooks.save())
                case _:
                    raise Stopped(Problem(f"stopped by {order.get('why', 'the sweep')}"))

    def _order(self, check: Callable[[], None]) -> Message:
        while not self.orders:
            check()
            if files.readable(self.line.end, LOOK_S):
                found = self.line.receive()
                if found is None:
                    raise Stopped(Problem("stopped: the sweep of this run is gone"))
                self.orders += found
        return self.orders.pop(0)

    def _say(self, **values: Any) -> None:
        try:
            self.line.send(member=self.number, **values)
        except OSError:
            raise Stopped(Problem("stopped: the sweep of this run is gone")) from None


_member: list[Member] = []


def taken() -> bool:
    """Whether this process is a member of a sweep."""
    return PLACE in os.environ


def wait(step: int, hooks: Hooks) -> float:
    """`Member.wait` of this process. Raises ConfigError where RLOO_TURNS leads nowhere."""
    if not _member:
        _member.append(Member(os.environ[PLACE]))
    return _member[0].wait(step, hooks)
