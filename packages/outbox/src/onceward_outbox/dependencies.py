"""Dependencies between entries, references to local ids, and what follows when a parent fails.

All traversals are loops or recursive queries: a chain of any length uses no stack.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from onceward_outbox.entry import Entry, OnRefusal, Status, awaited_local, created_by
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.events import EventKind
from onceward_outbox.transaction import Transaction
from onceward_protocol.local_ids import References
from onceward_protocol.operation import Operation

_DEAD: Final = frozenset({Status.FAILED, Status.DISCARDED, Status.EXPIRED})
"""A parent in one of these statuses will not succeed unless someone acts."""

_LAST: Final = "$[#-1]"
_BEFORE_LAST: Final = "$[#-2]"
"""Positions in the list of versions that this device has produced."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

# Path segments with a digit look like ids; the version of an API does not.
_HAS_DIGIT: Final = re.compile(r"^(?!v[0-9]+$).*[0-9]")

_EXIST: Final = "dependency_ids_must_exist_in_queue"
_ACYCLIC: Final = "dependency_ids_must_not_be_cyclic"


class Dependencies(NamedTuple):
    """Dependencies of an entry."""

    dependency_ids: tuple[str, ...]
    local_refs: tuple[str, ...]
    # What is not met yet, as entry_waits names it.
    awaited: tuple[str, ...]
    # The entry is parked at once.
    has_dead_parent: bool


class EntryRef(msgspec.Struct, frozen=True):
    """The entry whose dependencies are looked up."""

    id: str
    user_id: str
    operation: Operation
    local_id: str | None
    strict_order: bool

    @property
    def creates(self) -> str | None:
        """The local id that it creates."""
        return self.local_id if self.operation is Operation.CREATE else None


def find_dependencies(
    tx: Transaction,
    entry: EntryRef,
    depends_on: Sequence[str],
    refers_to: References,
    later: Mapping[str, str] = _NONE,
) -> Dependencies:
    """Look up what an entry depends on, or raise ``EntryInvalidError``.

    ``later`` are entries of the same transaction that are not written yet: their ids by id and by
    the local id that they create.
    """
    ids: dict[str, None] = {}
    awaited: dict[str, None] = {}
    dead = False
    for wanted in depends_on:
        found, status = _parent(tx, entry, wanted, later)
        if found is not None:
            ids[found] = None
            if status is not Status.SUCCEEDED:
                awaited[found] = None
                dead = dead or status in _DEAD
    refs = _local_refs(tx, entry, refers_to, later)
    for local_id in refs:
        if local_id in later:
            awaited[awaited_local(entry.user_id, local_id)] = None
            continue
        server_id, _, status_text = tx.rows(
            "local_state", user_id=entry.user_id, local_id=local_id
        )[0]
        if server_id is None:
            if status_text is None and entry.strict_order:
                raise EntryInvalidError(
                    _EXIST,
                    f"no queued entry creates the local id {local_id}, and in strict order a later "
                    "entry cannot be sent before this one",
                )
            awaited[awaited_local(entry.user_id, local_id)] = None
            dead = dead or status_text in _DEAD
    return Dependencies(tuple(ids), refs, tuple(awaited), dead)


def _parent(
    tx: Transaction, entry: EntryRef, wanted: str, later: Mapping[str, str]
) -> tuple[str | None, Status]:
    """Return the entry that an id or a local id means; None if only a mapping is left of it."""
    # An update's own local id means the entry that creates the entity, which is another one.
    if wanted in (entry.id, entry.creates):
        raise EntryInvalidError(_ACYCLIC, "an entry cannot depend on itself")
    if wanted in later:
        return later[wanted], Status.PENDING
    found = tx.rows("status_of", id=wanted, user_id=entry.user_id)
    if found:
        return wanted, Status(found[0][0])
    server_id, creator, status = tx.rows("local_state", user_id=entry.user_id, local_id=wanted)[0]
    if creator is not None:
        return creator, Status.SUCCEEDED if server_id is not None else Status(status)
    if server_id is not None:
        return None, Status.SUCCEEDED
    raise EntryInvalidError(_EXIST, f"there is no entry {wanted} of this user to depend on")


def _local_refs(
    tx: Transaction, entry: EntryRef, refers_to: References, later: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the local ids in the request that are replaced by server ids.

    Which UUIDs are local ids is decided here, once, so that every send has the same body.
    """
    if entry.creates in refers_to.placeholders:
        raise EntryInvalidError(_ACYCLIC, "a create cannot hold the server's id of what it creates")
    refs = set(refers_to.placeholders)
    unsure = refers_to.candidates - refs - {entry.creates}
    if unsure:
        refs.update(local_id for local_id in unsure if local_id in later)
        known = tx.rows(
            "known_locals",
            user_id=entry.user_id,
            candidates=msgspec.json.encode(sorted(unsure)).decode(),
        )
        refs.update(row[0] for row in known)
    return tuple(sorted(refs))


def check_acyclic(
    entries: Iterable[tuple[str, tuple[str, str | None], Iterable[str]]],
) -> None:
    """Raise for a batch that could never be sent: (id, user and lane, ids of parents), in order.

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
    visited = 0
    while free:
        visited += 1
        for follower in followers.get(free.pop(), ()):
            open_count[follower] -= 1
            if open_count[follower] == 0:
                free.append(follower)
    if visited < len(open_count):
        raise EntryInvalidError(
            _ACYCLIC, "these entries wait for each other, so none of them could ever be sent"
        )


def free_dependents(tx: Transaction, *, entry: str | None = None, local: str | None = None) -> None:
    """Mark an entry, a mapping or both as met, and count down what waits for them."""
    freed = tx.rows("meet_waits", entry=entry, local=local)
    if freed:
        tx.many("count_down", freed)


def park_dependents(tx: Transaction, parent: Entry) -> list[Entry]:
    """Park all entries that depend on one that will not succeed, directly or indirectly."""
    parked = tx.entries("park_dependents", id=parent.id, local=created_by(parent))
    for child in parked:
        tx.emit(EventKind.FAILED, child, detail=f"it depends on {parent.id}")
        leave_lane(tx, child)
    return parked


def bind_chain(tx: Transaction, refused: Entry) -> None:
    """Make the later entries of a chain depend on one that the server refuses."""
    if refused.chain is None:
        return
    found = tx.rows(
        "chain_behind",
        user_id=refused.user_id,
        chain=refused.chain,
        sequence_number=refused.sequence_number,
    )
    for (entry_id,) in found:
        if tx.rows("bind", awaited=refused.id, entry_id=entry_id):
            tx.rows("count_up", id=entry_id)


def leave_lane(tx: Transaction, entry: Entry) -> Entry:
    """Let the lane of a failed entry go on without it, unless its profile stops the lane."""
    profile = tx.profiles.find(entry.profile)
    stops = profile is not None and profile.on_refusal is OnRefusal.STOP
    if entry.lane is None or stops:
        return entry
    tx.rows("leave_lane", id=entry.id)
    tx.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)
    return msgspec.structs.replace(entry, lane=None, left_lane=entry.lane)


def step_aside(tx: Transaction, entry: Entry) -> Entry:
    """Let the strict order of a user go on without an entry that is sent again later.

    Only a create that is in no chain: what refers to the entity it creates waits for its id. Later
    changes of one entity, and the next entries of a chain, would overtake it.
    """
    profile = tx.profiles.find(entry.profile)
    may_be_overtaken = entry.operation is Operation.CREATE and entry.chain is None
    goes_on = (
        profile is not None and profile.strict_order and (profile.on_refusal is OnRefusal.CONTINUE)
    )
    if entry.lane is None or not may_be_overtaken or not goes_on:
        return entry
    aside = tx.changed("step_aside", id=entry.id)
    tx.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)
    return aside


def rejoin_lane(tx: Transaction, entry: Entry) -> Entry:
    """Return an entry that is pending again to the lane it had left, at its old position."""
    if entry.left_lane is None:
        return entry
    has_turn = tx.rows(
        "yield_turn",
        user_id=entry.user_id,
        lane=entry.left_lane,
        sequence_number=entry.sequence_number,
    )
    return keep_version(tx, tx.changed("rejoin_lane", id=entry.id, has_turn=bool(has_turn)))


def keep_version(tx: Transaction, back: Entry) -> Entry:
    """Let an edit that came back name the version it was made on, if a later one has overtaken it.

    The server then reports a conflict, and the newer edit is not overwritten.
    """
    if is_overtaken(tx, back):
        return tx.changed("keep_version", id=back.id, before=_BEFORE_LAST)
    if _has_later_edit(tx, back, "being_overtaken"):
        return tx.changed("keep_version", id=back.id, before=_LAST)
    return back


def is_overtaken(tx: Transaction, entry: Entry) -> bool:
    """Return whether a later edit of the same entity has succeeded while this one had failed."""
    return _has_later_edit(tx, entry, "overtaken")


def _has_later_edit(tx: Transaction, entry: Entry, query: str) -> bool:
    if entry.entity is None or entry.lane is None:
        return False
    found = tx.rows(
        query,
        user_id=entry.user_id,
        lane=entry.lane,
        entity=entry.entity,
        sequence_number=entry.sequence_number,
    )
    return bool(found)


def revive_dependents(tx: Transaction, parent: Entry) -> list[Entry]:
    """Return parked entries to ``pending`` whose parent is in the queue again."""
    revived: list[Entry] = []
    back = [parent]
    while back:
        entry = back.pop()
        children = tx.entries("revive_dependents", id=entry.id, local=created_by(entry), ms=tx.ms)
        children = [rejoin_lane(tx, child) for child in children]
        for child in children:
            tx.emit(EventKind.REVIVED, child)
        revived += children
        back += children
    return revived


# -- the entity that an entry is about -------------------------------------------------------------


def find_entity(
    tx: Transaction,
    *,
    user_id: str,
    entity_type: str,
    endpoint: str,
    local_id: str | None,
    server_id: str | int | None,
) -> tuple[str, str]:
    """Return the name of the entity, and of what the path names: the entity or a part of it.

    Both are the same for all entries about one entity, whichever of its ids they use. An entry
    about a part of the entity, such as ``/notes/5/pin``, names another thing, with its own version.
    """
    path = endpoint.partition("?")[0]
    text = _entity_in(path) if server_id is None else str(server_id)
    named = local_id
    if named is None:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
        found = tx.rows("local_of_server_id", user_id=user_id, text=text, number=number)
        named = found[0][0] if found else text
    entity = f"{entity_type}/{named}"
    return entity, entity + _part_in(path, str(named), text)


def _part_in(path: str, *names: str) -> str:
    """Return the path below the entity: ``/pin`` in ``/notes/5/pin``, often nothing."""
    parts = path.rstrip("/").split("/")
    for place in range(len(parts) - 1, -1, -1):
        if parts[place].removeprefix("{local:").removesuffix("}") in names:
            return "".join(f"/{part}" for part in parts[place + 1 :])
    return ""


def _entity_in(path: str) -> str:
    """Return the id of the entity in a path: ``5`` in ``/notes/5`` and in ``/notes/5/pin``."""
    parts = path.split("/")
    named = (part for part in reversed(parts) if _HAS_DIGIT.search(part))
    return next(named, parts[-1])
