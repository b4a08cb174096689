"""Rows of PostgreSQL, and the values they are made of."""

from typing import Any

import msgspec

from holdfast.core.idempotency_record import AuditEvent, Record, RecordId, RequestFingerprint
from holdfast.stores.postgres.literals import (
    bytes_literal,
    instant_literal,
    int_literal,
    text_literal,
)

__all__ = ["audit_values", "finish_statement", "finish_values", "record_of", "rows_of"]

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def rows_of(tag: str) -> int:
    """Read the number of rows off a command tag: ``INSERT 0 3``, ``UPDATE 2``, ``BEGIN``."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


def finish_statement(record: Record, audit: AuditEvent | None) -> str:
    """Write the call of ``holdfast_finish`` as text, to share a message with COMMIT."""
    tenant, endpoint, key = record.id
    text = text_literal
    audited = (
        f"{text(audit.id)},{text(audit.actor)},{text(audit.resource)},{int_literal(audit.version)}"
        if audit is not None
        else "NULL,NULL,NULL,NULL"
    )
    return (
        f"SELECT holdfast_finish({text(tenant)},{text(endpoint)},{text(key)},"
        f"{text(record.fingerprint.body_hash)},{text(record.fingerprint.request_hash)},"
        f"{int_literal(record.status)},{bytes_literal(record.body)},"
        f"{text(_encode_headers(record.headers).decode())},"
        f"{text(record.request_id)},{text(record.correlation_id)},"
        f"{instant_literal(record.created_at)},{instant_literal(record.expires_at)},{audited})"
    )


def finish_values(record: Record, audit: AuditEvent | None) -> tuple[Any, ...]:
    """Return the parameters of ``finish``, for bodies too large to be written out."""
    return (
        *record.id,
        *record.fingerprint,
        record.status,
        record.body,
        _encode_headers(record.headers).decode(),
        record.request_id,
        record.correlation_id,
        record.created_at,
        record.expires_at,
        audit.id if audit else None,
        audit.actor if audit else None,
        audit.resource if audit else None,
        audit.version if audit else None,
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
        event.created_at,
    )


def record_of(record_id: RecordId, row: Any) -> Record:
    """Make a record of a row."""
    return Record(
        id=record_id,
        fingerprint=RequestFingerprint(row[0], row[1]),
        status=row[2],
        body=row[3],
        headers=_decode_headers(row[4]),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=row[8],
        expires_at=row[9],
    )
