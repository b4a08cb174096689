"""Adding to the queue: one entry or many, in the transaction of the caller."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.canonical_json import canonical_json
from holdfast.core.outbox_entry import Entry, NewEntry, Operation, Reason, Status
from holdfast.errors import EntryInvalidError
from holdfast.ids import new_id
from holdfast.outbox.coalescing import merge_target, vanishing
from holdfast.outbox.dependencies import (
    Members,
    Subject,
    Waits,
    check_acyclic,
    park_dependents,
    waits_of,
)
from holdfast.outbox.events import Event, EventKind, about
from holdfast.outbox.hands import put_aside
from holdfast.outbox.placing import (
    Room,
    first_place,
    lane_of,
    new_entry,
    new_ids,
    number_after,
    own_lane,
    row_of,
)
from holdfast.outbox.rows import instant, json_text
from holdfast.outbox.unit import Unit
from holdfast.outbox.validation import Draft, check_all, check_name, check_new

__all__ = ["Room", "add", "add_many", "add_user", "announcement", "check", "check_all"]

_MERGE_WITHIN_MS: Final = 86_400_000
"""Changes are merged into those of the last day only: they would inherit an old one's age."""

_NO_WAITS: Final = Waits((), (), (), doomed=False)

check = check_new


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
    lane = lane_of(unit, draft)
    last, taken = first_place(unit, new.user_id, lane)
    number = number_after(last, new)
    if last >= room.limit(new.user_id):
        room.counted(new.user_id, last, unit.rows("count_open", user_id=new.user_id)[0][0])
    entry = new_entry(
        unit, draft, _NO_WAITS, id=new_id(unit.now), lane=lane, sequence_number=number
    )
    unit.run("insert_entry", row_of(unit, entry, turn=not taken))
    unit.tell(EventKind.ENQUEUED, entry)
    return entry


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
        self.ids = new_ids(unit, drafts)
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
            # First what the key was given for, if the entry has changed or has another key since.
            for changed, *before in unit.rows("former_key", key=draft.key):
                return _same_request(unit.entry(changed), tuple(before), draft)
            known = self._keys.get(draft.key) or unit.one("by_key", key=draft.key)
            if known is not None:
                asked = (known.user_id, known.operation.value, known.endpoint, known.payload)
                return _same_request(known, asked, draft)
        lane = lane_of(unit, draft)
        waits = self._waits_of(draft, entry_id)
        if coalesce and not waits.doomed:
            done = _coalesced(unit, draft, lane, waits)
            if done is not None:
                return done
        number, turn = self._place(new, lane)
        if new.id is not None:
            self._check_id(new.id)
        entry = new_entry(unit, draft, waits, id=entry_id, lane=lane, sequence_number=number)
        self._rows.append(row_of(unit, entry, turn=turn))
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
            last, taken = first_place(unit, user_id, lane)
        else:
            taken = lane is not None and self._is_taken(user_id, lane)
        number = number_after(last, new)
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
            lane = own_lane(draft)
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
            entry_id,
            draft.new.user_id,
            draft.operation,
            draft.local_id,
            strict_order=draft.profile.strict_order,
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
                (entry_id, (draft.new.user_id, lane_of(self._unit, draft)), parents)
                for entry_id, draft, parents in nodes
            )


def _same_request(known: Entry, asked: tuple[Any, ...], draft: Draft) -> Entry:
    """Return the entry that has or had this key, if the same was asked for under it."""
    *about, payload = asked
    if about != [draft.new.user_id, draft.operation.value, draft.request.endpoint] or (
        _canonical(payload) != _canonical(draft.request.payload)
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
    unit.rows("keep_first_request", id=merge.into.id)
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
