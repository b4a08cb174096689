"""Connects to the writable server of a URL with several hosts, whatever state the others are in.

Drivers try the hosts one after the other, and asyncpg has one time limit for all of them: a first
host that is frozen keeps clients from a second one that was promoted long ago. So each host is
connected to separately and at the same time.

Of two servers with the same data, the one that was promoted last counts. A promotion begins a new
timeline. A primary that was frozen or cut off while its standby was promoted still believes that it
is the primary when it is back. Once a process has seen the newer timeline, it does not use a
connection to a server on an older one.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from onceward.errors import ConfigurationError

# How long a first connection waits for those to the other hosts, to compare timelines.
COMPARE_SECONDS: Final = 0.5

_ATTRIBUTE: Final = "target_session_attrs"
_WRITABLE: Final = "read-write"


C = TypeVar("C")
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
    chosen = None
    try:
        pending = set(attempts)
        while pending and not _connected(attempts):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending and compare_seconds:
            await asyncio.wait(pending, timeout=compare_seconds)
        chosen = _newest(attempts)
        connection: C = chosen.result()[1]
        return connection
    finally:
        for attempt in attempts:
            if attempt is not chosen:
                attempt.cancel()
                attempt.add_done_callback(_close)


def _connected(attempts: Sequence[F]) -> list[F]:
    return [
        each for each in attempts if each.done() and not each.cancelled() and not each.exception()
    ]


def _newest(attempts: Sequence[F]) -> F:
    """Return the attempt with the newest timeline; if all have failed, the last one."""
    connected = _connected(attempts)
    return max(connected, key=lambda each: int(each.result()[0]), default=attempts[-1])


def _close(attempt: F) -> None:
    """Close a connection that is not used, and mark an error as seen."""
    if not attempt.cancelled() and attempt.exception() is None:
        connection = attempt.result()[1]
        # The names of asyncpg and of psycopg.
        (connection.terminate if isinstance(attempt, asyncio.Future) else connection.close)()


def connect_blocking_to_writable(
    urls: Sequence[str],
    connect: Callable[[str], tuple[int, C]],
    *,
    compare_seconds: float = 0.0,
) -> C:
    """Do the same with a driver that blocks, in a thread for each host."""
    if len(urls) == 1:
        return connect(urls[0])[1]
    attempts = [_in_thread(connect, url) for url in urls]
    pending = set(attempts)
    while pending and not _connected(attempts):
        _, pending = wait(pending, return_when=FIRST_COMPLETED)
    if pending and compare_seconds:
        wait(pending, timeout=compare_seconds)
    chosen = _newest(attempts)
    for attempt in attempts:
        if attempt is not chosen:
            attempt.add_done_callback(_close)
    connection: C = chosen.result()[1]
    return connection


def _in_thread(connect: Callable[[str], tuple[int, C]], url: str) -> "Future[tuple[int, C]]":
    """Connect in a thread that does not keep the process alive."""
    attempt: Future[tuple[int, C]] = Future()

    def run() -> None:
        try:
            attempt.set_result(connect(url))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            attempt.set_exception(error)

    threading.Thread(target=run, name="onceward-connect", daemon=True).start()
    return attempt


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


# A server in recovery writes no WAL: it has no timeline of its own.
READ_TIMELINE: Final = """
SELECT (SELECT system_identifier FROM pg_control_system())::text,
       CASE WHEN NOT pg_is_in_recovery() THEN
         ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
       END
"""
_PARTS_OF_IDENTITY: Final = 2


class ReplacedServerError(ConnectionError):
    """The server is on an older timeline than one that was seen before."""


class Timelines:
    """The newest timeline of each cluster that was seen. May be used in any thread."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether no timeline was seen yet."""
        return not self._newest

    def see(self, system: str, timeline: int) -> bool:
        """Note a timeline; return False if a newer one was seen."""
        with self._lock:
            newest = self._newest.get(system, 0)
            self._newest[system] = max(newest, timeline)
        return timeline >= newest

    def see_identity(self, identity: str | None) -> bool:
        """Do the same with the identity of ``read_epoch``, which may have no timeline."""
        parts = [] if identity is None else identity.split("/")
        if len(parts) < _PARTS_OF_IDENTITY or not parts[0].isdigit():
            return True
        return self.see(parts[0], int(parts[1], 16))

    def check(self, row: Any) -> int:
        """Return the timeline that ``READ_TIMELINE`` has read; 0 if there is none.

        Raises ``ReplacedServerError`` if a newer one was seen.
        """
        system, timeline = row
        if timeline is None:
            return 0
        if not self.see(str(system), int(timeline)):
            raise replaced(int(timeline))
        return int(timeline)


def replaced(timeline: int | None = None) -> ReplacedServerError:
    """Return the error for a server that another one has replaced."""
    place = "an older timeline" if timeline is None else f"timeline {timeline}"
    return ReplacedServerError(
        f"this server is on {place}, and a newer one was seen: another server was promoted. After "
        "a restore of older files, restart Onceward"
    )
