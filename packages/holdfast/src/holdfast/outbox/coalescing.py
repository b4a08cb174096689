"""Coalescing: what a later change makes superfluous before it was ever sent. Never reorders.

Only entries that no process has ever claimed are touched, so nothing that may be on its way
changes; only the end of a lane, so nothing in between is overtaken; and nothing that another lane
waits for.
"""

import msgspec

from holdfast.core.outbox_entry import Entry, Operation, Status
from holdfast.outbox.rows import created_by
from holdfast.outbox.unit import Unit
from holdfast.outbox.validation import Draft

__all__ = ["Merge", "merge_target", "vanishing"]

_CHANGES = (Operation.UPDATE, Operation.PATCH)
# A create with more changes behind it than this is rather deleted on the server.
_LONGEST_VANISHING = 100


class Merge(msgspec.Struct, frozen=True):
    """A pending entry that takes a later one's change, and what it will then say."""

    into: Entry
    operation: Operation
    payload: str | None


def merge_target(unit: Unit, draft: Draft, lane: str | None) -> Merge | None:
    """Return the update or patch that the new one can be merged into, if there is one."""
    if lane is None or draft.operation not in _CHANGES or draft.new.key is not None:
        return None
    tail = unit.one("lane_tail", user_id=draft.new.user_id, lane=lane)
    if tail is None or tail.operation not in _CHANGES or not _untouched(tail):
        return None
    if (
        tail.endpoint != draft.request.endpoint
        or tail.headers != draft.request.headers
        or tail.profile != draft.profile.name
        or tail.conflict_resolution is not draft.conflict_resolution
        or tail.entity_type != draft.new.entity_type
        or draft.new.depends_on
        or _is_awaited(unit, tail)
    ):
        return None
    return _merged(tail, draft)


def vanishing(unit: Unit, draft: Draft, lane: str | None) -> list[Entry]:
    """Return the entries that a delete takes away: the create and what was done to it since."""
    if lane is None or draft.operation is not Operation.DELETE or draft.new.key is not None:
        return []
    rows = unit.entries(
        "lane_open", user_id=draft.new.user_id, lane=lane, limit=_LONGEST_VANISHING + 1
    )
    if not rows or len(rows) > _LONGEST_VANISHING:
        return []
    first, *rest = rows
    if (
        first.operation is not Operation.CREATE
        or first.local_id is None
        or first.local_id != draft.local_id
        or any(
            entry.local_id != first.local_id or entry.operation not in _CHANGES for entry in rest
        )
        or not all(_untouched(entry) for entry in rows)
        or any(_is_awaited(unit, entry) for entry in rows)
    ):
        return []
    return rows


def _untouched(entry: Entry) -> bool:
    return entry.status is Status.PENDING and entry.claim_number == 0


def _is_awaited(unit: Unit, entry: Entry) -> bool:
    return bool(unit.rows("is_awaited", id=entry.id, local=created_by(entry), lane=entry.lane))


def _merged(tail: Entry, draft: Draft) -> Merge | None:
    """Say what the two changes come to, if that can be said."""
    new = draft.request.payload
    if draft.operation is Operation.UPDATE:
        # It says what the whole entity is to be: whatever was to be changed before is gone.
        return Merge(tail, Operation.UPDATE, new)
    if tail.payload is None or new is None:
        return None
    before, after = msgspec.json.decode(tail.payload), msgspec.json.decode(new)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return None
    # Servers differ in what a nested object or a null in a patch means: merged into the object
    # before or put in its place, removed or set. Where that matters the two stay two.
    if tail.operation is Operation.PATCH:
        unclear = any(isinstance(value, dict) and name in before for name, value in after.items())
    else:
        unclear = any(value is None or isinstance(value, dict) for value in after.values())
    if unclear:
        return None
    return Merge(tail, tail.operation, msgspec.json.encode(before | after).decode())
