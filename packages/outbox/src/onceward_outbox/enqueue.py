"""Enqueueing: give entries a lane and a number and write them, or merge them into earlier ones.

Coalescing never reorders: it changes only entries that were never claimed, only at the end of a
lane, and only those that no entry of another lane waits for.
"""

from collections.abc import Sequence
from datetime import UTC
from typing import Any, Final, NamedTuple

import msgspec

from onceward_outbox.dependencies import (
    BatchIndex,
    Dependencies,
    EntryRef,
    check_acyclic,
    find_dependencies,
    park_dependents,
)
from onceward_outbox.entities import find_entity
from onceward_outbox.entry import Entry, NewEntry, Reason, Status
from onceward_outbox.errors import EntryInvalidError, QueueFullError
from onceward_outbox.events import EventKind
from onceward_outbox.resolution import settle_unclaimed
from onceward_outbox.sql import created_by, instant, json_text
from onceward_outbox.transaction import Transaction
from onceward_outbox.validation import Draft, check_name
from onceward_protocol.fingerprint import canonical_json
from onceward_protocol.ids import new_id
from onceward_protocol.operation import Operation

__all__ = ["QueueQuota", "add_user", "enqueue", "enqueue_many"]

_MERGE_WITHIN_MS: Final = 86_400_000
"""Changes are merged only into entries of the last day: they would inherit an older age."""

_MAX_CANCELLED: Final = 100
"""A create with more changes behind it is sent and then deleted on the server."""

_CHANGES: Final = (Operation.UPDATE, Operation.PATCH)
_NO_DEPENDENCIES: Final = Dependencies((), (), (), has_dead_parent=False)


class QueueQuota:
    """Limit of unsettled entries per user, checked without counting them at every enqueue.

    Sequence numbers are never reused, so a user has at most as many entries as numbers were given
    since the last count. Entries are counted again only when that exceeds the limit.
    """

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        self._limits: dict[str, int] = {}

    def check(self, tx: Transaction, user_id: str, last: int) -> None:
        """Raise ``QueueFullError`` if the user cannot add an entry after number ``last``."""
        if self.is_certain(user_id, last):
            return
        entries = tx.rows("count_open", user_id=user_id)[0][0]
        if entries >= self._max:
            raise QueueFullError(
                f"the queue of {user_id} has {entries} unsettled entries, the maximum: send or "
                "discard some first"
            )
        self._limits[user_id] = last + self._max - entries

    def is_certain(self, user_id: str, last: int) -> bool:
        """Return whether ``check`` would pass without counting."""
        return last < self._limits.get(user_id, self._max)


def add_user(tx: Transaction, user_id: str) -> None:
    """Add a user if it does not exist."""
    check_name(user_id, "user_id_must_reference_existing_user", "user_id")
    tx.rows("add_user", user_id=user_id, added_at=tx.now_text)


def enqueue(tx: Transaction, draft: Draft, quota: QueueQuota, *, coalesce: bool) -> Entry:
    """Write one entry, or merge it into an earlier one."""
    if not coalesce and _is_simple(draft):
        return _insert_simple(tx, draft, quota)
    batch = Batch(tx, quota, (draft,))
    entry = batch.add(draft, batch.ids[0], coalesce=coalesce)
    batch.write()
    return entry


def enqueue_many(
    tx: Transaction, drafts: Sequence[Draft], quota: QueueQuota, *, coalesce: bool
) -> list[Entry]:
    """Write entries in this order; they may depend on each other in any order."""
    batch = Batch(tx, quota, drafts)
    entries = []
    for draft, entry_id in zip(drafts, batch.ids, strict=True):
        entries.append(batch.add(draft, entry_id, coalesce=coalesce))
        if coalesce:
            batch.write()  # the next one may be merged into it
    batch.write()
    return entries


def _is_simple(draft: Draft) -> bool:
    """Return whether the entry can be written without reading other entries, as most can."""
    new = draft.new
    return new.key is None and new.id is None and new.once is None and not _may_depend(draft)


def _may_depend(draft: Draft) -> bool:
    refers_to = draft.request.refers_to
    return bool(draft.new.depends_on or refers_to.placeholders or refers_to.candidates)


def _insert_simple(tx: Transaction, draft: Draft, quota: QueueQuota) -> Entry:
    new = draft.new
    place = _place_of(tx, draft)
    last, taken, seen = _read_position(tx, new.user_id, place)
    number = _next_number(last, new)
    quota.check(tx, new.user_id, last)
    entry = _new_entry(
        tx, draft, _NO_DEPENDENCIES, place, seen, id=new_id(tx.now), sequence_number=number
    )
    tx.run("insert_entry", _row_of(tx, entry, turn=not taken))
    tx.emit(EventKind.ENQUEUED, entry)
    return entry


class Batch:
    """Entries that are written together."""

    def __init__(self, tx: Transaction, quota: QueueQuota, drafts: Sequence[Draft]) -> None:
        """Raise ``EntryInvalidError`` if members depend on each other in a cycle."""
        self._tx = tx
        self._quota = quota
        self.ids = _new_ids(tx, drafts)
        self._rows: list[tuple[Any, ...]] = []
        self._waits: list[tuple[str, str]] = []
        self._dead: list[Entry] = []
        self._dead_ids: set[str] = set()
        self._last: dict[str, int] = {}
        # Versions seen last, by user and entity; complete for the entities of this batch.
        self._seen: dict[tuple[str, str], str] | None = None
        self._drafts = drafts
        # Lanes with an unsettled entry, and lanes that were looked up.
        self._taken_lanes: set[tuple[str, str]] = set()
        self._known_lanes: set[tuple[str, str]] = set()
        self._keys: dict[str, Entry] = {}
        self._once: dict[tuple[str, str], Entry] = {}
        self._given_ids: set[str] = set()
        # Entry ids by entry id and by the local id that the entry creates.
        self._members: dict[str, str] = {}
        if len(drafts) > 1:
            if any(_may_depend(draft) for draft in drafts):
                for draft, entry_id in zip(drafts, self.ids, strict=True):
                    self._members[entry_id] = entry_id
                    if draft.local_id is not None and draft.operation is Operation.CREATE:
                        self._members[draft.local_id] = entry_id
                self._check_order(drafts)
            self._look_up_lanes(drafts)

    def add(self, draft: Draft, entry_id: str, *, coalesce: bool) -> Entry:
        """Add one entry.

        Returns another one if that has its key or its ``once`` already, or takes its change.
        """
        tx, new = self._tx, draft.new
        known = self._find_known(draft)
        if known is not None:
            return known
        place = _place_of(tx, draft)
        lane = place.lane
        dependencies = self._dependencies_of(draft, entry_id)
        if coalesce and not dependencies.has_dead_parent:
            merged = _coalesce(tx, draft, lane, dependencies)
            if merged is not None:
                return merged
        number, turn, seen = self._position(new, place)
        if new.id is not None:
            self._check_id(new.id)
        entry = _new_entry(
            tx, draft, dependencies, place, seen, id=entry_id, sequence_number=number
        )
        self._rows.append(_row_of(tx, entry, turn=turn))
        self._waits += [(awaited, entry_id) for awaited in dependencies.awaited]
        if new.key is not None:
            self._keys[draft.key] = entry
        if new.once is not None:
            self._once[new.user_id, new.once] = entry
        tx.emit(EventKind.ENQUEUED, entry)
        if dependencies.has_dead_parent:
            self._dead.append(entry)
            self._dead_ids.add(entry.id)
            tx.emit(EventKind.FAILED, entry, detail="an entry it depends on will not succeed")
        return entry

    def _find_known(self, draft: Draft) -> Entry | None:
        """Return the entry that has the key of a new one, or its ``once``."""
        tx, new = self._tx, draft.new
        if new.key is not None:
            # First what the key was given for, if the entry was merged or has another key since.
            for changed, *before in tx.rows("former_key", key=draft.key):
                return _same_request(tx.entry(changed), tuple(before), draft)
            known = self._keys.get(draft.key) or tx.one("by_key", key=draft.key)
            if known is not None:
                queued = (known.user_id, known.operation.value, known.endpoint, known.payload)
                return _same_request(known, queued, draft)
        if new.once is None:
            return None
        added = self._once.get((new.user_id, new.once))
        return added or tx.one("by_once", user_id=new.user_id, once=new.once)

    def write(self) -> None:
        """Write the rows added since the last call."""
        if not self._rows:
            return
        self._tx.many("insert_entry", self._rows)
        if self._waits:
            self._tx.many("insert_wait", self._waits)
        # Members may have been added before the dead one they depend on.
        for entry in self._dead if self._members else ():
            park_dependents(self._tx, entry)
        self._rows, self._waits, self._dead = [], [], []

    def _position(self, new: NewEntry, place: "_Place") -> tuple[int, bool, str | None]:
        """Return the entry's number, whether it has the turn, and the version seen last."""
        tx, user_id, lane = self._tx, new.user_id, place.lane
        last = self._last.get(user_id)
        seen: str | None
        if last is None:
            last, taken, seen = _read_position(tx, user_id, place)
        else:
            taken = lane is not None and self._is_taken(user_id, lane)
            seen = None if place.entity is None else self._seen_version(user_id, place.entity)
        number = _next_number(last, new)
        if not self._quota.is_certain(user_id, last):
            self.write()  # so that the count includes this batch
            self._quota.check(tx, user_id, last)
        self._last[user_id] = number
        if lane is not None:
            self._taken_lanes.add((user_id, lane))
        return number, not taken, seen

    def _seen_version(self, user_id: str, entity: str) -> str | None:
        if self._seen is None:
            self._seen = {}
            entities: dict[str, set[str]] = {}
            for draft in self._drafts:
                place = _place_of(self._tx, draft)
                if place.entity is not None:
                    entities.setdefault(draft.new.user_id, set()).add(place.entity)
            for user, names in entities.items():
                found = self._tx.rows(
                    "seen_versions", user_id=user, entities=msgspec.json.encode(names).decode()
                )
                self._seen |= {(user, name): seen for name, seen in found}
        return self._seen.get((user_id, entity))

    def _is_taken(self, user_id: str, lane: str) -> bool:
        if (user_id, lane) in self._taken_lanes:
            return True
        if (user_id, lane) in self._known_lanes:
            return False
        return bool(self._tx.rows("lane_taken", user_id=user_id, lane=lane)[0][0])

    def _look_up_lanes(self, drafts: Sequence[Draft]) -> None:
        """Look up all lanes at once that follow from the entries alone."""
        lanes: dict[str, set[str]] = {}
        for draft in drafts:
            lane = _explicit_lane(draft)
            if lane is not None:
                lanes.setdefault(draft.new.user_id, set()).add(lane)
        for user_id, names in lanes.items():
            found = self._tx.rows(
                "lanes_taken", user_id=user_id, lanes=msgspec.json.encode(names).decode()
            )
            self._taken_lanes.update((user_id, row[0]) for row in found)
            self._known_lanes.update((user_id, name) for name in names)

    def _dependencies_of(self, draft: Draft, entry_id: str) -> Dependencies:
        if not _may_depend(draft):
            return _NO_DEPENDENCIES
        ref = EntryRef(
            entry_id,
            draft.new.user_id,
            draft.operation,
            draft.local_id,
            strict_order=draft.profile.strict_order,
        )
        batch = BatchIndex(self._members, self._dead_ids)
        refers_to = draft.request.refers_to
        return find_dependencies(self._tx, ref, draft.new.depends_on, refers_to, batch)

    def _check_id(self, entry_id: str) -> None:
        if entry_id in self._given_ids or self._tx.rows("get", id=entry_id):
            raise EntryInvalidError("id_must_be_unique", f"there is an entry {entry_id} already")
        self._given_ids.add(entry_id)

    def _check_order(self, drafts: Sequence[Draft]) -> None:
        """Raise if members depend on each other in a cycle; only forward references can."""
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
                (entry_id, (draft.new.user_id, _place_of(self._tx, draft).lane), parents)
                for entry_id, draft, parents in nodes
            )


def _same_request(known: Entry, queued: tuple[Any, ...], draft: Draft) -> Entry:
    """Return the entry that has or had this key, if its request was the same."""
    *about, payload = queued
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


# -- lanes and numbers ----------------------------------------------------------------------------


def _read_position(tx: Transaction, user_id: str, place: "_Place") -> tuple[int, bool, str | None]:
    """Return the user's last number, whether the lane is taken, and the version seen last."""
    found = tx.rows("place", user_id=user_id, lane=place.lane, entity=place.entity)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user", f"there is no user {user_id}: add_user first"
        )
    last, taken, seen = found[0]
    return last, bool(taken), seen


def _next_number(last: int, new: NewEntry) -> int:
    """Return the entry's sequence number: the next one, or its own if that is higher."""
    if new.sequence_number is None:
        return last + 1
    if new.sequence_number <= last:
        raise EntryInvalidError(
            "sequence_number_must_be_monotonic",
            f"sequence number {new.sequence_number} is not higher than the last one, {last}",
        )
    return new.sequence_number


class _Place(NamedTuple):
    """Where an entry belongs."""

    # Entries of one lane are sent in order; None is independent.
    lane: str | None
    # The entity whose version is checked; None for a create.
    entity: str | None


def _place_of(tx: Transaction, draft: Draft) -> _Place:
    """Return the lane and the entity of an entry.

    Entries about one entity share both. An entry about a part of it shares its lane, but has
    another version.
    """
    lane = _explicit_lane(draft)
    is_create, new = draft.operation is Operation.CREATE, draft.new
    if is_create and lane is not None:
        return _Place(lane, None)
    if is_create and draft.local_id is None and new.server_id is None:
        return _Place(None, None)
    entity, target = find_entity(
        tx,
        user_id=new.user_id,
        entity_type=new.entity_type,
        endpoint=draft.request.endpoint,
        local_id=draft.local_id,
        server_id=new.server_id,
    )
    return _Place(lane or entity, None if is_create else target)


def _explicit_lane(draft: Draft) -> str | None:
    """Return the lane if it follows from the entry alone, without reading the queue."""
    if draft.profile.strict_order:
        return draft.profile.name
    if draft.profile.is_strict_endpoint(draft.request.endpoint):
        return draft.profile.stream_name
    if draft.new.lane is not None:
        return draft.new.lane
    return None if draft.local_id is None else f"{draft.new.entity_type}/{draft.local_id}"


# -- rows -----------------------------------------------------------------------------------------


def _new_ids(tx: Transaction, drafts: Sequence[Draft]) -> list[str]:
    """Return an id for each draft; new ones ascend, because an index grows fastest at its end."""
    made = iter(sorted(new_id(tx.now) for draft in drafts if draft.new.id is None))
    return [draft.new.id or next(made) for draft in drafts]


def _new_entry(
    tx: Transaction,
    draft: Draft,
    dependencies: Dependencies,
    place: _Place,
    seen: str | None,
    **placed: Any,
) -> Entry:
    """Return the entry as it will be stored; ``placed`` has its id and number.

    Without a version of the app, it is based on the one that was seen last.
    """
    new = draft.new
    made_at = new.client_generated_at
    is_dead = dependencies.has_dead_parent
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
        status=Status.FAILED if is_dead else Status.PENDING,
        attempt_count=0,
        max_attempts=new.max_attempts,
        next_retry_at=None,
        last_error=None,
        last_error_code=None,
        dependency_ids=dependencies.dependency_ids,
        created_at=tx.now,
        synced_at=None,
        conflict_resolution=draft.conflict_resolution,
        priority=draft.priority,
        client_generated_at=tx.server_now() if made_at is None else made_at.astimezone(UTC),
        profile=draft.profile.name,
        reason=Reason.DEPENDENCY if is_dead else None,
        local_refs=dependencies.local_refs,
        payload_version=draft.payload_version,
        base=draft.base,
        base_version=draft.base_version or seen,
        theirs=None,
        theirs_version=None,
        conflict_fields=(),
        entity=place.entity,
        chain=draft.profile.chain_of(draft.request.endpoint, draft.request.payload),
        sent_version=None,
        lane=place.lane,
        left_lane=None,
        forced=False,
        outcome_unknown=False,
        claim_number=0,
        waiting_for=len(dependencies.awaited),
        enqueued_ms=tx.ms,
        once=draft.new.once,
        traceparent=draft.traceparent,
        **placed,
    )


def _row_of(tx: Transaction, entry: Entry, *, turn: bool) -> tuple[Any, ...]:
    """Return the parameters of ``insert_entry``, in its order."""
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
        tx.now_text,
        entry.conflict_resolution,
        entry.priority,
        tx.now_text if made_at is entry.created_at else instant(made_at),
        entry.profile,
        entry.reason,
        json_text(entry.local_refs),
        entry.payload_version,
        entry.base,
        entry.base_version,
        entry.entity,
        entry.chain,
        entry.lane,
        turn,
        entry.waiting_for,
        entry.enqueued_ms,
        entry.once,
        entry.traceparent,
    )


# -- coalescing -----------------------------------------------------------------------------------


class _Merge(msgspec.Struct, frozen=True):
    """A pending entry that takes a later change, and its request after that."""

    into: Entry
    operation: Operation
    payload: str | None


def _coalesce(
    tx: Transaction, draft: Draft, lane: str | None, dependencies: Dependencies
) -> Entry | None:
    """Merge a new entry into the queue; None if it has to be queued itself."""
    cancelled = _find_cancelled_creates(tx, draft, lane)
    if cancelled:
        for entry in reversed(cancelled):
            discarded = settle_unclaimed(tx, entry, Status.DISCARDED, Reason.COALESCED, None)
        return discarded
    merge = _find_merge(tx, draft, lane)
    if merge is None or not set(dependencies.local_refs) <= set(merge.into.local_refs):
        return None
    made_at = draft.new.client_generated_at
    tx.rows("keep_first_request", id=merge.into.id)
    found = tx.one(
        "merge_into",
        id=merge.into.id,
        operation=merge.operation.value,
        payload=merge.payload,
        client_generated_at=instant(made_at or tx.server_now()),
        local_refs=json_text(merge.into.local_refs),
        payload_version=draft.payload_version,
        young_ms=tx.ms - _MERGE_WITHIN_MS,
    )
    if found is not None:
        tx.emit(EventKind.MERGED, found)
    return found


def _find_merge(tx: Transaction, draft: Draft, lane: str | None) -> _Merge | None:
    """Return the update or patch at the end of the lane, if the new one can be merged into it."""
    is_named = draft.new.key is not None or draft.new.once is not None
    if lane is None or draft.operation not in _CHANGES or is_named:
        return None
    tail = tx.one("lane_tail", user_id=draft.new.user_id, lane=lane)
    if tail is None or tail.operation not in _CHANGES or not _never_claimed(tail):
        return None
    if (
        tail.endpoint != draft.request.endpoint
        or tail.headers != draft.request.headers
        or (draft.base_version is not None and tail.base_version != draft.base_version)
        or tail.profile != draft.profile.name
        or tail.conflict_resolution is not draft.conflict_resolution
        or tail.entity_type != draft.new.entity_type
        or draft.new.depends_on
        or _is_awaited(tx, tail)
    ):
        return None
    return _merged(tail, draft)


def _find_cancelled_creates(tx: Transaction, draft: Draft, lane: str | None) -> list[Entry]:
    """Return the entries that a delete cancels: the create of its entity and later changes."""
    if lane is None or draft.operation is not Operation.DELETE or draft.new.key is not None:
        return []
    rows = tx.entries("lane_open", user_id=draft.new.user_id, lane=lane, limit=_MAX_CANCELLED + 1)
    if not rows or len(rows) > _MAX_CANCELLED:
        return []
    first, *rest = rows
    if (
        first.operation is not Operation.CREATE
        or first.local_id is None
        or first.local_id != draft.local_id
        or any(
            entry.local_id != first.local_id or entry.operation not in _CHANGES for entry in rest
        )
        or not all(_never_claimed(entry) for entry in rows)
        or any(_is_awaited(tx, entry) for entry in rows)
    ):
        return []
    return rows


def _never_claimed(entry: Entry) -> bool:
    return entry.status is Status.PENDING and entry.claim_number == 0


def _is_awaited(tx: Transaction, entry: Entry) -> bool:
    return bool(tx.rows("is_awaited", id=entry.id, local=created_by(entry), lane=entry.lane))


def _merged(tail: Entry, draft: Draft) -> _Merge | None:
    """Return the two changes as one, if every server understands both forms alike."""
    new = draft.request.payload
    if draft.operation is Operation.UPDATE:
        # An update replaces the whole entity, so the earlier change has no effect.
        return _Merge(tail, Operation.UPDATE, new)
    if tail.payload is None or new is None:
        return None
    before, after = msgspec.json.decode(tail.payload), msgspec.json.decode(new)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return None
    # Servers differ in what a nested object or a null in a patch means: merged into the object
    # before or put in its place, removed or set. Where that matters they are not merged.
    if tail.operation is Operation.PATCH:
        unclear = any(isinstance(value, dict) and name in before for name, value in after.items())
    else:
        unclear = any(value is None or isinstance(value, dict) for value in after.values())
    if unclear:
        return None
    return _Merge(tail, tail.operation, msgspec.json.encode(before | after).decode())
