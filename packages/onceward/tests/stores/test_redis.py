"""The cache against a real Redis: it may be wrong, stale or dead, and only costs time."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.records import RecordId
from onceward.stores.redis import RedisRecords
from onceward_testing.samples import AWKWARD_NAMES, BODIES, NOW, a_record
from onceward_testing.servers import RealRedis

SECRET = b"s" * 32


async def secret() -> bytes:
    return SECRET


class Time:
    """The breaker's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
async def cache(redis_url: str, clock: Time) -> AsyncIterator[RedisRecords]:
    # A tenth of a second is for production; on a busy test machine it would be a coin toss.
    cache = RedisRecords(
        redis_url, environment="test", secret=secret, timeout_seconds=2, clock=clock
    )
    yield cache
    await cache.close()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


def name_of(record_id: RecordId) -> str:
    return f"idempo:test:{record_id.tenant}:{record_id.endpoint}:{record_id.key}"


async def test_cached_record_is_returned_unchanged(cache):
    record = a_record(audit_id="audit-1")
    await cache.put(record, NOW)
    assert await cache.get(record.id, NOW) == record


async def test_unknown_key_is_a_miss(cache):
    assert await cache.get(a_record().id, NOW) is None


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_empty_binary_and_large_bodies_are_stored_unchanged(cache, body):
    record = a_record(body=body)
    await cache.put(record, NOW)
    assert await cache.get(record.id, NOW) == record


@pytest.mark.parametrize("name", AWKWARD_NAMES, ids=range(len(AWKWARD_NAMES)))
async def test_special_characters_in_names_are_cached_unchanged(cache, name):
    record = a_record(name, tenant=name, endpoint=name)
    await cache.put(record, NOW)
    assert await cache.get(record.id, NOW) == record


async def test_lone_surrogate_is_a_miss_and_no_error(cache):
    record = a_record("half a \ud83d pair")
    await cache.put(record, NOW)
    assert await cache.get(record.id, NOW) is None


async def test_redis_key_and_expiry_follow_the_documentation(cache, raw):
    record = a_record("k", tenant="t", endpoint="e", life=timedelta(hours=1))
    await cache.put(record, NOW + timedelta(minutes=20))
    assert await raw.keys() == [b"idempo:test:t:e:k"]
    assert 39 * 60_000 < await raw.pttl("idempo:test:t:e:k") <= 40 * 60_000


async def test_expired_record_is_not_cached(cache, raw):
    record = a_record()
    await cache.put(record, record.expires_at)
    assert await raw.keys() == []


async def test_expired_cached_record_is_a_miss_and_deleted(cache, raw):
    record = a_record()
    await cache.put(record, NOW)
    assert await cache.get(record.id, record.expires_at) is None
    assert await raw.keys() == []


async def test_redis_expires_records(cache, raw):
    record = a_record(life=timedelta(milliseconds=30))
    await cache.put(record, NOW)
    await asyncio.sleep(0.1)
    assert await raw.keys() == []


@pytest.mark.parametrize("position", [0, 31, 32, 60, -1])
async def test_modified_value_is_a_miss_and_deleted(cache, raw, position):
    record = a_record()
    await cache.put(record, NOW)
    value = bytearray(await raw.get(name_of(record.id)))
    value[position] ^= 1
    await raw.set(name_of(record.id), bytes(value))
    assert await cache.get(record.id, NOW) is None
    assert await raw.keys() == []


@pytest.mark.parametrize("value", [b"", b"x", b"\x00" * 32, b"\xff" * 100, b"OK"])
async def test_malformed_value_is_a_miss_and_deleted(cache, raw, value):
    await raw.set(name_of(a_record().id), value)
    assert await cache.get(a_record().id, NOW) is None
    assert await raw.keys() == []


async def test_a_value_of_another_type_is_a_miss(cache, raw):
    await raw.lpush(name_of(a_record().id), "x")
    assert await cache.get(a_record().id, NOW) is None


async def test_a_record_copied_to_another_key_is_refused(cache, raw):
    record = a_record("mine")
    await cache.put(record, NOW)
    other = a_record("theirs").id
    await raw.copy(name_of(record.id), name_of(other))
    assert await cache.get(other, NOW) is None
    assert await cache.get(record.id, NOW) == record


async def test_tenants_that_share_a_redis_key_never_share_a_response(cache):
    """``a`` + ``b:c`` and ``a:b`` + ``c`` are one key in Redis, and two records."""
    one = a_record("k", tenant="a", endpoint="b:c")
    two = RecordId("a:b", "c", "k")
    assert name_of(one.id) == name_of(two)
    await cache.put(one, NOW)
    assert await cache.get(two, NOW) is None


async def test_a_value_of_another_database_is_refused(cache, redis_url):
    async def other_secret() -> bytes:
        return b"t" * 32

    other = RedisRecords(redis_url, environment="test", secret=other_secret, timeout_seconds=2)
    try:
        await other.put(a_record(), NOW)
        assert await other.get(a_record().id, NOW) == a_record()
        assert await cache.get(a_record().id, NOW) is None
    finally:
        await other.close()


async def test_forgotten_records_are_deleted(cache, raw):
    records = [a_record(f"key-{number}") for number in range(1200)]
    await asyncio.gather(*(cache.put(record, NOW) for record in records))
    await cache.forget([])
    await cache.forget(record.id for record in records[1:])
    assert await raw.keys() == [name_of(records[0].id).encode()]


async def test_unavailable_secret_is_a_miss(redis_url):
    responses: list[object] = [StoreUnavailableError("down"), SECRET]

    async def sometimes() -> bytes:
        response = responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return SECRET

    cache = RedisRecords(redis_url, environment="test", secret=sometimes, timeout_seconds=2)
    try:
        await cache.put(a_record(), NOW)
        await cache.put(a_record(), NOW)
        assert await cache.get(a_record().id, NOW) == a_record()
    finally:
        await cache.close()


async def test_killed_server_is_a_miss_logged_once_and_used_again_later(
    cache, clock, redis_server: RealRedis, caplog
):
    record = a_record()
    caplog.set_level(logging.INFO, "onceward.cache")
    await cache.put(record, NOW)
    redis_server.kill()
    for _ in range(5):
        assert await cache.get(record.id, NOW) is None
        await cache.put(record, NOW)
        await cache.forget([record.id])
        clock.seconds += 1.5  # past the breaker: every one of these asks and fails
    levels = [entry.levelname for entry in caplog.records]
    assert levels == ["WARNING"]
    redis_server.start()
    clock.seconds += 1.5
    assert await cache.get(record.id, NOW) is None  # it forgot everything
    await cache.put(record, NOW)
    assert await cache.get(record.id, NOW) == record
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO"]


async def test_few_commands_are_sent_while_redis_is_down(cache, clock, redis_server: RealRedis):
    redis_server.kill()
    assert await cache.get(a_record().id, NOW) is None
    redis_server.start()
    await cache.put(a_record(), NOW)  # within the second: skipped
    clock.seconds += 1.01
    assert await cache.get(a_record().id, NOW) is None
    await cache.put(a_record(), NOW)
    assert await cache.get(a_record().id, NOW) == a_record()


async def test_hanging_server_costs_one_timeout():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cache = RedisRecords(
        f"redis://127.0.0.1:{port}", environment="test", secret=secret, timeout_seconds=0.5
    )
    started = time.monotonic()
    for _ in range(20):
        assert await cache.get(a_record().id, NOW) is None
        await cache.put(a_record(), NOW)
    assert time.monotonic() - started < 8  # one time-out, then the breaker: forty take 20
    await cache.close()
    server.close()


@pytest.mark.parametrize("turns", range(12))
async def test_close_leaves_no_connection_of_a_running_command(redis_url, raw, turns):
    cache = RedisRecords(redis_url, environment="test", secret=secret, timeout_seconds=5)
    running = asyncio.gather(*(cache.get(a_record(f"key-{n}").id, NOW) for n in range(3)))
    for _ in range(turns):  # the command may be connecting, or waiting for the response
        await asyncio.sleep(0)
    await cache.close()
    assert await running == [None] * 3
    async with asyncio.timeout(10):  # Redis learns a little later that a connection was closed
        while len(await raw.client_list()) > 1:
            await asyncio.sleep(0.01)


async def test_a_cancelled_look_up_does_not_disturb_the_next(cache):
    records = [a_record(f"key-{number}", body=b"x" * 50_000) for number in range(20)]
    for record in records:
        await cache.put(record, NOW)
    for pause in range(10):
        tasks = [asyncio.create_task(cache.get(record.id, NOW)) for record in records]
        await asyncio.sleep(pause * 0.0003)
        for task in tasks[::2]:
            task.cancel()
        responses = await asyncio.gather(*tasks, return_exceptions=True)
        assert responses[1::2] == records[1::2]
    assert [await cache.get(record.id, NOW) for record in records] == records


async def test_a_closed_cache_is_a_miss(cache):
    await cache.put(a_record(), NOW)
    await cache.close()
    await cache.close()
    assert await cache.get(a_record().id, NOW) is None
    await cache.put(replace(a_record(), body=b""), NOW)


def test_nothing_is_connected_when_it_is_made():
    RedisRecords("redis://192.0.2.1:1", environment="test", secret=secret)
    with pytest.raises(ConfigurationError, match="Redis URL"):
        RedisRecords("http://localhost", environment="test", secret=secret)
