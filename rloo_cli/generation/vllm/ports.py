"""Who listens where on this machine, read from /proc: Linux, without root for one's own."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TCP_LISTEN_STATE, UDP_UNCONNECTED_STATE = (
    "0A",
    "07",
)  # states of /proc/net: a TCP socket that listens, a UDP one


@dataclass(frozen=True)
class Listener:
    """One socket that takes what is sent to it."""

    kind: str  # tcp, tcp6, udp, udp6
    address: str
    port: int
    inode: str


def listening_sockets() -> Iterator[Listener]:
    """Every socket of this machine that listens."""
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        state = TCP_LISTEN_STATE if kind.startswith("tcp") else UDP_UNCONNECTED_STATE
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    host, _, port = fields[1].partition(":")
                    yield Listener(kind, _address(host), int(port, 16), fields[9])


def _address(text: str) -> str:
    """The kernel's hexadecimal words, each in the machine's own order -> an address."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def socket_inodes(pid: int) -> set[str]:
    """The sockets that a process has open; none where it is somebody else's, or gone."""
    found = set()
    with contextlib.suppress(OSError):
        for handle in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(handle.path)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def port_holder(port: int) -> str:
    """The process that listens on a TCP port, as `process 17 (python -m http.server)`."""
    wanted = {s.inode for s in listening_sockets() if s.port == port and s.kind.startswith("tcp")}
    for pid in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        if wanted & socket_inodes(pid):
            return f"process {pid} ({process_command(pid)})"
    return "a process of another user" if wanted else "a process that is gone again"


def process_command(pid: int) -> str:
    """How a process was started, shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()[:120]


def bind_tcp_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address, not yet listening. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
