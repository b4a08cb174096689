"""What waits for what: dependencies, references to local ids, and what happens when a parent dies.

All walks are loops or recursive queries with a queue: a chain of any length costs no stack.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from holdfast.core.local_ids import References
from holdfast.core.outbox_entry import Entry, Operation, Status
from holdfast.errors import EntryInvalidError
from holdfast.outbox.events import EventKind
from holdfast.outbox.rows import awaited_local, created_by
from holdfast.outbox.unit import Unit

__all__ = [
    "Members",
    "Subject",
    "Waits",
    "check_acyclic",
    "free_dependents",
    "park_dependents",
    "revive_dependents",
    "waits_of",
]

DEAD: Final = frozenset({Status.FAILED, Status.DISCARDED, Status.EXPIRED})
"""A parent in one of these leads to no success by itself."""

_EXIST: Final = "dependency_ids_must_exist_in_queue"
_ACYCLIC: Final = "dependency_ids_must_not_be_cyclic"


class Waits(NamedTuple):
    """What an entry has to wait for."""

    dependency_ids: tuple[str, ...]
    local_refs: tuple[str, ...]
    # As entry_waits names them; none that is met already.
    awaited: tuple[str, ...]
    # One of them is dead: the entry is parked at once.
    doomed: bool


class Members(NamedTuple):
    """Entries that are written in the same transaction, and cannot be found in the queue yet."""

    # Ids, and local ids that they make, each with the id of its entry.
    ids: Mapping[str, str] = MappingProxyType({})
    doomed: Container[str] = ()


class Subject(msgspec.Struct, frozen=True):
    """The entry whose waits are looked for."""

    id: str
    user_id: str
    operation: Operation
    local_id: str | None
    strict_order: bool


def waits_of(
    unit: Unit,
    subject: Subject,
    depends_on: Sequence[str],
    refers_to: References,
    batch: Members,
) -> Waits:
    """Find out what an entry waits for, or raise ``EntryInvalidError``."""
    ids: dict[str, None] = {}
    awaited: dict[str, None] = {}
    doomed = False
    for wanted in depends_on:
        found, status = _parent(unit, subject, wanted, batch)
        if found is not None:
            ids[found] = None
            if status is not Status.SUCCEEDED:
                awaited[found] = None
                doomed = doomed or status in DEAD or found in batch.doomed
    refs = _local_refs(unit, subject, refers_to, batch)
    for local_id in refs:
        if local_id in batch.ids:
            awaited[awaited_local(subject.user_id, local_id)] = None
            doomed = doomed or batch.ids[local_id] in batch.doomed
            continue
        server_id, _, status_text = unit.rows(
            "local_state", user_id=subject.user_id, local_id=local_id
        )[0]
        if server_id is None:
            if status_text is None and subject.strict_order:
                raise EntryInvalidError(
                    _EXIST,
                    f"nothing that was queued makes the local id {local_id}, and what is queued "
                    "later cannot be sent before this entry",
                )
            awaited[awaited_local(subject.user_id, local_id)] = None
            doomed = doomed or status_text in DEAD
    return Waits(tuple(ids), refs, tuple(awaited), doomed)


def _parent(unit: Unit, subject: Subject, wanted: str, batch: Members) -> tuple[str | None, Status]:
    """Return the entry that is meant by an id or a local id; None if a mapping says it is done."""
    # An update's own local id means the entry that creates the entity, which is another one.
    makes = subject.local_id if subject.operation is Operation.CREATE else None
    if wanted in (subject.id, makes):
        raise EntryInvalidError(_ACYCLIC, "an entry cannot depend on itself")
    if wanted in batch.ids:
        return batch.ids[wanted], Status.PENDING
    found = unit.rows("status_of", id=wanted, user_id=subject.user_id)
    if found:
        return wanted, Status(found[0][0])
    server_id, maker, status = unit.rows("local_state", user_id=subject.user_id, local_id=wanted)[0]
    if maker is not None:
        return maker, Status.SUCCEEDED if server_id is not None else Status(status)
    if server_id is not None:
        return None, Status.SUCCEEDED
    raise EntryInvalidError(_EXIST, f"there is no entry {wanted} of this user to depend on")


def _local_refs(
    unit: Unit, subject: Subject, refers_to: References, batch: Members
) -> tuple[str, ...]:
    """Return the local ids in the request that stand for server ids.

    Which of the UUIDs in it are local ids is decided now, once: every send has the same body.
    """
    makes = subject.local_id if subject.operation is Operation.CREATE else None
    if makes in refers_to.placeholders:
        raise EntryInvalidError(_ACYCLIC, "a create cannot hold the server's id of what it creates")
    refs = set(refers_to.placeholders)
    unsure = refers_to.candidates - refs - {makes}
    if unsure:
        refs.update(local_id for local_id in unsure if local_id in batch.ids)
        known = unit.rows(
            "known_locals",
            user_id=subject.user_id,
            candidates=msgspec.json.encode(sorted(unsure)).decode(),
        )
        refs.update(row[0] for row in known)
    return tuple(sorted(refs))


def check_acyclic(
    entries: Iterable[tuple[str, tuple[str, str | None], Iterable[str]]],
) -> None:
    """Refuse a batch that could never be sent: (id, user and lane, ids it waits for), in order.

    The order within a lane counts as a dependency too.
    """
    followers: dict[str, list[str]] = {}
    open_count: dict[str, int] = {}
    last_in_lane: dict[tuple[str, str | None], str] = {}
    for entry_id, lane, parents in entries:
        before = set(parents)
        if lane[1] is not None:
            if lane in last_in_lane:
                before.add(last_in_lane[lane])
            last_in_lane[lane] = entry_id
        open_count[entry_id] = len(before)
        for parent in before:
            followers.setdefault(parent, []).append(entry_id)
    free = [entry_id for entry_id, count in open_count.items() if count == 0]
    gone = 0
    while free:
        gone += 1
        for follower in followers.get(free.pop(), ()):
            open_count[follower] -= 1
            if open_count[follower] == 0:
                free.append(follower)
    if gone < len(open_count):
        raise EntryInvalidError(
            _ACYCLIC, "these entries wait for each other, so none of them could ever be sent"
        )


def free_dependents(unit: Unit, *, entry: str | None = None, local: str | None = None) -> None:
    """Count down those that wait for what has just happened: an entry, a mapping, or both."""
    freed = unit.rows("meet_waits", entry=entry, local=local)
    if freed:
        unit.many("count_down", freed)


def park_dependents(unit: Unit, parent: Entry) -> list[Entry]:
    """Park all that wait for an entry that will not succeed, directly or not."""
    parked = unit.entries("park_dependents", id=parent.id, local=created_by(parent))
    for child in parked:
        unit.tell(EventKind.FAILED, child, detail=f"it depends on {parent.id}")
    return parked


def revive_dependents(unit: Unit, parent: Entry) -> list[Entry]:
    """Bring back those that were parked because of an entry that is in the queue again."""
    revived: list[Entry] = []
    back = [parent]
    while back:
        entry = back.pop()
        children = unit.entries("revive_dependents", id=entry.id, local=created_by(entry))
        for child in children:
            unit.tell(EventKind.REVIVED, child)
        revived += children
        back += children
    return revived
