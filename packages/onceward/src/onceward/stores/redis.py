"""A cache of committed records in Redis, for replays without a database query.

A stale or unavailable cache only costs time. Every value carries a MAC that proves that a server of
this database wrote it for this record; a value without a valid MAC is a miss.
"""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import lru_cache, partial
from hashlib import sha256
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

import msgspec

from onceward.core.breaker import Breaker
from onceward.core.idempotency_record import Record, RecordId
from onceward.errors import ConfigurationError, StoreError, StoreUnavailableError
from onceward.stores.redis_batches import OUTAGES, RedisBatches

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["RedisRecords"]

_log = logging.getLogger("onceward.cache")

# Part of the MAC. Change it when the encoding of records changes.
_CONTEXT: Final = b"onceward record 4"
_POSITION_CONTEXT: Final = b"onceward position 1"
_MAC_BYTES: Final = 32
# A digest of the epoch precedes the record, so that a value of another epoch is no alarm.
_EPOCH_BYTES: Final = 8
# Longer than records live; each reading of the epoch renews it.
_POSITION_SECONDS: Final = 400 * 86_400
_MAX_DELETED: Final = 500
_OPERATOR_TIMEOUT_SECONDS: Final = 10.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class RedisRecords:
    """A read-through cache under ``idempo:{env}:{tenant}:{endpoint}:{key}``.

    Such keys are ambiguous: a tenant with a colon in its name may share one with another tenant.
    The MAC covers tenant, endpoint and key separately, so that causes a miss, never a wrong
    response. It uses the database's secret: two databases may share a Redis, and write access to
    Redis alone does not allow to forge a response.
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
        """``secret`` returns the secret of the database. The first use connects."""
        self._prefix = f"idempo:{environment}"
        self._position_prefix = f"idempo-position:{environment}"
        self._read_secret = secret
        self._secret: bytes | None = None
        self._clock = clock
        # One failure is enough: a second without the cache is cheaper than another timeout.
        self._breaker = Breaker(failure_limit=1, open_seconds=1.0)
        self._is_down = False
        self._is_closed = False
        try:
            self._redis = RedisBatches(url, timeout_seconds=timeout_seconds)
        except ValueError as error:
            raise ConfigurationError(f"not a Redis URL: {error}") from error

    async def get(self, record_id: RecordId, now: datetime, *, epoch: str = "") -> Record | None:
        """Return a verified record that was put under this epoch, or None."""
        secret = self._secret or await self._known_secret()
        if secret is None:
            return None
        name = self._name(record_id)
        value = await self._try(lambda: self._redis.get(name))
        if value is None:
            return None
        record = None
        if value[_MAC_BYTES : _MAC_BYTES + _EPOCH_BYTES] == _epoch_digest(epoch):
            record = _verified(value, record_id, secret, epoch)
            if record is None:
                _log.warning("a cached record does not verify: dropped")
        if record is None or record.expires_at <= now:
            await self._run("delete", name)
            return None
        return record

    async def put(self, record: Record, now: datetime, *, epoch: str = "") -> None:
        """Cache a record that was committed in this epoch, until it expires. Never raises."""
        life_ms = int((record.expires_at - now).total_seconds() * 1000)
        secret = self._secret or await self._known_secret()
        if secret is None or life_ms <= 0:
            return
        try:
            payload = _encode(record)
        except UnicodeEncodeError:  # a lone surrogate in a name
            return
        mac = _mac(secret, (_CONTEXT, *map(_utf8, (epoch, *record.id))), payload)
        value = mac + _epoch_digest(epoch) + payload
        await self._try(lambda: self._redis.set(self._name(record.id), value, life_ms))

    async def highest_position(self, epoch: str) -> int | None:
        """Return the position that was kept for this epoch, 0 without one; None if unavailable."""
        secret = await self._known_secret()
        if secret is None:
            return None
        name = self._position_name(epoch)
        # A list: the position may be missing, which is no outage.
        found = await self._run("mget", name)
        if found is None:
            return None
        value = found[0] or b""
        mac, position = value[:_MAC_BYTES], value[_MAC_BYTES:]
        expected = _mac(secret, (_POSITION_CONTEXT, _utf8(epoch)), position)
        return int(position) if hmac.compare_digest(mac, expected) and position.isdigit() else 0

    async def keep_position(self, epoch: str, position: int) -> None:
        """Keep a position. Never raises."""
        secret = await self._known_secret()
        if secret is None:
            return
        payload = str(position).encode()
        value = _mac(secret, (_POSITION_CONTEXT, _utf8(epoch)), payload) + payload
        name = self._position_name(epoch)
        await self._run("set", name, value, ex=_POSITION_SECONDS)

    async def forget(self, record_ids: Iterable[RecordId]) -> None:
        """Drop records. Never raises."""
        names = [self._name(record_id) for record_id in record_ids]
        for start in range(0, len(names), _MAX_DELETED):
            batch = names[start : start + _MAX_DELETED]
            await self._run("delete", *batch)

    async def forget_tenant(self, tenant: str) -> int:
        """Delete all values of a tenant and return how many, for operators.

        Raises ``StoreUnavailableError``: unlike a cache, an erasure must not be skipped. Tenants
        whose names begin with this one and a colon may lose theirs too, which costs them a query.
        """
        special = str.maketrans({character: f"\\{character}" for character in "\\*?[]^"})
        pattern = _utf8(f"{self._prefix}:{tenant}:".translate(special)) + b"*"
        deleted, cursor = 0, 0
        try:
            while True:
                delete = partial(_delete_matching, pattern=pattern, cursor=cursor)
                cursor, count = await self._redis.run(delete, _OPERATOR_TIMEOUT_SECONDS)
                deleted += count
                if not cursor:
                    return deleted
        except OUTAGES as error:
            reason = str(error) or type(error).__name__
            raise StoreUnavailableError(f"Redis: {reason}") from error

    async def close(self) -> None:
        """Wait for running commands, which have a time limit, and disconnect. Idempotent."""
        self._is_closed = True
        try:
            await self._redis.close()
        except OUTAGES as error:
            _log.debug("Redis connections were not closed cleanly: %s", error)

    async def _run(self, command: str, *values: Any, **options: Any) -> Any:
        """Run a command of redis-py on its own; return None after an error."""
        run = methodcaller(command, *values, **options)
        return await self._try(lambda: self._redis.run(run))

    async def _try(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send a command unless Redis is closed or has failed just now; None after an error."""
        is_paused = self._is_down and self._breaker.retry_after(self._clock()) is not None
        if is_paused or self._is_closed:
            return None
        try:
            result = await send()
        except OUTAGES as error:
            self._breaker.failed(self._clock())
            if not self._is_down:
                self._is_down = True
                reason = str(error) or type(error).__name__
                _log.warning("Redis is unavailable, continuing without it: %s", reason)
            return None
        if self._is_down:
            self._breaker.succeeded()
            self._is_down = False
            _log.info("Redis is available again")
        return result

    async def _known_secret(self) -> bytes | None:
        if self._secret is None:
            try:
                self._secret = await self._read_secret()
            except StoreError:  # the database is down; its callers get the error
                return None
        return self._secret

    def _position_name(self, epoch: str) -> bytes:
        # Databases that share a Redis have different identities, or else different secrets.
        return _utf8(f"{self._position_prefix}:{_epoch_digest(epoch).hex()}")

    def _name(self, record_id: RecordId) -> bytes:
        return _utf8(f"{self._prefix}:{record_id.tenant}:{record_id.endpoint}:{record_id.key}")


async def _delete_matching(redis: "Redis", pattern: bytes, cursor: int) -> tuple[int, int]:
    """Delete one page of the names that match; return the next page and how many there were."""
    after, names = await redis.scan(cursor, match=pattern, count=_MAX_DELETED)
    return after, int(await redis.unlink(*names)) if names else 0


def _verified(value: bytes, record_id: RecordId, secret: bytes, epoch: str) -> Record | None:
    """Return the record in a value if its MAC is valid for this id and epoch."""
    mac, payload = value[:_MAC_BYTES], value[_MAC_BYTES + _EPOCH_BYTES :]
    expected = _mac(secret, (_CONTEXT, *map(_utf8, (epoch, *record_id))), payload)
    if not hmac.compare_digest(mac, expected):
        return None
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@lru_cache(maxsize=16)
def _epoch_digest(epoch: str) -> bytes:
    return sha256(_utf8(epoch)).digest()[:_EPOCH_BYTES]


def _mac(secret: bytes, parts: Iterable[bytes], payload: bytes) -> bytes:
    """Authenticate the parts, each preceded by its length, and the payload."""
    identity = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, identity + payload, "sha256")


def _utf8(text: str) -> bytes:
    # Names decoded by a lenient server may contain lone surrogates.
    return text.encode("utf-8", "surrogatepass")
