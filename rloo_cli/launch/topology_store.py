"""Where ranks meet, and what each of them is told. Imports no torch.

torch's TCPStore, left to itself, listens on every interface; given a socket that listens already
it does not. So the launcher opens the socket, and rank 0 inherits it (RLOO_STORE_FD).
"""

import os
import platform
import socket
import sys
from collections.abc import Iterator

from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.launch.processes import Start
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.rules_distributed import address
from rloo_cli.launch.topology import OURS, Place

LOOPBACK = "127.0.0.1"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
STORE = "RLOO_STORE_FD"


def listen(run: RunConfig, place: Place) -> socket.socket | None:
    """The socket of the store, listening; None where none is needed or others have made it.

    On one machine it is the loopback's, unless distributed.rdzv says where. Raises MachineError
    where that address is not ours to listen on.
    """
    if place.total == 1 or place.store:
        return None
    given = address(run.distributed.rdzv) if run.distributed.rdzv else None
    if given is None:
        hosts = [LOOPBACK] if place.nodes == 1 else [*_own_addresses(), LOOPBACK]
        for host in hosts:
            try:
                return _bound(host, 0)
            except OSError:
                continue
        given = LOOPBACK, 0
    try:
        return _bound(*given)
    except OSError as error:
        raise MachineError(
            Problem(
                f"the processes cannot meet at {given[0]}:{given[1]}",
                "distributed.rdzv",
                f"rank 0 is on {platform.node()} and cannot listen there: {error}",
                "distributed.rdzv=null",
            )
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def _own_addresses() -> Iterator[str]:
    """This node's addresses as the others resolve its name; then as packets leave it."""
    for name in (os.environ.get("SLURMD_NODENAME"), platform.node()):
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else []
        except OSError:
            continue
        yield from (str(f[4][0]) for f in found if not str(f[4][0]).startswith(("127.", "::1")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # kept for documents (RFC 5737): nothing is sent
            yield probe.getsockname()[0]
        except OSError:
            return


def starts(place: Place, host: str, port: int, listening: socket.socket | None) -> list[Start]:
    """The processes to start: who each of them is, and where all meet. One alone needs nothing.

    host, port: of the store. `listening`: its socket, for rank 0.
    """
    if place.total == 1:
        # What another program left in the environment must not make it one of many.
        stray = {name: value for name, value in ALONE.items() if name in os.environ}
        return [Start(stray | ({OURS: str(os.getpid())} if place.by else {}))]
    env = {
        "WORLD_SIZE": str(place.total),
        "LOCAL_WORLD_SIZE": str(place.on_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        OURS: str(os.getpid()),
    }
    if place.nodes == 1 and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # or it looks for an interface that the host's name has
    found = []
    for i in range(place.here):
        who = {"RANK": str(place.first + i), "LOCAL_RANK": str(place.local + i)}
        first = place.first + i == 0 and listening is not None
        files = (listening.fileno(),) if first and listening is not None else ()
        store = {STORE: str(listening.fileno())} if first and listening is not None else {}
        found.append(Start(env | who | store, files))
    return found
