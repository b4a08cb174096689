"""Validate the URL of a PostgreSQL database before connecting."""

from typing import Final
from urllib.parse import parse_qs, urlsplit

from onceward.errors import ConfigurationError

__all__ = ["check_dsn"]

_HIGHEST_PORT: Final = 65_535


def check_dsn(url: str) -> None:
    """Raise ``ConfigurationError`` for a malformed URL.

    There may be several hosts, IPv6 addresses in brackets, or no host, as asyncpg allows; names
    and options are left to it. The message contains no part of the URL, which may be a password.
    """
    try:
        parts = urlsplit(url)
        query_ports = parse_qs(parts.query).get("port", [])
    except ValueError as error:
        raise _wrong(str(error)) from error
    # After the brackets of an IPv6 address only the port follows.
    ends = [host.rpartition("]")[2] for host in parts.netloc.rpartition("@")[2].split(",")]
    ports = [port for listed in query_ports for port in listed.split(",")]
    for port in (*(end.partition(":")[2] for end in ends), *ports):
        if port and not (port.isdecimal() and 0 < int(port) <= _HIGHEST_PORT):
            raise _wrong(f"the port must be a number from 1 to {_HIGHEST_PORT}")


def _wrong(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"PostgreSQL URL is malformed: {why} (write it as postgresql://user@host:5432/name)"
    )
