"""Conversion between records and rows of the databases, and the texts that they can store."""

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from onceward.errors import BodyInvalidError, RecordUnreadableError
from onceward.ports import Params, Row
from onceward.records import AuditEvent, Record, RecordId, RequestFingerprint
from onceward.stores.statements import named_parameters

# No NUL, which PostgreSQL refuses, and no lone surrogates.
UNSTORABLE = (
    "the request contains a character that a database cannot store: NUL (U+0000) or a lone "
    "surrogate"
)

# PostgreSQL gives a transaction its number with its first write. On Citus the nodes that have the
# rows do so; the coordinator has the lock of each table that was written.
HAS_WRITTEN = """
SELECT txid_current_if_assigned() IS NOT NULL
       OR (to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL
           AND EXISTS (SELECT 1 FROM pg_locks
                        WHERE pid = pg_backend_pid() AND locktype = 'relation'
                          AND mode = 'RowExclusiveLock')) AS written
"""


def check_storable(*texts: str) -> None:
    """Raise ``BodyInvalidError`` for a text that a database cannot store.

    Before any statement, so that such a text is an error of its caller, not one of the database.
    """
    for text in texts:
        if "\x00" in text:
            raise BodyInvalidError(UNSTORABLE)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise BodyInvalidError(UNSTORABLE) from None


# What servers can send.
_FIRST_STATUS, _LAST_STATUS = 100, 599
_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


@lru_cache(maxsize=256)  # one instant is formatted several times per request
def to_text(instant: datetime) -> str:
    """Format an instant for SQLite: in UTC, with a fixed width so that text sorts by time."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds")[:26] + "Z"


def encode_headers(record: Record) -> str:
    """Return the stored headers as JSON."""
    return _encode_headers(record.headers).decode()


def record_of(record_id: RecordId, row: Sequence[Any]) -> Record:
    """Build a record from a row of ``find_record``, as any driver returns it.

    Raises ``RecordUnreadableError`` for a row that was damaged or changed by something else.
    """
    try:
        record = _record(record_id, row)
        # A replay encodes the headers: better here, where the error is that of one record.
        record.response()
        if not _FIRST_STATUS <= record.status <= _LAST_STATUS:
            raise ValueError(f"status {record.status}")  # noqa: TRY301
    except Exception as error:
        raise RecordUnreadableError(
            "the stored response of this key cannot be read: an operator has to remove its record",
            reason=f"{type(error).__name__}: {error}",
            record_id=record_id,
        ) from error
    return record


def listed_record(row: Sequence[Any]) -> Record:
    """Build a record from a row of ``list_records``, for operators.

    A damaged one has status 0 and the reason in its headers, so that it can be seen and removed.
    """
    record_id = RecordId(row[0], row[1], row[2])
    try:
        return record_of(record_id, row[3:])
    except RecordUnreadableError as error:
        return Record(
            id=record_id,
            fingerprint=RequestFingerprint(str(row[3]), str(row[4])),
            status=0,
            headers={"unreadable": error.reason},
            body=b"",
            request_id=str(row[8]),
            correlation_id=str(row[9]),
            created_at=_instant_or_epoch(row[11]),
            expires_at=_instant_or_epoch(row[12]),
        )


def _instant_or_epoch(value: Any) -> datetime:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value.astimezone(UTC)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (AttributeError, ValueError):
        return datetime.fromtimestamp(0, UTC)


def _record(record_id: RecordId, row: Sequence[Any]) -> Record:
    headers, created_at, expires_at, made_at = row[4], row[8], row[9], row[10]
    if isinstance(created_at, str):  # SQLite
        created_at = datetime.fromisoformat(created_at)
        expires_at = datetime.fromisoformat(expires_at)
        made_at = None if made_at is None else datetime.fromisoformat(made_at)
    elif created_at.tzinfo is not UTC:  # psycopg returns instants in the zone of the session
        created_at, expires_at = created_at.astimezone(UTC), expires_at.astimezone(UTC)
        made_at = None if made_at is None else made_at.astimezone(UTC)
    return Record(
        id=record_id,
        fingerprint=RequestFingerprint(row[0], row[1]),
        status=int(row[2]),
        body=bytes(row[3]),
        # Some drivers decode jsonb by themselves.
        headers=headers if isinstance(headers, dict) else _decode_headers(headers),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=created_at,
        expires_at=expires_at,
        client_generated_at=made_at,
    )


def finish_values(record: Record, audit: AuditEvent | None) -> tuple[Any, ...]:
    """Return the parameters of PostgreSQL's ``finish``."""
    about = (audit.id, audit.actor, audit.resource, audit.version) if audit else (None,) * 4
    return (
        *record.id,
        *record.fingerprint,
        record.status,
        record.body,
        encode_headers(record),
        record.request_id,
        record.correlation_id,
        record.created_at,
        record.expires_at,
        record.client_generated_at,
        *about,
    )


def audit_values(event: AuditEvent, created_at: Any) -> tuple[Any, ...]:
    """Return the parameters of ``save_audit_event``, with the instant as the database stores it."""
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
        created_at,
        event.reason,
    )


def record_values(record: Record) -> tuple[Any, ...]:
    """Return the parameters of SQLite's ``save_record``."""
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


def to_values(params: Params) -> dict[str, Any]:
    """Convert parameters to types that SQLite stores."""
    if params is None:
        return {}
    given = params if type(params) is dict else named_parameters(params)
    return {
        name: to_text(value) if isinstance(value, datetime) else value
        for name, value in given.items()
    }


def rows_of(cursor: sqlite3.Cursor) -> list[Row]:
    """Fetch all rows as mappings of column names."""
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
