"""A cache of committed records in Redis, for replays without a database query.

A stale or unavailable cache only costs time. Every value carries a MAC that proves that a server of
this database wrote it for this record; a value without a valid MAC is a miss.

Look-ups and writes are sent in batches: one round trip for all that wait.
redis-py takes a connection out of its pool, sets timers and runs about fifty functions for each
command, which is more than the rest of a guarded request does. Here all commands of a turn of the
event loop, and those that come while a batch is under way, are sent together and read together, so
the cost of a round trip is shared. redis-py connects, keeps the connections, sends and parses.
"""

import asyncio
import contextvars
import hmac
import logging
import time
from asyncio import AbstractEventLoop, Future, Task, get_running_loop, timeout, timeout_at
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from functools import lru_cache, partial
from hashlib import sha256
from operator import methodcaller
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from onceward.errors import ConfigurationError, StoreError, StoreUnavailableError
from onceward.records import Record, RecordId
from onceward.stores.breaker import Breaker
from onceward_protocol.extras import needs_extra

with needs_extra("redis"):
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import InvalidResponse, RedisError, ResponseError

__all__ = ["RedisRecords"]

T = TypeVar("T")

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

# Errors of Redis and the network, and timeouts.
OUTAGES: Final = (RedisError, OSError)

_MAX_CONNECTIONS: Final = 32
_MAX_BATCH: Final = 500
# More than that waits only if Redis is much too slow.
_MAX_WAITING: Final = 10_000
_MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
# A larger value has its own round trip: the rest of a batch would wait for it.
_MAX_BATCHED_BYTES: Final = 64 * 1024
_CLOSE_SECONDS: Final = 1.0
# Servers close connections that are idle for longer.
_IDLE_SECONDS: Final = 1.0

# In Redis' own encoding, for which redis-py's ``pack_commands`` takes eight times as long.
_SET: Final = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$%d\r\n%b\r\n"
_MGET: Final = b"*%d\r\n$4\r\nMGET\r\n%b"


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


async def _delete_matching(redis: Redis, pattern: bytes, cursor: int) -> tuple[int, int]:
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


class RedisBatches:
    """Runs commands on the connections of the running event loop; the first one connects.

    May be used in several event loops, one after another or at the same time: each has its own
    connections, which are closed when it ends, as ``asyncio.run`` ends it, or by ``close``.
    All commands raise one of ``OUTAGES``: of Redis, or after ``timeout_seconds``.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Take a URL for redis-py; raise ``ValueError`` for what is none."""
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        self._by_loop: dict[AbstractEventLoop, _Commands] = {}
        self._new_pool()

    async def get(self, name: bytes) -> bytes | None:
        """Return a value; None if there is none, or one of another type."""
        commands = self._by_loop.get(get_running_loop()) or await self._new_commands()
        encoded = b"$%d\r\n%b\r\n" % (len(name), name)
        value: bytes | None = await commands.add(encoded, is_read=True)
        return value

    async def set(self, name: bytes, value: bytes, life_ms: int) -> None:
        commands = self._by_loop.get(get_running_loop()) or await self._new_commands()
        if len(value) <= _MAX_BATCHED_BYTES:
            life = b"%d" % life_ms
            command = _SET % (len(name), name, len(value), value, len(life), life)
            await commands.add(command, is_read=False)
        else:
            await commands.run(lambda redis: redis.set(name, value, px=life_ms))

    async def run(
        self, command: Callable[[Redis], Awaitable[T]], timeout_seconds: float | None = None
    ) -> T:
        """Run any command of redis-py on its own."""
        commands = self._by_loop.get(get_running_loop()) or await self._new_commands()
        return await commands.run(command, timeout_seconds)

    async def close(self) -> None:
        self._is_closed = True
        for loop, commands in tuple(self._by_loop.items()):
            if loop is get_running_loop():
                await commands.close()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(commands.close(), loop)
                await asyncio.wait(
                    {asyncio.wrap_future(closing)}, timeout=_CLOSE_SECONDS + self._timeout_seconds
                )
            # Else it is closed when its loop ends.

    def _new_pool(self) -> BlockingConnectionPool:
        return BlockingConnectionPool.from_url(
            self._url,
            max_connections=_MAX_CONNECTIONS,
            timeout=self._timeout_seconds,
            # Each command has a time limit here; a second one for each read would cost more.
            socket_timeout=None,
            socket_connect_timeout=self._timeout_seconds,
            # With version 3, redis-py (8.1) does not see that Redis has closed an idle connection.
            protocol=2,
            # Retries of the client would multiply the timeout.
            retry=Retry(NoBackoff(), 0),
        )

    async def _new_commands(self) -> "_Commands":
        if self._is_closed:
            raise RedisConnectionError("the connection was closed")
        for loop in tuple(self._by_loop):
            if loop.is_closed():
                self._by_loop.pop(loop, None)
        commands = _Commands(self._new_pool(), self._timeout_seconds, self._by_loop)
        self._by_loop[get_running_loop()] = commands
        await anext(commands.until_end)
        return commands


class _Waiting(NamedTuple):
    """A command, and the future of its response."""

    # Encoded: a write, or the name to look up.
    command: bytes
    is_read: bool
    response: "Future[Any]"
    # Time of the event loop at which it has waited for too long.
    due: float


class _Commands:
    """The commands and connections of one event loop."""

    def __init__(
        self,
        pool: BlockingConnectionPool,
        timeout_seconds: float,
        registry: "dict[AbstractEventLoop, _Commands]",
    ) -> None:
        self._loop = get_running_loop()
        self._pool: Any = pool  # some of its methods have no types
        self._redis: Redis = Redis(connection_pool=pool)
        self._timeout_seconds = timeout_seconds
        self._registry = registry
        self._is_closed = False
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._batch: Sequence[_Waiting] = ()
        # Kept between batches: to take it out of the pool costs more than a batch.
        self._connection: Any = None
        self._used_at = 0.0
        self._sending: Task[None] | None = None
        # Commands that are not in a batch.
        self._running = 0
        self._all_ended = asyncio.Event()
        # Its first step registers it with the event loop; it does not connect yet.
        self.until_end = self._disconnect_at_end()

    def add(self, command: bytes, *, is_read: bool) -> "Future[Any]":
        """Add a command to the next batch and return the future of its response."""
        if self._is_closed:
            raise RedisConnectionError("the connection was closed")
        bytes_after = self._waiting_bytes + len(command)
        if len(self._waiting) >= _MAX_WAITING or bytes_after > _MAX_WAITING_BYTES:
            raise RedisConnectionError("too many commands wait for Redis")
        response: Future[Any] = self._loop.create_future()
        due = self._loop.time() + self._timeout_seconds
        self._waiting.append(_Waiting(command, is_read, response, due))
        self._waiting_bytes = bytes_after
        if self._sending is None:
            self._start_sending()
        return response

    async def run(
        self, command: Callable[[Redis], Awaitable[T]], timeout_seconds: float | None = None
    ) -> T:
        if self._is_closed:
            raise RedisConnectionError("the connection was closed")
        self._running += 1
        try:
            async with timeout(timeout_seconds or self._timeout_seconds):
                return await command(self._redis)
        finally:
            self._running -= 1
            if self._is_closed and not self._running:
                self._all_ended.set()

    async def close(self) -> None:
        """Wait for commands that wait or run, and disconnect. Idempotent."""
        self._is_closed = True
        # A command that connects meanwhile would keep its connection.
        while self._sending is not None:
            await asyncio.wait({self._sending})
        if self._running:
            await self._all_ended.wait()
        await self.until_end.aclose()

    async def _disconnect_at_end(self) -> AsyncGenerator[None, None]:
        """Disconnect when it is closed, which event loops also do when they end.

        The connections of a loop that has ended cannot be closed any more.
        """
        try:
            yield
        finally:
            self._is_closed = True
            self._registry.pop(self._loop, None)
            async with timeout(_CLOSE_SECONDS):
                await self._pool.disconnect()

    def _start_sending(self) -> None:
        # Not in the context of this request, which may end earlier. The task begins in the next
        # turn of the loop, so it finds all commands of this one.
        self._sending = self._loop.create_task(self._send(), context=contextvars.Context())
        self._sending.add_done_callback(self._sent)

    async def _send(self) -> None:
        """Send batches until no command waits."""
        if self._connection is not None and self._loop.time() > self._used_at + _IDLE_SECONDS:
            await self._release()  # the pool looks whether Redis has closed it
        try:
            while batch := self._next_batch():
                self._batch = batch
                try:
                    # Of the command that has waited for longest: none waits beyond its limit.
                    async with timeout_at(batch[0].due):
                        if self._connection is None:
                            self._connection = await self._pool.get_connection()
                        await _exchange(self._connection, batch)
                except Exception as error:  # noqa: BLE001 - raised by the commands of the batch
                    _fail(batch, error)
                    if self._connection is not None:
                        # A response that is still to come must not be that of another command.
                        await self._connection.disconnect(nowait=True)
                        await self._release()
        finally:
            self._used_at = self._loop.time()

    async def _release(self) -> None:
        connection, self._connection = self._connection, None
        await self._pool.release(connection)

    def _sent(self, task: "Task[None]") -> None:
        self._sending = None
        if task.cancelled():  # as all tasks are when the event loop ends
            for waiting in (*self._batch, *self._waiting):
                waiting.response.cancel()
            self._waiting.clear()
            self._waiting_bytes = 0
        elif error := task.exception():
            _fail(self._batch, error)
        self._batch = ()
        if self._waiting:  # since the last batch
            self._start_sending()

    def _next_batch(self) -> list[_Waiting]:
        """Take commands whose callers still wait."""
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < _MAX_BATCH:
            waiting = self._waiting.popleft()
            self._waiting_bytes -= len(waiting.command)
            if not waiting.response.done():
                batch.append(waiting)
        return batch


async def _exchange(connection: Any, batch: Sequence[_Waiting]) -> None:
    """Send the commands of a batch and pass on their responses.

    Writes come first, so that a look-up finds what was written before it.
    """
    writes = [waiting for waiting in batch if not waiting.is_read]
    reads = [waiting for waiting in batch if waiting.is_read]
    commands = [waiting.command for waiting in writes]
    if reads:
        # One response for all, and a value of another type is none.
        names = b"".join([waiting.command for waiting in reads])
        commands.append(_MGET % (1 + len(reads), names))
    await connection.send_packed_command(b"".join(commands))
    for waiting in writes:
        try:
            await connection.read_response(disable_decoding=True)
        except ResponseError as error:
            _fail((waiting,), error)
        else:
            _respond(waiting, None)
    if reads:
        try:
            values = await connection.read_response(disable_decoding=True)
        except ResponseError as error:
            _fail(reads, error)
        else:
            if not isinstance(values, list) or len(values) != len(reads):
                raise InvalidResponse("Redis has sent what is no response to MGET")
            for waiting, value in zip(reads, values, strict=True):
                _respond(waiting, value)


def _respond(waiting: _Waiting, value: bytes | None) -> None:
    if not waiting.response.done():  # else its caller was cancelled
        waiting.response.set_result(value)


def _fail(batch: Sequence[_Waiting], error: BaseException) -> None:
    for waiting in batch:
        if not waiting.response.done():
            waiting.response.set_exception(error)
