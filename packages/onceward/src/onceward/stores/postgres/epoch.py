"""Which PostgreSQL database a connection has reached, and whether it has lost commits.

A restore or a failover can lose commits whose records are still in memory or in Redis. The epoch
changes with the system identifier, the timeline, the database, the table of records, or its
contents as a whole (TRUNCATE). A server whose data directory was copied back differs in none of
them: only its WAL position is below one that was seen before.
"""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from onceward.ports import EpochReading
from onceward.stores.errors import DENIED_STATES, LOST_STATES, NO_TABLE_STATES, state_of
from onceward.stores.postgres.hosts import Timelines
from onceward.stores.replication import Durability
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.migrations import Steps, run_steps, run_steps_async

_log = logging.getLogger("onceward.stores")

_UNKNOWN: Final = EpochReading(None)
# A clock is not read from a response that took longer.
_CLOCK_SECONDS: Final = 2.0

Report = Callable[[EpochReading], None]


class EpochReader:
    """Reads the epoch on connections of one store, and reports it. May be used in any thread."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._lock = threading.Lock()
        self._is_denied = False
        self._is_unknown = False
        # The last epoch, None before the first reading, and its highest WAL position.
        self.identity: str | None = None
        self._position = 0
        self.timelines = Timelines()
        # What the server guaranteed at the last reading, and when that was (monotonic).
        self.durability: Durability | None = None
        self.durability_at = 0.0

    def report_to(self, report: Report) -> None:
        """Call ``report`` after each reading, in the thread of the reading."""
        self._reports.append(report)

    async def read(
        self,
        names: TableNames,
        fetch_row: Callable[[str], Awaitable[Any]],
        errors: tuple[type[BaseException], ...],
        outages: tuple[type[BaseException], ...] = (),
    ) -> EpochReading:
        """Read and report. Raises ``outages`` unchanged; of ``errors`` none."""

        async def fetch(sql: str, _values: object) -> Sequence[Any]:
            return (await fetch_row(sql),)

        return await run_steps_async(self._read(names, errors, outages), fetch)

    def read_blocking(
        self,
        names: TableNames,
        fetch_row: Callable[[str], Any],
        errors: tuple[type[BaseException], ...],
    ) -> EpochReading:
        """Do the same with a sync driver. A lost connection is not reported: nothing is known."""
        steps = self._read(names, errors, ignores_lost=True)
        return run_steps(steps, lambda sql, _values: (fetch_row(sql),))

    def _read(
        self,
        names: TableNames,
        errors: tuple[type[BaseException], ...],
        outages: tuple[type[BaseException], ...] = (),
        *,
        ignores_lost: bool = False,
    ) -> Steps[EpochReading]:
        """Yield the queries of a reading."""
        queries = load_queries("onceward.stores.postgres", "epoch.sql", names=names)
        is_by_start = False
        while True:
            with self._lock:
                is_by_start = is_by_start or self._is_denied
                before = self.identity, self._position
            started = time.monotonic()
            try:
                (row,) = yield queries["read_epoch_by_start" if is_by_start else "read_epoch"], ()
            except outages:
                raise
            except errors as error:
                state = state_of(error) or "08006"  # without one, the connection was lost
                if ignores_lost and state.startswith(LOST_STATES):
                    return _UNKNOWN
                if not self._falls_back(error, state, is_by_start=is_by_start):
                    return self._finish(None, before)
                is_by_start = True
            else:
                return self._finish(row, before, time.monotonic() - started)

    def _falls_back(self, error: BaseException, state: str, *, is_by_start: bool) -> bool:
        """Return whether to read the start time of the server instead of its identity."""
        if state in NO_TABLE_STATES:
            return False
        if is_by_start:
            if not self._is_unknown:
                self._is_unknown = True
                _log.warning("the epoch of the database is unknown, nothing is cached: %s", error)
            return False
        if state in DENIED_STATES and not self._is_denied:
            self._is_denied = True
            _log.warning(
                "PostgreSQL denies its system identifier or its WAL position: its start time is "
                "used instead, and each restart of it empties the caches of records (%s)",
                error,
            )
        return True

    def _finish(self, row: Any, before: tuple[str | None, int], took: float = 0.0) -> EpochReading:
        """Report what was read; ``before`` is what was known before the statement began."""
        reading, clock = _UNKNOWN, None
        if row is not None:
            if took <= _CLOCK_SECONDS:
                clock = row[9]
                reading = EpochReading(None, time=clock)
            self._see_durability(Durability.of(tuple(row)[3:8]))
        if row is not None and row[0] is not None:
            identity, cache_epoch, position = str(row[0]), str(row[1]), row[2]
            if not self.timelines.see_identity(identity):
                # The server was replaced: what it says of its data does not count.
                return EpochReading(None, is_replaced=True)
            # Not with what is known now: of two connections, the one that has read first may be the
            # second to report.
            went_back = before[0] == identity and position is not None and position < before[1]
            reading = EpochReading(identity, cache_epoch, position, went_back=went_back, time=clock)
            self._see(identity, position or 0, went_back=went_back)
            self._is_unknown = False
        for report in self._reports:
            report(reading)
        return reading

    def _see_durability(self, durability: Durability) -> None:
        """Keep what the server guarantees, and log it if it has changed."""
        with self._lock:
            has_changed = durability != self.durability
            self.durability, self.durability_at = durability, time.monotonic()
        if has_changed and not durability.is_in_recovery:
            weaknesses = durability.weaknesses()
            level = logging.WARNING if weaknesses else logging.INFO
            _log.log(
                level, "%s", "; ".join((f"PostgreSQL has {durability.describe()}", *weaknesses))
            )

    def _see(self, identity: str, position: int, *, went_back: bool) -> None:
        with self._lock:
            if went_back or identity != self.identity or position > self._position:
                self.identity, self._position = identity, position


def backend_of(row: Any) -> int:
    """Return the process id of the backend that has read an epoch; a pooler says others."""
    return int(row[8])
