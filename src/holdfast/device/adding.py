"""Adding to the queue: one entry or many, in the transaction of the caller."""

from collections.abc import Sequence
from datetime import UTC
from typing import Any, Final

import msgspec

from holdfast.core.canonical import canonical_json
from holdfast.core.entry import Entry, NewEntry, Operation, Reason, Status
from holdfast.device.coalescing import merge_target, vanishing
from holdfast.device.dependencies import (
    Members,
    Subject,
    Waits,
    check_acyclic,
    park_dependents,
    waits_of,
)
from holdfast.device.events import Event, EventKind, about
from holdfast.device.hands import put_aside
from holdfast.device.rows import instant, json_text
from holdfast.device.unit import Unit
from holdfast.device.validation import Draft, check_all, check_name, check_new
from holdfast.errors import EntryInvalidError, QueueFullError
from holdfast.system import new_id

__all__ = ["Room", "add", "add_many", "add_user", "announcement", "check", "check_all"]

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
    if not coalesce and _is_plain(draft):
        return _add_plain(unit, draft, room)
    batch = Batch(unit, room, (draft,))
    entry = batch.add(draft, batch.ids[0], coalesce=coalesce)
    batch.write()
    return entry


def _is_plain(draft: Draft) -> bool:
    """Say whether nothing in the queue has to be looked at but where it goes."""
    return draft.new.key is None and draft.new.id is None and not _may_wait(draft)


def _may_wait(draft: Draft) -> bool:
    """Say whether an entry names anything that it might have to wait for."""
    refers_to = draft.request.refers_to
    return bool(draft.new.depends_on or refers_to.placeholders or refers_to.candidates)


def _add_plain(unit: Unit, draft: Draft, room: Room) -> Entry:
    """Write the kind of entry that most are, without what a batch needs."""
    new = draft.new
    lane = _lane(unit, draft)
    last, taken = _first_place(unit, new.user_id, lane)
    number = _number_after(last, new)
    if last >= room.limit(new.user_id):
        room.counted(new.user_id, last, unit.rows("count_open", user_id=new.user_id)[0][0])
    entry = _new_entry(
        unit, draft, _NO_WAITS, id=new_id(unit.now), lane=lane, sequence_number=number
    )
    unit.run("insert_entry", _row(unit, entry, turn=not taken))
    unit.tell(EventKind.ENQUEUED, entry)
    return entry


def _first_place(unit: Unit, user_id: str, lane: str | None) -> tuple[int, bool]:
    """Return the user's last number, and whether the lane has somebody in it."""
    found = unit.rows("place", user_id=user_id, lane=lane)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user",
            f"there is no user {user_id}: add_user first",
        )
    last, taken = found[0]
    return last, bool(taken)


def _number_after(last: int, new: NewEntry) -> int:
    if new.sequence_number is None:
        return last + 1
    if new.sequence_number <= last:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic",
            f"sequence number {new.sequence_number} is not higher than the last one, {last}",
        )
    return new.sequence_number


def add_many(unit: Unit, drafts: Sequence[Draft], room: Room, *, coalesce: bool) -> list[Entry]:
    """Write entries in this order; they may depend on each other in any order."""
    batch = Batch(unit, room, drafts)
    entries = []
    for draft, entry_id in zip(drafts, batch.ids, strict=True):
        entries.append(batch.add(draft, entry_id, coalesce=coalesce))
        if coalesce:
            batch.write()  # the next one has to find it
    batch.write()
    return entries


def announcement(unit: Unit, entry: Entry) -> Event:
    """Make the event for an entry that the app has committed by itself."""
    return about(EventKind.ENQUEUED, entry, unit.now)


class Batch:
    """Entries on their way into the queue, written together."""

    def __init__(self, unit: Unit, room: Room, drafts: Sequence[Draft]) -> None:
        """Look over what is to be written; raises if members wait for each other in a circle."""
        self._unit = unit
        self._room = room
        self.ids = _ids(unit, drafts)
        self._rows: list[tuple[Any, ...]] = []
        self._waits: list[tuple[str, str]] = []
        self._doomed: list[Entry] = []
        self._doomed_ids: set[str] = set()
        self._last: dict[str, int] = {}
        # Lanes with an entry that is not settled, and those that were asked about.
        self._lanes: set[tuple[str, str]] = set()
        self._known_lanes: set[tuple[str, str]] = set()
        self._keys: dict[str, Entry] = {}
        self._given_ids: set[str] = set()
        # Ids, and local ids that are made here, each with the id of its entry.
        self._members: dict[str, str] = {}
        if len(drafts) > 1:
            if any(_may_wait(draft) for draft in drafts):
                for draft, entry_id in zip(drafts, self.ids, strict=True):
                    self._members[entry_id] = entry_id
                    if draft.local_id is not None and draft.operation is Operation.CREATE:
                        self._members[draft.local_id] = entry_id
                self._check_order(drafts)
            self._look_up_lanes(drafts)

    def add(self, draft: Draft, entry_id: str, *, coalesce: bool) -> Entry:
        """Take one more entry, or find what makes it superfluous."""
        unit, new = self._unit, draft.new
        if new.key is not None:
            known = self._keys.get(draft.key) or unit.one("by_key", key=draft.key)
            if known is not None:
                return _same_request(known, draft)
        lane = _lane(unit, draft)
        waits = self._waits_of(draft, entry_id)
        if coalesce and not waits.doomed:
            done = _coalesced(unit, draft, lane, waits)
            if done is not None:
                return done
        number, turn = self._place(new, lane)
        if new.id is not None:
            self._check_id(new.id)
        entry = _new_entry(unit, draft, waits, id=entry_id, lane=lane, sequence_number=number)
        self._rows.append(_row(unit, entry, turn=turn))
        self._waits += [(awaited, entry_id) for awaited in waits.awaited]
        if new.key is not None:
            self._keys[draft.key] = entry
        unit.tell(EventKind.ENQUEUED, entry)
        if waits.doomed:
            self._doomed.append(entry)
            self._doomed_ids.add(entry.id)
            unit.tell(EventKind.FAILED, entry, detail="what it depends on will not happen")
        return entry

    def write(self) -> None:
        """Write what was taken."""
        if not self._rows:
            return
        self._unit.many("insert_entry", self._rows)
        if self._waits:
            self._unit.many("insert_wait", self._waits)
        # Members that came before the one they wait for could not know that it is doomed.
        for entry in self._doomed if self._members else ():
            park_dependents(self._unit, entry)
        self._rows, self._waits, self._doomed = [], [], []

    def _place(self, new: NewEntry, lane: str | None) -> tuple[int, bool]:
        """Return the entry's number, and whether it has the turn in its lane."""
        unit, user_id = self._unit, new.user_id
        last = self._last.get(user_id)
        if last is None:
            last, taken = _first_place(unit, user_id, lane)
        else:
            taken = lane is not None and self._is_taken(user_id, lane)
        number = _number_after(last, new)
        if last >= self._room.limit(user_id):
            # Those of this batch that are not written yet are not counted, so they are written.
            self.write()
            self._room.counted(user_id, last, unit.rows("count_open", user_id=user_id)[0][0])
        self._last[user_id] = number
        if lane is not None:
            self._lanes.add((user_id, lane))
        return number, not taken

    def _is_taken(self, user_id: str, lane: str) -> bool:
        if (user_id, lane) in self._lanes:
            return True
        if (user_id, lane) in self._known_lanes:
            return False
        return bool(self._unit.rows("lane_taken", user_id=user_id, lane=lane)[0][0])

    def _look_up_lanes(self, drafts: Sequence[Draft]) -> None:
        """Ask once for all lanes that need no look at the queue to be named."""
        lanes: dict[str, set[str]] = {}
        for draft in drafts:
            lane = _own_lane(draft)
            if lane is not None:
                lanes.setdefault(draft.new.user_id, set()).add(lane)
        for user_id, names in lanes.items():
            found = self._unit.rows(
                "lanes_taken", user_id=user_id, lanes=msgspec.json.encode(names).decode()
            )
            self._lanes.update((user_id, row[0]) for row in found)
            self._known_lanes.update((user_id, name) for name in names)

    def _waits_of(self, draft: Draft, entry_id: str) -> Waits:
        if not _may_wait(draft):
            return _NO_WAITS
        refers_to = draft.request.refers_to
        subject = Subject(
            entry_id, draft.new.user_id, draft.operation, draft.profile, draft.local_id
        )
        batch = Members(self._members, self._doomed_ids)
        return waits_of(self._unit, subject, draft.new.depends_on, refers_to, batch)

    def _check_id(self, entry_id: str) -> None:
        if entry_id in self._given_ids or self._unit.rows("get", id=entry_id):
            raise EntryInvalidError("id_must_be_unique", f"there is an entry {entry_id} already")
        self._given_ids.add(entry_id)

    def _check_order(self, drafts: Sequence[Draft]) -> None:
        """Refuse a batch whose members wait for each other; most have none that could."""
        nodes, seen, forward = [], set[str](), False
        for draft, entry_id in zip(drafts, self.ids, strict=True):
            refers_to = draft.request.refers_to
            own = draft.local_id if draft.operation is Operation.CREATE else None
            names = {*draft.new.depends_on, *refers_to.placeholders, *refers_to.candidates} - {own}
            parents = {self._members[name] for name in names if name in self._members}
            seen.add(entry_id)
            forward = forward or not parents <= seen
            nodes.append((entry_id, draft, parents))
        if forward:
            check_acyclic(
                (entry_id, (draft.new.user_id, _lane(self._unit, draft)), parents)
                for entry_id, draft, parents in nodes
            )


def _ids(unit: Unit, drafts: Sequence[Draft]) -> list[str]:
    """Return an id for each, those made here in order: an index grows quickest at its end."""
    made = iter(sorted(new_id(unit.now) for draft in drafts if draft.new.id is None))
    return [draft.new.id or next(made) for draft in drafts]


def _lane(unit: Unit, draft: Draft) -> str | None:
    """Say which entries this one must stay in order with; None if with none.

    Entries about one entity are of one lane, whichever of its ids they use.
    """
    lane = _own_lane(draft)
    if lane is not None:
        return lane
    new = draft.new
    entity: str | int | None = new.server_id
    if entity is None:
        if draft.operation is Operation.CREATE:
            return None
        entity = draft.request.endpoint.partition("?")[0].rpartition("/")[2]
    text = str(entity)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
    found = unit.rows("local_of_server_id", user_id=new.user_id, text=text, number=number)
    entity = found[0][0] if found else entity
    return f"{new.entity_type}/{entity}"


def _own_lane(draft: Draft) -> str | None:
    """Return the lane of an entry if the entry alone says which."""
    if not draft.profile.allows_lanes:
        return _WALK_LANE
    if draft.new.lane is not None:
        return draft.new.lane
    return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"


def _new_entry(unit: Unit, draft: Draft, waits: Waits, **placed: Any) -> Entry:
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
        profile=draft.profile,
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


def _row(unit: Unit, entry: Entry, *, turn: bool) -> tuple[Any, ...]:
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
        f"{entry.profile}",
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


def _same_request(known: Entry, draft: Draft) -> Entry:
    """Return the entry that has this key already, if it is the same request."""
    if (
        known.user_id != draft.new.user_id
        or known.operation is not draft.operation
        or known.endpoint != draft.request.endpoint
        or _canonical(known.payload) != _canonical(draft.request.payload)
    ):
        raise EntryInvalidError(
            "idempotency_key_unique_per_mutation",
            "this idempotency key is in the queue for another request: a new one needs a new key",
        )
    return known


def _canonical(payload: str | None) -> bytes | None:
    return None if payload is None else canonical_json(payload.encode())


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
