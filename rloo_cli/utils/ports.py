"""Finds who listens on which port of this machine, and binds sockets of our own."""

import contextlib
import errno
import socket
from dataclasses import dataclass

import psutil

from rloo_cli.utils.errors import MachineError, RunError, refuse


@dataclass(frozen=True)
class ListeningSocket:
    """A TCP socket that listens, or a UDP socket that receives."""

    address: str
    port: int  # TCP and UDP ports are separate: both can use the same number
    is_tcp: bool
    pid: int | None  # None: a process of another user


def listening_sockets() -> list[ListeningSocket]:
    """Every socket of this machine that listens."""
    return [
        ListeningSocket(each.laddr.ip, each.laddr.port, each.type == socket.SOCK_STREAM, each.pid)
        for each in psutil.net_connections("inet")
        if each.laddr and not each.raddr and each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]


def port_holder(port: int) -> str:
    """The process that listens on a TCP port, as `process 17 (python -m http.server)`."""
    holders = [each.pid for each in listening_sockets() if each.is_tcp and each.port == port]
    for pid in holders:
        with contextlib.suppress(psutil.Error):
            if pid is not None:
                return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    return "a process of another user" if holders else "a process that has exited"


def bind_tcp_socket(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A TCP socket bound to an address; it listens where `backlog` is given. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if backlog is not None:
            bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound


def bind_failure(error: OSError) -> str:
    """Why a socket could not be bound, without the error number."""
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not an address of this machine"
    return error.strerror or str(error)


def bind_or_refuse(
    section: str,
    host: str,
    port: int,
    backlog: int | None = None,
    error: type[RunError] = MachineError,
) -> socket.socket:
    """`bind_tcp_socket` for the keys SECTION.host and SECTION.port. Raises `error`, which names the
    process that uses the port."""
    try:
        return bind_tcp_socket(host, port, backlog)
    except OSError as failed:
        key, what = f"{section}.port", f"{section}.port = {port} is taken"
        why, fix = f"by {port_holder(port)}", f"{key}=0 for a free port"
        if failed.errno != errno.EADDRINUSE:
            key, why = f"{section}.host", bind_failure(failed)
            what = f"{key} = {host!r}, port {port}: the server cannot listen there"
            fix = f"{key}=127.0.0.1, or an address of this machine"
        refuse(key, what, fix, why, error=error)
