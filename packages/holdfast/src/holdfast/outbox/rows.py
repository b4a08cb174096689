"""Conversion between rows of the queue and entries."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.core.outbox_entry import (
    Action,
    Attempt,
    ConflictResolution,
    Entry,
    Operation,
    Reason,
    Status,
)

__all__ = [
    "COLUMNS",
    "attempt_of",
    "awaited_local",
    "created_by",
    "entry_of",
    "instant",
    "json_text",
]

COLUMNS: Final = (
    "id",
    "user_id",
    "operation",
    "entity_type",
    "local_id",
    "server_id",
    "endpoint",
    "payload",
    "headers",
    "idempotency_key",
    "status",
    "attempt_count",
    "max_attempts",
    "next_retry_at",
    "last_error",
    "last_error_code",
    "sequence_number",
    "dependency_ids",
    "created_at",
    "synced_at",
    "conflict_resolution",
    "priority",
    "client_generated_at",
    "profile",
    "lane",
    "reason",
    "local_refs",
    "payload_version",
    "base",
    "base_version",
    "theirs",
    "theirs_version",
    "forced",
    "outcome_unknown",
    "claim_number",
    "waiting_for",
)
"""The columns of an entry, in the order in which ``entry_of`` reads them."""

_encode = msgspec.json.Encoder().encode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_headers = msgspec.json.Decoder(dict[str, str]).decode


def instant(at: datetime) -> str:
    """Return an instant as ISO 8601 text in UTC, which sorts by time."""
    utc = at if at.tzinfo is UTC else at.astimezone(UTC)
    return f"{utc.isoformat(timespec='microseconds')[:-6]}Z"


def json_text(value: Any) -> str | None:
    """Return a list or an object as JSON; None if it is empty."""
    return _encode(value).decode() if value else None


def awaited_local(user_id: str, local_id: str) -> str:
    """Return the name of a local id's mapping in ``entry_waits``."""
    return f"local/{user_id}/{local_id}"


def created_by(entry: Entry) -> str | None:
    """Return the name in ``entry_waits`` of the mapping that this entry's success creates."""
    if entry.operation is not Operation.CREATE or entry.local_id is None:
        return None
    return awaited_local(entry.user_id, entry.local_id)


def entry_of(row: Sequence[Any]) -> Entry:
    """Return a row of ``COLUMNS`` as an entry."""
    (
        id_,
        user_id,
        operation,
        entity_type,
        local_id,
        server_id,
        endpoint,
        payload,
        headers,
        key,
        status,
        attempt_count,
        max_attempts,
        next_retry_at,
        last_error,
        last_error_code,
        sequence_number,
        dependency_ids,
        created_at,
        synced_at,
        conflict_resolution,
        priority,
        client_generated_at,
        profile,
        lane,
        reason,
        local_refs,
        payload_version,
        base,
        base_version,
        theirs,
        theirs_version,
        forced,
        outcome_unknown,
        claim_number,
        waiting_for,
    ) = row
    return Entry(
        id=id_,
        user_id=user_id,
        operation=Operation(operation),
        entity_type=entity_type,
        local_id=local_id,
        server_id=server_id,
        endpoint=endpoint,
        payload=payload,
        headers=_headers(headers) if headers else {},
        idempotency_key=key,
        status=Status(status),
        attempt_count=attempt_count,
        max_attempts=max_attempts,
        next_retry_at=_read(next_retry_at),
        last_error=last_error,
        last_error_code=last_error_code,
        sequence_number=sequence_number,
        dependency_ids=_strings(dependency_ids) if dependency_ids else (),
        created_at=datetime.fromisoformat(created_at),
        synced_at=_read(synced_at),
        conflict_resolution=ConflictResolution(conflict_resolution)
        if conflict_resolution
        else None,
        priority=priority,
        client_generated_at=datetime.fromisoformat(client_generated_at),
        profile=profile,
        lane=lane,
        reason=Reason(reason) if reason else None,
        local_refs=_strings(local_refs) if local_refs else (),
        payload_version=payload_version,
        base=base,
        base_version=base_version,
        theirs=theirs,
        theirs_version=theirs_version,
        forced=bool(forced),
        outcome_unknown=bool(outcome_unknown),
        claim_number=claim_number,
        waiting_for=waiting_for,
    )


def attempt_of(row: Sequence[Any]) -> Attempt:
    """Return a row of ``attempts``."""
    entry_id, number, started_at, ended_at, outcome, status, code, request_id, error = row
    return Attempt(
        entry_id=entry_id,
        number=number,
        started_at=datetime.fromisoformat(started_at),
        ended_at=datetime.fromisoformat(ended_at),
        outcome=Action(outcome),
        status=status,
        code=code,
        request_id=request_id,
        error=error,
    )


def _read(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
