"""Claim entries for sending, in the caller's transaction, and name the process that holds them.

The name of a process is its pid. On Linux it also has when that process was started, and the boot
and namespaces in which these numbers hold. Elsewhere a claim ends with its lease.

A profile names the endpoints whose server has ``ordering="strict"``. Their entries share a lane:
one request or batch of them is outstanding, and an unknown outcome holds the rest. An entry gets
its number with the claim before its first send, and keeps it on every retry. If the profile numbers
on demand, a stream begins when the server refuses a request because it has no number.
"""

import os
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from onceward_outbox.entry import Claimed, Entry, awaited_local, created_by, entry_of
from onceward_outbox.errors import ClaimLostError
from onceward_outbox.events import EventKind
from onceward_outbox.profile import Profile
from onceward_outbox.transaction import Transaction
from onceward_outbox.transport import Response
from onceward_protocol.ids import new_uuid4
from onceward_protocol.operation import Operation
from onceward_protocol.sequence import MAX_SEQUENCE, SEQUENCE_HEADER, SequenceNumber

# -- numbers of strict sequences -------------------------------------------------------------------


VIOLATION_CODES: Final = frozenset({"ORDERING_VIOLATION", "sequence.violation"})
OUTCOME_UNKNOWN: Final = "outcome_unknown"
"""The error of an entry whose number the server has used for it, and whose response is lost."""

_BAD_REQUEST: Final = 400
_UNPROCESSABLE: Final = 422


class Violation(msgspec.Struct, frozen=True):
    """Details of a number that the server refuses."""

    # The number that the server expects next.
    expected: int
    # The number to send the entry with; None if it may have happened, so that it must not be sent.
    number: int | None
    # The server cannot have used this number, or a higher one.
    is_gap: bool


def number_claim(tx: Transaction, entry: Entry, profile: Profile | None) -> SequenceNumber | None:
    """Return the number to send an entry with, a new one if it has none; None for no number."""
    if profile is None or not profile.is_strict_endpoint(entry.endpoint):
        return None
    stream = {"user_id": entry.user_id, "stream": profile.stream_name}
    found = tx.rows("find_stream", **stream)
    if not found and profile.numbers_on_demand:
        return None
    if not found:
        begin_stream(tx, entry)
        found = tx.rows("find_stream", **stream)
    client_id, number, _ = found[0]
    known = tx.rows("number_of", id=entry.id)
    if known:
        return SequenceNumber(client_id, known[0][0])
    tx.rows("take_number", id=entry.id, number=number, **stream)
    tx.rows("set_next_number", number=number + 1, **stream)
    return SequenceNumber(client_id, number)


def begin_stream(tx: Transaction, entry: Entry) -> None:
    """Give numbers to the entry and those behind it, from their next claim on."""
    tx.rows("begin_stream", client_id=new_uuid4(), **_stream_of(tx, entry))


def requires_number(response: Response) -> bool:
    """Return whether the server has refused a request because it has no number."""
    if response.status != _BAD_REQUEST:
        return False
    required = _details_of(response).get("required_headers")
    return isinstance(required, list) and SEQUENCE_HEADER in required


def acknowledge(tx: Transaction, claimed: Claimed, http_status: int | None) -> None:
    """Note that the server has used a number. A success that it reports as an error has none."""
    is_success = http_status is not None and 200 <= http_status < 300  # noqa: PLR2004
    if claimed.sequence is not None and is_success:
        tx.rows("acknowledge", number=claimed.sequence.number, **_stream_of(tx, claimed.entry))


def renumber(tx: Transaction, claimed: Claimed, violation: Violation) -> Entry:
    """Give an entry the number that the server asks for. Its claim has ended.

    Entries behind it lose theirs, and get new ones when they are claimed again.
    """
    assert claimed.sequence is not None  # noqa: S101 - the server has refused its number
    entry = claimed.entry
    stream = _stream_of(tx, entry)
    note_rewind(tx, claimed, violation)
    if violation.number is None:
        return entry
    tx.rows("take_number", id=entry.id, number=violation.number, **stream)
    above = claimed.sequence.number if violation.is_gap else MAX_SEQUENCE
    if violation.number == violation.expected:
        tx.rows("forget_later_numbers", id=entry.id, above=above, **stream)
        tx.rows("set_next_number", number=violation.expected + 1, **stream)
    return tx.changed("not_happened", id=entry.id)


def note_rewind(tx: Transaction, claimed: Claimed, violation: Violation) -> None:
    """Report that the server has lost numbers that it had acknowledged."""
    stream = _stream_of(tx, claimed.entry)
    acknowledged = tx.rows("find_stream", **stream)[0][2]
    if violation.expected <= acknowledged:
        tx.rows("rewind", number=violation.expected - 1, **stream)
        tx.emit(
            EventKind.SERVER_REWOUND,
            claimed.entry,
            detail=f"the server expects {violation.expected}, after it has acknowledged "
            f"{acknowledged}",
        )


def read_violation(response: Response, sent: SequenceNumber) -> Violation | None:
    """Return the facts of a 422 about a number; None for every other response."""
    if response.status != _UNPROCESSABLE or response.code not in VIOLATION_CODES:
        return None
    details = _details_of(response)
    expected = _number(details.get("expected"))
    if expected is None:
        return None
    key_number = _number(details.get("key_sequence"))
    is_gap = sent.number > expected
    used_by = details.get("used_by")
    number: int | None = None
    if key_number is not None and key_number != sent.number:
        number = key_number  # the key was used with it: the replay says what happened
    elif used_by == "other_key" or (used_by is None and is_gap):
        number = expected
    return Violation(expected, number, is_gap)


def _details_of(response: Response) -> dict[str, Any]:
    body = response.json()
    details = body.get("details") if isinstance(body, dict) else None
    return details if isinstance(details, dict) else {}


def _stream_of(tx: Transaction, entry: Entry) -> dict[str, Any]:
    profile = tx.profiles.get(entry.profile)
    return {"user_id": entry.user_id, "stream": profile.stream_name}


def _number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 1 <= value <= MAX_SEQUENCE else None


# -- claims ----------------------------------------------------------------------------------------


_PROC: Final = Path("/proc")
_FIELDS: Final = 4


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries to claim."""

    user_id: str
    limit: int
    # The claims are for one request: also what waits for others of the same request.
    in_batch: bool = False
    skip_profiles: Iterable[str] = ()
    # Templates of endpoints, see ``path_template``.
    held_paths: Iterable[str] = ()


def claim_some(
    tx: Transaction, wanted: Wanted, *, lease_seconds: float, worker: str
) -> list[Claimed]:
    """Claim the next entries of a user, in the order in which to send them.

    First the heads of their lanes; if there are fewer than the limit, also those behind them, as
    far as only the one before blocks them. For a batch also those that wait for others, as far as
    nothing blocks them but entries of this batch.
    """
    user_id = wanted.user_id
    holder = {
        "claimed_by": worker,
        "now": tx.now_text,
        "ms": tx.ms,
        "lease_ms": tx.ms + int(lease_seconds * 1000),
    }
    # Parameters of statements that leave out profiles and endpoints.
    skip = {
        "skip": msgspec.json.encode(sorted(wanted.skip_profiles)).decode(),
        "held": _patterns(wanted.held_paths),
    }
    versions: dict[str, str] = {}

    def claim(name: str, **params: Any) -> list[Entry]:
        rows = tx.rows(name, **params, **holder)
        versions.update((row[0], row[-1]) for row in rows if row[-1])
        return [entry_of(row[:-1]) for row in rows]

    tx.rows("promote_due", user_id=user_id, ms=tx.ms)
    entries = claim("claim_some", user_id=user_id, limit=wanted.limit, **skip)
    left = wanted.limit - len(entries)
    search = _Search(tx, wanted, entries, skip) if entries and left > 0 else None
    ids = [] if search is None else search.find(left)
    if search is None or not ids:
        # Heads of lanes block none of the others.
        entries.sort(key=_rank)
    else:
        entries += claim("claim_behind", ids=msgspec.json.encode(ids).decode())
        entries = _in_send_order(user_id, entries, search.waits)
    found = []
    for entry in entries:
        tx.emit(EventKind.CLAIMED, entry)
        sequence = number_claim(tx, entry, tx.profiles.find(entry.profile))
        version = versions.get(entry.id)
        found.append(Claimed(entry, entry.claim_number, lease_seconds, version, sequence=sequence))
    return found


def renew(tx: Transaction, claimed: Claimed) -> None:
    """Restart the lease. Raises ``ClaimLostError``."""
    lease_ms = tx.ms + int(claimed.lease_seconds * 1000)
    if not tx.rows("renew", id=claimed.entry.id, number=claimed.number, lease_ms=lease_ms):
        raise lost(claimed)


def lost(claimed: Claimed) -> ClaimLostError:
    """Return the error of a claim that is over."""
    return ClaimLostError(
        f"claim {claimed.number} of {claimed.entry.id} is over: its lease expired or it was ended"
    )


def _patterns(paths: Iterable[str]) -> str:
    """Return each path template with a pattern of the paths that have more segments."""
    patterns = [(path, "*/" * (path.count("/") + 1) + "*") for path in sorted(paths)]
    return msgspec.json.encode(patterns).decode()


# -- what can be sent behind the heads of lanes ---------------------------------------------------


class _Candidate(msgspec.Struct, frozen=True):
    id: str
    operation: str
    local_id: str | None
    lane: str | None
    entity: str | None
    is_ready: bool
    awaited: tuple[str, ...]


class _Search:
    """Looks for entries that could be sent if those before them had succeeded."""

    def __init__(
        self, tx: Transaction, wanted: Wanted, heads: list[Entry], skip: dict[str, str]
    ) -> None:
        self._tx = tx
        self._user_id = wanted.user_id
        self._in_batch = wanted.in_batch
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
        for head in self._heads:
            if head.lane is not None:
                self._read_lane(head.lane, head.sequence_number, left)
        while len(self._found) < left:
            before = len(self._found)
            for lane in list(self._behind):
                self._take_from(lane, left)
            if self._in_batch:
                self._take_awaiting(left)
            if len(self._found) == before:
                break
        return list(self._found)

    def _read_lane(self, lane: str, sequence_number: int, left: int) -> None:
        rows = self._tx.rows(
            "behind",
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
            "awaiting",
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
        if not candidate.is_ready or not self._may_wait_for(candidate.awaited):
            return False
        entity = candidate.entity
        if entity is not None and self._in_batch:
            if self._entities.get(entity, candidate.lane) != candidate.lane:
                return False  # edits of one entity in two lanes: one after the other
            self._entities[entity] = candidate.lane
        self._found[candidate.id] = None
        if candidate.awaited:
            self.waits[candidate.id] = candidate.awaited
        creates = candidate.operation == Operation.CREATE and candidate.local_id is not None
        local = awaited_local(self._user_id, candidate.local_id or "") if creates else None
        self._provide(candidate.id, local)
        return True

    def _may_wait_for(self, awaited: tuple[str, ...]) -> bool:
        return not awaited or (self._in_batch and self._provided.issuperset(awaited))

    def _provide(self, entry_id: str, local: str | None) -> None:
        names = [entry_id] if local is None else [entry_id, local]
        self._provided.update(names)
        self._new += names


def _candidate(row: tuple[Any, ...]) -> _Candidate:
    entry_id, operation, local_id, lane, entity, is_ready, awaited = row
    names = () if awaited == "[]" else msgspec.json.decode(awaited, type=tuple[str, ...])
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
    for entry in sorted(entries, key=attrgetter("sequence_number")):
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


# -- the process that holds a claim ---------------------------------------------------------------


def claim_holder() -> str:
    """Return the name of this process as the holder of claims."""
    return _holder(os.getpid())


def has_ended(holder: str) -> bool:
    """Return whether the process is known to have ended. False if it is not certain."""
    fields, own = holder.split("/"), claim_holder().split("/")
    if len(fields) != _FIELDS or fields[2:] != own[2:] or not fields[0].isdigit():
        return False
    pid, started = fields[:2]
    try:
        # Not by /proc, which may hide the processes of other users.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it lives, and belongs to another user
        pass
    found = _started(int(pid))
    return found is not None and found != started


@lru_cache(maxsize=1)
def _holder(pid: int) -> str:
    started, context = _started(pid), _context()
    return f"{pid}" if started is None or context is None else f"{pid}/{started}/{context}"


def _context() -> str | None:
    """Return where pids and start times mean the same: the boot, and the namespaces."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # In containers that share a file, a pid is that of another process, or of none.
        pids = (_PROC / "self/ns/pid").readlink()
    except (OSError, ValueError):
        return None
    try:
        times = str((_PROC / "self/ns/time").readlink())
    except OSError:  # before Linux 5.6
        times = "-"
    return f"{boot}/{pids}+{times}"


def _started(pid: int) -> str | None:
    """Return when a process was started, in ticks since the boot; None if it is not known."""
    try:
        before, _, after = (_PROC / f"{pid}/stat").read_text(encoding="latin-1").rpartition(")")
    except OSError:
        return None
    # The name of the program is in parentheses, and may contain anything. The start is field 22.
    values = after.split()
    return values[19] if before.startswith(f"{pid} (") and len(values) > 19 else None  # noqa: PLR2004
