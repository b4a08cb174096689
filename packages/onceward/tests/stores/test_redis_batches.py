"""Batches of Redis commands: who gets which response, failures, time limits and event loops."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from onceward.stores import redis as redis_batches
from onceward.stores.redis import OUTAGES, RedisBatches
from onceward_testing.network_link import NetworkLink
from onceward_testing.servers import RealRedis

LIFE_MS = 60_000
# Detects hangs only.
PATIENCE = 30


@pytest.fixture
async def batches(redis_url: str) -> AsyncIterator[RedisBatches]:
    made = RedisBatches(redis_url, timeout_seconds=PATIENCE)
    yield made
    await made.close()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    await client.config_resetstat()
    yield client
    await client.aclose()


@pytest.fixture
def link(redis_server: RealRedis, redis_url: str) -> Iterator[NetworkLink]:
    assert redis_url
    with NetworkLink(redis_server.port) as link:
        yield link


def through(link: NetworkLink, timeout_seconds: float = PATIENCE) -> RedisBatches:
    return RedisBatches(f"redis://127.0.0.1:{link.port}", timeout_seconds=timeout_seconds)


async def calls_of(raw: Redis, command: str) -> int:
    stats = await raw.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def connections_of(raw: Redis) -> int:
    return len(await raw.client_list()) - 1  # without its own


async def until_connections(raw: Redis, expected: int) -> None:
    async with asyncio.timeout(PATIENCE):  # Redis learns a little later of a closed connection
        while await connections_of(raw) != expected:
            await asyncio.sleep(0.01)


async def until_sent(batches: RedisBatches, name: bytes) -> "asyncio.Task[Any]":
    """Connect, then start a look-up and return when its batch is under way."""
    await batches.get(b"connects")
    task = asyncio.create_task(batches.get(name))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_each_command_gets_its_own_response(batches):
    names = [b"name-%d" % number for number in range(300)]
    await asyncio.gather(*(batches.set(name, b"of " + name, LIFE_MS) for name in names))
    found = await asyncio.gather(*(batches.get(name) for name in (*names, b"unknown")))
    assert found == [*(b"of " + name for name in names), None]


async def test_look_ups_of_one_turn_are_one_command_on_one_connection(batches, raw):
    await asyncio.gather(*(batches.get(b"name-%d" % number) for number in range(50)))
    assert await calls_of(raw, "mget") == 1
    assert await connections_of(raw) == 1


async def test_a_batch_has_at_most_500_commands(batches, raw):
    await asyncio.gather(*(batches.get(b"name-%d" % number) for number in range(1200)))
    assert await calls_of(raw, "mget") == 3


async def test_commands_that_come_while_a_batch_is_under_way_are_the_next_batch(batches, raw):
    first = await until_sent(batches, b"name")
    assert await asyncio.gather(first, *(batches.get(b"name") for _ in range(20))) == [None] * 21
    assert await calls_of(raw, "mget") <= 3  # that which connects, the first, and the others


async def test_look_up_finds_what_was_written_before_it(batches):
    _, found = await asyncio.gather(batches.set(b"name", b"value", LIFE_MS), batches.get(b"name"))
    assert found == b"value"


@pytest.mark.parametrize("value", [b"", b"\r\n", b"$3\r\nabc\r\n", b"-ERR\r\n", bytes(range(256))])
async def test_values_that_look_like_responses_are_returned_unchanged(batches, value):
    await batches.set(b"name", value, LIFE_MS)
    assert await asyncio.gather(*map(batches.get, (b"name", b"other"))) == [value, None]


async def test_large_value_has_its_own_round_trip(batches, raw):
    large = b"x" * (64 * 1024 + 1)
    await asyncio.gather(batches.set(b"large", large, LIFE_MS), batches.get(b"other"))
    assert await batches.get(b"large") == large
    assert await connections_of(raw) == 2


async def test_value_of_another_type_is_none(batches, raw):
    await raw.lpush("list", "x")
    await batches.set(b"name", b"value", LIFE_MS)
    assert await asyncio.gather(*map(batches.get, (b"list", b"name"))) == [None, b"value"]


async def test_value_ends_after_its_life(batches):
    await batches.set(b"short", b"value", 1)
    async with asyncio.timeout(PATIENCE):
        while await batches.get(b"short") is not None:
            await asyncio.sleep(0.01)


async def test_error_of_one_write_leaves_the_others(raw, redis_server):
    await raw.acl_setuser("limited", True, nopass=True, keys=["allowed*"], categories=["+@all"])
    url = f"redis://limited:any@127.0.0.1:{redis_server.port}"
    batches = RedisBatches(url, timeout_seconds=PATIENCE)
    try:
        names = (b"allowed-1", b"forbidden", b"allowed-2")
        found = await asyncio.gather(
            *(batches.set(name, b"value", LIFE_MS) for name in names),
            batches.get(b"allowed-1"),
            return_exceptions=True,
        )
    finally:
        await batches.close()
        await raw.acl_deluser("limited")
    assert isinstance(found[1], ResponseError)
    assert [found[0], *found[2:]] == [None, None, b"value"]


async def test_error_of_a_look_up_leaves_the_writes(raw, redis_server):
    await raw.acl_setuser("limited", True, nopass=True, keys=["allowed*"], categories=["+@all"])
    url = f"redis://limited:any@127.0.0.1:{redis_server.port}"
    batches = RedisBatches(url, timeout_seconds=PATIENCE)
    try:
        found = await asyncio.gather(
            batches.set(b"allowed", b"value", LIFE_MS),
            batches.get(b"forbidden"),
            return_exceptions=True,
        )
        assert await batches.get(b"allowed") == b"value"
    finally:
        await batches.close()
        await raw.acl_deluser("limited")
    assert found[0] is None
    assert isinstance(found[1], ResponseError)


async def test_command_after_a_restart_connects_again(batches, redis_server: RealRedis):
    await batches.set(b"name", b"value", LIFE_MS)
    redis_server.kill()
    with pytest.raises(OUTAGES):
        await batches.get(b"name")
    redis_server.start()
    assert await batches.get(b"name") is None


async def test_connection_that_redis_has_closed_while_idle_is_replaced(batches, raw, monkeypatch):
    monkeypatch.setattr(redis_batches, "_IDLE_SECONDS", 0.0)
    assert await batches.get(b"name") is None
    await raw.client_kill_filter(skipme=True)
    await until_connections(raw, 0)
    assert await batches.get(b"name") is None


async def test_outage_reaches_all_commands_that_wait(batches, redis_server: RealRedis):
    redis_server.kill()
    found = await asyncio.gather(
        *(batches.get(b"name") for _ in range(5)),
        batches.set(b"name", b"value", LIFE_MS),
        return_exceptions=True,
    )
    redis_server.start()
    assert all(isinstance(one, RedisError) for one in found)


async def test_cancelled_command_does_not_cancel_the_others(batches, raw):
    for turns in range(8):  # it waits, connects, is sent, or is read
        tasks = [asyncio.create_task(batches.get(b"name")) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError) or found[0] is None
        assert found[1:] == [None, None]
    assert await connections_of(raw) == 1


async def test_command_that_was_cancelled_while_it_waited_is_not_sent(batches, raw):
    first = await until_sent(batches, b"first")
    cancelled = asyncio.create_task(batches.set(b"cancelled", b"value", LIFE_MS))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(first, cancelled, return_exceptions=True)
    assert await batches.get(b"cancelled") is None


async def test_commands_end_with_the_task_that_sends_them(batches):
    others = asyncio.all_tasks()
    waiting = [asyncio.create_task(batches.get(b"name")) for _ in range(2)]
    await asyncio.sleep(0)
    (sending,) = asyncio.all_tasks() - others - set(waiting)
    sending.cancel()
    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError] * 2
    assert await batches.get(b"name") is None


async def test_silent_redis_fails_all_commands_at_their_limit(link):
    batches = through(link, timeout_seconds=0.3)
    await batches.get(b"connects")
    link.cut()
    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(
            *(batches.get(b"name") for _ in range(5)), return_exceptions=True
        )
    assert [type(error) for error in found] == [TimeoutError] * 5
    link.heal()
    await batches.close()


async def test_command_behind_a_silent_batch_has_no_limit_of_its_own_on_top(link):
    batches = through(link, timeout_seconds=0.6)
    await batches.get(b"connects")
    link.cut()
    first = asyncio.create_task(batches.get(b"first"))
    for _ in range(5):
        await asyncio.sleep(0)
    second = asyncio.create_task(batches.get(b"second"))
    later = asyncio.create_task(asyncio.sleep(1.1))
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait({second, later}, return_when=asyncio.FIRST_COMPLETED)
    assert second.done()  # two limits would be 1.2 s
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(error) for error in found] == [TimeoutError] * 2
    later.cancel()
    link.heal()
    await batches.close()


async def test_late_response_is_not_that_of_the_next_command(link):
    batches = through(link, timeout_seconds=0.3)
    await batches.set(b"one", b"1", LIFE_MS)
    await batches.set(b"two", b"2", LIFE_MS)
    link.cut()
    with pytest.raises(TimeoutError):
        await batches.get(b"one")
    link.heal()
    assert await batches.get(b"two") == b"2"
    await batches.close()


@pytest.mark.parametrize("response", [b"*2\r\n$1\r\n1\r\n$1\r\n2\r\n", b"+OK\r\n", b"x\r\n"])
async def test_what_is_no_response_fails_and_disconnects(response):
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while data := await reader.read(65_536):
            if b"MGET" in data:
                writer.write(response if connections == 1 else b"*1\r\n$5\r\nvalue\r\n")
            else:
                writer.write(b"+OK\r\n" * data.count(b"SETINFO"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    batches = RedisBatches(f"redis://127.0.0.1:{port}", timeout_seconds=PATIENCE)
    with pytest.raises(InvalidResponse):
        await batches.get(b"name")
    assert await batches.get(b"name") == b"value"
    assert connections == 2
    await batches.close()
    server.close()


@pytest.mark.parametrize(
    ("limit", "value"), [("_MAX_WAITING", 10), ("_MAX_WAITING_BYTES", 10 * 1100)]
)
async def test_waiting_commands_are_bounded(link, monkeypatch, limit, value):
    monkeypatch.setattr(redis_batches, limit, value)
    batches = through(link, timeout_seconds=0.5)
    await batches.get(b"connects")
    link.cut()
    found = await asyncio.gather(
        *(batches.set(b"name", b"x" * 1000, LIFE_MS) for _ in range(15)), return_exceptions=True
    )
    refused = [error for error in found if "too many" in str(error)]
    assert len(refused) == 5
    assert all(isinstance(error, RedisConnectionError) for error in refused)
    link.heal()
    # Those that have waited do not count any more.
    await asyncio.gather(*(batches.set(b"name", b"x" * 1000, LIFE_MS) for _ in range(10)))
    await batches.close()


@pytest.mark.parametrize("turns", range(8))
async def test_close_waits_for_commands_and_leaves_no_connection(redis_url, raw, turns):
    batches = RedisBatches(redis_url, timeout_seconds=PATIENCE)
    running = asyncio.gather(
        *(batches.get(b"name") for _ in range(3)),
        batches.set(b"name", b"x" * 100_000, LIFE_MS),
        batches.run(lambda redis: redis.exists("name")),
    )
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    await batches.close()
    assert len(await running) == 5
    await until_connections(raw, 0)
    with pytest.raises(RedisConnectionError):
        await batches.get(b"name")
    await batches.close()


async def test_close_waits_for_a_command_on_its_own(redis_url, raw):
    batches = RedisBatches(redis_url, timeout_seconds=PATIENCE)
    running = asyncio.create_task(batches.run(lambda redis: redis.blpop("list", 0)))
    async with asyncio.timeout(PATIENCE):
        while not any(one["cmd"] == "blpop" for one in await raw.client_list()):
            await asyncio.sleep(0.01)
    closing = asyncio.create_task(batches.close())
    await raw.ping()
    await raw.lpush("list", "x")
    await closing
    assert await running == (b"list", b"x")
    await until_connections(raw, 0)


def run_with_warnings_as_errors(code: str, *arguments: str) -> None:
    """Run a program that must end in time, without a warning and without a traceback."""
    program = textwrap.dedent(code) + "\nimport gc\ngc.collect()\nprint('ended')\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
async def test_event_loops_one_after_another_leave_no_connection(redis_url, raw, module):
    code = """
        import asyncio, importlib, sys
        from onceward.stores.redis import RedisBatches

        batches = RedisBatches(sys.argv[2], timeout_seconds=20)
        run = importlib.import_module(sys.argv[1]).run

        async def use():
            await batches.set(b"name", b"value", 60_000)
            assert await asyncio.gather(*map(batches.get, (b"name", b"other"))) == [b"value", None]
            assert len(await batches.run(lambda redis: redis.client_list())) <= 3

        async def use_and_leave_unfinished():
            await use()
            batches.unfinished = asyncio.ensure_future(batches.get(b"name"))
            await asyncio.sleep(0)

        for _ in range(3):
            run(use())
            run(use_and_leave_unfinished())
        assert batches.unfinished.cancelled()
        run(batches.close())
    """
    await asyncio.to_thread(run_with_warnings_as_errors, code, module, redis_url)
    await until_connections(raw, 0)


async def test_event_loops_at_the_same_time_have_their_own_connections(batches, raw):
    ready, end = threading.Barrier(3), threading.Event()
    found: list[list[bytes | None]] = []

    async def use(name: bytes) -> None:
        for _ in range(50):
            await batches.set(name, b"of " + name, LIFE_MS)
            found.append(await asyncio.gather(batches.get(name), batches.get(b"unknown")))
        await asyncio.to_thread(ready.wait, PATIENCE)
        while not end.is_set():
            await asyncio.sleep(0.01)

    threads = [
        threading.Thread(target=asyncio.run, args=(use(b"name-%d" % number),))
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    await batches.get(b"name")
    await asyncio.to_thread(ready.wait, PATIENCE)
    assert await connections_of(raw) == 3
    assert (
        sorted(map(tuple, found), key=str)
        == [(b"of name-0", None)] * 50 + [(b"of name-1", None)] * 50
    )
    await batches.close()  # also those of the other loops, which still run
    await until_connections(raw, 0)
    end.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()
