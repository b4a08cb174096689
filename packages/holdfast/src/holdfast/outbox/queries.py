"""Read-only queries on the queue."""

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.core.outbox_entry import OPEN, Entry, Status
from holdfast.errors import UsageError
from holdfast.outbox.sql import COLUMNS, entry_of
from holdfast.outbox.transaction import Transaction

__all__ = ["Stats", "count_entries", "list_entries"]


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue."""

    # By status; every status is present.
    counts: dict[Status, int]
    # Pending entries that could be claimed now.
    ready: int
    # Pending entries that wait for their next attempt.
    waiting: int
    # Pending entries behind another one in their lane, or behind what they depend on.
    blocked: int
    # Seconds since the oldest pending entry was queued, as far as is certain.
    oldest_pending_seconds: float | None
    # Bytes of the file and its log.
    file_bytes: int

    @property
    def unsent(self) -> int:
        """Entries that are not settled."""
        return sum(self.counts[status] for status in OPEN)


def list_entries(
    tx: Transaction,
    user_id: str | None,
    *,
    status: Status | Iterable[Status] | None,
    entity_type: str | None,
    limit: int,
    after: str | None,
) -> list[Entry]:
    """Return a page of entries in the order in which they were queued."""
    if limit < 1:
        raise UsageError("limit must be at least 1")
    conditions, params = ["1"], dict[str, Any](limit=limit)
    if user_id is not None:
        conditions.append("user_id = :user_id")
        params["user_id"] = user_id
    if status is not None:
        wanted = [status] if isinstance(status, Status) else list(status)
        names = [f":status_{number}" for number in range(len(wanted))]
        conditions.append(f"status IN ({', '.join(names)})")
        params |= {f"status_{number}": Status(name).value for number, name in enumerate(wanted)}
    if entity_type is not None:
        conditions.append("entity_type = :entity_type")
        params["entity_type"] = entity_type
    if after is not None:
        conditions.append("rowid > (SELECT rowid FROM offline_sync_queue WHERE id = :after)")
        params["after"] = tx.entry(after).id
    sql = (
        f"SELECT {', '.join(COLUMNS)} FROM offline_sync_queue"  # noqa: S608 - constants only
        f" WHERE {' AND '.join(conditions)} ORDER BY rowid LIMIT :limit"
    )
    return [entry_of(row) for row in tx.query(sql, params)]


def count_entries(tx: Transaction, user_id: str | None) -> Stats:
    """Count entries of one user or of all."""
    counts = dict.fromkeys(Status, 0)
    users: set[str] = set()
    for owner, status, count in tx.rows("counts", user_id=user_id):
        counts[Status(status)] += count
        users.add(owner)
    ready = tx.rows("count_ready", user_id=user_id)[0][0]
    in_back_off, due = tx.rows("count_waiting", user_id=user_id, ms=tx.ms)[0]
    oldest = [
        found[0][0]
        for owner in users
        if (found := tx.rows("oldest_unsent", user_id=owner))[0][0] is not None
    ]
    return Stats(
        counts=counts,
        ready=ready + due,
        waiting=in_back_off - due,
        blocked=counts[Status.PENDING] - ready - in_back_off,
        oldest_pending_seconds=(tx.ms - min(oldest)) / 1000 if oldest else None,
        file_bytes=tx.file_bytes(),
    )
