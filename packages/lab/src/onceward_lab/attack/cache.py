"""Attacks by someone who can write to the Redis of the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from onceward_lab.attack.target import Attack, Target
from onceward_lab.conformance.harness import (
    CheckFailedError,
    CheckSkippedError,
    Credentials,
    Request,
    Response,
)

__all__ = ["ATTACKS"]

_GROUP: Final = "cache"
# A server may write to Redis after it has responded, and not at all for a while after an error.
_WAIT_SECONDS: Final = 30.0
_WRITTEN_SECONDS: Final = 2.0
_REDIS_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_REPLAY_POLL_SECONDS: Final = 0.2
_UNIT: Final = 8


@asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[Any]:
    if target.redis_url is None:
        raise CheckSkippedError("needs --redis")
    redis: Any = Redis.from_url(target.redis_url, socket_timeout=_REDIS_SECONDS)
    try:
        await redis.ping()
        yield redis
    except (RedisError, OSError) as error:
        raise CheckSkippedError(f"Redis: {error}") from error
    finally:
        await redis.aclose()


class _Stored(NamedTuple):
    """A request, and what the server has written to Redis for it."""

    request: Request
    key: str
    response: Response
    name: bytes
    value: bytes

    def name_for(self, key: str) -> bytes:
        """Return the name of another key of the same tenant."""
        return self.name.replace(self.key.encode(), key.encode())


async def _stored(target: Target, redis: Any, *, of_other: bool = False) -> _Stored:
    """Send requests until the server has written one to Redis."""
    harness = target.harness
    credentials = harness.other_credentials if of_other else None
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_SECONDS
    while loop.time() < end and not target.is_redis_unused:
        own = harness.other_request() if of_other else None
        request, key = own or await harness.new_request(), harness.new_key()
        response = await target.send_until_served(request, key, credentials=credentials)
        end_of_wait = loop.time() + _WRITTEN_SECONDS
        while loop.time() < end_of_wait:
            names = [name async for name in redis.scan_iter(match=f"*{key}*", count=1000)]
            if names and await redis.type(names[0]) == b"string":
                value = await redis.get(names[0])
                if value:
                    return _Stored(request, key, response, names[0], value)
            await asyncio.sleep(_POLL_SECONDS)
    target.is_redis_unused = True
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
    response = await target.send_until_served(request, key, credentials=credentials)
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
        stored = await _stored(target, redis)
        forgeries = _forgeries(stored.value)
        for what, forged in forgeries.items():
            other = target.harness.new_key()
            await redis.set(stored.name_for(other), forged, ex=600)
            await _expect_executed(target, stored.request, other, what)
        return f"{len(forgeries)} values ignored"


async def _swapped(target: Target) -> str:
    """Copy a valid value to another key of the same tenant, and of another tenant."""
    harness = target.harness
    async with _connected(target) as redis:
        stored = await _stored(target, redis)
        other_key = harness.new_key()
        await redis.set(stored.name_for(other_key), stored.value, ex=600)
        await _expect_executed(target, stored.request, other_key, "a copy for another key")
        credentials = harness.other_credentials
        own = await _stored(target, redis, of_other=True)
        for source in (stored.value, own.value):
            await redis.set(own.name_for(stored.key), source, ex=600)
            response = await target.send_until_served(
                stored.request, stored.key, credentials=credentials
            )
            if response.is_replay and response.body == stored.response.body:
                raise CheckFailedError("a copy for another tenant: replayed to it")
            planted = harness.new_key()
            await redis.set(own.name_for(planted), source, ex=600)
            await _expect_executed(
                target, own.request, planted, "a copy for another tenant", credentials=credentials
            )
        return "copies for another key and another tenant ignored"


async def _garbage(target: Target) -> str:
    async with _connected(target) as redis:
        stored = await _stored(target, redis)
        planted: dict[str, Any] = {
            "an empty text": b"",
            "one byte": b"\x00",
            "JSON": b'{"status":200,"body":"attack"}',
            "5 MB": b"\xc1" * 5_000_000,
            "a pickle": b"cposix\nsystem\n(S'true'\ntR.",
        }
        for what, value in planted.items():
            other = target.harness.new_key()
            await redis.set(stored.name_for(other), value, ex=600)
            await _expect_executed(target, stored.request, other, what)
        other = target.harness.new_key()
        await redis.lpush(stored.name_for(other), b"a", b"b")
        await _expect_executed(target, stored.request, other, "a list")
        await redis.set(stored.name, b"attack", ex=600)
        replay = await target.send_until_served(stored.request, stored.key)
        if not replay.is_replay or replay.body != stored.response.body:
            raise CheckFailedError(f"a stored response was lost: {replay.summary()}")
        return f"{len(planted) + 2} values ignored"


async def _former_epoch(target: Target) -> str:
    """Make the database lose a commit, and write back what the server had cached of it."""
    if target.lose_commit is None:
        raise CheckSkippedError("needs --database")
    async with _connected(target) as redis:
        stored = await _stored(target, redis)
        await target.lose_commit(stored.key)
        loop = asyncio.get_running_loop()
        end = loop.time() + target.limits.patience_seconds
        while True:
            await redis.set(stored.name, stored.value, ex=600)
            response = await target.send_until_served(stored.request, stored.key)
            if not response.is_replay:
                break
            if loop.time() > end:
                raise CheckFailedError(
                    f"{response.summary()} after {target.limits.patience_seconds:g} seconds, for a "
                    "commit that the database has lost"
                )
            await asyncio.sleep(_REPLAY_POLL_SECONDS)
        if not response.is_success:
            raise CheckFailedError(f"{response.summary()}, expected a new execution")
        # What was executed now counts, also if the former value is written once more.
        await redis.set(stored.name, stored.value, ex=600)
        again = await target.send_until_served(stored.request, stored.key)
        if not again.is_replay or again.body != response.body:
            raise CheckFailedError(f"{again.summary()}, expected a replay of the new execution")
        return "executed as a new request; the cached record of before was ignored"


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
    Attack(
        "values of Redis from before a restore",
        _GROUP,
        "executed as a new request",
        _former_epoch,
        why="The caller would get a success for rows that the restored database does not have.",
        change="Give the database an epoch that a restore changes, authenticate cached values with "
        "it, and empty memory when it changes.",
    ),
)
