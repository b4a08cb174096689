"""One POST request to a server of others: one deadline, no redirects, no internal addresses."""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import h11

from onceward_services.webhooks.addresses import (
    Network,
    check_literal,
    is_allowed,
    resolve,
)

__all__ = [
    "HttpResult",
    "InvalidUrlError",
    "NoResponseError",
    "Target",
    "check_url",
    "parse_url",
    "post",
]

# What is kept of a response, for logs and for error codes in it.
_MAX_BODY_BYTES: Final = 16 * 1024
_READ_BYTES: Final = 16 * 1024
_PORTS: Final = {"http": 80, "https": 443}
_MAX_URL_CHARS: Final = 2000


class InvalidUrlError(ValueError):
    """The text is not a URL that can be called."""


class NoResponseError(Exception):
    """No response: the server cannot be reached, hangs or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpResult:
    """A response; the body is cut off after some kilobytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def parse_url(url: str) -> Target:
    """Parse an http or https URL. Raises ``InvalidUrlError``."""
    if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidUrlError(
            f"should have at most {_MAX_URL_CHARS} visible ASCII characters and no spaces"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidUrlError("should be an address such as https://example.com/hook") from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidUrlError("should be an address such as https://example.com/hook")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidUrlError("should have no user, no password and no fragment")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


def check_url(url: str, allowed: Sequence[Network] = ()) -> None:
    """Refuse a URL that ``post`` would refuse, without looking up its name.

    Raises ``InvalidUrlError``, or ``AddressRefusedError`` for an address that is internal.
    """
    target = parse_url(url)
    check_literal(target.host, allowed)
    if target.scheme == "http" and not allowed:
        raise InvalidUrlError("should begin with https://")


async def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_seconds: float,
    allowed: Sequence[Network] = (),
    context: ssl.SSLContext | None = None,
) -> HttpResult:
    """Send a POST request and return the response, a redirect included.

    The deadline covers everything: look-up, connection, response. Plain http is refused unless the
    address is in ``allowed``. Raises ``InvalidUrlError``, ``AddressRefusedError`` or
    ``NoResponseError``.
    """
    target = parse_url(url)
    try:
        async with asyncio.timeout(timeout_seconds):
            address = await resolve(target.host, target.port, allowed)
            if target.scheme == "http" and not _is_inside(address, allowed):
                raise InvalidUrlError("should begin with https://")
            return await _exchange(target, address, body, headers, context)
    except TimeoutError as error:
        raise NoResponseError(f"no response within {timeout_seconds:g} seconds") from error
    except (OSError, ssl.SSLError, EOFError) as error:
        raise NoResponseError(f"{type(error).__name__}: {error}") from error
    except h11.ProtocolError as error:
        raise NoResponseError(f"not a valid response: {error}") from error


def _is_inside(address: str, allowed: Sequence[Network]) -> bool:
    """Return whether an address is allowed although it is internal."""
    return is_allowed(address, allowed) and not is_allowed(address)


async def _exchange(
    target: Target,
    address: str,
    body: bytes,
    headers: Mapping[str, str],
    context: ssl.SSLContext | None,
) -> HttpResult:
    is_tls = target.scheme == "https"
    reader, writer = await asyncio.open_connection(
        address,
        target.port,
        ssl=(context or ssl.create_default_context()) if is_tls else None,
        # The certificate is checked for the name in the URL, although the address is given.
        server_hostname=target.host if is_tls else None,
    )
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_READ_BYTES)
        sent = [
            ("host", target.host_header),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *headers.items(),
        ]
        request = h11.Request(method="POST", target=target.path, headers=sent)
        writer.write(connection.send(request) or b"")
        writer.write(connection.send(h11.Data(body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _response(connection, reader)
    finally:
        writer.transport.abort()


async def _response(connection: h11.Connection, reader: asyncio.StreamReader) -> HttpResult:
    head: h11.Response | None = None
    body = b""
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            case h11.Response():
                head = event
            case h11.Data():
                body += bytes(event.data)
            case h11.EndOfMessage() | h11.ConnectionClosed() | h11.PAUSED:
                break
            case _:
                pass  # 1xx
        if len(body) > _MAX_BODY_BYTES:
            break
    if head is None:
        raise EOFError("the connection was closed before the response")
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return HttpResult(head.status_code, found, body[:_MAX_BODY_BYTES])
