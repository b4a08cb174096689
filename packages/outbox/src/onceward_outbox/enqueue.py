"""Enqueueing: give entries a lane and a number and write them, or merge them into earlier ones.

Coalescing never reorders: it changes only entries that were never claimed, only at the end of a
lane, and only those that no entry of another lane waits for.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from typing import Any, Final, NamedTuple

import msgspec

from onceward_outbox.dependencies import (
    Dependencies,
    EntryRef,
    check_acyclic,
    find_dependencies,
    find_entity,
    park_dependents,
)
from onceward_outbox.entry import Entry, NewEntry, Reason, Status, created_by, instant, json_text
from onceward_outbox.errors import EntryInvalidError, QueueFullError
from onceward_outbox.events import EventKind
from onceward_outbox.resolution import settle_unclaimed
from onceward_outbox.transaction import Transaction
from onceward_outbox.validation import Draft, check_name
from onceward_protocol.fingerprint import canonical_json
from onceward_protocol.ids import new_id
from onceward_protocol.operation import Operation

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
        if last < self._limits.get(user_id, self._max):
            return
        entries = tx.rows("count_open", user_id=user_id)[0][0]
        if entries >= self._max:
            raise QueueFullError(
                f"the queue of {user_id} has {entries} unsettled entries, the maximum: send or "
                "discard some first"
            )
        self._limits[user_id] = last + self._max - entries


def add_user(tx: Transaction, user_id: str) -> None:
    """Add a user if it does not exist."""
    check_name(user_id, "user_id_must_reference_existing_user", "user_id")
    tx.rows("add_user", user_id=user_id, added_at=tx.now_text)


def enqueue(tx: Transaction, draft: Draft, quota: QueueQuota, *, coalesce: bool) -> Entry:
    """Write one entry, or merge it into an earlier one."""
    new = draft.new
    is_simple = new.key is None and new.id is None and new.once is None and not _may_depend(draft)
    if coalesce or not is_simple:
        return enqueue_many(tx, [draft], quota, coalesce=coalesce)[0]
    # As most are: it can be written without reading other entries.
    return _write(tx, draft, quota, new_id(tx.now), _place_of(tx, draft))


def enqueue_many(
    tx: Transaction, drafts: Sequence[Draft], quota: QueueQuota, *, coalesce: bool
) -> list[Entry]:
    """Write entries in this order; they may depend on each other in any order."""
    # New ids ascend, because an index grows fastest at its end.
    made = iter(sorted(new_id(tx.now) for draft in drafts if draft.new.id is None))
    members = [(draft, draft.new.id or next(made)) for draft in drafts]
    names = _names_of(members)
    if names:
        _check_order(tx, members, names)
    later = dict(names)
    entries: list[Entry] = []
    dead: list[Entry] = []
    for draft, entry_id in members:
        for name in _own_names(draft, entry_id):
            later.pop(name, None)
        entry = _add(tx, draft, entry_id, quota, later, coalesce=coalesce)
        entries.append(entry)
        if entry.id == entry_id and entry.status is Status.FAILED:
            dead.append(entry)
    # Members may have been added before the dead one that they depend on.
    for entry in dead if names else ():
        park_dependents(tx, entry)
    return entries


def _may_depend(draft: Draft) -> bool:
    refers_to = draft.request.refers_to
    return bool(draft.new.depends_on or refers_to.placeholders or refers_to.candidates)


def _own_names(draft: Draft, entry_id: str) -> Iterator[str]:
    """Yield the names by which another member may depend on this one."""
    yield entry_id
    if draft.local_id is not None and draft.operation is Operation.CREATE:
        yield draft.local_id


def _names_of(members: Sequence[tuple[Draft, str]]) -> dict[str, str]:
    """Return the ids of entries by their names; empty if none depends on another."""
    if len(members) == 1 or not any(_may_depend(draft) for draft, _ in members):
        return {}
    return {name: entry_id for draft, entry_id in members for name in _own_names(draft, entry_id)}


def _add(
    tx: Transaction,
    draft: Draft,
    entry_id: str,
    quota: QueueQuota,
    later: Mapping[str, str],
    *,
    coalesce: bool,
) -> Entry:
    """Write one entry.

    Returns another one if that has its key or its ``once`` already, or takes its change. ``later``
    are the ids of members that are not written yet.
    """
    new = draft.new
    known = _find_known(tx, draft)
    if known is not None:
        return known
    place = _place_of(tx, draft)
    dependencies = _NO_DEPENDENCIES
    if _may_depend(draft):
        is_strict = draft.profile.strict_order
        ref = EntryRef(entry_id, new.user_id, draft.operation, draft.local_id, is_strict)
        dependencies = find_dependencies(tx, ref, new.depends_on, draft.request.refers_to, later)
    if coalesce and not dependencies.has_dead_parent:
        merged = _coalesce(tx, draft, place.lane, dependencies)
        if merged is not None:
            return merged
    if new.id is not None and tx.rows("get", id=entry_id):
        raise EntryInvalidError("id_must_be_unique", f"there is an entry {entry_id} already")
    entry = _write(tx, draft, quota, entry_id, place, dependencies=dependencies)
    if dependencies.awaited:
        tx.many("insert_wait", [(awaited, entry_id) for awaited in dependencies.awaited])
    if dependencies.has_dead_parent:
        tx.emit(EventKind.FAILED, entry, detail="an entry it depends on will not succeed")
    return entry


def _write(
    tx: Transaction,
    draft: Draft,
    quota: QueueQuota,
    entry_id: str,
    place: "_Place",
    *,
    dependencies: Dependencies = _NO_DEPENDENCIES,
) -> Entry:
    """Give an entry its number and write it."""
    user_id = draft.new.user_id
    found = tx.rows("place", user_id=user_id, lane=place.lane, entity=place.entity)
    if not found:
        raise EntryInvalidError(
            "user_id_must_reference_existing_user", f"there is no user {user_id}: add_user first"
        )
    last, is_taken, seen = found[0]
    number = _next_number(last, draft.new)
    quota.check(tx, user_id, last)
    entry = _new_entry(tx, draft, dependencies, place, seen, id=entry_id, sequence_number=number)
    tx.run("insert_entry", _row_of(tx, entry, turn=not is_taken))
    tx.emit(EventKind.ENQUEUED, entry)
    return entry


def _find_known(tx: Transaction, draft: Draft) -> Entry | None:
    """Return the entry that has the key of a new one, or its ``once``."""
    new = draft.new
    if new.key is not None:
        # First what the key was given for, if the entry was merged or has another key since.
        for changed, *before in tx.rows("former_key", key=draft.key):
            return _same_request(tx.entry(changed), tuple(before), draft)
        known = tx.one("by_key", key=draft.key)
        if known is not None:
            queued = (known.user_id, known.operation.value, known.endpoint, known.payload)
            return _same_request(known, queued, draft)
    return None if new.once is None else tx.one("by_once", user_id=new.user_id, once=new.once)


def _check_order(
    tx: Transaction, members: Sequence[tuple[Draft, str]], names: Mapping[str, str]
) -> None:
    """Raise if members depend on each other in a cycle; only forward references can."""
    nodes, seen, has_forward = [], set[str](), False
    for draft, entry_id in members:
        refers_to = draft.request.refers_to
        own = draft.local_id if draft.operation is Operation.CREATE else None
        wanted = {*draft.new.depends_on, *refers_to.placeholders, *refers_to.candidates} - {own}
        parents = {names[name] for name in wanted if name in names}
        seen.add(entry_id)
        has_forward = has_forward or not parents <= seen
        nodes.append((entry_id, draft, parents))
    if has_forward:
        check_acyclic(
            (entry_id, (draft.new.user_id, _place_of(tx, draft).lane), parents)
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
        max_attempts=new.max_attempts,
        dependency_ids=dependencies.dependency_ids,
        created_at=tx.now,
        conflict_resolution=draft.conflict_resolution,
        priority=draft.priority,
        client_generated_at=tx.server_now() if made_at is None else made_at.astimezone(UTC),
        profile=draft.profile.name,
        reason=Reason.DEPENDENCY if is_dead else None,
        local_refs=dependencies.local_refs,
        payload_version=draft.payload_version,
        base=draft.base,
        base_version=draft.base_version or seen,
        entity=place.entity,
        chain=draft.profile.chain_of(draft.request.endpoint, draft.request.payload),
        lane=place.lane,
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
