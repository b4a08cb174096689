"""Rows of SQLite, and the values they are made of."""

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from holdfast.core.idempotency_record import AuditEvent, Record, RecordId, RequestFingerprint
from holdfast.ports import Params, Row
from holdfast.stores.sql_loader import load_queries

__all__ = [
    "audit_values",
    "exists",
    "find_any",
    "is_busy",
    "is_outage",
    "record_of",
    "record_values",
    "rows_of",
    "to_text",
    "to_values",
]

_SQL: Final = load_queries("holdfast.stores.sqlite")
_FIND_ANY: Final = _SQL["find_any_record"]
_EXISTS: Final = _SQL["live_record_exists"]

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


@lru_cache(maxsize=256)  # one instant is written several times per request
def to_text(instant: datetime) -> str:
    """Write an instant so that text order is time order: fixed width, UTC."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds")[:26] + "Z"


def from_text(text: str) -> datetime:
    """Read an instant back."""
    return datetime.fromisoformat(text)


def to_values(params: Params) -> dict[str, Any]:
    """Adapt parameters to what SQLite can hold."""
    if not params:
        return {}
    return {
        name: to_text(value) if isinstance(value, datetime) else value
        for name, value in params.items()
    }


def is_busy(error: Exception) -> bool:
    """Tell whether somebody else holds the lock."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY


def is_outage(error: sqlite3.OperationalError) -> bool:
    """Tell the file's troubles from the handler's bad SQL."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return (code & 0xFF) not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def rows_of(cursor: sqlite3.Cursor) -> list[Row]:
    """Read all rows by their columns' names."""
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def find_any(db: sqlite3.Connection, record_id: RecordId) -> Record | None:
    """Return the record of a key, past its time or not."""
    row = db.execute(_FIND_ANY, record_id).fetchone()
    return None if row is None else record_of(record_id, row)


def exists(db: sqlite3.Connection, record_id: RecordId, instant: str) -> bool:
    """Tell whether a key has a live record."""
    return db.execute(_EXISTS, (*record_id, instant)).fetchone() is not None


def record_of(record_id: RecordId, row: Sequence[Any]) -> Record:
    """Make a record of a row."""
    return Record(
        id=record_id,
        fingerprint=RequestFingerprint(row[0], row[1]),
        status=row[2],
        body=bytes(row[3]),
        headers=_decode_headers(row[4]),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=from_text(row[8]),
        expires_at=from_text(row[9]),
    )


def record_values(record: Record) -> tuple[Any, ...]:
    """Return a record's values in the order of ``save_record``."""
    return (
        *record.id,
        *record.fingerprint,
        record.status,
        record.body,
        _encode_headers(record.headers).decode(),
        record.request_id,
        record.correlation_id,
        record.audit_id,
        to_text(record.created_at),
        to_text(record.expires_at),
    )


def audit_values(event: AuditEvent) -> tuple[Any, ...]:
    """Return an event's values in the order of ``save_audit_event``."""
    return (
        event.tenant,
        event.id,
        event.actor,
        event.endpoint,
        event.payload_hash,
        event.status,
        event.resource,
        event.version,
        event.request_id,
        event.correlation_id,
        to_text(event.created_at),
    )
