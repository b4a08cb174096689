"""Sample records, names and bodies for tests of stores."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Final

from onceward.ports import Claimed, Store, UnitOfWork
from onceward.records import AuditEvent, Record, RecordId, RequestFingerprint

__all__ = [
    "AWKWARD_NAMES",
    "BODIES",
    "NOW",
    "a_record",
    "an_audit_event",
    "claimed",
    "claimed_soon",
    "commit",
]

# The time of the samples.
NOW: Final = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
_DAY: Final = timedelta(days=1)

# Texts that a store must keep unchanged.
AWKWARD_NAMES: Final = (
    "o'; DROP TABLE onceward_idempotency_records; --",
    "\\",
    "\\x27",
    '"quoted"',
    "$$tag$$ $1 :name ? %s {brace}",
    "🐚 Müller 株式会社",
    " spaces and\ttabs\nand lines ",
    "a:b",
    "e\u0301",  # differs from "é"
    "x" * 500,
)

# Bodies that a store must keep unchanged.
BODIES: Final = (
    b"",
    b"\x00",
    b"\xff\xfe\x00\x80 not text",
    b"'; DROP TABLE onceward_idempotency_records; --\\",
    bytes(range(256)) * 3600,  # 900 KB: above every inline limit
)


def a_record(
    key: str = "key-1",
    *,
    tenant: str = "tenant-1",
    endpoint: str = "orders.create",
    created_at: datetime = NOW,
    life: timedelta = _DAY,
    body: bytes = b'{"id":"1"}',
    audit_id: str | None = None,
    client_generated_at: datetime | None = NOW - _DAY,
) -> Record:
    """Return a record that is not expired at ``NOW``."""
    return Record(
        id=RecordId(tenant, endpoint, key),
        fingerprint=RequestFingerprint("ab" * 32, "cd" * 32),
        status=201,
        headers={"content-type": "application/json", "etag": '"1"', "location": "/orders/ü"},
        body=body,
        created_at=created_at,
        expires_at=created_at + life,
        request_id="request-1",
        correlation_id="correlation-1",
        audit_id=audit_id,
        client_generated_at=client_generated_at,
    )


def an_audit_event(record: Record) -> AuditEvent:
    """Return the audit event of a record."""
    return AuditEvent(
        id=record.audit_id or "audit-1",
        tenant=record.id.tenant,
        actor="actor-1",
        endpoint=record.id.endpoint,
        payload_hash=record.fingerprint.body_hash,
        status=record.status,
        request_id=record.request_id,
        correlation_id=record.correlation_id,
        created_at=record.created_at,
        resource="order/1",
        version=7,
    )


async def claimed(store: Store, record_id: RecordId, now: datetime = NOW) -> UnitOfWork:
    """Claim a key, which must succeed."""
    claim = await store.claim(record_id, now)
    assert isinstance(claim, Claimed), claim
    return claim.unit


async def claimed_soon(store: Store, record_id: RecordId, *, seconds: float = 20) -> UnitOfWork:
    """Claim a key that may still be held for a moment by a connection that was cut.

    The server notices that only after the statement that it executes.
    """
    async with asyncio.timeout(seconds):
        while True:
            claim = await store.claim(record_id, NOW)
            if isinstance(claim, Claimed):
                return claim.unit
            await asyncio.sleep(0.01)


async def commit(store: Store, record: Record, *, now: datetime = NOW, audit: bool = False) -> None:
    """Claim and commit a record without business rows."""
    unit = await claimed(store, record.id, now)
    await unit.commit(record, an_audit_event(record) if audit else None)
