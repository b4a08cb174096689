"""Records in memory, and the epoch of all cached records.

The epoch of cached records: when it changes, memory and Redis hold nothing that counts.
A store reads it with each new connection, so a restore or a failover, which ends connections, is
noticed before anything else is done on a new one. Besides, a process reads it at most once a second
while it serves replays from caches: tables may be restored below a connection, and an operator may
remove a record. So such a record is replayed for one second at most by a process that can reach the
database.
"""

import asyncio
import contextvars
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from typing import Final

from onceward.errors import StoreError
from onceward.guard.request_thread import is_in_request_thread
from onceward.ports import Clock, EpochReading, PositionCache, Store
from onceward.records import Record, RecordId
from onceward.stores.sql_loader import load_queries

_log = logging.getLogger("onceward.cache")

_LIFETIME_SECONDS: Final = 1.0
# A database that does not respond must not delay replays from memory for longer.
_WAIT_SECONDS: Final = 0.25
# What a record takes in memory beside its body, about.
_RECORD_BYTES: Final = 2048


def new_epoch() -> str:
    """Return a random epoch: a counter could repeat after a backup was restored."""
    return secrets.token_hex(16)


class Epoch:
    """A period in which no commit was lost, as far as this process knows. Compare with ``is``."""

    __slots__ = ("is_compared", "value")

    def __init__(self, value: str | None, *, is_compared: bool = True) -> None:
        # The same in all processes. None: unknown, so that nothing may be cached.
        self.value = value
        # False until its position was compared with those of other processes. They may have cached
        # records that the database has lost, before this process began.
        self.is_compared = is_compared


class CacheEpoch:
    """The current epoch. Calls ``on_change`` after each change, in any thread."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        positions: PositionCache | None = None,
    ) -> None:
        """``positions`` keeps WAL positions for processes that start after a restore."""
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._positions = positions
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        # The reading after which the database must get a new epoch, and what is used until then.
        self._lost: EpochReading | None = None
        self._lost_value = ""
        # Replaced as a whole: code that has a reference can see whether it is still current.
        self.current = Epoch(None)
        store.report_epochs(self.learn)

    def is_due(self) -> bool:
        return self._clock.monotonic() >= self._due

    def learn(self, reading: EpochReading) -> None:
        """Take a reading of a connection into account. May be called in any thread."""
        with self._lock:
            value = self._value_of(reading)
            if value == self.current.value:
                return
            is_compared = self._positions is None or reading.position is None
            before, self.current = self.current.value, Epoch(value, is_compared=is_compared)
            if reading.went_back:
                self._due = 0.0
        if before is not None and value is not None:
            _log.info("the epoch of the database has changed: cached records do not count any more")
        self._on_change()

    async def check(self) -> None:
        """Read the epoch if it is due. Never raises: without the database, caches still count."""
        if not self.is_due():
            return
        if is_in_request_thread():  # without an event loop; other threads do not wait for it
            self._due = self._clock.monotonic() + _LIFETIME_SECONDS
            await self._read()
            return
        if self._reading is None:
            # Not in the context of this request, whose thread may end earlier.
            self._reading = asyncio.create_task(self._read(), context=contextvars.Context())
        _, pending = await asyncio.wait({self._reading}, timeout=_WAIT_SECONDS)
        if pending:  # other replays do not wait for the same reading
            self._due = self._clock.monotonic() + _LIFETIME_SECONDS

    async def close(self) -> None:
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_WAIT_SECONDS)
            self._reading = None  # one that was cancelled before it began is still here

    def _value_of(self, reading: EpochReading) -> str | None:
        """Return the value of the epoch; a new one if the database has lost commits."""
        if reading.identity is None:
            return None
        if reading.went_back:
            self._lost, self._lost_value = reading, f"{_value_of(reading)}/{new_epoch()}"
        if self._lost is not None and _value_of(reading) == _value_of(self._lost):
            return self._lost_value
        self._lost = None
        return _value_of(reading)

    async def _read(self) -> None:
        started = self._clock.monotonic()
        try:
            reading = await self._read_store()
            if self._positions is not None:
                reading = await self._compare_position(reading, self._positions)
                self.learn(reading)
            await self._renew_lost()
        except StoreError:
            return
        except Exception as error:  # noqa: BLE001 - a replay must not fail because of it
            _log.warning("cannot read or renew the epoch of the database: %s", error)
        finally:
            self._due = started + _LIFETIME_SECONDS
            self._reading = None

    async def _read_store(self) -> EpochReading:
        reading = await self._store.read_epoch()
        self.learn(reading)
        return reading

    async def _compare_position(
        self, reading: EpochReading, positions: PositionCache
    ) -> EpochReading:
        """Compare with the highest position that any process has seen; keep a higher one."""
        epoch, position = _value_of(reading), reading.position
        if epoch is None or position is None:
            return reading
        highest = await positions.highest_position(epoch)
        if highest is None:  # not available, and neither are the records
            return reading
        if highest <= position:
            if highest < position:
                await positions.keep_position(epoch, position)
            current = self.current
            if current.value == epoch:
                current.is_compared = True
        else:
            # Another process may have seen it after this one has read: read again.
            again = await self._read_store()
            if _value_of(again) == epoch and again.position is not None:
                went_back = again.went_back or again.position < highest
                return EpochReading(again.identity, again.cache_epoch, again.position, went_back)
            return again
        return reading

    async def _renew_lost(self) -> None:
        """Give a database that has lost commits a new epoch, for all processes; the first wins."""
        lost = self._lost
        if lost is None:
            return
        _log.warning(
            "the database has gone back to an earlier state: cached records do not count any more"
        )
        sql = load_queries("onceward.stores", "records.sql", names=self._store.table_names)
        values = {"epoch": new_epoch(), "before": lost.cache_epoch}
        await self._store.write(sql["replace_cache_epoch"], values)
        await self._read_store()


def _value_of(reading: EpochReading) -> str | None:
    return None if reading.identity is None else f"{reading.identity}/{reading.cache_epoch}"


class RecordLruCache:
    """An LRU cache of records, bounded in bytes. With zero bytes it keeps nothing.

    A record counts only for the epoch in which it was put. Thread-safe: a connection that is opened
    in another thread may end the epoch.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[RecordId, tuple[Record, Epoch]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, record_id: RecordId, now: datetime, epoch: Epoch) -> Record | None:
        if record_id not in self._records:  # most requests are no replays and need no lock
            return None
        with self._lock:
            found = self._records.get(record_id)
            if found is None:
                return None
            record, put_in = found
            if put_in is not epoch or record.expires_at <= now:
                self._drop(record_id)
                return None
            self._records.move_to_end(record_id)
            return record

    def put(self, record: Record, epoch: Epoch) -> None:
        """Keep a committed record, evicting the least recently used ones."""
        cost = _cost_of(record)
        if cost > self._max_bytes or epoch.value is None:
            return
        with self._lock:
            if record.id in self._records:
                self._drop(record.id)
            self._records[record.id] = record, epoch
            self.size_bytes += cost
            while self.size_bytes > self._max_bytes:
                self._drop(next(iter(self._records)))

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self.size_bytes = 0

    def _drop(self, record_id: RecordId) -> None:
        record, _ = self._records.pop(record_id)
        self.size_bytes -= _cost_of(record)


def _cost_of(record: Record) -> int:
    headers = sum(len(name) + len(value) for name, value in record.headers.items())
    return _RECORD_BYTES + headers + len(record.body)
