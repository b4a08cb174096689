"""Apps with their own sessions lose nothing at a failover: SQLAlchemy and Django."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.ports import Found, Held
from onceward.records import Record
from onceward_testing.samples import a_record
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.session_standby import (
    FAMILIES,
    HANG_SECONDS,
    Family,
    opened,
    pair,
    until_commits_wait,
    until_replayed,
    waiting_commits,
)

# All tests share one pair.
pytestmark = pytest.mark.xdist_group("session-failover")

Pair = tuple[RealPostgres, RealPostgres]

# One record shares the message of COMMIT, one is sent before.
BODIES = {"small": b"{}", "large": b"x" * 20_000}


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair() as (primary, standby):
        yield primary, standby


@pytest.fixture(scope="module")
def database(servers: Pair) -> str:
    primary, _ = servers
    url = primary.create_database("sessions")
    primary.run("psql", "-Xq", "-d", url, "-c", "CREATE TABLE orders (item text)")
    return url


@pytest.fixture
def url(servers: Pair, database: str) -> Iterator[str]:
    yield database
    for server in servers:
        server.start()


@pytest.fixture(params=FAMILIES)
async def family(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Family]:
    async with opened(request.param, url, commit_seconds=1.0) as family:
        yield family


LOCK_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'"


def records(test: str, family: Family) -> list[Record]:
    name = type(family.store).__name__
    return [a_record(f"{test}-{name}-{size}", body=body) for size, body in BODIES.items()]


async def found(family: Family, record: Record) -> object:
    """Repeat a request until the database knows its outcome."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            with suppress(StoreUnavailableError):
                outcome = await family.write(record)
                if not isinstance(outcome, Held):  # by a look-up that was cut
                    return outcome
            await asyncio.sleep(0.02)


async def test_commit_whose_wait_for_the_standby_was_cancelled_is_unknown(
    family: Family, servers: Pair, url: str
) -> None:
    _, standby = servers
    standby.stop()
    both = records("cancelled", family)
    observer = await asyncpg.connect(url)
    writing = [asyncio.ensure_future(family.write(record)) for record in both]
    for pid in await until_commits_wait(observer, len(both)):
        await observer.execute("SELECT pg_cancel_backend($1)", pid)
    outcomes = await asyncio.gather(*writing, return_exceptions=True)
    assert [type(each) for each in outcomes] == [CommitUnknownError] * 2
    # Both are visible, but the standby may not have them.
    looks = [asyncio.ensure_future(family.write(record)) for record in both]
    looks.append(asyncio.ensure_future(family.find(both[0])))
    outcomes = await asyncio.gather(*looks, return_exceptions=True)
    assert [type(each) for each in outcomes] == [StoreUnavailableError] * 3
    standby.start()
    for record in both:
        assert await found(family, record) == Found(record)
    await observer.close()


async def test_commits_that_were_cut_are_counted_and_refuse_work_until_they_have_ended(
    family: Family, servers: Pair, url: str
) -> None:
    _, standby = servers
    abandoned = family.limits.abandoned
    abandoned.limit_to_half_of(4)
    counts: list[int] = []
    abandoned.report = counts.append
    standby.stop()
    both = records("counted", family)
    writing = [asyncio.ensure_future(family.write(record)) for record in both]
    outcomes = await asyncio.gather(*writing, return_exceptions=True)
    assert [isinstance(each, CommitUnknownError) and each.is_cut for each in outcomes] == [True] * 2
    assert counts == [1, 2]
    observer = await asyncpg.connect(url)
    other = a_record(f"other-{type(family.store).__name__}")
    with pytest.raises(StoreUnavailableError) as refused:
        await family.write(other)
    assert refused.value.reason == "commits_waiting"
    assert len(await waiting_commits(observer)) == 2  # no third one
    await observer.close()
    standby.start()
    assert await found(family, other) is None
    assert len(abandoned) == 0
    for record in both:
        assert await found(family, record) == Found(record)


async def test_late_and_cancelled_commits_are_cut_and_are_unknown_after_a_restart(
    family: Family, servers: Pair, url: str
) -> None:
    primary, standby = servers
    standby.stop()
    both = records("late", family)
    observer = await asyncpg.connect(url)
    writing = [asyncio.ensure_future(family.write(record)) for record in both]
    waiting = await until_commits_wait(observer, len(both))
    writing[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing[0]
    with pytest.raises(CommitUnknownError):
        await writing[1]
    assert await waiting_commits(observer) == waiting  # not cancelled
    for record in both:
        assert isinstance(await family.write(record), Held)
    observer.terminate()
    primary.stop("immediate")
    primary.start()
    # PostgreSQL has recovered both commits, and shows them without the standby.
    outcomes = await asyncio.gather(*map(family.write, both), return_exceptions=True)
    assert [type(each) for each in outcomes] == [StoreUnavailableError] * 2
    standby.start()
    for record in both:
        assert await found(family, record) == Found(record)


@pytest.mark.parametrize("name", FAMILIES)
async def test_requests_to_a_frozen_database_are_refused_until_it_responds(
    name: str, postgres: RealPostgres, postgres_url: str
) -> None:
    limits: dict[str, Any] = dict.fromkeys(
        ("claim_seconds", "statement_seconds", "commit_seconds"), 1.0
    )
    pool = {} if name == "Django" else {"pool_size": 10, "max_overflow": 0, "pool_timeout": 1.0}
    observer = await asyncpg.connect(postgres_url)
    await observer.execute("CREATE TABLE orders (item text); SELECT pg_advisory_lock(1)")
    async with opened(name, postgres_url, engine_options=pool, **limits) as family:
        many = [a_record(f"frozen-{number}") for number in range(100)]
        # Three have a connection: their handlers wait for a lock.
        waits = "SELECT pg_advisory_lock_shared(1)"
        writing = [asyncio.ensure_future(family.write(each, waits)) for each in many[:3]]
        while await observer.fetchval(LOCK_WAITS) < len(writing):
            await asyncio.sleep(0.02)
        with postgres.frozen():
            writing += [asyncio.ensure_future(family.write(each)) for each in many[3:]]
            async with asyncio.timeout(HANG_SECONDS):
                outcomes = await asyncio.gather(*writing, return_exceptions=True)
        assert [type(each) for each in outcomes] == [StoreUnavailableError] * 100
        await observer.execute("SELECT pg_advisory_unlock(1)")  # ends their transactions
        assert [await found(family, each) for each in many[:4]] == [None] * 4
        assert await observer.fetchval("SELECT count(*) FROM orders") == 4
    await observer.close()


async def test_promoted_standby_is_used_while_the_first_host_is_frozen(servers: Pair) -> None:
    """The last of the file: the pair is two primaries afterwards."""
    primary, standby = servers
    database = primary.create_database("hosts")
    primary.run("psql", "-Xq", "-d", database, "-c", "CREATE TABLE orders (item text)")
    until_replayed(primary)
    name = urlsplit(database).path[1:]
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    url = f"postgresql://postgres@{hosts}/{name}"
    limits: dict[str, Any] = dict.fromkeys(("claim_seconds", "commit_seconds"), 1.0)
    async with AsyncExitStack() as stack:
        families = [
            await stack.enter_async_context(opened(each, url, **limits)) for each in FAMILIES
        ]
        before = [a_record(f"before-{number}") for number in range(3)]
        for family, record in zip(families, before, strict=True):
            assert await family.write(record) is None
        with primary.frozen():
            standby.promote()
            await _stop_waiting_for_a_standby(standby)
            for number, family in enumerate(families):
                assert await found(family, a_record(f"after-{number}")) is None
            for family, record in zip(families, before, strict=True):
                assert await found(family, record) == Found(record)
        # The old primary responds again, and believes that it is the primary.
        for number, family in enumerate(families[:2]):
            await family.forget_connections()
            assert await found(family, a_record(f"thawed-{number}")) is None
        with pytest.raises(StoreUnavailableError, match="replaced"):
            await families[2].write(a_record("thawed-2"))  # Django takes the first host
        connection = await asyncpg.connect(standby.url(name))
        assert await connection.fetchval("SELECT count(*) FROM orders") == 8
        await connection.close()


async def _stop_waiting_for_a_standby(server: RealPostgres) -> None:
    """Make a promoted server, which has the settings of the primary, commit by itself."""
    connection = await asyncpg.connect(server.url())
    await connection.execute("SET synchronous_commit = local")
    await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()
