"""A primary with a synchronous standby, and an app's own sessions on it, for tests of failover."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.guard.request_thread import DirectThread, run_in_request_thread
from onceward.ports import Claimed
from onceward.records import Record
from onceward.stores.sessions.hosts import async_creator, creator
from onceward.stores.sessions.messages import SessionLimits
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.samples import NOW
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support import django_project

assert django_project

from django.db import connections  # noqa: E402

from onceward.stores.sessions.django import DjangoStore  # noqa: E402

T = TypeVar("T")

FAMILIES = ("SQLAlchemy on asyncpg", "SQLAlchemy on psycopg", "Django")
# How long a test waits for something that happens soon, to detect that it never does.
HANG_SECONDS = 60.0
# As many as a test has requests.
_MOST_THREADS = 100


@contextmanager
def pair() -> Iterator[tuple[RealPostgres, RealPostgres]]:
    """Start a primary whose commits wait for a standby."""
    with RealPostgres() as primary, RealPostgres(standby_of=primary) as standby:
        primary.run("psql", "-Xq", "-d", primary.url(), "-c", WAIT_FOR_STANDBY)
        primary.run("psql", "-Xq", "-d", primary.url(), "-c", "SELECT pg_reload_conf()")
        yield primary, standby


WAIT_FOR_STANDBY = "ALTER SYSTEM SET synchronous_standby_names = '*'"


def until_replayed(primary: RealPostgres) -> None:
    """Wait until the standby shows what was committed: by default it only has it on disk."""
    sql = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_flush_lsn()"
    deadline = time.monotonic() + HANG_SECONDS
    while primary.run("psql", "-XqAt", "-d", primary.url(), "-c", sql).strip() == "0":
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Family:
    """An app's sessions of one kind, with the store that guards them."""

    def __init__(
        self,
        store: Any,
        run: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
        forget_connections: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.store = store
        # Runs a coroutine of the store where a request's code would run.
        self.run = run
        self._forget_connections = forget_connections

    @property
    def limits(self) -> SessionLimits:
        """The limits of the store."""
        found: SessionLimits = getattr(self.store, "limits", None) or self.store._limits
        return found

    async def forget_connections(self) -> None:
        """Close the pool of the engine, so that the next request connects."""
        assert self._forget_connections is not None
        await self._forget_connections()

    async def find(self, record: Record) -> Any:
        """Look a record up."""
        return await self.run(self.store.find(record.id, NOW))

    async def write(self, record: Record, statement: str = "SELECT 1") -> Any:
        """Run a guarded request: return None once it is committed, else what was found.

        Its handler inserts a row after it has run ``statement``.
        """
        return await self.run(self._write(record, statement))

    async def _write(self, record: Record, statement: str) -> Any:
        claim = await self.store.claim(record.id, NOW)
        if not isinstance(claim, Claimed):
            return claim
        try:
            await claim.unit.statements.fetch_all(statement)
            await claim.unit.statements.execute(
                "INSERT INTO orders VALUES (:key)", {"key": record.id.key}
            )
            await claim.unit.commit(record, None)
        except BaseException:
            await claim.unit.rollback()
            raise
        return None


@asynccontextmanager
async def opened(
    name: str, url: str, *, engine_options: dict[str, Any] | None = None, **limits: Any
) -> AsyncIterator[Family]:
    """Open the store of a family on a database."""
    engine_options = engine_options or {}
    if name == "SQLAlchemy on asyncpg":
        async_engine = create_async_engine(
            "postgresql+asyncpg://", async_creator=async_creator(url), **engine_options
        )
        async_store = SqlAlchemyStore(async_engine, **limits)
        await async_store.open()
        yield Family(async_store, lambda work: work, async_engine.dispose)
        await async_store.close()
        await async_engine.dispose()
    elif name == "SQLAlchemy on psycopg":
        engine = create_engine("postgresql+psycopg://", creator=creator(url), **engine_options)
        store = SqlAlchemySyncStore(engine, **limits)
        await store.open()
        yield Family(store, lambda work: work, lambda: asyncio.to_thread(engine.dispose))
        await store.close()
        engine.dispose()
    else:
        loop = asyncio.get_running_loop()
        with _django_alias(url) as alias, ThreadPoolExecutor(_MOST_THREADS) as threads:

            def run(work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
                return loop.run_in_executor(threads, in_request_thread, work)

            django_store = DjangoStore(run_in_request_thread, using=alias, **limits)
            await run(django_store.open())
            yield Family(django_store, run)
            await django_store.close()


@contextmanager
def _django_alias(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    user, _, addresses = parts.netloc.rpartition("@")
    hosts = [address.rsplit(":", 1) for address in addresses.split(",")]
    alias = f"standby {parts.path[1:]}"
    connections.databases[alias] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": user,
        "HOST": ",".join(host for host, _ in hosts),
        "PORT": ",".join(port for _, port in hosts),
        "OPTIONS": {"target_session_attrs": "read-write", "connect_timeout": 2},
    }
    try:
        yield alias
    finally:
        del connections.databases[alias]


_lock = threading.RLock()


def in_request_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a store in this thread, as the bridge does for a sync framework."""
    try:
        return DirectThread(_lock).wait(work)
    finally:
        connections.close_all()  # as Django does at the end of a request


async def waiting_commits(connection: asyncpg.Connection) -> list[int]:
    """Return the pids of the backends whose COMMIT waits for the standby."""
    rows = await connection.fetch(
        "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname IS NOT NULL"
    )
    return [row["pid"] for row in rows]


async def until_commits_wait(connection: asyncpg.Connection, count: int = 1) -> list[int]:
    """Wait until this many commits wait for the standby."""
    async with asyncio.timeout(HANG_SECONDS):
        while len(pids := await waiting_commits(connection)) < count:
            await asyncio.sleep(0.02)
    return pids
