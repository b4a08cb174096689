"""Conversion between records and rows of SQLite."""

import sqlite3
from datetime import datetime
from typing import Any

from onceward.core.idempotency_record import Record, RecordId
from onceward.ports import Params, Row
from onceward.stores.rows import encode_headers, record_of, to_text
from onceward.stores.statements import named_parameters
from onceward_protocol.storage.sql_files import Queries

__all__ = [
    "exists",
    "find_any",
    "is_busy",
    "is_outage",
    "record_values",
    "rows_of",
    "to_values",
]


def to_values(params: Params) -> dict[str, Any]:
    """Convert parameters to types that SQLite stores."""
    if params is None:
        return {}
    return {
        name: to_text(value) if isinstance(value, datetime) else value
        for name, value in named_parameters(params).items()
    }


def is_busy(error: Exception) -> bool:
    """Check whether an error means that the database is locked."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY


def is_outage(error: sqlite3.OperationalError) -> bool:
    """Check whether an error is about the file, not about the statement."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return (code & 0xFF) not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def rows_of(cursor: sqlite3.Cursor) -> list[Row]:
    """Fetch all rows as mappings of column names."""
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def find_any(db: sqlite3.Connection, sql: Queries, record_id: RecordId) -> Record | None:
    """Return the record of a key, expired or not."""
    row = db.execute(sql["find_any_record"], record_id).fetchone()
    return None if row is None else record_of(record_id, row)


def exists(db: sqlite3.Connection, sql: Queries, record_id: RecordId, instant: str) -> bool:
    """Check whether a key has a record that is not expired."""
    return db.execute(sql["live_record_exists"], (*record_id, instant)).fetchone() is not None


def record_values(record: Record) -> tuple[Any, ...]:
    """Return a record's values in the order of ``save_record``."""
    return (
        *record.id,
        *record.fingerprint,
        record.status,
        record.body,
        encode_headers(record),
        record.request_id,
        record.correlation_id,
        record.audit_id,
        to_text(record.created_at),
        to_text(record.expires_at),
        None if record.client_generated_at is None else to_text(record.client_generated_at),
    )
