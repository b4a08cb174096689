"""One transaction's work: named statements, the time it is, and what to tell afterwards."""

from datetime import datetime
from typing import Any

import msgspec

from holdfast.core.outbox_entry import Entry
from holdfast.errors import EntryNotFoundError
from holdfast.outbox.database import Database
from holdfast.outbox.events import Event, EventKind, about
from holdfast.outbox.profile import ProfileRegistry
from holdfast.outbox.rows import entry_of, instant
from holdfast.outbox.statements import statement
from holdfast.outbox.time_keeping import ClockRow, Moment, moment_of, server_time
from holdfast.outbox.world import DeviceClock

__all__ = ["Unit"]


class Unit:
    """Runs statements by name on one connection."""

    __slots__ = (
        "_clock",
        "_database",
        "_listening",
        "_moment",
        "_now_text",
        "events",
        "profiles",
    )

    def __init__(
        self,
        database: Database,
        clock: DeviceClock,
        profiles: ProfileRegistry,
        *,
        listening: bool,
    ) -> None:
        """Work on this connection; events are made only if somebody listens."""
        self._database = database
        self._clock = clock
        self.profiles = profiles
        self._listening = listening
        self._moment: Moment | None = None
        self._now_text: str | None = None
        self.events: list[Event] = []

    def rows(self, name: str, **params: Any) -> list[Any]:
        """Run a statement to its end and return its rows."""
        return self._database.rows(statement(name), params)

    def query(self, sql: str, params: dict[str, Any]) -> list[Any]:
        """Run a statement that was put together, from constants only."""
        return self._database.rows(sql, params)

    def many(self, name: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement that gives nothing once for each row of parameters."""
        self._database.many(statement(name), rows)

    def run(self, name: str, params: tuple[Any, ...]) -> None:
        """Run a statement that gives nothing."""
        self._database.rows(statement(name), params)

    def one(self, name: str, **params: Any) -> Entry | None:
        """Run a statement that gives at most one entry."""
        found = self._database.rows(statement(name), params)
        return entry_of(found[0]) if found else None

    def entries(self, name: str, **params: Any) -> list[Entry]:
        """Run a statement that gives entries."""
        return [entry_of(row) for row in self._database.rows(statement(name), params)]

    def entry(self, entry_id: str) -> Entry:
        """Return the entry with this id, or raise."""
        found = self.one("get", id=entry_id)
        if found is None:
            raise EntryNotFoundError(f"there is no entry {entry_id} in the queue")
        return found

    def changed(self, name: str, **params: Any) -> Entry:
        """Run a statement that changes one entry, which was just looked at, and return it."""
        return entry_of(self._database.rows(statement(name), params)[0])

    def file_bytes(self) -> int:
        """Return the size of the file and its log."""
        return self._database.file_bytes()

    # ------------------------------------------------------------------ time

    @property
    def moment(self) -> Moment:
        """All clocks, read once per unit."""
        if self._moment is None:
            found = self.rows("clock")
            row = ClockRow(*found[0]) if found else None
            clock = self._clock
            boot_id, boot_seconds, wall = clock.boot_id(), clock.monotonic(), clock.now()
            moment = moment_of(row, boot_id, boot_seconds, wall)
            if moment.restarted:
                newest = self.rows("newest_ms")
                moment = moment_of(
                    row, boot_id, boot_seconds, wall, newest[0][0] if newest else None
                )
            self._moment = moment
        return self._moment

    @property
    def now(self) -> datetime:
        """The device's wall clock: for people, and never to decide by."""
        return self.moment.wall

    @property
    def now_text(self) -> str:
        """The same as it is stored."""
        if self._now_text is None:
            self._now_text = instant(self.moment.wall)
        return self._now_text

    @property
    def ms(self) -> int:
        """The file's own time, which decides."""
        return self.moment.ms

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known."""
        return server_time(self.moment)

    def keep_time(self) -> None:
        """Write down what the clocks say, if they say that it should be."""
        moment = self.moment
        if moment.save:
            self.set_clock(moment.row)
        if moment.restarted:
            # Before the leases end: who had one may have sent. Where several restarts have left one
            # gap, the time off may have been after any of them.
            self.rows("clamp_maybe", ms=moment.row.gap_ms)
            self.rows("end_leases")
            self.rows("wake_due", now=self.now_text)

    def set_clock(self, row: ClockRow) -> None:
        """Write the file's time down."""
        self.rows("set_clock", **msgspec.structs.asdict(row))
        self.forget_time()

    def forget_time(self) -> None:
        """Read the clocks anew when they are asked for next."""
        self._moment = self._now_text = None

    # ------------------------------------------------------------------ events

    def tell(
        self,
        kind: EventKind,
        entry: Entry,
        *,
        delay_seconds: float | None = None,
        detail: str | None = None,
    ) -> None:
        """Have the listeners told, once this is committed."""
        if self._listening:
            self.events.append(
                about(kind, entry, self.now, delay_seconds=delay_seconds, detail=detail)
            )
