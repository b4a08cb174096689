"""The URL of a PostgreSQL, looked at before anything connects: a slip is told, not waited for."""

from typing import Final
from urllib.parse import parse_qs, urlsplit

from holdfast.errors import ConfigurationError

__all__ = ["check_address"]

_HIGHEST_PORT: Final = 65_535


def check_address(url: str) -> None:
    """Raise ``ConfigurationError`` for an address nobody could connect to.

    Hosts may be several, in square brackets, or none, as asyncpg allows; names and options are
    left to it. The message has no part of the URL: what looks like a port may be of a password.
    """
    try:
        parts = urlsplit(url)
        asked = parse_qs(parts.query).get("port", [])
    except ValueError as error:
        raise _wrong(str(error)) from error
    # After the brackets of an IPv6 address there is nothing but the port.
    ends = [host.rpartition("]")[2] for host in parts.netloc.rpartition("@")[2].split(",")]
    ports = [port for listed in asked for port in listed.split(",")]
    for port in (*(end.partition(":")[2] for end in ends), *ports):
        if port and not (port.isdecimal() and 0 < int(port) <= _HIGHEST_PORT):
            raise _wrong(f"the port should be a number from 1 to {_HIGHEST_PORT}")


def _wrong(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"this is no address of PostgreSQL: {why} (write it as postgresql://user@host:5432/name)"
    )
