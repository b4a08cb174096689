"""Upkeep of a queue: age and server time, payloads of earlier versions, removal of what is old.

Settled entries are removed without notice. Failed entries and conflicts are a person's work, and a
mapping may still be in use in the app's own tables: their removal is announced by the event
``pruning``, and happens only if the announcement was long enough ago. Everything is removed in
small transactions, so that each takes milliseconds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final

import msgspec

from onceward_outbox.clock import update_from_server
from onceward_outbox.database import check_new_passphrase, rekey
from onceward_outbox.entries import Entries, QueueFile
from onceward_outbox.entry import Entry, Reason, Status, entry_of, json_text
from onceward_outbox.errors import EntryInvalidError, OutboxFileError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.resolution import Rewrite, park, settle_unclaimed
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction, Write
from onceward_outbox.validation import Request
from onceward_protocol.ids import new_uuid4
from onceward_protocol.local_ids import is_local_id

KEY_EXPIRED: Final = (
    "it was sent, no response came, and the server no longer knows its key: look whether it "
    "happened before you send it again"
)
"""Error of an entry whose outcome can no longer be found out."""

PRUNE_BATCH: Final = 500
"""Rows removed per commit."""

_PRUNE_INTERVAL_SECONDS: Final = 3600.0
_MAX_TRANSIT: Final = timedelta(minutes=10)
"""A request may reach the server this long after it was claimed."""

_WARN_EVERY_MS: Final = 86_400_000
_PAGE: Final = 200
_MIGRATION_BATCH: Final = 200
_SETTLED: Final = (Status.SUCCEEDED, Status.DISCARDED, Status.EXPIRED)
_strings = msgspec.json.Decoder(tuple[str, ...]).decode

_log = logging.getLogger(__name__)


class Maintenance(Entries):
    """The upkeep of a queue: the part of ``OutboxQueue`` that is about time and the file."""

    def __init__(self, file: QueueFile, passphrase: str | bytes | None) -> None:
        super().__init__(file)
        # Limits and times of this queue.
        self.settings = file.settings
        self._passphrase = passphrase
        self._prune_at = 0.0

    # ------------------------------------------------------------------ time and age

    def has_gap(self) -> bool:
        """Return whether the device was off for a time that is not known yet."""
        with self._read() as tx:
            return tx.clock.row.gap_ms is not None

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known, otherwise the device's."""
        with self._read() as tx:
            return tx.server_now()

    def learn_server_time(self, server_now: datetime) -> bool:
        """Store the ``Date`` of a response that the server has just sent.

        Cheap to call with every response: it is written only when it changes something. Returns
        whether the device was off for longer than was counted: entries are older than recorded.
        """
        with self._read() as tx:
            update = update_from_server(tx.clock, server_now)
        if update is None:
            return False
        with self._write("learn_server_time") as tx:
            update = update_from_server(tx.clock, server_now)
            if update is None:
                return False
            if update.missed_ms:
                for name in (
                    "shift_since",
                    "shift_aged",
                    "shift_signed_out",
                    "shift_settled",
                    "shift_maybe",
                ):
                    tx.rows(name, by_ms=update.missed_ms, since_ms=update.since_ms)
                tx.rows("shift_leases", by_ms=update.missed_ms)
            if update.gap_unknown:
                server_ms = update.row.server_ms
                tx.rows("age_maybe", ms=tx.ms, server_ms=server_ms, since_ms=update.since_ms)
            tx.set_clock(update.row)
            return update.missed_ms > 0

    def key_expired(self, entry: Entry) -> bool:
        """Return whether an entry may have happened, and its key no longer protects it.

        So much time has certainly passed since it was first sent that the server may have expired
        the key: sent again, it might happen a second time.
        """
        with self._read() as tx:
            found = tx.rows("maybe_since", id=entry.id)
            return bool(found) and _key_expired(tx, entry, found[0][0])

    def key_may_be_expired(self, entry: Entry) -> bool:
        """Like ``key_expired``, but by the wall clock, which a user can change.

        For when the time that the device was off is unknown.
        """
        with self._read() as tx:
            found = tx.rows("maybe_since", id=entry.id)
            if not found or found[0][1] is None:
                return False
            lifetime = _certain_lifetime(tx, entry)
            return lifetime is not None and tx.now - datetime.fromisoformat(found[0][1]) >= lifetime

    def expire_stale(self, user_id: str) -> list[Entry]:
        """Expire what has been pending for longer than the cap of its profile; park its dependents.

        Time spent waiting for a person's decision or for a sign-in does not count. If entries will
        pass the cap within 48 hours, an event ``expiring`` is emitted, once a day.

        Age is time that has certainly passed: by a clock that cannot be set while the device is
        on, and by the server's ``Date`` (``learn_server_time``) across the times when it was off.
        The wall clock is not used. Entries whose outcome is unknown are kept as long as the server
        certainly knows their keys.
        """
        with self._write("expire_stale") as tx:
            return expire_stale(tx, user_id, self.settings)

    def unsettled_at_end(self, user_id: str) -> tuple[int, int, bool]:
        """Return the counts of unsent and refused entries, and whether the user has to sign in."""
        with self._read() as tx:
            count, refused, signed_out_ms = tx.rows("count_unsettled", user_id=user_id)[0]
            return count - refused, refused, signed_out_ms is not None

    def note_sign_in(self, user_id: str, *, signed_in: bool) -> None:
        """Store whether a user has to sign in: entries do not age meanwhile."""
        with self._write("note_sign_in") as tx:
            since_ms = _signed_out_since(tx, user_id)
            if signed_in and since_ms is not None:
                tx.rows("skip_signed_out", user_id=user_id, ms=tx.ms, since_ms=since_ms)
            if (since_ms is None) is not signed_in:
                tx.rows("set_signed_out", user_id=user_id, ms=None if signed_in else tx.ms)

    # ------------------------------------------------------------------ removal

    def prune(self, *, limit: int | None = None) -> int:
        """Remove what succeeded 7 days ago and what was otherwise settled 30 days ago.

        Also failed entries, conflicts, mappings and versions of entities that are older than the
        settings say and that nothing refers to; the first three only if the event ``pruning`` has
        announced it. Works in small transactions; ``limit`` bounds how many entries are removed.
        Returns how many were.
        """
        removed = _prune_settled(self._write, self.settings, limit)
        for user_id in self.users():
            left = None if limit is None else limit - removed
            removed += _prune_stuck(self._write, self.settings, user_id, left)
            for step in (_prune_mappings, _prune_versions):
                _repeat(self._write, step, self.settings, user_id)
        return removed

    def prune_if_due(self) -> bool:
        """Prune a batch if the last check was an hour ago; returns whether there is more to prune.

        For idle time: it is cheap when called often, and prunes only if the oldest
        entries can be removed. Errors of the file are logged, and it is tried again in an hour.
        """
        if monotonic() < self._prune_at:
            return False
        self._prune_at = monotonic() + _PRUNE_INTERVAL_SECONDS
        try:
            with self._read() as tx:
                users = [user_id for (user_id,) in tx.rows("users")]
                is_due = any(_may_prune(tx, self.settings, user_id) for user_id in users)
                warned = [
                    user_id
                    for user_id in users
                    if tx.has_listeners and _expires_soon(tx, user_id, self.settings)
                ]
            for user_id in warned:
                with self._write("warn_of_expiry") as tx:
                    _warn_of_expiry(tx, user_id, self.settings)
            has_more = is_due and self.prune(limit=PRUNE_BATCH) == PRUNE_BATCH
        except OutboxFileError as error:
            _log.warning("nothing was pruned: %s", error)
            return False
        if has_more:
            self._prune_at = 0.0
        return has_more

    # ------------------------------------------------------------------ the file

    def users(self) -> list[str]:
        """Return the known users, sorted."""
        with self._read() as tx:
            return [str(row[0]) for row in tx.rows("users")]

    def change_passphrase(
        self, passphrase: str | bytes, *, allow_weak_passphrase: bool = False
    ) -> None:
        """Encrypt the file under another passphrase; a plain file opened with ``apsw`` too.

        No other process may have the file open: ``FileBusyError`` otherwise. A crash leaves the
        old passphrase or the new one, never a mixture. Needs free disk space of the file's size.
        A weak passphrase is refused as for a new file; see ``open``.
        """
        check_new_passphrase(passphrase, allow_weak=allow_weak_passphrase)
        with self._file.transactions.exclusive() as database:
            rekey(database, self._passphrase, passphrase)
            self._passphrase = passphrase

    def check_integrity(self) -> None:
        """Read the whole file and raise ``FileDamagedError`` if a part of it is damaged."""
        self._file.transactions.check_integrity()


# -- age ------------------------------------------------------------------------------------------


def _key_expired(tx: Transaction, entry: Entry, maybe_since_ms: int | None) -> bool:
    if maybe_since_ms is None:  # a person has checked, and wants it to be sent
        return False
    lifetime = _certain_lifetime(tx, entry)
    return lifetime is not None and maybe_since_ms <= tx.ago(lifetime)


def _certain_lifetime(tx: Transaction, entry: Entry) -> timedelta | None:
    """Return how long the server certainly knows the key; None if the profile is unknown."""
    profile = tx.profiles.find(entry.profile)
    return None if profile is None else profile.key_lifetime - _MAX_TRANSIT


def expire_stale(tx: Transaction, user_id: str, settings: QueueSettings) -> list[Entry]:
    """Expire what has been pending for longer than its cap, and warn of what soon will be.

    Entries that may have happened are kept as long as the server certainly knows their keys; those
    that wait for a person, and all while the user is signed out, do not expire.
    """
    expired: list[Entry] = []
    after, caps = 0, _caps(tx, settings)
    while True:
        page = tx.rows("pending_by_age", user_id=user_id, after=after, limit=_PAGE)
        for rowid, entry_id, profile, enqueued_ms, aged_ms in page:
            after = rowid
            if profile not in caps and tx.profiles.find(profile) is not None:
                caps = _caps(tx, settings)
            cap = caps.get(profile)
            if cap is not None and aged_ms < tx.ago(cap):
                if _signed_out_since(tx, user_id) is not None:
                    return expired
                expired += _expire_unless_kept(tx, entry_id)
            elif caps and enqueued_ms >= tx.ago(min(caps.values())):
                _warn_of_expiry(tx, user_id, settings)
                return expired
        if len(page) < _PAGE or not caps:
            return expired


def _expire_unless_kept(tx: Transaction, entry_id: str) -> list[Entry]:
    """Expire an entry, unless it waits for a person or may have happened."""
    entry = tx.entry(entry_id)
    # Parked when an earlier one expired, or behind one that a person has to decide about.
    if entry.status is not Status.PENDING or _waits_for_person(tx, entry):
        return []
    if not entry.outcome_unknown:
        return [settle_unclaimed(tx, entry, Status.EXPIRED, Reason.STALE, None)]
    if _key_expired(tx, entry, tx.rows("maybe_since", id=entry.id)[0][0]):
        return [settle_unclaimed(tx, entry, Status.EXPIRED, Reason.STALE, KEY_EXPIRED)]
    return []


def _caps(tx: Transaction, settings: QueueSettings) -> dict[str, timedelta]:
    """Return the caps of the profiles that have one, by name."""
    return {
        profile.name: cap
        for profile in tx.profiles.loaded()
        if (cap := settings.stale_after or profile.stale_after) is not None
    }


def _signed_out_since(tx: Transaction, user_id: str) -> int | None:
    found = tx.rows("signed_out", user_id=user_id)
    return found[0][0] if found else None


def _waits_for_person(tx: Transaction, entry: Entry) -> bool:
    """Return whether a pending entry waits for one that is failed or in conflict."""
    seen, waiting = {entry.id}, [entry]
    while waiting:
        one = waiting.pop()
        if one.status in {Status.FAILED, Status.CONFLICT}:
            return True
        before = [] if one.status is not Status.PENDING else _waited_for(tx, one)
        waiting += [each for each in before if each.id not in seen]
        seen.update(each.id for each in before)
    return False


def _waited_for(tx: Transaction, entry: Entry) -> list[Entry]:
    """Return the first entry of the lane of an entry, and those that it depends on."""
    found = []
    if entry.lane is not None:
        found += tx.entries("lane_open", user_id=entry.user_id, lane=entry.lane, limit=1)
    for (name,) in tx.rows("awaited_by", id=entry.id) if entry.waiting_for else ():
        parent_id = name
        if "/" in name:
            local_id = name.rpartition("/")[2]
            parent_id = tx.rows("local_state", user_id=entry.user_id, local_id=local_id)[0][1]
        found += [] if parent_id is None else [tx.entry(parent_id)]
    return found


def _expires_soon(tx: Transaction, user_id: str, settings: QueueSettings) -> bool:
    """Return whether the user's oldest pending entry may expire soon."""
    found, caps = tx.rows("oldest_unsent", user_id=user_id)[0][0], _caps(tx, settings)
    return bool(caps) and (
        found is not None and found < tx.ago(min(caps.values()) - settings.warn_before)
    )


def _warn_of_expiry(tx: Transaction, user_id: str, settings: QueueSettings) -> None:
    """Emit ``expiring`` if entries pass the cap soon; once a day, and only if it is listened to."""
    if not tx.has_listeners or not _expires_soon(tx, user_id, settings):
        return
    counts: Counter[str] = Counter()
    ages, delays = [], []
    for profile, cap in _caps(tx, settings).items():
        since, before = tx.ago(cap), tx.ago(cap - settings.warn_before)
        for entity_type, count, oldest in tx.rows(
            "expiring", user_id=user_id, profile=profile, since=since, before=before
        ):
            counts[entity_type] += count
            ages.append((tx.ms - oldest) / 1000)
            delays.append((oldest - since) / 1000)
    if not ages or not tx.rows("warn", user_id=user_id, ms=tx.ms, before=tx.ms - _WARN_EVERY_MS):
        return
    tx.events.append(
        Event(
            kind=EventKind.EXPIRING,
            at=tx.now,
            user_id=user_id,
            age_seconds=max(ages),
            delay_seconds=min(delays),
            count=counts.total(),
            counts=dict(counts),
        )
    )


# -- payloads of earlier versions of the app ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PayloadMigration:
    """The app's format, and a function that migrates an older entry to it.

    ``migrate`` gets each entry whose ``payload_version`` is lower. If it raises, that entry becomes
    ``failed`` with reason ``migration``; the others are migrated.

    Entries that were never sent keep their key. Those that were sent and got a response get a new
    one, because the server may know the old one with the old payload. Those sent without a response
    stay as they are: only the same key and body can find out their outcome; they are migrated at a
    later opening.
    """

    # The version of the app's payload format now.
    version: int
    # Rewrites one entry of an older version.
    migrate: Callable[[Entry], Rewrite]
    # The largest payload after the migration.
    max_payload_bytes: int = 1_048_576


def migrate_payloads(write: Write, migration: PayloadMigration) -> int:
    """Migrate all older entries; returns how many were read.

    Works in small transactions, and continues where it was interrupted.
    """
    count, after, more = 0, 0, True
    while more:
        with write("migrate_payloads") as tx:
            page = tx.entries(
                "outdated_payloads", after=after, version=migration.version, limit=_MIGRATION_BATCH
            )
            for entry in page:
                _migrate(tx, entry, migration)
            if page:
                after = tx.rows("rowid_of", id=page[-1].id)[0][0]
            count += len(page)
            more = len(page) == _MIGRATION_BATCH
    return count


def _migrated_request(tx: Transaction, entry: Entry, migration: PayloadMigration) -> Request:
    request = migration.migrate(entry).applied_to(tx, entry, migration.max_payload_bytes)
    if request.refers_to.placeholders - set(entry.local_refs):
        raise EntryInvalidError(
            "dependency_ids_must_exist_in_queue",
            "a migrated payload cannot refer to other local ids than before",
        )
    return request


def _migrate(tx: Transaction, entry: Entry, migration: PayloadMigration) -> None:
    try:
        request = _migrated_request(tx, entry, migration)
    except Exception as error:  # noqa: BLE001 - the app's own code may raise anything
        if entry.status is Status.PENDING:
            why = f"{type(error).__name__}: {error}"
            park(tx, entry.id, reason=Reason.MIGRATION, error=why)
        return
    tx.rows(
        "migrated_payload",
        id=entry.id,
        payload=request.payload,
        headers=json_text(request.headers),
        endpoint=request.endpoint,
        key=entry.idempotency_key if entry.claim_number == 0 else new_uuid4(),
        local_refs=json_text(entry.local_refs),
        version=migration.version,
    )


# -- pruning --------------------------------------------------------------------------------------


def _may_prune(tx: Transaction, settings: QueueSettings, user_id: str) -> bool:
    """Return whether there is something to announce, or the oldest of something can be removed."""
    for status in _SETTLED:
        oldest = tx.rows("oldest_settled", user_id=user_id, status=status.value)[0][0]
        if oldest is not None and oldest <= tx.ago(_kept_for(settings, status)):
            return True
    if settings.keep_failed is not None and tx.rows(
        "has_stuck",
        user_id=user_id,
        stuck_notice=tx.ago(settings.keep_failed - settings.prune_notice),
        stuck_before=tx.ago(settings.keep_failed),
        noticed_before=tx.ago(settings.prune_notice),
    ):
        return True
    if tx.rows("has_mappings", user_id=user_id, **_mapping_times(tx, settings)):
        return True
    before = tx.ago(settings.keep_versions)
    return bool(tx.rows("has_versions", user_id=user_id, seen_before=before))


def _prune_settled(write: Write, settings: QueueSettings, limit: int | None) -> int:
    removed = 0
    for status in _SETTLED:
        position, has_more = 0, True
        while has_more and (limit is None or removed < limit):
            size = PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - removed)
            with write("prune") as tx:
                before = tx.ago(_kept_for(settings, status))
                page = tx.rows(
                    "prunable",
                    status=status.value,
                    after=position,
                    settled_before=before,
                    limit=size,
                )
                _remove(tx, [entry_of(row[1:]) for row in page])
                if page:
                    tx.rows("forget_bodies", before=before)
            removed += len(page)
            has_more = len(page) == size
            position = page[-1][0] if page else position
    return removed


def _kept_for(settings: QueueSettings, status: Status) -> timedelta:
    return settings.keep_succeeded if status is Status.SUCCEEDED else settings.keep_settled


def _prune_stuck(write: Write, settings: QueueSettings, user_id: str, limit: int | None) -> int:
    """Announce and remove failed entries and conflicts; returns how many were removed."""
    if settings.keep_failed is None:
        return 0
    _repeat(write, _announce_stuck, settings, user_id)
    removed, has_more = 0, True
    while has_more and (limit is None or removed < limit):
        with write("prune") as tx:
            # Those that others depend on follow in the next round.
            page = tx.entries(
                "prunable_stuck",
                user_id=user_id,
                limit=PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - removed),
                stuck_before=tx.ago(settings.keep_failed),
                noticed_before=tx.ago(settings.prune_notice),
            )
            for entry in page:
                settle_unclaimed(tx, entry, Status.DISCARDED, Reason.STALE, None)
            _remove(tx, page)
        removed += len(page)
        has_more = bool(page)
    return removed


def _announce_stuck(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    assert settings.keep_failed is not None  # noqa: S101 - checked by the caller
    noted = tx.rows("note_stuck", user_id=user_id, ms=tx.ms, limit=PRUNE_BATCH)
    found = tx.entries(
        "announce_stuck",
        user_id=user_id,
        ms=tx.ms,
        stuck_before=tx.ago(settings.keep_failed - settings.prune_notice),
        limit=PRUNE_BATCH,
    )
    for entry in found:
        tx.emit(EventKind.PRUNING, entry, delay_seconds=settings.prune_notice.total_seconds())
    return len(noted) + len(found)


def _remove(tx: Transaction, entries: Sequence[Entry]) -> None:
    """Delete entries, and emit how many of each user."""
    for entry in entries:
        tx.rows("raise_floor", user_id=entry.user_id, sequence_number=entry.sequence_number)
        tx.rows("forget_awaited", id=entry.id)
        tx.rows("remove", id=entry.id)
        names = _names_in(entry.local_id, entry.local_refs, entry.lane, entry.left_lane)
        if names:
            tx.rows("use_mappings", user_id=entry.user_id, ms=tx.ms, local_ids=_json(names))
    for user_id, count in Counter(entry.user_id for entry in entries).items():
        tx.events.append(Event(kind=EventKind.PRUNED, at=tx.now, user_id=user_id, count=count))


def _prune_mappings(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    """Announce and remove mappings that no entry refers to; returns how many were changed."""
    noted = len(tx.rows("note_mappings", user_id=user_id, ms=tx.ms, limit=PRUNE_BATCH))
    times = _mapping_times(tx, settings)
    found = tx.rows("old_mappings", user_id=user_id, limit=PRUNE_BATCH, **times)
    if not found:
        return noted
    used: set[str] = set()
    for local_id, refs, *lanes in tx.rows("referring", user_id=user_id):
        used |= _names_in(local_id, _strings(refs) if refs else (), *lanes)
    changes: dict[str, list[str]] = {
        "use_mappings": [name for name, _ in found if name in used],
        "announce_mappings": [name for name, known in found if not known and name not in used],
        "remove_mappings": [name for name, known in found if known and name not in used],
    }
    for name, local_ids in changes.items():
        params: dict[str, Any] = {} if name == "remove_mappings" else {"ms": tx.ms}
        if local_ids:
            tx.rows(name, user_id=user_id, local_ids=_json(local_ids), **params)
    if changes["announce_mappings"]:
        tx.events.append(
            Event(
                kind=EventKind.PRUNING,
                at=tx.now,
                user_id=user_id,
                delay_seconds=settings.prune_notice.total_seconds(),
                count=len(changes["announce_mappings"]),
                detail="id mappings",
            )
        )
    return noted + len(found)


def _mapping_times(tx: Transaction, settings: QueueSettings) -> dict[str, int]:
    return {
        "used_notice": tx.ago(settings.keep_mappings - settings.prune_notice),
        "used_before": tx.ago(settings.keep_mappings),
        "noticed_before": tx.ago(settings.prune_notice),
    }


def _names_in(local_id: str | None, local_refs: Iterable[str], *lanes: str | None) -> set[str]:
    """Return the local ids that an entry refers to; its lane may be named after one."""
    names = {*local_refs}
    if local_id is not None:
        names.add(local_id)
    for lane in lanes:
        names.update(part for part in (lane or "").split("/") if is_local_id(part))
    return names


def _prune_versions(tx: Transaction, settings: QueueSettings, user_id: str) -> int:
    before = tx.ago(settings.keep_versions)
    return len(tx.rows("prune_versions", user_id=user_id, seen_before=before, limit=PRUNE_BATCH))


def _repeat(
    write: Write,
    step: Callable[[Transaction, QueueSettings, str], int],
    settings: QueueSettings,
    user_id: str,
) -> None:
    """Repeat a step, each time in a transaction of its own, until it changes nothing."""
    changed = True
    while changed:
        with write("prune") as tx:
            changed = step(tx, settings, user_id) > 0


def _json(names: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(names)).decode()
