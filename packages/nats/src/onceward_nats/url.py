"""Parse the URLs of NATS servers from a setting. Needs no NATS driver."""

from typing import Final
from urllib.parse import urlsplit

from onceward.errors import ConfigurationError

__all__ = ["servers_of"]

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})


def servers_of(url: str) -> list[str]:
    """Split a setting at its commas.

    Raises ``ConfigurationError`` for a malformed URL, which would otherwise look like an outage.
    """
    servers = [server.strip() for server in url.split(",") if server.strip()]
    if not servers or not all(_is_address(server) for server in servers):
        # The URL is not shown: it may contain a password.
        raise ConfigurationError("NATS URL is malformed: write it as nats://host:4222")
    return servers


def _is_address(server: str) -> bool:
    try:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or a bad port
        return False
