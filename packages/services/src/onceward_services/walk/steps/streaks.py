"""Streaks: consecutive days that reached the goal. Pure; days are those of the walker's calendar.

A streak is a function of the *set* of attested days, so the order in which days are settled does
not matter. The streak at the end of each attested day is stored with that day, and a change is
computed forward from there, so a long history costs nothing.

The length is the number of attested days without a gap. The tier depends on the length and decays
more slowly: a missed day ends the streak but costs only one tier.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

__all__ = ["AttestedDay", "StreakRules", "StreakState", "extend_streak", "streak_on", "today_in"]

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class StreakRules:
    """The days needed for each tier, ascending, and the tiers lost per missed day."""

    tiers: tuple[int, ...] = (3, 7, 14, 30)
    decay_tiers: int = 1


@dataclass(frozen=True, slots=True)
class AttestedDay:
    """A day that reached the goal, and the streak at its end."""

    day: date
    length: int
    tier: int


@dataclass(frozen=True, slots=True)
class StreakState:
    """A streak as of some day. ``decay_at`` is when it next decays without an attested day."""

    length: int = 0
    last_attested: date | None = None
    tier: int = 0
    decay_at: datetime | None = None


def today_in(zone: ZoneInfo, now: datetime) -> date:
    """Return the calendar day in a time zone."""
    return now.astimezone(zone).date()


def extend_streak(
    before: AttestedDay | None, days: Iterable[date], rules: StreakRules
) -> Iterator[AttestedDay]:
    """Yield the streak at the end of each of these attested days, in ascending order."""
    for day in days:
        if before is None:
            length, tier = 1, 0
        else:
            missed = (day - before.day).days - 1
            length = before.length + 1 if missed == 0 else 1
            tier = max(0, before.tier - missed * rules.decay_tiers)
        before = AttestedDay(day, length, max(tier, bisect_right(rules.tiers, length)))
        yield before


def streak_on(
    last: AttestedDay | None, today: date, zone: ZoneInfo, rules: StreakRules
) -> StreakState:
    """Return the streak as of today, given the last attested day.

    Today counts as missed only when it is over.
    """
    if last is None:
        return StreakState()
    missed = max(0, (today - last.day).days - 1)
    if missed == 0:
        return StreakState(last.length, last.day, last.tier, _midnight(last.day + 2 * _DAY, zone))
    tier = max(0, last.tier - missed * rules.decay_tiers)
    decays = tier > 0 and rules.decay_tiers > 0
    return StreakState(0, last.day, tier, _midnight(today + _DAY, zone) if decays else None)


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    """Return when a day begins in a time zone; if midnight is skipped, the first instant after."""
    return datetime.combine(day, time(), zone).astimezone(UTC)
