"""What is known of the replication of a commit, on real servers."""

import asyncio
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest

from onceward.errors import StoreUnavailableError
from onceward.stores.replication import (
    CONFIRMING_COMMIT,
    CommitNotices,
    ConfirmedCommits,
    Durability,
    ReplicationBarrier,
    is_replication_warning,
    unconfirmed,
)
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.standby import HANG_SECONDS, absent_standby, until_waiting

# The columns of ``epoch.sql`` that are about durability.
READ_DURABILITY = (
    "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),"
    " current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery()"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RealPostgres]:
    with RealPostgres() as started:
        yield started


async def test_confirming_commit_waits_for_the_standby_and_warns_if_cancelled(
    server: RealPostgres,
) -> None:
    url = server.create_database()
    async with absent_standby(url) as observer:
        notices = CommitNotices()
        connection = await asyncpg.connect(url)
        connection.add_log_listener(notices.on_message)
        commit = asyncio.create_task(connection.fetch(CONFIRMING_COMMIT))
        pid = connection.get_server_pid()
        assert await until_waiting(observer) == [pid]
        assert not notices.has_warned
        await observer.fetch("SELECT pg_cancel_backend($1)", pid)
        await commit  # PostgreSQL reports success
        assert notices.has_warned
        await connection.close()


async def test_psycopg_reports_the_warning_too(server: RealPostgres) -> None:
    url = server.create_database()
    async with absent_standby(url) as observer:
        notices = CommitNotices()
        connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        connection.add_notice_handler(notices.on_diagnostic)
        commit = asyncio.create_task(connection.execute(CONFIRMING_COMMIT))
        pid = connection.info.backend_pid
        assert await until_waiting(observer) == [pid]
        await observer.fetch("SELECT pg_cancel_backend($1)", pid)
        await commit
        assert notices.has_warned
        await connection.close()


def test_only_warnings_of_the_two_states_count() -> None:
    assert is_replication_warning("WARNING", "01000")
    assert is_replication_warning("WARNING", "57P01")
    assert not is_replication_warning("NOTICE", "01000")
    assert not is_replication_warning("WARNING", "25P01")  # there is no transaction in progress


async def test_durability_is_read_and_described(server: RealPostgres) -> None:
    url = server.create_database()
    connection = await asyncpg.connect(url)
    alone = Durability.of(await connection.fetchrow(READ_DURABILITY))
    await connection.close()
    assert not alone.waits_for_standby
    assert not alone.is_replicated
    assert [text.partition(":")[0] for text in alone.weaknesses()] == [
        "there is no synchronous standby"
    ]
    async with absent_standby(url) as observer:
        replicated = Durability.of(await observer.fetchrow(READ_DURABILITY))
    assert replicated.waits_for_standby
    assert replicated.is_replicated
    assert replicated.weaknesses() == ()
    assert replicated.describe() == (
        "fsync on, full_page_writes on, synchronous_commit on, synchronous standbys: absent"
    )


def test_weaker_settings_are_named_with_what_to_do() -> None:
    weak = Durability("", "off", "off", "off")
    assert len(weak.weaknesses()) == 4
    assert all("set " in text for text in weak.weaknesses())
    written = Durability("*", "remote_write", "on", "on")
    assert written.waits_for_standby
    assert not written.is_replicated
    assert not Durability("*", "local", "on", "on").waits_for_standby


def test_a_commit_covers_only_reads_before_it_began() -> None:
    commits = ConfirmedCommits()
    before = commits.mark()
    started = commits.mark()
    after = commits.mark()
    assert not commits.cover(before)
    commits.confirm(started)
    assert commits.cover(before)
    assert not commits.cover(after)


async def test_barrier_is_shared_by_callers_that_came_before_it_began() -> None:
    begun = asyncio.Semaphore(0)
    allowed = asyncio.Semaphore(0)
    count = 0

    async def commit() -> None:
        nonlocal count
        count += 1
        begun.release()
        await allowed.acquire()

    barrier = ReplicationBarrier(ConfirmedCommits(), commit)
    first = asyncio.create_task(barrier.wait())
    await begun.acquire()
    later = [asyncio.create_task(barrier.wait()) for _ in range(5)]
    await asyncio.sleep(0)
    allowed.release()
    await first
    assert not any(task.done() for task in later)  # the commit began before they came
    allowed.release()
    await asyncio.wait_for(asyncio.gather(*later), HANG_SECONDS)
    assert count == 2


async def test_failed_barrier_fails_all_callers_and_the_next_one_tries_again() -> None:
    results = [unconfirmed("no standby"), None]

    async def commit() -> None:
        await asyncio.sleep(0)
        if (error := results.pop(0)) is not None:
            raise error

    barrier = ReplicationBarrier(ConfirmedCommits(), commit)
    first, second = await asyncio.gather(barrier.wait(), barrier.wait(), return_exceptions=True)
    assert isinstance(first, StoreUnavailableError)
    assert first.reason == "outcome_unknown"
    assert isinstance(second, StoreUnavailableError)
    await barrier.wait()
    assert results == []
