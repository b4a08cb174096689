"""Checks of one report of steps. Pure: the time and the last report are arguments.

A report is the number of steps of a day so far, between two instants, from one source bundle. All
reports of a day together are assessed in ``day_assessment``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from re import Pattern, escape
from re import compile as regex
from typing import Any, Final
from zoneinfo import ZoneInfo

from onceward_services.walk.steps.streaks import today_in

__all__ = [
    "LastSync",
    "Limits",
    "Rejection",
    "Report",
    "Span",
    "find_rejection",
    "find_zone",
    "is_burst",
    "provisional_credit",
    "scaled",
]

_ZONE: Final = regex(r"[A-Za-z][A-Za-z0-9_+-]{0,31}(?:/[A-Za-z0-9_+-]{1,32}){0,2}")
_HOUR: Final = timedelta(hours=1)
_MAX_SAFE: Final = 2**53
# Files of the zone database that are not zones: the server's local zone, and clocks with leap
# seconds.
_NOT_A_ZONE: Final = frozenset({"localtime", "posix", "posixrules", "right", "Factory"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a plausible report."""

    # Names; ``*`` matches one or more characters, because HealthKit adds a suffix to its own.
    bundles: frozenset[str]
    steps_per_day: int = 50_000
    # The speed of a long run, and how much faster a report may be: samples arrive in groups, and a
    # short sprint is legitimate.
    steps_per_second: float = 3.0
    burst_tolerance: float = 3.0
    tz_jump: timedelta = timedelta(hours=12)
    tz_window: timedelta = timedelta(hours=24)
    offline_days: int = 7
    # How far samples may be outside their day, and how far a device's clock may be ahead.
    span_grace: timedelta = timedelta(hours=6)
    clock_ahead: timedelta = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Span:
    """The times of the first and the last sample."""

    start: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return (self.end - self.start).total_seconds()


@dataclass(frozen=True, slots=True)
class Report:
    """A device's report about one day."""

    day: date
    count: int
    zone: ZoneInfo
    span: Span
    bundle: str


@dataclass(frozen=True, slots=True)
class LastSync:
    """The time of the walker's last report, and its offset from UTC."""

    at: datetime
    offset: timedelta


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a report is rejected. Anti-cheat reasons count towards a review of the walker."""

    status: int
    code: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
    is_anti_cheat: bool = False


def find_rejection(
    report: Report, limits: Limits, last_sync: LastSync | None, now: datetime
) -> Rejection | None:
    """Return the first reason to reject a report, or None."""
    return (
        _source(report, limits)
        or _count(report, limits)
        or _burst(report, limits)
        or _tz_jump(report, limits, last_sync, now)
        or _day(report, limits, now)
        or _span(report, limits, now)
    )


def is_burst(count: int, seconds: float, limits: Limits) -> bool:
    """Return whether the step rate exceeds the limit."""
    return count > limits.steps_per_second * limits.burst_tolerance * max(0.0, seconds)


def provisional_credit(count: int, prior: int | None, factor: float, floor: int = 0) -> int:
    """Return the step count to show before reconciliation.

    The first report of a day counts in full, later ones up to ``factor`` times the previous count,
    or up to ``floor`` if that is more.
    """
    return count if prior is None else min(count, max(floor, scaled(prior, factor)))


def scaled(count: int, factor: float) -> int:
    """Multiply and round down in decimal arithmetic, so that 0.1 is exactly a tenth."""
    return int(count * Decimal(str(factor)))


@lru_cache(maxsize=1024)
def find_zone(name: str) -> ZoneInfo:
    """Return a time zone of the IANA database; raises ``ValueError`` for other names."""
    if _ZONE.fullmatch(name) is None or name.partition("/")[0] in _NOT_A_ZONE:
        raise ValueError("should be an IANA time zone, such as Europe/Warsaw")
    try:
        return ZoneInfo(name)
    # Not only KeyError: some names are directories or other files of the database.
    except (LookupError, OSError, ValueError):
        raise ValueError("should be an IANA time zone, such as Europe/Warsaw") from None


# -- one check each ------------------------------------------------------------------------------


def _source(report: Report, limits: Limits) -> Rejection | None:
    if report.bundle in limits.bundles or _patterns(limits.bundles).fullmatch(report.bundle):
        return None
    return Rejection(
        403,
        "SOURCE_NOT_ALLOWED",
        "steps from this source bundle are not accepted",
        {"received": report.bundle, "allowed": sorted(limits.bundles)},
    )


@lru_cache(maxsize=16)
def _patterns(bundles: frozenset[str]) -> Pattern[str]:
    """Return a pattern that matches the names with a ``*``, and nothing if there is none."""
    words = [".+".join(map(escape, word.split("*"))) for word in bundles if "*" in word]
    return regex("|".join(words) or r"(?!)")


def _count(report: Report, limits: Limits) -> Rejection | None:
    if report.count <= limits.steps_per_day:
        return None
    return Rejection(
        422,
        "STEP_COUNT_EXCEEDED",
        f"a day can have at most {limits.steps_per_day} steps",
        {
            "received": _number(report.count),
            "limit": limits.steps_per_day,
            "maxStepsPerDay": limits.steps_per_day,
        },
        is_anti_cheat=True,
    )


def _burst(report: Report, limits: Limits) -> Rejection | None:
    if not is_burst(report.count, report.span.seconds, limits):
        return None
    rate = limits.steps_per_second * limits.burst_tolerance
    return Rejection(
        422,
        "BURST_RATE_EXCEEDED",
        "the step rate is too high for the sample span",
        {
            "received": _number(report.count),
            "limit": int(rate * report.span.seconds),
            "spanSeconds": report.span.seconds,
            "minSpanSeconds": report.count / rate,
            "maxStepsPerSecond": limits.steps_per_second,
            "tolerance": limits.burst_tolerance,
        },
        is_anti_cheat=True,
    )


def _tz_jump(
    report: Report, limits: Limits, last_sync: LastSync | None, now: datetime
) -> Rejection | None:
    """Compare offsets, not names: Lisbon and London have the same time."""
    if last_sync is None or now - last_sync.at > limits.tz_window:
        return None
    offset = now.astimezone(report.zone).utcoffset() or timedelta()
    jump = abs(offset - last_sync.offset)
    if jump <= limits.tz_jump:
        return None
    return Rejection(
        422,
        "TZ_JUMP",
        "the time zone is too far from that of the last report",
        {
            "received": report.zone.key,
            "jumpHours": jump / _HOUR,
            "maxJumpHours": limits.tz_jump / _HOUR,
            "limit": limits.tz_jump / _HOUR,
            "lastOffsetHours": last_sync.offset / _HOUR,
            # The window includes its last instant.
            "passesAt": _text(last_sync.at + limits.tz_window + timedelta(microseconds=1)),
        },
        is_anti_cheat=not _is_flight(jump, now - last_sync.at),
    )


def _is_flight(jump: timedelta, elapsed: timedelta) -> bool:
    """Return whether a plane could have flown that far.

    Across the date line the offset changes by a day more than the distance, and a plane crosses at
    most two time zones in an hour.
    """
    distance = min(jump, abs(timedelta(days=1) - jump))
    return elapsed > timedelta() and distance <= 2 * elapsed


def _day(report: Report, limits: Limits, now: datetime) -> Rejection | None:
    """Check the age of the day by the server's clock, in the time zone of the report."""
    today = today_in(report.zone, now)
    ahead = (report.day - today).days
    details = {"received": report.day.isoformat(), "today": today.isoformat()}
    if ahead > 1:
        begins_at = datetime.combine(report.day - timedelta(days=1), time(), report.zone)
        return Rejection(
            422,
            "FUTURE_DATED",
            "the day is in the future",
            details
            | {
                "limit": (today + timedelta(days=1)).isoformat(),
                "passesAt": _text(begins_at),
            },
        )
    if -ahead > limits.offline_days:
        return Rejection(
            422,
            "OFFLINE_CAP_EXCEEDED",
            f"the day is more than {limits.offline_days} days old",
            details
            | {
                "limit": (today - timedelta(days=limits.offline_days)).isoformat(),
                "capDays": limits.offline_days,
                # It only gets older.
                "passesAt": None,
            },
        )
    return None


def _span(report: Report, limits: Limits, now: datetime) -> Rejection | None:
    """Check that the samples have been taken; a device's clock may be a little ahead."""
    if report.span.end <= now + limits.clock_ahead:
        return None
    return Rejection(
        422,
        "FUTURE_DATED",
        "the samples end in the future",
        {
            "received": _text(report.span.end),
            "limit": _text(now + limits.clock_ahead),
            "serverNow": _text(now),
            "passesAt": _text(report.span.end - limits.clock_ahead),
        },
    )


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _number(count: int) -> int | str:
    """Return a number that every JSON parser reads exactly, else its digits."""
    return count if count <= _MAX_SAFE else str(count)
