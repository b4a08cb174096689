"""Which addresses a request to a configured URL may reach: none inside our own network.

A URL that a customer has registered must not reach a database, a metadata service or an admin
page. The name is resolved once, and the connection is made to the address that was checked: a
second look-up could have another result.
"""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

__all__ = ["AddressRefusedError", "Network", "check_literal", "parse_networks", "resolve"]

Network = IPv4Network | IPv6Network

# Prefixes whose addresses contain an IPv4 address, and where in the 128 bits it begins.
_TRANSLATED: Final = (
    (IPv6Network("64:ff9b::/96"), 0),
    (IPv6Network("64:ff9b:1::/48"), 0),
    (IPv6Network("2002::/16"), 80),
)


class AddressRefusedError(Exception):
    """The host has an internal address, or none."""


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse networks such as ``127.0.0.0/8,10.1.2.3``. Raises ``ValueError``."""
    return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())


async def resolve(host: str, port: int, allowed: Sequence[Network] = ()) -> str:
    """Return an address of a host that may be connected to.

    Raises ``AddressRefusedError`` if one of its addresses is internal and not in ``allowed``, and
    ``OSError`` if the host cannot be resolved.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise AddressRefusedError(f"{host} has no address")
    for text in addresses:
        # All of them: a name with a public and an internal address is an attempt to get in.
        if not is_allowed(text, allowed):
            raise AddressRefusedError(f"{host} has the internal address {text}")
    return addresses[0]


def check_literal(host: str, allowed: Sequence[Network] = ()) -> None:
    """Raise ``AddressRefusedError`` if a host is an internal address. Looks up no name.

    In all spellings that a look-up would accept: ``127.1`` and ``2130706433`` are 127.0.0.1.
    """
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        found = []  # a name
    name = host.rstrip(".").lower()
    is_loopback = name == "localhost" or name.endswith(".localhost")
    addresses = ["127.0.0.1"] if is_loopback else [str(entry[4][0]) for entry in found]
    for text in addresses:
        if not is_allowed(text, allowed):
            raise AddressRefusedError(f"{host} is an internal address")


def is_allowed(text: str, allowed: Sequence[Network] = ()) -> bool:
    """Return whether an address is public, or in one of the networks that are allowed."""
    address = _inner(ip_address(text.partition("%")[0]))
    if any(address in network for network in allowed):
        return True
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_private
        and not address.is_reserved
        and not address.is_link_local
    )


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 address is translated to, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    for network, shift in _TRANSLATED:
        if address in network:
            return IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
    return address
