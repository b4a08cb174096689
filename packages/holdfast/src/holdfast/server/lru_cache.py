"""Committed records in memory: they never change, so replays may be served from here."""

from collections import OrderedDict
from datetime import datetime

from holdfast.core.idempotency_record import Record, RecordId

__all__ = ["MemoryRecords"]


class MemoryRecords:
    """Least recently used records, bounded in bytes. Zero bytes switches it off."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._records: OrderedDict[RecordId, Record] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return how many records are kept."""
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
        """Keep a committed record, letting go of the least recently used."""
        cost = record.cost_bytes
        if cost > self._max_bytes:
            return
        if record.id in self._records:
            self._drop(record.id)
        self._records[record.id] = record
        self.size_bytes += cost
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    def _drop(self, record_id: RecordId) -> None:
        self.size_bytes -= self._records.pop(record_id).cost_bytes
