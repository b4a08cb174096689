"""Committed records in memory. They never change, so replays can be served from here."""

import threading
from collections import OrderedDict
from datetime import datetime

from onceward.core.idempotency_record import Record, RecordId
from onceward.guard.cache_epoch import Epoch

__all__ = ["RecordLruCache"]


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
        """Return a live record that was put in this epoch, or None."""
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
        cost = record.cost_bytes
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
        """Drop all records."""
        with self._lock:
            self._records.clear()
            self.size_bytes = 0

    def _drop(self, record_id: RecordId) -> None:
        self.size_bytes -= self._records.pop(record_id)[0].cost_bytes
