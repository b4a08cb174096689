"""Where a new entry goes: its id, its number, its lane, and the row that it becomes."""

import re
from collections.abc import Sequence
from datetime import UTC
from typing import Any, Final

from holdfast.core.outbox_entry import Entry, NewEntry, Operation, Reason, Status
from holdfast.errors import EntryInvalidError, QueueFullError
from holdfast.ids import new_id
from holdfast.outbox.dependencies import Waits
from holdfast.outbox.rows import instant, json_text
from holdfast.outbox.unit import Unit
from holdfast.outbox.validation import Draft

__all__ = [
    "Room",
    "first_place",
    "lane_of",
    "new_entry",
    "new_ids",
    "number_after",
    "own_lane",
    "row_of",
]

# As ids have; not the version of an interface.
_HAS_DIGIT: Final = re.compile(r"^(?!v[0-9]+$).*[0-9]")


class Room:
    """How many entries a user may still add, without counting them each time.

    Numbers are never used twice, so a user has at most as many entries as numbers were given since
    the last count. Only when that is too many are they counted again.
    """

    def __init__(self, max_entries: int) -> None:
        """Allow this many entries that are not settled, per user."""
        self._max = max_entries
        self._limits: dict[str, int] = {}

    def limit(self, user_id: str) -> int:
        """Return the sequence number up to which there is certainly room."""
        return self._limits.get(user_id, self._max)

    def counted(self, user_id: str, last: int, entries: int) -> None:
        """Take a fresh count, made when ``last`` was the last number."""
        if entries >= self._max:
            raise QueueFullError(
                f"the queue of {user_id} has {entries} entries that are not settled, and may not "
                "have more: send or discard some first"
            )
        self._limits[user_id] = last + self._max - entries


def first_place(unit: Unit, user_id: str, lane: str | None) -> tuple[int, bool]:
    """Return the user's last number, and whether the lane has somebody in it."""
    found = unit.rows("place", user_id=user_id, lane=lane)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user",
            f"there is no user {user_id}: add_user first",
        )
    last, taken = found[0]
    return last, bool(taken)


def number_after(last: int, new: NewEntry) -> int:
    """Return the entry's number: the next one, or the one it was given if that is higher."""
    if new.sequence_number is None:
        return last + 1
    if new.sequence_number <= last:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic",
            f"sequence number {new.sequence_number} is not higher than the last one, {last}",
        )
    return new.sequence_number


def new_ids(unit: Unit, drafts: Sequence[Draft]) -> list[str]:
    """Return an id for each, those made here in order: an index grows quickest at its end."""
    made = iter(sorted(new_id(unit.now) for draft in drafts if draft.new.id is None))
    return [draft.new.id or next(made) for draft in drafts]


def lane_of(unit: Unit, draft: Draft) -> str | None:
    """Say which entries this one must stay in order with; None if with none.

    Entries about one entity are of one lane, whichever of its ids they use.
    """
    lane = own_lane(draft)
    if lane is not None:
        return lane
    new = draft.new
    entity: str | int | None = new.server_id
    if entity is None:
        if draft.operation is Operation.CREATE:
            return None
        entity = _entity_in(draft.request.endpoint.partition("?")[0])
    text = str(entity)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
    found = unit.rows("local_of_server_id", user_id=new.user_id, text=text, number=number)
    entity = found[0][0] if found else entity
    return f"{new.entity_type}/{entity}"


def _entity_in(path: str) -> str:
    """Return what names the entity in a path: ``5`` in ``/notes/5`` and in ``/notes/5/pin``."""
    parts = path.split("/")
    named = (part for part in reversed(parts) if _HAS_DIGIT.search(part))
    return next(named, parts[-1])


def own_lane(draft: Draft) -> str | None:
    """Return the lane of an entry if the entry alone says which."""
    if draft.profile.strict_order:
        return draft.profile.name
    if draft.new.lane is not None:
        return draft.new.lane
    return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"


def new_entry(unit: Unit, draft: Draft, waits: Waits, **placed: Any) -> Entry:
    """Return the entry as it will be; ``placed`` is where: id, lane and number."""
    new = draft.new
    made_at = new.client_generated_at
    return Entry(
        user_id=new.user_id,
        operation=draft.operation,
        entity_type=new.entity_type,
        local_id=draft.local_id,
        server_id=new.server_id,
        endpoint=draft.request.endpoint,
        payload=draft.request.payload,
        headers=draft.request.headers,
        idempotency_key=draft.key,
        status=Status.FAILED if waits.doomed else Status.PENDING,
        attempt_count=0,
        max_attempts=new.max_attempts,
        next_retry_at=None,
        last_error=None,
        last_error_code=None,
        dependency_ids=waits.dependency_ids,
        created_at=unit.now,
        synced_at=None,
        conflict_resolution=draft.conflict_resolution,
        priority=draft.priority,
        client_generated_at=unit.server_now() if made_at is None else made_at.astimezone(UTC),
        profile=draft.profile.name,
        reason=Reason.DEPENDENCY if waits.doomed else None,
        local_refs=waits.local_refs,
        payload_version=draft.payload_version,
        base=draft.base,
        base_version=new.base_version,
        theirs=None,
        theirs_version=None,
        forced=False,
        outcome_unknown=False,
        claim_number=0,
        waiting_for=len(waits.awaited),
        **placed,
    )


def row_of(unit: Unit, entry: Entry, *, turn: bool) -> tuple[Any, ...]:
    """Return what ``insert_entry`` takes, in its order."""
    # Enumerations are formatted: that takes a third of the time of their `value`.
    made_at = entry.client_generated_at
    return (
        entry.id,
        entry.user_id,
        f"{entry.operation}",
        entry.entity_type,
        entry.local_id,
        entry.server_id,
        entry.endpoint,
        entry.payload,
        json_text(entry.headers),
        entry.idempotency_key,
        f"{entry.status}",
        entry.max_attempts,
        entry.sequence_number,
        json_text(entry.dependency_ids),
        unit.now_text,
        entry.conflict_resolution,
        entry.priority,
        unit.now_text if made_at is entry.created_at else instant(made_at),
        entry.profile,
        entry.reason,
        json_text(entry.local_refs),
        entry.payload_version,
        entry.base,
        entry.base_version,
        entry.lane,
        turn,
        entry.waiting_for,
        unit.ms,
    )
