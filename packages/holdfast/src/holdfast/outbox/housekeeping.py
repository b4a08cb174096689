"""Keeping the queue in order: lost claims, age, time, and what may go."""

import logging
from datetime import datetime
from time import monotonic
from typing import Final

from holdfast.core.outbox_entry import Entry, Status
from holdfast.errors import OutboxFileError
from holdfast.outbox import claiming, upkeep
from holdfast.outbox.operations import Operations

__all__ = ["Housekeeping"]

_PRUNE_SECONDS: Final = 3600.0
"""How long to leave it at that when there was nothing more to prune. What goes is days old."""

_log = logging.getLogger(__name__)


class Housekeeping(Operations):
    """What has to be done now and then, by the drain or by the app."""

    # By a clock that nobody can set.
    _prune_at: float = 0.0

    def watchdog(self) -> list[Entry]:
        """Bring back what was claimed and whose lease is over, because its process died.

        The entries are ``pending`` again, with the same key, their outcome unknown and no attempt
        counted: that a process died is not the entry's fault. A claim that is renewed is left
        alone.
        """
        with self._write("watchdog") as unit:
            return claiming.watchdog(unit)

    def expire_stale(self, user_id: str) -> list[Entry]:
        """Expire what has been pending for longer than the cap (7 days), and park its dependents.

        Age is time that has certainly passed: measured by a clock that cannot be set while the
        device is on, and by the server's ``Date`` (``learn_server_time``) across the times when it
        was off. The device's wall clock has no say. Entries whose outcome is unknown are left as
        long as the server is certain to remember their keys, and can tell what became of them.
        """
        with self._write("expire_stale") as unit:
            return upkeep.expire_stale(unit, user_id, self._settings.stale_after)

    def learn_server_time(self, server_now: datetime) -> bool:
        """Take the ``Date`` of a response from the configured server, just received.

        Cheap to call with every answer: it is written only when it says something new. Returns
        whether time had passed unseen, so that entries are older than they seemed.
        """
        with self._read() as unit:
            news = upkeep.is_news(unit, server_now)
        if not news:
            return False
        with self._write("learn_server_time") as unit:
            return upkeep.learn_server_time(unit, server_now)

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known, otherwise the device's."""
        with self._read() as unit:
            return unit.server_now()

    def prune(self, *, limit: int | None = None) -> int:
        """Remove what succeeded 7 days ago and what was otherwise settled 30 days ago.

        Mappings stay. Works in small transactions; ``limit`` bounds how many entries go in all.
        Returns how many went.
        """
        removed = 0
        batch = upkeep.PRUNE_BATCH
        place = upkeep.Place()
        while not place.done and (limit is None or removed < limit):
            size = batch if limit is None else min(batch, limit - removed)
            with self._write("prune") as unit:
                removed += upkeep.prune(unit, self._settings, place, size)
        return removed

    def prune_in_passing(self) -> bool:
        """Prune a little, for whoever has nothing to send; returns whether there is more to prune.

        Costs next to nothing when called often: it looks at most once an hour, and prunes only if
        the oldest entries may go. A file that is busy or full is left for the next time.
        """
        if monotonic() < self._prune_at:
            return False
        self._prune_at = monotonic() + _PRUNE_SECONDS
        try:
            if not self._may_prune():
                return False
            has_more = self.prune(limit=upkeep.PRUNE_BATCH) == upkeep.PRUNE_BATCH
        except OutboxFileError as error:
            _log.warning("nothing was pruned: %s", error)
            return False
        if has_more:
            self._prune_at = 0.0
        return has_more

    def _may_prune(self) -> bool:
        keep = {
            Status.SUCCEEDED: self._settings.keep_succeeded,
            Status.DISCARDED: self._settings.keep_settled,
            Status.EXPIRED: self._settings.keep_settled,
        }
        with self._read() as unit:
            for (user_id,) in unit.rows("users"):
                for status, span in keep.items():
                    rows = unit.rows("oldest_settled", user_id=user_id, status=status.value)
                    oldest = rows[0][0]
                    if oldest is not None and oldest <= unit.ms - span.total_seconds() * 1000:
                        return True
        return False

    def purge_user(self, user_id: str, *, force: bool = False) -> int:
        """Remove a user with all entries, attempts and mappings, as at logout.

        Raises ``UnsentEntriesError`` while anything is not settled, unless ``force``. The pages
        are overwritten. Returns how many entries went.
        """
        with self._write("purge_user") as unit:
            removed = upkeep.purge_user(unit, user_id, force=force)
        self._transactions.checkpoint()
        return removed
