"""Committed records in memory. They never change, so replays can be served from here."""

from collections import OrderedDict
from datetime import datetime

from holdfast.core.idempotency_record import Record, RecordId

__all__ = ["RecordLruCache"]


class RecordLruCache:
    """An LRU cache of records, bounded in bytes. With zero bytes it keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[RecordId, Record] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, record_id: RecordId, now: datetime) -> Record | None:
        """Return a live record, or None."""
        record = self._records.get(record_id)
        if record is None:
            return None
        if record.expires_at <= now:
            self._drop(record_id)
            return None
        self._records.move_to_end(record_id)
        return record

    def put(self, record: Record) -> None:
        """Keep a committed record, evicting the least recently used ones."""
        cost = record.cost_bytes
        if cost > self._max_bytes:
            return
        if record.id in self._records:
            self._drop(record.id)
        self._records[record.id] = record
        self.size_bytes += cost
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    def clear(self) -> None:
        """Drop all records."""
        self._records.clear()
        self.size_bytes = 0

    def _drop(self, record_id: RecordId) -> None:
        self.size_bytes -= self._records.pop(record_id).cost_bytes
