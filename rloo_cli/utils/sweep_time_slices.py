"""A trial's side of a sweep: between steps it waits here for its time slice. Imports no torch.

`rloo sweep` starts each trial as an ordinary run with RLOO_TURNS in its environment: the sweep's
socket, and the trial's number. Without it, nothing here has an effect. At the end of its time slice
a trial sends its last step, follows orders (save, leave the device, stop), and continues when it
receives the step at which its next time slice ends. Both sides send lines of JSON.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from rloo_cli.utils import files
from rloo_cli.utils.environment import SWEEP_SOCKET_VARIABLE
from rloo_cli.utils.errors import Stopped, refuse
from rloo_cli.utils.files import JsonObject

SOCKET_VARIABLE = SWEEP_SOCKET_VARIABLE  # <socket>:<number>
STOP_CHECK_S = 0.2  # seconds between stop checks of a waiting trial
STOPPED_TRIAL_FIX = "to resume it alone: rloo train with its overrides and resume=auto"
SWEEP_GONE = "stopped: the process of rloo sweep ended before its trials; rloo sweep resume SWEEP"

SweepMessage = JsonObject


class JsonLineSocket:
    """One end of a connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket):
        self.connection, self.buffer = connection, b""

    def send(self, **values: object) -> None:
        """Send one object. Raises OSError if the other side is gone."""
        self.connection.sendall(json.dumps(values).encode() + b"\n")

    def receive(self) -> list[SweepMessage] | None:
        """Wait for bytes. -> the messages completed by them; None if the other side is gone"""
        try:
            received = self.connection.recv(65536)
        except ConnectionError:
            return None
        if not received:
            return None
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class TimeSliceHooks:
    """Orders that a waiting trial can execute."""

    save: Callable[[], str | None]  # writes a checkpoint and returns its path
    offload: Callable[[], None]  # moves off the device
    reload: Callable[[], None]  # moves back to the device
    check_stop: Callable[[], object]  # raises Stopped if a signal was received


class SweepTrial:
    """This process as a trial of a sweep, connected to the sweep's socket."""

    def __init__(self, socket_address: str):
        path, _, number = socket_address.rpartition(":")
        self.until_step, self.messages = -1, list[SweepMessage]()
        try:
            end = socket.socket(socket.AF_UNIX)
            end.connect(path)
            self.trial_number = int(number)
        except (OSError, ValueError) as error:
            what = f"{SOCKET_VARIABLE} = {socket_address!r} does not name a running sweep"
            refuse("environment", what, f"unset {SOCKET_VARIABLE}", error)
        self.json_socket = JsonLineSocket(end)

    def wait_for_time_slice(self, step: int, hooks: TimeSliceHooks) -> float:
        """Wait until the step after `step` is in our time slice. -> seconds waited

        Raises Stopped if the trial must stop, or the sweep is gone.
        """
        if step < self.until_step:
            return 0.0
        began, offloaded = time.perf_counter(), False
        self._send(step=step)
        while True:
            order = self._next_message(hooks.check_stop)
            match order["do"]:
                case "go":
                    if offloaded:
                        hooks.reload()
                    self.until_step = int(order["until"])
                    return time.perf_counter() - began
                case "park":
                    hooks.offload()
                    offloaded = True
                    self._send(parked=True)
                case "save":
                    self._send(saved=hooks.save())
                case _:
                    raise Stopped(
                        f"stopped by {order.get('why', 'the sweep')}: {STOPPED_TRIAL_FIX}"
                    )

    def _next_message(self, check_stop: Callable[[], object]) -> SweepMessage:
        while not self.messages:
            check_stop()
            if files.wait_until_readable(self.json_socket.connection, STOP_CHECK_S):
                found = self.json_socket.receive()
                if found is None:
                    raise Stopped(SWEEP_GONE)
                self.messages += found
        return self.messages.pop(0)

    def _send(self, **values: object) -> None:
        try:
            self.json_socket.send(trial=self.trial_number, **values)
        except OSError:
            raise Stopped(SWEEP_GONE) from None


_sweep_trial: list[SweepTrial] = []


def is_sweep_trial() -> bool:
    """Whether this process is a trial of a sweep."""
    return SOCKET_VARIABLE in os.environ


def wait_in_sweep(step: int, hooks: TimeSliceHooks) -> float:
    """`wait_for_time_slice` of this process. Raises ConfigError for an invalid RLOO_TURNS."""
    if not _sweep_trial:
        _sweep_trial.append(SweepTrial(os.environ[SOCKET_VARIABLE]))
    return _sweep_trial[0].wait_for_time_slice(step, hooks)
