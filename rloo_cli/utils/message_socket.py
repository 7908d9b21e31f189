"""Messages over a socket that only a parent and its own child have: pickled, or as JSON."""

import json
import pickle
import socket
import struct
from typing import Any

LENGTH_HEADER = struct.Struct("!Q")


class PeerGone(Exception):
    """The process at the other end of the socket ended."""


def send_pickled(connection: socket.socket, message: object) -> None:
    """Send one pickled message, with its length before it."""
    body = pickle.dumps(message)
    connection.sendall(LENGTH_HEADER.pack(len(body)) + body)


def receive_pickled(connection: socket.socket) -> Any:
    """The next message. Raises PeerGone when the other side has closed, TimeoutError."""
    (num_bytes,) = LENGTH_HEADER.unpack(_receive_bytes(connection, LENGTH_HEADER.size))
    return pickle.loads(_receive_bytes(connection, num_bytes))


def _receive_bytes(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        try:
            part = connection.recv(min(num_bytes, 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise PeerGone
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def send_json(connection: socket.socket, message: object) -> None:
    """Send one message as JSON, with its length before it."""
    body = json.dumps(message).encode()
    connection.sendall(LENGTH_HEADER.pack(len(body)) + body)


def receive_json(connection: socket.socket, max_bytes: int) -> Any:
    """The next message of a peer that is not trusted: JSON cannot run code, as a pickle can.

    Raises PeerGone when the other side has closed, or sends no JSON or too much; TimeoutError.
    """
    (num_bytes,) = LENGTH_HEADER.unpack(_receive_bytes(connection, LENGTH_HEADER.size))
    if num_bytes > max_bytes:
        raise PeerGone
    try:
        return json.loads(_receive_bytes(connection, num_bytes))
    except ValueError:
        raise PeerGone from None
