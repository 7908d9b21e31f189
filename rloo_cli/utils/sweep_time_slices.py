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
from rloo_cli.utils.environment import SWEEP_SOCKET_VARIABLE
from rloo_cli.utils.errors import ConfigError, Problem, Stopped
from rloo_cli.utils.files import JsonObject

SOCKET_VARIABLE = SWEEP_SOCKET_VARIABLE  # <socket>:<number>
STOP_CHECK_S = 0.2  # how often one that waits looks whether it was asked to end

SweepMessage = JsonObject


class JsonLineSocket:
    """One end of a connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket):
        self.connection, self.buffer = connection, b""

    def send(self, **values: Any) -> None:
        """Send one. Raises OSError where nobody is there any more."""
        self.connection.sendall(json.dumps(values).encode() + b"\n")

    def receive(self) -> list[SweepMessage] | None:
        """What has come, once something has; None where the other side is gone."""
        try:
            found = self.connection.recv(65536)
        except ConnectionError:
            return None
        if not found:
            return None
        *lines, self.buffer = (self.buffer + found).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class TimeSliceHooks:
    """What a member can be told to do while it waits."""

    save: Callable[[], str | None]  # a checkpoint of where it stands: its path
    offload: Callable[[], None]  # leave the device
    reload: Callable[[], None]
    check_stop: Callable[[], None]  # raises Stopped where a signal has come


class SweepTrial:
    """This process as the sweep knows it."""

    def __init__(self, socket_address: str):
        path, _, number = socket_address.rpartition(":")
        self.until_step, self.messages = -1, list[SweepMessage]()
        try:
            end = socket.socket(socket.AF_UNIX)
            end.connect(path)
            self.trial_number = int(number)
        except (OSError, ValueError) as error:
            why = f"it names the socket of a sweep that runs, and its number there: {error}"
            what = f"{SOCKET_VARIABLE} = {socket_address!r} is no place in a sweep"
            raise ConfigError(
                Problem(what, "environment", why, f"unset {SOCKET_VARIABLE}")
            ) from None
        self.json_socket = JsonLineSocket(end)

    def wait_for_time_slice(self, step: int, hooks: TimeSliceHooks) -> float:
        """Wait until the step after `step` is ours to do; the seconds that took.

        Raises Stopped where the member is to end, or the sweep is gone.
        """
        if step < self.until_step:
            return 0.0
        began, parked = time.perf_counter(), False
        self._send(step=step)
        while True:
            order = self._next_message(hooks.check_stop)
            match order["do"]:
                case "go":
                    if parked:
                        hooks.reload()
                    self.until_step = int(order["until"])
                    return time.perf_counter() - began
                case "park":
                    hooks.offload()
                    parked = True
                    self._send(parked=True)
                case "save":
                    self._send(saved=hooks.save())
                case _:
                    raise Stopped(Problem(f"stopped by {order.get('why', 'the sweep')}"))

    def _next_message(self, check_stop: Callable[[], None]) -> SweepMessage:
        while not self.messages:
            check_stop()
            if files.wait_until_readable(self.json_socket.connection, STOP_CHECK_S):
                found = self.json_socket.receive()
                if found is None:
                    raise Stopped(Problem("stopped: the sweep of this run is gone"))
                self.messages += found
        return self.messages.pop(0)

    def _send(self, **values: Any) -> None:
        try:
            self.json_socket.send(member=self.trial_number, **values)
        except OSError:
            raise Stopped(Problem("stopped: the sweep of this run is gone")) from None


_sweep_trial: list[SweepTrial] = []


def is_sweep_trial() -> bool:
    """Whether this process is a member of a sweep."""
    return SOCKET_VARIABLE in os.environ


def wait_in_sweep(step: int, hooks: TimeSliceHooks) -> float:
    """`Member.wait` of this process. Raises ConfigError where RLOO_TURNS leads nowhere."""
    if not _sweep_trial:
        _sweep_trial.append(SweepTrial(os.environ[SOCKET_VARIABLE]))
    return _sweep_trial[0].wait_for_time_slice(step, hooks)
