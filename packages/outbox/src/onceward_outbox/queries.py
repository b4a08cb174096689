"""Queries of a queue: entries, counts, and what is known about the server. They change nothing."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

import msgspec

from onceward_outbox import maintenance
from onceward_outbox.backoff import StoredHold, holds_row, read_holds
from onceward_outbox.batch_offer import BatchOffer, offer_row, read_offer
from onceward_outbox.entry import (
    OPEN,
    Attempt,
    Claimed,
    Entry,
    Reason,
    Status,
    StatusName,
    member_named,
)
from onceward_outbox.errors import UsageError
from onceward_outbox.sql import COLUMNS, attempt_of, created_by, entry_of
from onceward_outbox.transaction import Transaction

__all__ = ["QueueQueries", "Stats"]


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue."""

    # By status; every status is present.
    counts: dict[Status, int]
    # Pending entries that could be claimed now.
    ready: int
    # Pending entries that wait for their next attempt.
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
        return sum(self.counts[status] for status in OPEN)


class QueueQueries:
    """The queries of ``OutboxQueue``, each in a transaction that only reads."""

    def __init__(self, read: Callable[[], AbstractContextManager[Transaction]]) -> None:
        """``read`` begins a transaction."""
        self._read = read

    def users(self) -> list[str]:
        """Return the known users, sorted."""
        with self._read() as tx:
            return [str(row[0]) for row in tx.rows("users")]

    def get(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``EntryNotFoundError``."""
        with self._read() as tx:
            return tx.entry(entry_id)

    def by_key(self, key: str) -> Entry | None:
        """Return the entry with this idempotency key."""
        with self._read() as tx:
            return tx.one("by_key", key=key)

    def by_local_id(self, local_id: str) -> list[Entry]:
        """Return all entries about the entity with this local id, in order."""
        with self._read() as tx:
            return tx.entries("by_local_id", local_id=local_id)

    def entries(
        self,
        user_id: str | None = None,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] | None = None,
        entity_type: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Entry]:
        """Return a page of entries in the order in which they were queued.

        ``after`` is the id of the last entry of the page before.
        """
        if limit < 1:
            raise UsageError("limit must be at least 1")
        conditions, params = ["1"], dict[str, Any](limit=limit)
        if user_id is not None:
            conditions.append("user_id = :user_id")
            params["user_id"] = user_id
        if status is not None:
            given = [status] if isinstance(status, str) else status
            wanted = [member_named(Status, name) for name in given]
            names = [f":status_{number}" for number in range(len(wanted))]
            conditions.append(f"status IN ({', '.join(names)})")
            params |= {f"status_{number}": name.value for number, name in enumerate(wanted)}
        if entity_type is not None:
            conditions.append("entity_type = :entity_type")
            params["entity_type"] = entity_type
        if after is not None:
            conditions.append("rowid > (SELECT rowid FROM offline_sync_queue WHERE id = :after)")
        sql = (
            f"SELECT {', '.join(COLUMNS)} FROM offline_sync_queue"  # noqa: S608 - constants only
            f" WHERE {' AND '.join(conditions)} ORDER BY rowid LIMIT :limit"
        )
        with self._read() as tx:
            if after is not None:
                params["after"] = tx.entry(after).id
            return [entry_of(row) for row in tx.query(sql, params)]

    def next_eligible(self, user_id: str) -> Entry | None:
        """Return what ``claim`` would claim now."""
        with self._read() as tx:
            return tx.one("next_eligible", user_id=user_id, ms=tx.ms)

    def eligible_users(self) -> list[str]:
        """Return the users for whom something can be claimed now."""
        with self._read() as tx:
            return [str(row[0]) for row in tx.rows("eligible_users", ms=tx.ms)]

    def next_due_seconds(self, user_id: str) -> float | None:
        """Return how long until the user's first retry is due; None if there is none."""
        with self._read() as tx:
            due_ms = tx.rows("next_due", user_id=user_id)[0][0]
            return None if due_ms is None else max(0, due_ms - tx.ms) / 1000

    def blocked_by(self, user_id: str, lane: str | None = None) -> list[Entry]:
        """Return the ``failed`` and ``conflict`` entries, which need a person.

        Entries that are parked because of another (reason ``dependency``) are left out: the other
        one needs the attention.
        """
        with self._read() as tx:
            return [
                entry
                for entry in tx.entries("stuck", user_id=user_id)
                if entry.reason is not Reason.DEPENDENCY and lane in (None, entry.lane)
            ]

    def dependents(self, entry_id: str, *, transitive: bool = False) -> list[Entry]:
        """Return the entries that depend on this one, or on the entity it creates."""
        with self._read() as tx:
            entry = tx.entry(entry_id)
            name = "all_dependents" if transitive else "dependents"
            return tx.entries(name, id=entry.id, local=created_by(entry))

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the history of an entry's sends, oldest first."""
        with self._read() as tx:
            return [attempt_of(row) for row in tx.rows("attempts", id=tx.entry(entry_id).id)]

    def mappings(self, user_id: str, local_ids: Iterable[str]) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        wanted = msgspec.json.encode(list(local_ids)).decode()
        with self._read() as tx:
            return dict(tx.rows("mappings", user_id=user_id, local_ids=wanted))

    def server_state(
        self, server: str, base_url: str
    ) -> tuple[dict[str, StoredHold], BatchOffer | None]:
        """Return what the server has set by ``Retry-After``, by path, and its batch endpoint.

        See ``Outages`` and ``Batches``.
        """
        holds, offer = holds_row(server), offer_row(base_url)
        with self._read() as tx:
            rows = dict(tx.rows("server_rows", holds=holds, offer=offer))
            return read_holds(tx, rows.get(holds)), read_offer(tx, rows.get(offer))

    def base_of(self, claimed: Claimed) -> str | None:
        """Return the entity as it was when the claimed edit was made, as a JSON text, if known."""
        entry = claimed.entry
        if claimed.base is not None or entry.entity is None or claimed.version is None:
            return claimed.base or entry.base
        with self._read() as tx:
            found = tx.rows("entity_version", user_id=entry.user_id, entity=entry.entity)
        version, body = found[0] if found else (None, None)
        return body if body is not None and version == claimed.version else entry.base

    def key_expired(self, entry: Entry) -> bool:
        """Return whether an entry may have happened, and its key no longer protects it.

        So much time has certainly passed since it was first sent that the server may have expired
        the key: sent again, it might happen a second time.
        """
        with self._read() as tx:
            return maintenance.key_expired(tx, entry)

    def key_may_be_expired(self, entry: Entry) -> bool:
        """Like ``key_expired``, but by the wall clock, which a user can change."""
        with self._read() as tx:
            return maintenance.key_may_be_expired(tx, entry)

    def has_gap(self) -> bool:
        """Return whether the device was off for a time that is not known yet."""
        with self._read() as tx:
            return tx.clock.row.gap_ms is not None

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known, otherwise the device's."""
        with self._read() as tx:
            return tx.server_now()

    def unsent(self, user_id: str) -> int:
        """Count a user's entries that are not settled."""
        with self._read() as tx:
            return int(tx.rows("count_unsent", user_id=user_id)[0][0])

    def in_flight(self, user_id: str) -> int:
        """Count a user's entries that are claimed, by any process."""
        with self._read() as tx:
            return int(tx.rows("count_in_flight", user_id=user_id)[0][0])

    def lease_seconds_left(self, user_id: str) -> tuple[float, float] | None:
        """Return for how long a user's claims hold unless they are renewed: shortest and longest.

        None if nothing is claimed.
        """
        with self._read() as tx:
            first, last = tx.rows("lease_ends", user_id=user_id)[0]
            if first is None:
                return None
            return max(0.0, (first - tx.ms) / 1000), max(0.0, (last - tx.ms) / 1000)

    def stats(self, user_id: str | None = None) -> Stats:
        """Count entries, of one user or of all."""
        with self._read() as tx:
            counts = dict.fromkeys(Status, 0)
            users: set[str] = set()
            for owner, status, count in tx.rows("counts", user_id=user_id):
                counts[Status(status)] += count
                users.add(owner)
            ready = tx.rows("count_ready", user_id=user_id)[0][0]
            in_back_off, due = tx.rows("count_waiting", user_id=user_id, ms=tx.ms)[0]
            oldest = [
                found[0][0]
                for owner in users
                if (found := tx.rows("oldest_unsent", user_id=owner))[0][0] is not None
            ]
            return Stats(
                counts=counts,
                ready=ready + due,
                waiting=in_back_off - due,
                blocked=counts[Status.PENDING] - ready - in_back_off,
                oldest_pending_seconds=(tx.ms - min(oldest)) / 1000 if oldest else None,
                file_bytes=tx.file_bytes(),
            )
