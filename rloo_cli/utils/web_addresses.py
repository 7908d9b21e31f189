"""Which addresses are of the open network, and which ones a host's name has.

A name may resolve to another address the second time: whoever checks must connect to an address
that was checked, and not to the name.
"""

import asyncio
import ipaddress
import socket

# What holds an IPv4 address in its last 32 bits, and leads there.
WRAPPED_IPV4 = tuple(map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96")))
LOCAL_TRANSLATION = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215: of this network alone


class PrivateAddress(Exception):
    """A host has an address of this machine or of its network."""


async def resolve_host(host: str, port: int, private: bool) -> list[str]:
    """The addresses of a host, all of which may be asked. Raises OSError, PrivateAddress.

    `private`: addresses of this machine and its network may be asked, too.
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
    """Whether an IP address is of the open network: not this machine's, a local or a shared one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None:
            return is_public_address(str(ip.sixtofour))
        if ip.teredo is not None or ip in LOCAL_TRANSLATION:
            return False
        if any(ip in network for network in WRAPPED_IPV4):
            return is_public_address(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
