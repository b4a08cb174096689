"""Commands on one connection to Redis: order, failures, and responses in any pieces."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from holdfast.stores.redis_pipeline import RedisPipeline
from holdfast.testing.servers import RealRedis

LIFE_MS = 60_000
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def pipeline(redis_url: str) -> AsyncIterator[RedisPipeline]:
    made = RedisPipeline(redis_url, timeout_seconds=20)
    yield made
    await made.close()


async def read_command(reader: asyncio.StreamReader) -> bytes:
    """Read a command with its arguments, and return its name."""
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words[0]


@asynccontextmanager
async def scripted(serve: Serve, timeout_seconds: float = 20) -> AsyncIterator[RedisPipeline]:
    """Yield a pipeline to a server that calls ``serve`` after the first GET that it has read."""

    async def greet_and_serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await read_command(reader) != b"GET":
                writer.write(b"+OK\r\n")  # what redis-py sends when it connects
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client has disconnected
        finally:
            writer.close()

    server = await asyncio.start_server(greet_and_serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pipeline = RedisPipeline(f"redis://127.0.0.1:{port}", timeout_seconds)
    try:
        yield pipeline
    finally:
        await pipeline.close()
        server.close()


async def test_commands_at_once_get_their_own_responses(pipeline):
    names = [b"name-%d" % number for number in range(300)]
    await asyncio.gather(*(pipeline.set(name, b"of " + name, LIFE_MS) for name in names))
    found = await asyncio.gather(*(pipeline.get(name) for name in (*names, b"unknown")))
    assert found == [*(b"of " + name for name in names), None]


@pytest.mark.parametrize("value", [b"", b"\r\n", b"$3\r\nabc\r\n", b"-ERR\r\n", bytes(range(256))])
async def test_values_that_look_like_responses_are_returned_unchanged(pipeline, value):
    await pipeline.set(b"name", value, LIFE_MS)
    found = await asyncio.gather(*map(pipeline.get, (b"name", b"other")))
    assert found == [value, None]


async def test_error_of_one_command_leaves_the_others(pipeline, redis_url):
    client = Redis.from_url(redis_url)
    await client.lpush("list", "x")
    await client.aclose()
    await pipeline.set(b"name", b"value", LIFE_MS)
    wrong, right = await asyncio.gather(
        *map(pipeline.get, (b"list", b"name")), return_exceptions=True
    )
    assert isinstance(wrong, ResponseError)
    assert right == b"value"


async def test_value_ends_after_its_life(pipeline):
    await pipeline.set(b"short", b"value", 1)
    async with asyncio.timeout(20):
        while await pipeline.get(b"short") is not None:
            await asyncio.sleep(0.01)


async def test_all_commands_share_one_connection(pipeline, redis_url):
    await asyncio.gather(*(pipeline.get(b"name-%d" % number) for number in range(50)))
    client = Redis.from_url(redis_url)
    assert len(await client.client_list()) == 2
    await client.aclose()


async def test_command_after_a_restart_connects_again(pipeline, redis_server: RealRedis):
    await pipeline.set(b"name", b"value", LIFE_MS)
    redis_server.kill()
    with pytest.raises((RedisError, OSError)):
        await pipeline.get(b"name")
    redis_server.start()
    assert await pipeline.get(b"name") is None


async def test_cancelled_command_does_not_cancel_the_connection_of_others(pipeline):
    first = asyncio.create_task(pipeline.get(b"name"))
    second = asyncio.create_task(pipeline.get(b"name"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is None


async def test_response_in_pieces_of_one_byte():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_command(reader)
        for byte in b"$5\r\nab\r\nc\r\n$-1\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with scripted(serve) as pipeline:
        found = await asyncio.gather(*map(pipeline.get, (b"one", b"two")))
    assert found == [b"ab\r\nc", None]


async def test_time_limit_fails_all_commands_that_wait():
    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(serve, timeout_seconds=0.2) as pipeline:
        found = await asyncio.gather(
            pipeline.get(b"one"), pipeline.get(b"two"), return_exceptions=True
        )
    assert [type(error) for error in found] == [RedisTimeoutError] * 2


async def test_close_fails_commands_that_wait():
    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(serve) as pipeline:
        running = asyncio.create_task(pipeline.get(b"one"))
        await asyncio.sleep(0.05)
        await pipeline.close()
        with pytest.raises(RedisConnectionError):
            await running


@pytest.mark.parametrize("response", [b"*1\r\n$1\r\na\r\n", b"HTTP/1.1 400\r\n", b"$x\r\n"])
async def test_what_is_no_response_fails_and_disconnects(response):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        await reader.read()

    async with scripted(serve) as pipeline:
        with pytest.raises(InvalidResponse):
            await pipeline.get(b"one")


async def test_response_without_a_command_disconnects():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"$-1\r\n$-1\r\n")
        await reader.read()

    async with scripted(serve) as pipeline:
        assert await pipeline.get(b"one") is None
        assert await pipeline.get(b"one") is None  # on a new connection
