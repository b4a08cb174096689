"""Adding to the queue: one entry or many, in the transaction of the caller."""

from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Final

import msgspec

from holdfast.core.canonical import canonical_json
from holdfast.core.entry import Entry, Operation, Reason, Status
from holdfast.device.coalescing import merge_target, vanishing
from holdfast.device.dependencies import Subject, Waits, check_acyclic, waits_of
from holdfast.device.events import Event, EventKind, about
from holdfast.device.hands import put_aside
from holdfast.device.rows import instant, json_text
from holdfast.device.unit import Unit
from holdfast.device.validation import Draft, check_name, check_new
from holdfast.errors import EntryInvalidError, QueueFullError
from holdfast.system import new_id

__all__ = ["Room", "add", "add_many", "add_user", "announcement", "check"]

_WALK_LANE: Final = "walk"
_MERGE_WITHIN_MS: Final = 86_400_000
"""Changes are merged into those of the last day only: they would inherit an old one's age."""

_NO_WAITS: Final = Waits((), (), (), doomed=False)

check = check_new


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


def add_user(unit: Unit, user_id: str) -> None:
    """Make a user known."""
    check_name(user_id, "user_id_must_reference_existing_user", "user_id")
    unit.rows("add_user", user_id=user_id, added_at=unit.now_text)


def add(unit: Unit, draft: Draft, room: Room, *, coalesce: bool) -> Entry:
    """Write one entry."""
    return _add(unit, draft, draft.new.id or new_id(unit.now), {}, room, coalesce=coalesce)


def add_many(unit: Unit, drafts: Sequence[Draft], room: Room, *, coalesce: bool) -> list[Entry]:
    """Write entries in this order; they may depend on each other in any order."""
    ids = [draft.new.id or new_id(unit.now) for draft in drafts]
    later: dict[str, str] = {}
    for draft, entry_id in zip(drafts, ids, strict=True):
        later[entry_id] = entry_id
        if draft.local_id is not None and draft.operation is Operation.CREATE:
            later[draft.local_id] = entry_id
    if _points_forward(drafts, ids, later):
        _check_order(unit, drafts, ids, later)
    entries = []
    for draft, entry_id in zip(drafts, ids, strict=True):
        # From here on it is in the queue, and found there.
        later.pop(entry_id)
        if draft.local_id is not None and later.get(draft.local_id) == entry_id:
            del later[draft.local_id]
        entries.append(_add(unit, draft, entry_id, later, room, coalesce=coalesce))
    return entries


def announcement(unit: Unit, entry: Entry) -> Event:
    """Make the event for an entry that the app has committed by itself."""
    return about(EventKind.ENQUEUED, entry, unit.now)


def _add(
    unit: Unit, draft: Draft, entry_id: str, later: Mapping[str, str], room: Room, *, coalesce: bool
) -> Entry:
    lane = _lane(unit, draft)
    waits = _waits(unit, draft, entry_id, later)
    if coalesce and not waits.doomed:
        done = _coalesced(unit, draft, lane, waits)
        if done is not None:
            return done
    entry = _new_entry(unit, draft, entry_id, lane, waits)
    number = _insert(unit, entry, draft.new.sequence_number, room)
    if number is None:
        return _known(unit, entry)
    entry = msgspec.structs.replace(entry, sequence_number=number)
    for awaited in waits.awaited:
        unit.rows("insert_wait", awaited=awaited, entry_id=entry_id)
    unit.tell(EventKind.ENQUEUED, entry)
    if waits.doomed:
        unit.tell(EventKind.FAILED, entry, detail="what it depends on will not happen")
    return entry


def _lane(unit: Unit, draft: Draft) -> str | None:
    """Say which entries this one must stay in order with; None if with none.

    Entries about one entity are of one lane, whichever of its ids they use.
    """
    if not draft.profile.allows_lanes:
        return _WALK_LANE
    new = draft.new
    if new.lane is not None:
        return new.lane
    entity: str | int | None = draft.local_id or new.server_id
    if entity is None:
        if draft.operation is Operation.CREATE:
            return None
        entity = draft.request.endpoint.partition("?")[0].rpartition("/")[2]
    if draft.local_id is None:
        text = str(entity)
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
        found = unit.rows("local_of_server_id", user_id=new.user_id, text=text, number=number)
        entity = found[0][0] if found else entity
    return f"{new.entity_type}/{entity}"


def _waits(unit: Unit, draft: Draft, entry_id: str, later: Mapping[str, str]) -> Waits:
    refers_to = draft.request.refers_to
    if not draft.new.depends_on and not refers_to.placeholders and not refers_to.candidates:
        return _NO_WAITS
    subject = Subject(entry_id, draft.new.user_id, draft.operation, draft.profile, draft.local_id)
    return waits_of(unit, subject, draft.new.depends_on, refers_to, later)


def _new_entry(unit: Unit, draft: Draft, entry_id: str, lane: str | None, waits: Waits) -> Entry:
    new = draft.new
    made_at = new.client_generated_at
    return Entry(
        id=entry_id,
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
        sequence_number=0,
        dependency_ids=waits.dependency_ids,
        created_at=unit.now,
        synced_at=None,
        conflict_resolution=draft.conflict_resolution,
        priority=draft.priority,
        client_generated_at=unit.server_now() if made_at is None else made_at.astimezone(UTC),
        profile=draft.profile,
        lane=lane,
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
    )


def _insert(unit: Unit, entry: Entry, wanted_number: int | None, room: Room) -> int | None:
    """Write the row; returns its number, or None if its key is in the queue already."""
    params = {
        "id": entry.id,
        "user_id": entry.user_id,
        "operation": entry.operation.value,
        "entity_type": entry.entity_type,
        "local_id": entry.local_id,
        "server_id": entry.server_id,
        "endpoint": entry.endpoint,
        "payload": entry.payload,
        "headers": json_text(entry.headers),
        "key": entry.idempotency_key,
        "status": entry.status.value,
        "max_attempts": entry.max_attempts,
        "sequence_number": wanted_number,
        "dependency_ids": json_text(entry.dependency_ids),
        "created_at": instant(entry.created_at),
        "conflict_resolution": entry.conflict_resolution,
        "priority": entry.priority,
        "client_generated_at": instant(entry.client_generated_at),
        "profile": entry.profile.value,
        "reason": entry.reason,
        "local_refs": json_text(entry.local_refs),
        "payload_version": entry.payload_version,
        "base": entry.base,
        "base_version": entry.base_version,
        "lane": entry.lane,
        "waiting_for": entry.waiting_for,
        "enqueued_ms": unit.ms,
    }
    found = unit.rows("insert_entry", sequence_limit=room.limit(entry.user_id), **params)
    if found:
        return int(found[0][0])
    if unit.rows("by_key", key=entry.idempotency_key):
        return None
    last = _last_number(unit, entry.user_id, wanted_number)
    if last >= room.limit(entry.user_id):
        room.counted(entry.user_id, last, unit.rows("count_open", user_id=entry.user_id)[0][0])
    found = unit.rows("insert_entry", sequence_limit=room.limit(entry.user_id), **params)
    return int(found[0][0])


def _last_number(unit: Unit, user_id: str, wanted: int | None) -> int:
    """Return the user's last number, or say why there can be no next one."""
    found = unit.rows("user_last", user_id=user_id)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user", f"there is no user {user_id}: add_user first"
        )
    last = int(found[0][0])
    if wanted is not None and wanted <= last:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic",
            f"the sequence number {wanted} is not higher than the last one, {last}",
        )
    return last


def _known(unit: Unit, entry: Entry) -> Entry:
    """Return the entry that has this key already, if it is the same request."""
    known = unit.one("by_key", key=entry.idempotency_key)
    if (
        known is None
        or known.user_id != entry.user_id
        or known.operation is not entry.operation
        or known.endpoint != entry.endpoint
        or _canonical(known) != _canonical(entry)
    ):
        raise EntryInvalidError(
            "idempotency_key_unique_per_mutation",
            "this idempotency key is in the queue for another request: a new one needs a new key",
        )
    return known


def _canonical(entry: Entry) -> bytes | None:
    return None if entry.payload is None else canonical_json(entry.payload.encode())


def _coalesced(unit: Unit, draft: Draft, lane: str | None, waits: Waits) -> Entry | None:
    """Let the new entry be taken up by what is queued; None if it has to be queued itself."""
    gone = vanishing(unit, draft, lane)
    if gone:
        for entry in reversed(gone):
            discarded = put_aside(unit, entry, Status.DISCARDED, Reason.COALESCED, None)
        return discarded
    merge = merge_target(unit, draft, lane)
    if merge is None or not set(waits.local_refs) <= set(merge.into.local_refs):
        return None
    made_at = draft.new.client_generated_at
    found = unit.one(
        "merge_into",
        id=merge.into.id,
        operation=merge.operation.value,
        payload=merge.payload,
        client_generated_at=instant(made_at or unit.server_now()),
        local_refs=json_text(merge.into.local_refs),
        payload_version=draft.payload_version,
        young_ms=unit.ms - _MERGE_WITHIN_MS,
    )
    if found is not None:
        unit.tell(EventKind.MERGED, found)
    return found


def _points_forward(drafts: Sequence[Draft], ids: Sequence[str], later: Mapping[str, str]) -> bool:
    """Say whether an entry of the batch refers to one that comes after it."""
    seen: set[str] = set()
    for draft, entry_id in zip(drafts, ids, strict=True):
        refers_to = draft.request.refers_to
        for name in (*draft.new.depends_on, *refers_to.placeholders, *refers_to.candidates):
            if later.get(name, entry_id) not in seen and name in later:
                return True
        seen.add(entry_id)
    return False


def _check_order(
    unit: Unit, drafts: Sequence[Draft], ids: Sequence[str], later: Mapping[str, str]
) -> None:
    nodes = []
    for draft, entry_id in zip(drafts, ids, strict=True):
        refers_to = draft.request.refers_to
        own = draft.local_id if draft.operation is Operation.CREATE else None
        names = {*draft.new.depends_on, *refers_to.placeholders, *(refers_to.candidates - {own})}
        lane = _lane(unit, draft)
        key = None if lane is None else f"{draft.new.user_id}/{lane}"
        nodes.append((entry_id, key, {later[name] for name in names if name in later}))
    check_acyclic(nodes)
