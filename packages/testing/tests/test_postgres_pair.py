"""The pair of the test kit: it fails over, and loses nothing unless replication is asynchronous."""

import asyncio
import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psutil  # type: ignore[import-untyped]
import pytest

from onceward_testing.network_link import NetworkLink
from onceward_testing.postgres_pair import PairedPostgres, RealPostgresPair

pytestmark = pytest.mark.xdist_group("postgres-pair")

HANGS_SECONDS = 60.0


@pytest.fixture(scope="module")
def pair() -> Iterator[RealPostgresPair]:
    with RealPostgresPair() as pair:
        yield pair


@pytest.fixture
def url(pair: RealPostgresPair) -> str:
    """Return a new database with a table; the pair is whole."""
    assert pair.is_in_sync
    url = pair.create_database()
    asyncio.run(execute(url, "CREATE TABLE kept (n int)"))
    return url


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url, timeout=HANGS_SECONDS)
    try:
        yield connection
    finally:
        connection.terminate()


async def execute(url: str, sql: str) -> None:
    async with connected(url) as connection:
        await connection.execute(sql)


def write(url: str, number: int) -> None:
    asyncio.run(execute(url, f"INSERT INTO kept VALUES ({number})"))


def kept(url: str) -> list[int]:
    async def read() -> list[int]:
        async with connected(url) as connection:
            return [row["n"] for row in await connection.fetch("SELECT n FROM kept ORDER BY n")]

    return asyncio.run(read())


def url_of(server: PairedPostgres, url: str) -> str:
    return server.url(url.rpartition("/")[2].partition("?")[0])


async def waits_for_standby(server: PairedPostgres) -> None:
    """Return when a commit waits for the standby."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    async with asyncio.timeout(HANGS_SECONDS):
        while await asyncio.to_thread(server.query, sql) == "0":
            await asyncio.sleep(0.02)


def test_both_servers_are_durable_and_replicate_synchronously(pair: RealPostgresPair) -> None:
    for server in (pair.primary, pair.standby):
        assert server.query("SHOW fsync") == "on"
        assert server.query("SHOW synchronous_commit") == "on"
        assert server.query("SHOW full_page_writes") == "on"
    assert pair.primary.query("SHOW synchronous_standby_names") == pair.standby.name
    sql = "SELECT application_name, sync_state FROM pg_stat_replication"
    assert pair.primary.query(sql) == f"{pair.standby.name}|sync"
    assert pair.standby.query("SELECT pg_is_in_recovery()") == "t"


def test_the_standby_takes_over_and_the_old_primary_follows_it(
    pair: RealPostgresPair, url: str
) -> None:
    for number in (1, 2):  # there and back
        old = pair.primary
        write(url, number)
        pair.kill_primary()
        pair.fail_over()
        assert pair.standby is old
        assert not pair.is_in_sync
        write(url, number + 10)  # alone
        assert pair.rewind() is None
        assert pair.is_in_sync
        assert pair.primary.query("SHOW synchronous_standby_names") == old.name
        assert kept(url_of(old, url)) == kept(url)
    assert kept(url) == [1, 2, 11, 12]


def test_commits_wait_while_the_network_is_cut(pair: RealPostgresPair, url: str) -> None:
    async def commit_across_the_cut() -> None:
        writing = asyncio.create_task(execute(url, "INSERT INTO kept VALUES (1)"))
        await waits_for_standby(pair.primary)
        assert not writing.done()
        pair.heal_network()
        await asyncio.wait_for(writing, HANGS_SECONDS)

    pair.cut_network()
    try:
        asyncio.run(commit_across_the_cut())
    finally:
        pair.heal_network()
    assert kept(url) == [1]


def test_commits_wait_for_a_killed_standby(pair: RealPostgresPair, url: str) -> None:
    async def commit_without_the_standby() -> None:
        writing = asyncio.create_task(execute(url, "INSERT INTO kept VALUES (1)"))
        await waits_for_standby(pair.primary)
        assert not writing.done()
        await asyncio.to_thread(pair.start_standby)
        await asyncio.wait_for(writing, HANGS_SECONDS)

    pair.kill_standby()
    asyncio.run(commit_without_the_standby())
    assert kept(url_of(pair.standby, url)) == [1]


def test_an_old_primary_that_continues_acknowledges_nothing(
    pair: RealPostgresPair, url: str
) -> None:
    async def commit_on_the_old_primary() -> None:
        writing = asyncio.create_task(execute(old_url, "INSERT INTO kept VALUES (2)"))
        await waits_for_standby(pair.standby)
        assert not writing.done()
        await asyncio.to_thread(pair.rewind)
        with pytest.raises((asyncpg.PostgresConnectionError, OSError)):
            await asyncio.wait_for(writing, HANGS_SECONDS)

    write(url, 1)
    old_url = url_of(pair.primary, url)
    pair.freeze_primary()
    assert pair.primary.is_frozen
    pair.fail_over()
    pair.thaw()
    assert pair.standby.query("SELECT pg_is_in_recovery()") == "f"  # it does not know
    asyncio.run(commit_on_the_old_primary())
    assert kept(url) == [1]


def test_a_strict_failover_waits_for_the_old_primary(pair: RealPostgresPair, url: str) -> None:
    async def commit_after_the_failover() -> None:
        writing = asyncio.create_task(execute(url, "INSERT INTO kept VALUES (1)"))
        await waits_for_standby(pair.primary)
        assert not writing.done()
        await asyncio.to_thread(pair.rewind)
        await asyncio.wait_for(writing, HANGS_SECONDS)

    pair.kill_primary()
    pair.fail_over(alone=False)
    asyncio.run(commit_after_the_failover())
    assert kept(url) == [1]


@pytest.mark.long
def test_an_old_primary_that_cannot_be_rewound_gets_a_copy(
    pair: RealPostgresPair, url: str
) -> None:
    write(url, 1)
    pair.kill_primary()
    (pair.primary.directory / "data/global/pg_control").unlink()
    pair.fail_over()
    reason = pair.rewind()
    assert reason is not None
    assert "pg_control" in reason
    assert pair.is_in_sync
    assert kept(url_of(pair.standby, url)) == [1]


def test_a_standby_that_is_down_cannot_be_promoted(pair: RealPostgresPair) -> None:
    pair.kill_standby()
    with pytest.raises(RuntimeError, match="is not running"):
        pair.fail_over()
    pair.start_standby()


def test_a_standby_that_cannot_follow_is_reported_with_both_logs(
    pair: RealPostgresPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_testing.postgres_pair._WAIT_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="does not follow") as raised:
        pair._wait_for("false")
    for server in (pair.primary, pair.standby):
        assert f"{server.name}:\n" in str(raised.value)
    assert "database system is ready" in str(raised.value)


@pytest.mark.long
def test_asynchronous_replication_loses_what_was_acknowledged() -> None:
    with RealPostgresPair(synchronous=False) as pair:
        url = pair.create_database()
        asyncio.run(execute(url, "CREATE TABLE kept (n int)"))
        write(url, 1)
        pair._wait_for_standby()
        assert not pair.is_in_sync
        pair.cut_network()
        write(url, 2)
        assert kept(url) == [1, 2]
        pair.kill_primary()
        pair.fail_over()
        assert kept(url) == [1]
        pair.heal_network()
        pair.rewind()
        assert kept(url_of(pair.standby, url)) == [1]
        directories = [server.directory for server in (pair.primary, pair.standby)]
        pair.freeze_primary()
    assert not any(directory.exists() for directory in directories)
    pair.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as another user")
def test_the_pair_runs_as_an_ordinary_user() -> None:
    script = """
import os
from onceward_testing.postgres_pair import RealPostgresPair
assert os.geteuid() != 0
with RealPostgresPair() as pair:
    pair.kill_primary()
    pair.fail_over()
    print(pair.rewind(), pair.is_in_sync)
"""
    account = pwd.getpwnam("nobody")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": "/nonexistent"}
    run: dict[str, Any] = {
        "user": account.pw_uid,
        "group": account.pw_gid,
        "extra_groups": [],
        "env": environment,
        "cwd": "/",
        "capture_output": True,
        "text": True,
    }
    try:
        probe = subprocess.run([sys.executable, "-c", "import asyncpg"], check=False, **run)
    except PermissionError:
        pytest.skip("nobody cannot run this Python")
    if probe.returncode != 0:
        pytest.skip("nobody cannot read the installed packages")
    done = subprocess.run([sys.executable, "-c", script], check=False, **run)
    assert (done.stdout, done.returncode) == ("None True\n", 0), done.stderr


def test_a_cut_link_delivers_nothing_until_it_is_healed() -> None:
    async def exchange() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while line := await reader.readline():
                    arrived.append(line)
                    writer.write(line)
            writer.transport.abort()
            ended.release()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        with NetworkLink(server.sockets[0].getsockname()[1]) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            writer.write(b"one\n")
            assert await asyncio.wait_for(reader.readline(), HANGS_SECONDS) == b"one\n"
            await asyncio.to_thread(link.cut)
            assert link.is_cut
            writer.write(b"two\n")
            _, other = await asyncio.open_connection("127.0.0.1", link.port)
            other.write(b"three\n")
            # Nothing to wait for: a link that forwards would have done so in this time.
            await asyncio.sleep(0.2)
            assert arrived == [b"one\n"]
            await asyncio.to_thread(link.heal)
            assert await asyncio.wait_for(reader.readline(), HANGS_SECONDS) == b"two\n"
            other.transport.abort()
            writer.transport.abort()
            await asyncio.sleep(0)
        for _ in range(2):
            await asyncio.wait_for(ended.acquire(), HANGS_SECONDS)
        server.close()
        assert not link.is_cut
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            link.cut()

    arrived: list[bytes] = []
    ended = asyncio.Semaphore(0)
    asyncio.run(exchange())


def test_a_closed_link_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that it accepts while it closes."""
    with socket.create_server(("127.0.0.1", 0)) as target, ExitStack() as clients:
        link = NetworkLink(target.getsockname()[1])
        link.start()
        is_closing = threading.Event()
        close = link._close

        def closing() -> Any:
            is_closing.set()
            return close()

        monkeypatch.setattr(link, "_close", closing)
        assert link._loop is not None
        link._loop.call_soon_threadsafe(is_closing.wait)
        connected = [
            clients.enter_context(socket.create_connection(("127.0.0.1", link.port)))
            for _ in range(5)
        ]
        link.close()
        for client in connected:
            client.settimeout(HANGS_SECONDS)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""


def test_a_killed_test_process_leaves_no_frozen_server(tmp_path: Path) -> None:
    script = """
import os, signal
from onceward_testing.servers import RealPostgres
server = RealPostgres()
server.start()
server.freeze()
print(server.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as owner:
        assert owner.stdout is not None
        postmaster = psutil.Process(int(owner.stdout.readline()))
        processes = [postmaster, *postmaster.children()]
        assert len(processes) > 1
        owner.kill()
    _, left = psutil.wait_procs(processes, timeout=HANGS_SECONDS)
    assert left == []
