"""Attacks by someone who can write to the Redis of the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast_lab.attack.target import Attack, Target
from holdfast_lab.conformance.harness import (
    CheckFailedError,
    CheckSkippedError,
    Credentials,
    Request,
    Response,
)

__all__ = ["ATTACKS"]

_GROUP: Final = "cache"
_WAIT_SECONDS: Final = 2.0
_UNIT: Final = 8


@asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[Any]:
    if target.redis_url is None:
        raise CheckSkippedError("needs --redis")
    redis: Any = Redis.from_url(target.redis_url, socket_timeout=5)
    try:
        await redis.ping()
        yield redis
    except (RedisError, OSError) as error:
        raise CheckSkippedError(f"Redis: {error}") from error
    finally:
        await redis.aclose()


async def _stored(target: Target, redis: Any) -> tuple[Request, str, Response, bytes, bytes]:
    """Send a request, and return it with its key, response, and name and value in Redis."""
    request, key = await target.harness.new_request(), target.harness.new_key()
    first = await target.harness.send(request, key)
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_SECONDS
    while loop.time() < end:
        names = [name async for name in redis.scan_iter(match=f"*{key}*", count=1000)]
        if names and await redis.type(names[0]) == b"string":
            value = await redis.get(names[0])
            if value:
                return request, key, first, names[0], value
        await asyncio.sleep(0.05)
    raise CheckSkippedError("no text in Redis has the key in its name")


async def _expect_executed(
    target: Target,
    request: Request,
    key: str,
    what: str,
    *,
    credentials: Credentials | None = None,
) -> None:
    """Send a request whose key has a planted value; it must run as a new one."""
    response = await target.harness.send(request, key, credentials=credentials)
    if response.is_replay or not response.is_success:
        raise CheckFailedError(f"{what}: {response.summary()}, expected a new execution")


def _forgeries(value: bytes) -> dict[str, bytes]:
    """Return changed copies of a value: each part of it, its text, and other lengths."""
    found = {}
    for start in range(0, min(len(value), 12 * _UNIT), _UNIT):
        part = bytes(byte ^ 1 for byte in value[start : start + _UNIT])
        changed = value[:start] + part + value[start + _UNIT :]
        found[f"bytes from {start} on changed"] = changed
    found["the end changed"] = value[:-1] + bytes([value[-1] ^ 1])
    found["digits changed"] = value.translate(bytes.maketrans(b"0123456789", b"1234567890"))
    found["zeros in place of the first 32 bytes"] = bytes(32) + value[32:]
    found["without the first 32 bytes"] = value[32:]
    found["half of it"] = value[: len(value) // 2]
    return found


async def _forged(target: Target) -> str:
    async with _connected(target) as redis:
        request, key, _, name, value = await _stored(target, redis)
        forgeries = _forgeries(value)
        for what, forged in forgeries.items():
            other = target.harness.new_key()
            await redis.set(name.replace(key.encode(), other.encode()), forged, ex=600)
            await _expect_executed(target, request, other, what)
        return f"{len(forgeries)} values ignored"


async def _swapped(target: Target) -> str:
    """Copy a valid value to another key of the same tenant, and of another tenant."""
    harness = target.harness
    async with _connected(target) as redis:
        request, key, first, name, value = await _stored(target, redis)
        other_key = harness.new_key()
        await redis.set(name.replace(key.encode(), other_key.encode()), value, ex=600)
        await _expect_executed(target, request, other_key, "a copy for another key")
        credentials = harness.other_credentials
        own = harness.other_request() or await harness.new_request()
        own_key = harness.new_key()
        await harness.send(own, own_key, credentials=credentials)
        own_name = None
        async for found in redis.scan_iter(match=f"*{own_key}*", count=1000):
            own_name = found
        if own_name is None:
            raise CheckSkippedError("nothing of the other tenant is in Redis")
        planted = harness.new_key()
        for source in (value, await redis.get(own_name)):
            await redis.set(own_name.replace(own_key.encode(), key.encode()), source, ex=600)
            response = await harness.send(request, key, credentials=credentials)
            if response.is_replay and response.body == first.body:
                raise CheckFailedError("a copy for another tenant: replayed to it")
            key_name = own_name.replace(own_key.encode(), planted.encode())
            await redis.set(key_name, source, ex=600)
            await _expect_executed(
                target, own, planted, "a copy for another tenant", credentials=credentials
            )
            planted = harness.new_key()
        return "copies for another key and another tenant ignored"


async def _garbage(target: Target) -> str:
    async with _connected(target) as redis:
        request, key, first, name, _ = await _stored(target, redis)
        planted: dict[str, Any] = {
            "an empty text": b"",
            "one byte": b"\x00",
            "JSON": b'{"status":200,"body":"attack"}',
            "5 MB": b"\xc1" * 5_000_000,
            "a pickle": b"cposix\nsystem\n(S'true'\ntR.",
        }
        for what, value in planted.items():
            other = target.harness.new_key()
            await redis.set(name.replace(key.encode(), other.encode()), value, ex=600)
            await _expect_executed(target, request, other, what)
        other = target.harness.new_key()
        await redis.lpush(name.replace(key.encode(), other.encode()), b"a", b"b")
        await _expect_executed(target, request, other, "a list")
        await redis.set(name, b"attack", ex=600)
        replay = await target.harness.send(request, key)
        if not replay.is_replay or replay.body != first.body:
            raise CheckFailedError(f"a stored response was lost: {replay.summary()}")
        return f"{len(planted) + 2} values ignored"


ATTACKS: Final = (
    Attack(
        "forged values in Redis",
        _GROUP,
        "executed as a new request",
        _forged,
        why="Anyone who can write to Redis would choose what the server confirms.",
        change="Authenticate each value with a secret that is not in Redis, over tenant, endpoint, "
        "key and epoch.",
    ),
    Attack(
        "values of Redis under other names",
        _GROUP,
        "executed as a new request",
        _swapped,
        why="A valid value of one tenant would be replayed to another.",
        change="Include tenant, endpoint and key in what is authenticated.",
    ),
    Attack(
        "garbage in Redis",
        _GROUP,
        "ignored; the stored response is replayed from the database",
        _garbage,
        why="A cache that fails must not fail requests, and unpickling runs code.",
        change="Treat a value that cannot be read as a miss; never unpickle.",
    ),
)
