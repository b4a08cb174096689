"""Connects to the writable server of a URL with several hosts, whatever state the others are in.

Drivers try the hosts one after the other, and asyncpg has one time limit for all of them: a first
host that is frozen keeps clients from a second one that was promoted long ago. So each host is
connected to separately and at the same time.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

__all__ = ["COMPARE_SECONDS", "connect_blocking_to_writable", "connect_to_writable", "host_urls"]

# How long a first connection waits for those to the other hosts, to compare timelines.
COMPARE_SECONDS: Final = 0.5

_ATTRIBUTE: Final = "target_session_attrs"
_WRITABLE: Final = "read-write"


class _BlockingConnection(Protocol):
    def close(self) -> None:
        """Close."""


B = TypeVar("B", bound=_BlockingConnection)


class _Closable(Protocol):
    def terminate(self) -> None:
        """Close at once."""


C = TypeVar("C", bound=_Closable)
F = TypeVar("F", "asyncio.Future[Any]", "Future[Any]")


def host_urls(url: str) -> list[str]:
    """Return one URL for each host, which asks for a writable server.

    A URL with one host is returned as it is. ``target_session_attrs`` of the URL is kept.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    user, at, addresses = parts.netloc.rpartition("@")
    if addresses:
        hosts = addresses.split(",")
        places = [(f"{user}{at}{host}", query) for host in hosts]
    else:
        names, ports = query.get("host", "").split(","), query.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(names)
        rest = {name: value for name, value in query.items() if name not in ("host", "port")}
        places = [
            (
                parts.netloc,
                {"host": name, **({"port": port} if port else {}), **rest},
            )
            for name, port in zip(names, ports, strict=False)
        ]
    if len(places) == 1:
        return [url]
    return [
        urlunsplit(
            parts._replace(
                netloc=netloc,
                query=urlencode({_ATTRIBUTE: _WRITABLE, **asked}, quote_via=quote, safe="/"),
            )
        )
        for netloc, asked in places
    ]


async def connect_to_writable(
    urls: Sequence[str],
    connect: Callable[[str], Awaitable[tuple[int, C]]],
    *,
    compare_seconds: float = 0.0,
) -> C:
    """Connect to all servers at once; return the first connection and close the others.

    ``connect`` returns a timeline and a connection. It raises if a server is not writable, was
    replaced or does not respond in time; if all fail, the error of the last one is raised. With
    ``compare_seconds``, the others get that much time after the first, and the connection with the
    newest timeline is returned: a replaced primary may respond, too.
    """
    if len(urls) == 1:
        return (await connect(urls[0]))[1]
    attempts = [asyncio.ensure_future(connect(url)) for url in urls]
    chosen: asyncio.Future[tuple[int, C]] | None = None
    try:
        pending = set(attempts)
        while pending and not _connected(attempts):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending and compare_seconds:
            await asyncio.wait(pending, timeout=compare_seconds)
        connected = _connected(attempts)
        if not connected:
            return attempts[-1].result()[1]
        chosen = max(connected, key=lambda attempt: attempt.result()[0])
        return chosen.result()[1]
    finally:
        for attempt in attempts:
            if attempt is not chosen:
                attempt.cancel()
                attempt.add_done_callback(_close)


def _connected(attempts: Sequence[F]) -> list[F]:
    return [
        each for each in attempts if each.done() and not each.cancelled() and not each.exception()
    ]


def _close(attempt: "asyncio.Future[tuple[int, C]]") -> None:
    """Close a connection that is not used, and mark an error as seen."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[1].terminate()


def connect_blocking_to_writable(
    urls: Sequence[str],
    connect: Callable[[str], tuple[int, B]],
    *,
    compare_seconds: float = 0.0,
) -> B:
    """Do the same with a driver that blocks, in a thread for each host."""
    if len(urls) == 1:
        return connect(urls[0])[1]
    attempts = [_in_thread(connect, url) for url in urls]
    pending = set(attempts)
    while pending and not _connected(attempts):
        _, pending = wait(pending, return_when=FIRST_COMPLETED)
    if pending and compare_seconds:
        wait(pending, timeout=compare_seconds)
    connected = _connected(attempts)
    if not connected:
        return attempts[-1].result()[1]
    chosen: Future[tuple[int, B]] = max(connected, key=lambda attempt: attempt.result()[0])
    for attempt in attempts:
        if attempt is not chosen:
            attempt.add_done_callback(_close_blocking)
    return chosen.result()[1]


def _in_thread(connect: Callable[[str], tuple[int, B]], url: str) -> "Future[tuple[int, B]]":
    """Connect in a thread that does not keep the process alive."""
    attempt: Future[tuple[int, B]] = Future()

    def run() -> None:
        try:
            attempt.set_result(connect(url))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            attempt.set_exception(error)

    threading.Thread(target=run, name="onceward-connect", daemon=True).start()
    return attempt


def _close_blocking(attempt: "Future[tuple[int, B]]") -> None:
    if attempt.exception() is None:
        attempt.result()[1].close()
