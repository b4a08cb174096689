"""Connections of a SQLAlchemy engine to the writable server of a URL with several hosts.

Drivers try the hosts one after the other: while the first one does not respond, each connection
waits for its time limit, and asyncpg has one limit for all hosts together. These functions connect
to all hosts at once, and never to a server that another one has replaced::

    engine = create_async_engine("postgresql+asyncpg://", async_creator=async_creator(url))
    engine = create_engine("postgresql+psycopg://", creator=creator(url))
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from onceward.stores.postgres.hosts import (
    COMPARE_SECONDS,
    READ_TIMELINE,
    Timelines,
    connect_blocking_to_writable,
    connect_to_writable,
    host_urls,
)
from onceward_protocol.extras import needs_extra

__all__ = ["async_creator", "creator"]


def async_creator(
    url: str, *, connect_seconds: float = 5.0, **options: Any
) -> Callable[[], Awaitable[Any]]:
    """Return ``async_creator`` for an engine on asyncpg.

    ``url`` is ``postgresql://user@host1:5432,host2:5432/name``. ``connect_seconds`` limits each
    attempt; ``options`` are those of ``asyncpg.connect``.
    """
    with needs_extra("postgres"):
        import asyncpg  # noqa: PLC0415 - an optional dependency
    urls, timelines = host_urls(url), Timelines()
    denied = (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedFunctionError)

    async def connect(url: str) -> tuple[int, Any]:
        connection = await asyncpg.connect(url, timeout=connect_seconds, **options)
        if len(urls) == 1:
            return 0, connection
        try:
            async with asyncio.timeout(connect_seconds):
                return timelines.check(await connection.fetchrow(READ_TIMELINE)), connection
        except denied:
            return 0, connection
        except BaseException:
            connection.terminate()
            raise

    async def create() -> Any:
        wait = COMPARE_SECONDS if timelines.is_empty else 0.0
        return await connect_to_writable(urls, connect, compare_seconds=wait)

    return create


def creator(url: str, *, connect_seconds: float = 5.0, **options: Any) -> Callable[[], Any]:
    """Return ``creator`` for an engine on psycopg; ``options`` are those of ``psycopg.connect``.

    See ``async_creator``.
    """
    with needs_extra("psycopg"):
        import psycopg  # noqa: PLC0415 - an optional dependency

        from onceward.stores.psycopg.connections import timeline_of  # noqa: PLC0415
        from onceward.stores.sessions.psycopg_messages import limits_of  # noqa: PLC0415
    urls, timelines = host_urls(url), Timelines()
    options.setdefault("connect_timeout", math.ceil(connect_seconds))

    def connect(url: str) -> tuple[int, Any]:
        connection: Any = psycopg.connect(url, **options)
        if len(urls) == 1:
            return 0, connection
        limits = limits_of(connection)
        limits.seconds = connect_seconds
        timeline = timeline_of(connection, timelines)
        connection.rollback()
        limits.seconds = None
        return timeline, connection

    def create() -> Any:
        wait = COMPARE_SECONDS if timelines.is_empty else 0.0
        return connect_blocking_to_writable(urls, connect, compare_seconds=wait)

    return create
