"""Looking at the queue. Nothing in here changes it."""

from collections.abc import Iterable

from holdfast.core.outbox_entry import Attempt, Entry, Status
from holdfast.outbox import claiming, reading, upkeep
from holdfast.outbox.operations import Operations
from holdfast.outbox.upkeep import Stats

__all__ = ["Looking"]


class Looking(Operations):
    """What is in the queue, what comes next, and what stands in the way."""

    def get(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``EntryNotFoundError``."""
        with self._read() as unit:
            return unit.entry(entry_id)

    def by_key(self, key: str) -> Entry | None:
        """Return the entry with this idempotency key."""
        with self._read() as unit:
            return unit.one("by_key", key=key)

    def by_local_id(self, local_id: str) -> list[Entry]:
        """Return all entries about the entity with this local id, in order."""
        with self._read() as unit:
            return unit.entries("by_local_id", local_id=local_id)

    def entries(
        self,
        user_id: str | None = None,
        *,
        status: Status | Iterable[Status] | None = None,
        entity_type: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Entry]:
        """List entries in the order in which they were queued, a page at a time.

        ``after`` is the id of the last entry seen.
        """
        with self._read() as unit:
            return reading.entries(
                unit, user_id, status=status, entity_type=entity_type, limit=limit, after=after
            )

    def next_eligible(self, user_id: str) -> Entry | None:
        """Return what ``claim`` would take now, without taking it."""
        with self._read() as unit:
            return unit.one("next_eligible", user_id=user_id, ms=unit.ms)

    def eligible_users(self) -> list[str]:
        """Return the users for whom something can be claimed now."""
        with self._read() as unit:
            return [str(row[0]) for row in unit.rows("eligible_users", ms=unit.ms)]

    def next_due_seconds(self, user_id: str) -> float | None:
        """Return how long until the user's first waiting retry is due; None if none waits."""
        with self._read() as unit:
            return claiming.next_due_seconds(unit, user_id)

    def blocked_by(self, user_id: str, lane: str | None = None) -> list[Entry]:
        """Return the ``failed`` and ``conflict`` entries whose lanes stand still, for a person.

        Entries that are parked because of another (reason ``dependency``) are left out: the one
        to look at is the other.
        """
        with self._read() as unit:
            return reading.blocked_by(unit, user_id, lane)

    def dependents(self, entry_id: str, *, transitive: bool = False) -> list[Entry]:
        """Return the entries that depend on this one, or on the entity it creates."""
        with self._read() as unit:
            return reading.dependents(unit, entry_id, transitive=transitive)

    def is_forgotten(self, entry: Entry) -> bool:
        """Say whether an entry may have happened, and its key no longer protects it.

        So much time has certainly passed since it was first sent that a service of its profile may
        have forgotten the key: sent again, it might happen a second time.
        """
        with self._read() as unit:
            return upkeep.is_forgotten(unit, entry)

    def seems_forgotten(self, entry: Entry) -> bool:
        """Say the same by the device's clock, which anybody may have set."""
        with self._read() as unit:
            return upkeep.seems_forgotten(unit, entry)

    def has_gap(self) -> bool:
        """Say whether the device was off for a time that nobody knows yet."""
        with self._read() as unit:
            return unit.moment.row.gap_ms is not None

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the history of an entry's sends, oldest first."""
        with self._read() as unit:
            return reading.attempts(unit, entry_id)

    def mappings(self, user_id: str, local_ids: Iterable[str]) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        with self._read() as unit:
            return claiming.mappings(unit, user_id, local_ids)

    def unsent(self, user_id: str) -> int:
        """Count a user's entries that are not settled."""
        with self._read() as unit:
            return int(unit.rows("count_unsent", user_id=user_id)[0][0])

    def in_flight(self, user_id: str) -> int:
        """Count a user's entries that are claimed, by whomever."""
        with self._read() as unit:
            return int(unit.rows("count_in_flight", user_id=user_id)[0][0])

    def stats(self, user_id: str | None = None) -> Stats:
        """Count what is there, for one user or for all."""
        with self._read() as unit:
            return upkeep.stats(unit, user_id)
