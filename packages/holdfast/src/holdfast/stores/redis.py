"""Committed records in Redis, for replays that spare the database. Never the truth.

Wrong, stale or down, the cache costs time and nothing else. So every value carries a proof that
this database's own server wrote it for this very record; whatever does not prove it is a miss.
"""

import hmac
import logging
import time
from asyncio import timeout
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, TypeVar

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from holdfast.core.breaker import Breaker
from holdfast.core.idempotency_record import Record, RecordId
from holdfast.errors import ConfigurationError, StoreError

__all__ = ["RedisRecords"]

T = TypeVar("T")

_log = logging.getLogger("holdfast.cache")

# What is proven, and in which shape: another shape of record needs another name here.
_CONTEXT: Final = b"holdfast record 1"
_PROOF_BYTES: Final = 32
_MAX_CONNECTIONS: Final = 32
_FORGET_AT_ONCE: Final = 500

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode

# Redis, the network, and the time-out that stands around both.
_OUTAGES: Final = (RedisError, OSError)


class RedisRecords:
    """A read-through cache under ``idempo:{env}:{tenant}:{endpoint}:{key}``.

    Such keys are ambiguous: a tenant with a colon in its name may share one with another tenant.
    The proof covers tenant, endpoint and key one by one, so they cost each other a miss and can
    never answer for each other. It is made with the database's secret: two databases may share a
    Redis, and whoever can only write to Redis cannot make an answer up.
    """

    def __init__(
        self,
        url: str,
        *,
        environment: str,
        secret: Callable[[], Awaitable[bytes]],
        timeout_seconds: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the address and where the secret comes from; nothing is connected yet."""
        self._prefix = f"idempo:{environment}"
        self._ask_secret = secret
        self._secret: bytes | None = None
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        # One failure is enough: to do without the cache for a second is cheaper than to wait.
        self._breaker = Breaker(failure_limit=1, open_seconds=1.0)
        self._is_down = False
        self._is_closed = False
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout_seconds,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                # The client's own retries would multiply the time-out.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigurationError(f"not a Redis URL: {error}") from error
        self._redis: Redis = Redis(connection_pool=pool)

    async def get(self, record_id: RecordId, now: datetime) -> Record | None:
        """Return a record that is certainly what was put, or None."""
        secret = await self._known_secret()
        if secret is None:
            return None
        name = self._name(record_id)
        value = await self._try(lambda: self._redis.get(name))
        if value is None:
            return None
        record = _opened(value, record_id, secret)
        if record is None:
            _log.warning("a cached record does not verify and was dropped")
        if record is None or record.expires_at <= now:
            await self._try(lambda: self._redis.delete(name))
            return None
        return record

    async def put(self, record: Record, now: datetime) -> None:
        """Remember a committed record until it expires. Never raises."""
        life_ms = int((record.expires_at - now).total_seconds() * 1000)
        secret = await self._known_secret()
        if secret is None or life_ms <= 0:
            return
        try:
            payload = _encode(record)
        except UnicodeEncodeError:  # half a surrogate pair in a name: not for a cache
            return
        value = _proof(secret, record.id, payload) + payload
        name = self._name(record.id)
        await self._try(lambda: self._redis.set(name, value, px=life_ms))

    async def forget(self, record_ids: Iterable[RecordId]) -> None:
        """Drop records. Never raises."""
        names = [self._name(record_id) for record_id in record_ids]
        for start in range(0, len(names), _FORGET_AT_ONCE):
            batch = names[start : start + _FORGET_AT_ONCE]
            await self._try(lambda batch=batch: self._redis.delete(*batch))  # type: ignore[misc]

    async def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._is_closed = True
        try:
            async with timeout(1):
                await self._redis.aclose()
                await self._redis.connection_pool.disconnect()
        except _OUTAGES as error:
            _log.debug("Redis connections were cut off: %s", error)

    # -- inside ---------------------------------------------------------------------------

    async def _try(self, ask: Callable[[], Any]) -> Any:
        """Ask Redis, for a moment. Whatever goes wrong is None."""
        if self._is_closed or self._breaker.retry_after(self._clock()) is not None:
            return None
        try:
            async with timeout(self._timeout_seconds):
                answer = await ask()
        except _OUTAGES as error:
            self._breaker.failed(self._clock())
            if not self._is_down:
                self._is_down = True
                reason = str(error) or type(error).__name__
                _log.warning("Redis does not answer, going on without it: %s", reason)
            return None
        self._breaker.succeeded()
        if self._is_down:
            self._is_down = False
            _log.info("Redis answers again")
        return answer

    async def _known_secret(self) -> bytes | None:
        if self._secret is None:
            try:
                self._secret = await self._ask_secret()
            except StoreError:  # the database is down: its own callers will say so
                return None
        return self._secret

    def _name(self, record_id: RecordId) -> bytes:
        return _utf8(f"{self._prefix}:{record_id.tenant}:{record_id.endpoint}:{record_id.key}")


def _opened(value: bytes, record_id: RecordId, secret: bytes) -> Record | None:
    """Return the record in a value, if it proves to be ours and for this id."""
    proof, payload = value[:_PROOF_BYTES], value[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, record_id, payload)):
        return None
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _proof(secret: bytes, record_id: RecordId, payload: bytes) -> bytes:
    """Sign what is said and of whom, each part after its length so that none runs into another."""
    identity = b"".join(
        len(part).to_bytes(4, "big") + part for part in (_CONTEXT, *map(_utf8, record_id))
    )
    return hmac.new(secret, identity + payload, sha256).digest()


def _utf8(text: str) -> bytes:
    # A name decoded by a lenient server may hold half a surrogate pair; it still is a name.
    return text.encode("utf-8", "surrogatepass")
