"""Looking at the queue, a page at a time."""

from collections.abc import Iterable
from typing import Any

from holdfast.core.outbox_entry import Attempt, Entry, Reason, Status
from holdfast.errors import UsageError
from holdfast.outbox.rows import COLUMNS, attempt_of, created_by, entry_of
from holdfast.outbox.unit import Unit

__all__ = ["attempts", "blocked_by", "dependents", "entries"]


def entries(
    unit: Unit,
    user_id: str | None,
    *,
    status: Status | Iterable[Status] | None,
    entity_type: str | None,
    limit: int,
    after: str | None,
) -> list[Entry]:
    """Return entries in the order in which they were queued."""
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
        params["after"] = unit.entry(after).id
    sql = (
        f"SELECT {', '.join(COLUMNS)} FROM offline_sync_queue"  # noqa: S608 - constants only
        f" WHERE {' AND '.join(conditions)} ORDER BY rowid LIMIT :limit"
    )
    return [entry_of(row) for row in unit.query(sql, params)]


def blocked_by(unit: Unit, user_id: str, lane: str | None) -> list[Entry]:
    """Return what a person has to look at before something can go on."""
    return [
        entry
        for entry in unit.entries("stuck", user_id=user_id)
        if entry.reason is not Reason.DEPENDENCY and lane in (None, entry.lane)
    ]


def dependents(unit: Unit, entry_id: str, *, transitive: bool) -> list[Entry]:
    """Return those that depend on an entry."""
    entry = unit.entry(entry_id)
    name = "all_dependents" if transitive else "dependents"
    return unit.entries(name, id=entry.id, local=created_by(entry))


def attempts(unit: Unit, entry_id: str) -> list[Attempt]:
    """Return the history of an entry's sends."""
    return [attempt_of(row) for row in unit.rows("attempts", id=unit.entry(entry_id).id)]
