"""Public addresses, and the addresses of a host name.

A name may resolve to a different address the second time: connect to the address that was checked,
not to the name.
"""

import asyncio
import ipaddress
import socket

# Networks that embed an IPv4 address in their last 32 bits and route to it.
WRAPPED_IPV4 = tuple(map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96")))
LOCAL_TRANSLATION = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215: local use only


class PrivateAddress(Exception):
    """A host resolves to an address of this machine or its network."""


async def resolve_host(host: str, port: int, private: bool) -> list[str]:
    """The allowed addresses of a host. Raises OSError, PrivateAddress.

    `private`: also allow addresses of this machine and its network.
    """
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    for address in addresses:
        if not private and not is_public_address(address):
            why = f"{host} is {address}, an address of this machine or of its network"
            raise PrivateAddress(why)
    return addresses


def is_public_address(address: str) -> bool:
    """Whether an IP address is public: not this machine's, a local or a shared one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None:
            return is_public_address(str(ip.sixtofour))
        if ip.teredo is not None or ip in LOCAL_TRANSLATION:
            return False
        if any(ip in network for network in WRAPPED_IPV4):
            return is_public_address(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
