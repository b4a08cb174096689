"""Maintenance of the queue: server time, expiry, purging, files of earlier versions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from onceward_outbox.clock import update_from_server
from onceward_outbox.entry import Entry, Reason, Status
from onceward_outbox.errors import EntryInvalidError, UnsentEntriesError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.resolution import Rewrite, park, settle_unclaimed
from onceward_outbox.settings import QueueSettings
from onceward_outbox.sql import json_text
from onceward_outbox.transaction import Transaction
from onceward_outbox.validation import Request
from onceward_protocol.ids import new_uuid4

__all__ = [
    "KEY_EXPIRED",
    "PayloadMigration",
    "expire_stale",
    "expires_soon",
    "key_expired",
    "key_may_be_expired",
    "learn_server_time",
    "migrate_payloads",
    "purge_user",
    "warn_of_expiry",
]

Write = Callable[[str], AbstractContextManager[Transaction]]
"""Begins a transaction of its own for the named operation."""

KEY_EXPIRED: Final = (
    "it was sent, no response came, and the server no longer knows its key: look whether it "
    "happened before you send it again"
)
"""Error of an entry whose outcome can no longer be found out."""

_MAX_TRANSIT: Final = timedelta(minutes=10)
"""A request may reach the server this long after it was claimed."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_WARN_EVERY_MS: Final = 86_400_000
_PAGE: Final = 200
_MIGRATION_BATCH: Final = 200


# -- keys that the server may have expired ---------------------------------------------------------


def key_expired(tx: Transaction, entry: Entry) -> bool:
    """Return whether an entry may have happened so long ago that its key no longer protects it."""
    found = tx.rows("maybe_since", id=entry.id)
    return bool(found) and _key_expired(tx, entry, found[0][0])


def key_may_be_expired(tx: Transaction, entry: Entry) -> bool:
    """Like ``key_expired``, by the wall clock: for when the time the device was off is unknown."""
    found = tx.rows("maybe_since", id=entry.id)
    if not found or found[0][1] is None:
        return False
    lifetime = _certain_lifetime(tx, entry)
    return lifetime is not None and tx.now - datetime.fromisoformat(found[0][1]) >= lifetime


def _key_expired(tx: Transaction, entry: Entry, maybe_since_ms: int | None) -> bool:
    if maybe_since_ms is None:  # a person has checked, and wants it to be sent
        return False
    lifetime = _certain_lifetime(tx, entry)
    return lifetime is not None and tx.ms - maybe_since_ms >= lifetime // _MILLISECOND


def _certain_lifetime(tx: Transaction, entry: Entry) -> timedelta | None:
    """Return how long the server certainly knows the key; None if the profile is unknown."""
    profile = tx.profiles.find(entry.profile)
    return None if profile is None else profile.key_lifetime - _MAX_TRANSIT


# -- time and age ---------------------------------------------------------------------------------


def expire_stale(tx: Transaction, user_id: str, settings: QueueSettings) -> list[Entry]:
    """Expire what has been pending for longer than the cap, and warn of what soon will be.

    Entries that may have happened are kept as long as the server certainly knows their keys.
    """
    limit = tx.ms - settings.stale_after // _MILLISECOND
    expired: list[Entry] = []
    after = 0
    while True:
        page = tx.rows("pending_by_age", user_id=user_id, after=after, limit=_PAGE)
        for rowid, entry_id, enqueued_ms, outcome_unknown, maybe_since_ms in page:
            if enqueued_ms >= limit:
                if enqueued_ms < limit + settings.warn_before // _MILLISECOND:
                    warn_of_expiry(tx, user_id, settings)
                return expired
            after = rowid
            entry = tx.entry(entry_id)
            if entry.status is not Status.PENDING:  # parked when an earlier one expired
                continue
            if not outcome_unknown or _key_expired(tx, entry, maybe_since_ms):
                error = KEY_EXPIRED if outcome_unknown else None
                expired.append(settle_unclaimed(tx, entry, Status.EXPIRED, Reason.STALE, error))
        if len(page) < _PAGE:
            return expired


def expires_soon(tx: Transaction, user_id: str, settings: QueueSettings) -> bool:
    """Return whether the user's oldest pending entry expires soon."""
    found = tx.rows("oldest_unsent", user_id=user_id)[0][0]
    span = settings.stale_after - settings.warn_before
    return found is not None and found < tx.ms - span // _MILLISECOND


def warn_of_expiry(tx: Transaction, user_id: str, settings: QueueSettings) -> None:
    """Emit ``expiring`` if entries pass the cap soon; once a day, and only if it is listened to."""
    if not tx.has_listeners:
        return
    expired_before = tx.ms - settings.stale_after // _MILLISECOND
    found = tx.rows(
        "expiring",
        user_id=user_id,
        since=expired_before,
        before=expired_before + settings.warn_before // _MILLISECOND,
    )
    if not found or not tx.rows("warn", user_id=user_id, ms=tx.ms, before=tx.ms - _WARN_EVERY_MS):
        return
    oldest = min(row[2] for row in found)
    tx.events.append(
        Event(
            kind=EventKind.EXPIRING,
            at=tx.now,
            user_id=user_id,
            age_seconds=(tx.ms - oldest) / 1000,
            delay_seconds=(oldest - expired_before) / 1000,
            count=sum(row[1] for row in found),
            counts={entity_type: count for entity_type, count, _ in found},
        )
    )


def learn_server_time(tx: Transaction, server_now: datetime) -> bool:
    """Store the server's time and fill the gap before it; returns whether there was one."""
    update = update_from_server(tx.clock, server_now)
    if update is None:
        return False
    if update.missed_ms:
        tx.rows("shift_since", by_ms=update.missed_ms, since_ms=update.since_ms)
        tx.rows("shift_settled", by_ms=update.missed_ms, since_ms=update.since_ms)
        tx.rows("shift_maybe", by_ms=update.missed_ms, since_ms=update.since_ms)
        tx.rows("shift_leases", by_ms=update.missed_ms)
    if update.gap_unknown:
        tx.rows("age_maybe", ms=tx.ms, server_ms=update.row.server_ms, since_ms=update.since_ms)
    tx.set_clock(update.row)
    return update.missed_ms > 0


# -- removal --------------------------------------------------------------------------------------


def purge_user(tx: Transaction, user_id: str, *, force: bool) -> int:
    """Remove a user with all entries, attempts and mappings."""
    unsent = tx.rows("count_unsent", user_id=user_id)[0][0]
    if unsent and not force:
        raise UnsentEntriesError(
            f"{user_id} has {unsent} unsettled entries, which would be lost: send them, or use "
            "force",
            unsent=unsent,
        )
    tx.rows("purge_waits", user_id=user_id)
    tx.rows("purge_attempts", user_id=user_id)
    removed = len(tx.rows("purge_entries", user_id=user_id))
    tx.rows("purge_mappings", user_id=user_id)
    tx.rows("purge_versions", user_id=user_id)
    tx.rows("purge_user", user_id=user_id)
    tx.events.append(Event(kind=EventKind.PURGED, at=tx.now, user_id=user_id, count=removed))
    return removed


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
