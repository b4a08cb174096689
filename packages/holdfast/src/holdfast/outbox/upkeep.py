"""Keeping house: the server's time, what is too old, what may go, and how much is there."""

from datetime import datetime, timedelta
from typing import Final

import msgspec

from holdfast.core.outbox_entry import DEFAULT_PROFILE_NAME, Entry, Reason, Status
from holdfast.errors import UnsentEntriesError
from holdfast.outbox.events import Event, EventKind
from holdfast.outbox.hands import put_aside
from holdfast.outbox.profile import FORMER_DEFAULT_NAME
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.time_keeping import learn
from holdfast.outbox.unit import Unit

__all__ = [
    "MAYBE",
    "PRUNE_BATCH",
    "Place",
    "Stats",
    "adopt_default_profile",
    "expire_stale",
    "is_forgotten",
    "is_news",
    "learn_server_time",
    "prune",
    "purge_user",
    "seems_forgotten",
    "stats",
]

PRUNE_BATCH: Final = 500
"""Entries removed per commit: the disk is busy for milliseconds, not for seconds."""

MAYBE: Final = (
    "it was sent, no answer came, and by now the server has forgotten its key: look whether it "
    "happened before you send it again"
)
"""What a person is told about an entry that nobody can ask for any more."""

_ON_ITS_WAY: Final = timedelta(minutes=10)
"""A request may be on its way for so long after it was claimed."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_PAGE: Final = 200
_PRUNED: Final = (Status.SUCCEEDED, Status.DISCARDED, Status.EXPIRED)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """How the queue stands."""

    # By status; every status is there.
    counts: dict[Status, int]
    # Pending entries that could be claimed now.
    ready: int
    # Pending entries that wait for their next try.
    waiting: int
    # Pending entries behind another one in their lane, or behind what they depend on.
    blocked: int
    # Seconds since the oldest pending entry was queued, as far as is certain.
    oldest_pending_seconds: float | None
    # Bytes of the file and its log.
    file_bytes: int

    @property
    def unsent(self) -> int:
        """Entries that are not settled."""
        return sum(
            self.counts[status]
            for status in (Status.PENDING, Status.IN_FLIGHT, Status.FAILED, Status.CONFLICT)
        )


class Place:
    """Where a pruning has got to, so that no batch looks at the same rows again."""

    def __init__(self) -> None:
        """Begin at the beginning."""
        self.statuses = list(_PRUNED)
        self.after = 0

    @property
    def done(self) -> bool:
        """Whether everything was looked at."""
        return not self.statuses


def adopt_default_profile(unit: Unit) -> None:
    """Give entries from before schema version 4 a profile that exists.

    They have the name that was then the default. If that name is registered, they keep it;
    otherwise they were queued by an app that named no profile, and become ``default``. Decided
    once per file, at the first opening after the upgrade.
    """
    if not unit.rows("former_default_unchecked"):
        return
    if unit.rows("has_profile", profile=FORMER_DEFAULT_NAME) and (
        unit.profiles.find(FORMER_DEFAULT_NAME) is None
    ):
        unit.rows("rename_profile", old=FORMER_DEFAULT_NAME, new=DEFAULT_PROFILE_NAME)
    unit.rows("former_default_checked")


def is_forgotten(unit: Unit, entry: Entry) -> bool:
    """Say whether an entry may have happened so long ago that its key no longer protects it."""
    found = unit.rows("maybe_since", id=entry.id)
    return bool(found) and _is_forgotten(unit, entry, found[0][0])


def seems_forgotten(unit: Unit, entry: Entry) -> bool:
    """Say the same by the device's clock: for when nobody says how long the device was off."""
    found = unit.rows("maybe_since", id=entry.id)
    if not found or found[0][1] is None:
        return False
    remembered = _remembered(unit, entry)
    return remembered is not None and unit.now - datetime.fromisoformat(found[0][1]) >= remembered


def _is_forgotten(unit: Unit, entry: Entry, maybe_since_ms: int | None) -> bool:
    if maybe_since_ms is None:  # a person has looked, and wants it to be sent
        return False
    remembered = _remembered(unit, entry)
    return remembered is not None and unit.ms - maybe_since_ms >= remembered // _MILLISECOND


def _remembered(unit: Unit, entry: Entry) -> timedelta | None:
    """Return how long the server certainly knows the key; None if the profile is not registered."""
    profile = unit.profiles.find(entry.profile)
    return None if profile is None else profile.key_lifetime - _ON_ITS_WAY


def expire_stale(unit: Unit, user_id: str, cap: timedelta) -> list[Entry]:
    """Expire what has been pending for longer than the cap.

    What may have happened is asked for again as long as the server is certain to remember its key.
    """
    limit = unit.ms - int(cap.total_seconds() * 1000)
    expired: list[Entry] = []
    after = 0
    while True:
        page = unit.rows("pending_by_age", user_id=user_id, after=after, limit=_PAGE)
        for rowid, entry_id, enqueued_ms, outcome_unknown, maybe_since_ms in page:
            if enqueued_ms >= limit:
                return expired
            after = rowid
            entry = unit.entry(entry_id)
            if entry.status is not Status.PENDING:  # one expired before has parked it
                continue
            if not outcome_unknown:
                expired.append(put_aside(unit, entry, Status.EXPIRED, Reason.STALE, None))
            elif _is_forgotten(unit, entry, maybe_since_ms):
                expired.append(put_aside(unit, entry, Status.EXPIRED, Reason.STALE, MAYBE))
        if len(page) < _PAGE:
            return expired


def is_news(unit: Unit, server_now: datetime) -> bool:
    """Say whether the server's time tells something that is not known."""
    return learn(unit.moment, server_now) is not None


def learn_server_time(unit: Unit, server_now: datetime) -> bool:
    """Take the server's time, and fill the gap before it if there is one; says whether it did."""
    learnt = learn(unit.moment, server_now)
    if learnt is None:
        return False
    if learnt.missed_ms:
        unit.rows("shift_since", by_ms=learnt.missed_ms, since_ms=learnt.since_ms)
        unit.rows("shift_settled", by_ms=learnt.missed_ms, since_ms=learnt.since_ms)
        unit.rows("shift_maybe", by_ms=learnt.missed_ms, since_ms=learnt.since_ms)
        unit.rows("shift_leases", by_ms=learnt.missed_ms)
    if learnt.is_blind:
        unit.rows("age_maybe", ms=unit.ms, server_ms=learnt.row.server_ms, since_ms=learnt.since_ms)
    unit.set_clock(learnt.row)
    return learnt.missed_ms > 0


def prune(unit: Unit, settings: QueueSettings, place: Place, size: int) -> int:
    """Remove up to ``size`` entries that were settled long enough ago, and move on."""
    status = place.statuses[0]
    keep = settings.keep_succeeded if status is Status.SUCCEEDED else settings.keep_settled
    page = unit.rows(
        "prunable",
        status=status.value,
        after=place.after,
        settled_before=unit.ms - int(keep.total_seconds() * 1000),
        limit=size,
    )
    for rowid, entry_id, user_id, sequence_number in page:
        unit.rows("raise_floor", user_id=user_id, sequence_number=sequence_number)
        unit.rows("forget_awaited", id=entry_id)
        unit.rows("remove", id=entry_id)
        place.after = rowid
    if len(page) < size:
        place.statuses.pop(0)
        place.after = 0
    if page:
        unit.events.append(Event(kind=EventKind.PRUNED, at=unit.now, count=len(page)))
    return len(page)


def purge_user(unit: Unit, user_id: str, *, force: bool) -> int:
    """Remove a user and all that is theirs."""
    unsent = unit.rows("count_unsent", user_id=user_id)[0][0]
    if unsent and not force:
        raise UnsentEntriesError(
            f"{user_id} has {unsent} entries that are not settled; they would be lost",
            unsent=unsent,
        )
    unit.rows("purge_waits", user_id=user_id)
    unit.rows("purge_attempts", user_id=user_id)
    removed = len(unit.rows("purge_entries", user_id=user_id))
    unit.rows("purge_mappings", user_id=user_id)
    unit.rows("purge_user", user_id=user_id)
    unit.events.append(Event(kind=EventKind.PURGED, at=unit.now, user_id=user_id, count=removed))
    return removed


def stats(unit: Unit, user_id: str | None) -> Stats:
    """Count what is there."""
    counts = dict.fromkeys(Status, 0)
    users: set[str] = set()
    for owner, status, count in unit.rows("counts", user_id=user_id):
        counts[Status(status)] += count
        users.add(owner)
    ready = unit.rows("count_ready", user_id=user_id)[0][0]
    in_back_off, due = unit.rows("count_waiting", user_id=user_id, ms=unit.ms)[0]
    oldest = [
        found[0][0]
        for owner in users
        if (found := unit.rows("oldest_unsent", user_id=owner))[0][0] is not None
    ]
    return Stats(
        counts=counts,
        ready=ready + due,
        waiting=in_back_off - due,
        blocked=counts[Status.PENDING] - ready - in_back_off,
        oldest_pending_seconds=(unit.ms - min(oldest)) / 1000 if oldest else None,
        file_bytes=unit.file_bytes(),
    )
