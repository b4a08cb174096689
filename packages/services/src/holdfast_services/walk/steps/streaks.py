"""Streaks: days in a row that reached the goal. Pure; days are the walker's own.

A streak is a function of the *set* of attested days, so the order in which days are settled does
not matter: days that come in late, reversed or twice end in the same streak. What a streak was at
the end of each attested day is kept with that day, and a change is carried on from there, so that
a long history costs nothing.

The length is the number of attested days without a gap. The tier is earned by the length and
outlives it for a while: a missed day ends the row but costs one tier, not all of them.
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
    """Days that each tier takes, growing; and how many tiers a missed day costs."""

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
    """A streak as it stands on some day. ``decay_at`` is when it next gets worse by itself."""

    length: int = 0
    last_attested: date | None = None
    tier: int = 0
    decay_at: datetime | None = None


def today_in(zone: ZoneInfo, now: datetime) -> date:
    """Return the walker's calendar day."""
    return now.astimezone(zone).date()


def extend_streak(
    before: AttestedDay | None, days: Iterable[date], rules: StreakRules
) -> Iterator[AttestedDay]:
    """Give the streak at the end of each of these days, which are attested and in order."""
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
    """Return the streak of someone whose newest attested day is this one.

    Today counts as missed only once it is over. A day that comes in late makes up for it.
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
    """Return when a day begins there; where clocks skip midnight, the first instant after."""
    return datetime.combine(day, time(), zone).astimezone(UTC)
