"""Messages over a socket that a process shares with its own child: a length, then that many bytes.

A receiver can set a deadline and a byte limit, so that a child that stops in the middle of a
message, or sends without end, cannot block its parent.
"""

import pickle
import select
import socket
import struct
import time
from types import TracebackType
from typing import Any, Self

LENGTH_HEADER = struct.Struct("!Q")
SMALL_BYTES = 1 << 16  # read at a time; most messages have less
LARGE_BYTES = 1 << 20  # read at a time of a longer message
SHORTEST_WAIT_S = 0.01  # a passed deadline still reads available data
TIMEOUT_SLACK_S = 0.01  # a timeout within this of the target is not set again


class PeerGone(Exception):
    """The process at the other end ended, or sent an invalid message."""


class MessageSocket:
    """One end of a connection. It takes ownership of `connection`."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.received = bytearray()  # bytes read of the next messages
        self.timeout: float | None = None  # of the connection
        connection.settimeout(None)
        self.poll = select.poll()
        self.poll.register(connection, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Our end, and the socket for a child."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def send(self, body: bytes, deadline: float | None = None) -> None:
        """Send one message. `deadline`: of time.monotonic(). Raises PeerGone, TimeoutError."""
        self._wait_at_most_until(deadline)
        try:
            self.connection.sendall(LENGTH_HEADER.pack(len(body)) + body)
        except TimeoutError:
            raise
        except OSError:
            raise PeerGone from None

    def receive(self, deadline: float | None = None, max_bytes: int | None = None) -> bytes:
        """The next message. `deadline`: of time.monotonic(), for the whole message.

        Raises PeerGone when the other end is closed or the message has over `max_bytes`,
        TimeoutError.
        """
        self._read_until(LENGTH_HEADER.size, deadline)
        (num_bytes,) = LENGTH_HEADER.unpack_from(self.received)
        if max_bytes is not None and num_bytes > max_bytes:
            raise PeerGone
        end = LENGTH_HEADER.size + num_bytes
        self._read_until(end, deadline)
        body = bytes(self.received[LENGTH_HEADER.size : end])
        del self.received[:end]
        return body

    def send_pickled(self, message: object) -> None:
        """Send one object. Raises PeerGone."""
        self.send(pickle.dumps(message))

    def receive_pickled(self, deadline: float | None = None) -> Any:
        """The next object of a trusted peer: a pickle can run code. Raises as `receive`."""
        return pickle.loads(self.receive(deadline))

    def has_input(self, seconds: float = 0.0) -> bool:
        """Whether data arrives, or the other end is closed, within this time."""
        return bool(self.received or self.poll.poll(1000 * seconds))

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _read_until(self, num_bytes: int, deadline: float | None) -> None:
        while len(self.received) < num_bytes:
            self._wait_at_most_until(deadline)
            try:
                missing = num_bytes - len(self.received)
                part = self.connection.recv(min(max(missing, SMALL_BYTES), LARGE_BYTES))
            except TimeoutError:
                raise
            except OSError:
                part = b""
            if not part:
                raise PeerGone
            self.received += part

    def _wait_at_most_until(self, deadline: float | None) -> None:
        """Let the next call on the connection take until the deadline."""
        before, self.timeout = self.timeout, None
        if deadline is not None:
            self.timeout = max(SHORTEST_WAIT_S, deadline - time.monotonic())
            if before is not None and 0 <= before - self.timeout < TIMEOUT_SLACK_S:
                self.timeout = before
        if self.timeout != before:
            self.connection.settimeout(self.timeout)
