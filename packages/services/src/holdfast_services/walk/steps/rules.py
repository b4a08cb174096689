"""Checks of one report of steps. Pure: the time and the last report are arguments.

A report is the number of steps of a day so far, between two instants, from one source bundle. All
reports of a day together are assessed in ``day_assessment``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from re import compile as regex
from typing import Any, Final
from zoneinfo import ZoneInfo

from holdfast_services.walk.steps.streaks import today_in

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
# Files of the zone database that are not zones: the server's local zone, and clocks with leap
# seconds.
_NOT_A_ZONE: Final = frozenset({"localtime", "posix", "posixrules", "right", "Factory"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a plausible report."""

    bundles: frozenset[str]
    steps_per_day: int = 50_000
    # The speed of a long run, and how much faster a report may be: samples arrive in groups, and a
    # short sprint is legitimate.
    steps_per_second: float = 3.0
    burst_tolerance: float = 3.0
    tz_jump: timedelta = timedelta(hours=12)
    tz_window: timedelta = timedelta(hours=24)
    offline_days: int = 7


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
    )


def is_burst(count: int, seconds: float, limits: Limits) -> bool:
    """Return whether the step rate exceeds the limit."""
    return count > limits.steps_per_second * limits.burst_tolerance * max(0.0, seconds)


def provisional_credit(count: int, prior: int | None, factor: float) -> int:
    """Return the step count to show before reconciliation.

    The first report of a day counts in full, later ones up to ``factor`` times the previous count.
    """
    return count if prior is None else min(count, scaled(prior, factor))


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
    if report.bundle in limits.bundles:
        return None
    return Rejection(
        403,
        "SOURCE_NOT_ALLOWED",
        "steps from this source bundle are not accepted",
    )


def _count(report: Report, limits: Limits) -> Rejection | None:
    if report.count <= limits.steps_per_day:
        return None
    return Rejection(
        422,
        "STEP_COUNT_EXCEEDED",
        f"a day can have at most {limits.steps_per_day} steps",
        {"maxStepsPerDay": limits.steps_per_day},
        is_anti_cheat=True,
    )


def _burst(report: Report, limits: Limits) -> Rejection | None:
    if not is_burst(report.count, report.span.seconds, limits):
        return None
    return Rejection(
        422,
        "BURST_RATE_EXCEEDED",
        "the step rate is too high for the sample span",
        {"maxStepsPerSecond": limits.steps_per_second, "tolerance": limits.burst_tolerance},
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
            "jumpHours": jump / timedelta(hours=1),
            "maxJumpHours": limits.tz_jump / timedelta(hours=1),
        },
        is_anti_cheat=True,
    )


def _day(report: Report, limits: Limits, now: datetime) -> Rejection | None:
    """Check the age of the day by the server's clock, in the time zone of the report."""
    today = today_in(report.zone, now)
    ahead = (report.day - today).days
    details = {"today": today.isoformat()}
    if ahead > 1:
        return Rejection(422, "FUTURE_DATED", "the day is in the future", details)
    if -ahead > limits.offline_days:
        return Rejection(
            422,
            "OFFLINE_CAP_EXCEEDED",
            f"the day is more than {limits.offline_days} days old",
            details | {"capDays": limits.offline_days},
        )
    return None
