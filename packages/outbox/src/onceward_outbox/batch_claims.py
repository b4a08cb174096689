"""Claim entries that travel in one request, with those that wait for others of the same request."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import msgspec

from onceward_outbox.claims import Claiming
from onceward_outbox.entry import Claimed, Entry
from onceward_outbox.sql import awaited_local, created_by
from onceward_outbox.transaction import Transaction
from onceward_protocol.operation import Operation

__all__ = ["claim_batch"]


def claim_batch(
    tx: Transaction,
    user_id: str,
    *,
    limit: int,
    lease_seconds: float,
    worker: str,
    skip_profiles: Iterable[str] = (),
    held_paths: Iterable[str] = (),
) -> list[Claimed]:
    """Claim the next entries of a user, in the order in which to send them.

    First the heads of their lanes; if there are fewer than ``limit``, also those behind them and
    those that wait for them, as far as nothing blocks them but entries of this batch.
    """
    claiming = Claiming(
        tx,
        lease_seconds=lease_seconds,
        worker=worker,
        skip_profiles=skip_profiles,
        held_paths=held_paths,
    )
    heads = claiming.claim_heads(user_id, limit)
    left = limit - len(heads)
    search = _Search(tx, user_id, heads, claiming.skip)
    ids = search.find(left) if heads and left > 0 else []
    entries = heads + (claiming.claim_behind(ids) if ids else [])
    return claiming.claimed(_in_send_order(user_id, entries, search.waits))


class _Candidate(msgspec.Struct, frozen=True):
    id: str
    operation: str
    local_id: str | None
    lane: str | None
    entity: str | None
    is_ready: bool
    awaited: tuple[str, ...]


class _Search:
    """Looks for entries that could be sent if those of the batch before them had succeeded."""

    def __init__(
        self, tx: Transaction, user_id: str, heads: list[Entry], skip: dict[str, str]
    ) -> None:
        self._tx = tx
        self._user_id = user_id
        self._skip = skip
        # What the success of the batch brings, as entry_waits names it; and what is new in it.
        self._provided: set[str] = set()
        self._new: list[str] = []
        self._entities: dict[str, str | None] = {}
        self._found: dict[str, None] = {}
        # By lane: the entries behind the last one that was taken.
        self._behind: dict[str, list[_Candidate]] = {}
        # By entry: what it waits for.
        self.waits: dict[str, tuple[str, ...]] = {}
        self._heads = heads
        for head in heads:
            self._provide(head.id, created_by(head))
            if head.entity is not None:
                self._entities[head.entity] = head.lane

    def find(self, left: int) -> list[str]:
        """Return the ids of up to ``left`` entries."""
        for head in self._heads:
            if head.lane is not None:
                self._read_lane(head.lane, head.sequence_number, left)
        while len(self._found) < left:
            before = len(self._found)
            for lane in list(self._behind):
                self._take_from(lane, left)
            self._take_awaiting(left)
            if len(self._found) == before:
                break
        return list(self._found)

    def _read_lane(self, lane: str, sequence_number: int, left: int) -> None:
        rows = self._tx.rows(
            "behind_in_batch",
            user_id=self._user_id,
            lane=lane,
            sequence_number=sequence_number,
            limit=left,
            **self._skip,
        )
        if rows:
            self._behind[lane] = [_candidate(row) for row in rows]

    def _take_from(self, lane: str, left: int) -> None:
        """Take entries of a lane in order, up to the first that cannot be taken."""
        waiting = self._behind[lane]
        while waiting and len(self._found) < left and self._take(waiting[0]):
            waiting.pop(0)
        if not waiting or not waiting[0].is_ready:
            del self._behind[lane]

    def _take_awaiting(self, left: int) -> None:
        """Take heads of other lanes that wait for what is new in the batch."""
        names, self._new = self._new, []
        if not names:
            return
        rows = self._tx.rows(
            "awaiting_in_batch",
            user_id=self._user_id,
            names=msgspec.json.encode(names).decode(),
            limit=left,
            **self._skip,
        )
        for candidate in map(_candidate, rows):
            if len(self._found) >= left or candidate.id in self._found:
                continue
            if self._take(candidate) and candidate.lane is not None:
                number = self._tx.entry(candidate.id).sequence_number
                self._read_lane(candidate.lane, number, left)

    def _take(self, candidate: _Candidate) -> bool:
        if not candidate.is_ready or not self._provided.issuperset(candidate.awaited):
            return False
        entity = candidate.entity
        if entity is not None and self._entities.get(entity, candidate.lane) != candidate.lane:
            return False  # edits of one entity in two lanes: one after the other
        self._found[candidate.id] = None
        if entity is not None:
            self._entities[entity] = candidate.lane
        if candidate.awaited:
            self.waits[candidate.id] = candidate.awaited
        creates = candidate.operation == Operation.CREATE and candidate.local_id is not None
        local = awaited_local(self._user_id, candidate.local_id or "") if creates else None
        self._provide(candidate.id, local)
        return True

    def _provide(self, entry_id: str, local: str | None) -> None:
        names = [entry_id] if local is None else [entry_id, local]
        self._provided.update(names)
        self._new += names


def _candidate(row: tuple[Any, ...]) -> _Candidate:
    entry_id, operation, local_id, lane, entity, is_ready, awaited = row
    names = msgspec.json.decode(awaited, type=tuple[str, ...])
    return _Candidate(entry_id, operation, local_id, lane, entity, bool(is_ready), names)


def _in_send_order(
    user_id: str, entries: list[Entry], waits: dict[str, tuple[str, ...]]
) -> list[Entry]:
    """Return the order in which single claims would come if each send succeeds."""
    by_id = {entry.id: entry for entry in entries}
    before = _blockers(user_id, entries, waits)
    followers: dict[str, list[str]] = {}
    for entry_id, blockers in before.items():
        for blocker in blockers:
            followers.setdefault(blocker, []).append(entry_id)
    ready = [_rank(by_id[entry_id]) for entry_id, blockers in before.items() if not blockers]
    heapify(ready)
    order = []
    while ready:
        entry = by_id[heappop(ready)[2]]
        order.append(entry)
        for follower in followers.get(entry.id, ()):
            before[follower].discard(entry.id)
            if not before[follower]:
                heappush(ready, _rank(by_id[follower]))
    return order


def _blockers(
    user_id: str, entries: list[Entry], waits: dict[str, tuple[str, ...]]
) -> dict[str, set[str]]:
    """Return by entry the ids of those that have to be sent before it."""
    providers = {entry.id: entry.id for entry in entries}
    lanes: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: each.sequence_number):
        if entry.operation is Operation.CREATE and entry.local_id is not None:
            providers[awaited_local(user_id, entry.local_id)] = entry.id
        if entry.lane is not None:
            lanes.setdefault(entry.lane, []).append(entry)
    before: dict[str, set[str]] = {entry.id: set() for entry in entries}
    for members in lanes.values():
        for first, second in pairwise(members):
            before[second.id].add(first.id)
    for entry_id, names in waits.items():
        before[entry_id].update(providers[name] for name in names)
    return before


def _rank(entry: Entry) -> tuple[int, int, str]:
    return -entry.priority, entry.sequence_number, entry.id
