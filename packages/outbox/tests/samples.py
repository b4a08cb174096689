"""Entries for tests that need one without a queue."""

from datetime import UTC, datetime

from onceward_outbox.entry import Entry, Status
from onceward_protocol.operation import Operation


def entry(
    operation: Operation = Operation.CREATE,
    attempt: int = 1,
    last: int | None = None,
    *,
    outcome_unknown: bool = False,
) -> Entry:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    return Entry(
        id="e",
        user_id="ada",
        operation=operation,
        entity_type="activity",
        local_id=None,
        server_id=None,
        endpoint="/x",
        payload=None,
        headers={},
        idempotency_key="k",
        status=Status.IN_FLIGHT,
        attempt_count=attempt,
        max_attempts=12,
        next_retry_at=None,
        last_error=None,
        last_error_code=last,
        sequence_number=1,
        dependency_ids=(),
        created_at=now,
        synced_at=None,
        conflict_resolution=None,
        priority=5,
        client_generated_at=now,
        profile="default",
        lane=None,
        reason=None,
        local_refs=(),
        payload_version=0,
        base=None,
        base_version=None,
        theirs=None,
        theirs_version=None,
        forced=False,
        outcome_unknown=outcome_unknown,
        claim_number=1,
        waiting_for=0,
    )
