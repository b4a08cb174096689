"""The addresses of NATS as they are written in a setting. Needs no NATS, nor its driver."""

from typing import Final
from urllib.parse import urlsplit

from holdfast.errors import ConfigurationError

__all__ = ["servers_of"]

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})


def servers_of(url: str) -> list[str]:
    """Return the servers of a setting, which has commas between them.

    Raises ``ConfigurationError`` for one that nobody could ever connect to: else it would look as
    if NATS were away, for ever.
    """
    servers = [server.strip() for server in url.split(",") if server.strip()]
    if not servers or not all(_is_address(server) for server in servers):
        # Not shown: there may be a password in it.
        raise ConfigurationError("write the address of NATS as nats://host:4222")
    return servers


def _is_address(server: str) -> bool:
    try:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        return False
