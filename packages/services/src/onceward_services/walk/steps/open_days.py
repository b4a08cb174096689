"""Which of a walker's days are not settled. What was done on such a day, or later, is provisional.

A reported day is open while it is pending or in quarantine. A day without a report, from the
walker's first action on, is open until nothing can be reported for it any more; then it is settled
as empty. ``OpenDays`` is pure; ``read_open_days`` fills it with one query.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from onceward import Transaction
from onceward_services.walk.steps.repository import DayStatus, sql, stored_zone
from onceward_services.walk.steps.streaks import today_in

__all__ = ["OpenDays", "end_of_day", "read_open_days"]

_DAY: Final = timedelta(days=1)
_OPEN: Final = ("PENDING", "QUARANTINED")


@dataclass(frozen=True, slots=True)
class OpenDays:
    """A walker's recent days as of now."""

    zone: ZoneInfo
    now: datetime
    first_action_at: datetime | None
    # How long after its end a day without a report is open.
    empty_after: timedelta
    # All days of the last weeks, and older ones that are open.
    statuses: Mapping[date, DayStatus]
    # What pending days promise beyond what they were credited with.
    provisional_energy: int = 0

    def day_of(self, at: datetime) -> date:
        """Return the walker's day of an action. A device's clock may be ahead of ours."""
        return today_in(self.zone, min(at, self.now))

    def is_open_up_to(self, at: datetime) -> bool:
        """Return whether any day up to that of an action is open."""
        last = self.day_of(at)
        is_undecided = any(day <= last and status in _OPEN for day, status in self.statuses.items())
        return is_undecided or next(self._missing(last), None) is not None

    def settles_at(self, at: datetime) -> datetime | None:
        """Return when the last day without a report up to an action is settled; None if none is."""
        missing = next(self._missing(self.day_of(at)), None)
        return None if missing is None else self._empty_at(missing)

    def is_quarantined(self) -> bool:
        """Return whether a day waits for an admin."""
        return "QUARANTINED" in self.statuses.values()

    def _missing(self, last: date) -> Iterator[date]:
        """Yield the days without a report that are still open, newest first."""
        if self.first_action_at is None:
            return
        first, day = self.day_of(self.first_action_at), last
        while day >= first and self._empty_at(day) > self.now:
            if day not in self.statuses:
                yield day
            day -= _DAY

    def _empty_at(self, day: date) -> datetime:
        return end_of_day(day, self.zone) + self.empty_after


async def read_open_days(
    tx: Transaction,
    tenant: str,
    first_action_at: datetime | None,
    *,
    empty_after: timedelta,
    now: datetime,
) -> OpenDays:
    """Read a walker's days. The walker is locked."""
    # A day more on each side, because the walker's zone is not known before the query.
    since = now.astimezone(UTC).date() - empty_after - 3 * _DAY
    rows = await tx.fetch_all(sql("open_days"), {"tenant": tenant, "since": since.isoformat()})
    zone = ZoneInfo("UTC")
    statuses: dict[date, DayStatus] = {}
    energy = 0
    for row in rows:
        if row["what"] == "zone":
            zone = stored_zone(row["name"])
            continue
        statuses[date.fromisoformat(row["name"])] = row["status"]
        if row["status"] == "PENDING":
            energy += max(0, row["energy"])
    return OpenDays(zone, now, first_action_at, empty_after, statuses, energy)


def end_of_day(day: date, zone: ZoneInfo) -> datetime:
    """Return when a day ends in a time zone."""
    return datetime.combine(day + _DAY, time(), zone).astimezone(UTC)
