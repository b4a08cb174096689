"""Assess all reports of one day together. Pure: no I/O, no clock.

The counts of one source bundle are readings of one counter, so they only grow. Readings are ordered
by the end of their samples and not by arrival, because devices may send late. Readings of two
bundles over the same time are probably the same steps, counted by a phone and a watch. Samples
belong to one day, in the walker's zone with a grace, and count on one day only. If counts shrink,
times overlap or samples belong to another day, the day is quarantined until an admin has reviewed
it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from onceward_services.walk.steps.rules import Limits, Span, is_burst

__all__ = ["Accepted", "Quarantined", "Reading", "Rejected", "Ruling", "Verdict", "assess_day"]

# A sample may begin before midnight and end after it, and be part of both days.
_SHARED: Final = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Reading:
    """One stored report. ``number`` is its position among the reports of the day."""

    number: int
    bundle: str
    count: int
    span: Span
    # The zones of the device when it reported, and at the report before.
    zones: tuple[ZoneInfo, ...] = (ZoneInfo("UTC"),)


@dataclass(frozen=True, slots=True)
class Ruling:
    """An admin's decision about the readings up to a number."""

    accepted: bool
    up_to: int
    count: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The day counts, with ``count`` steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The day needs a review."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The day does not count."""

    reason: str
    is_anti_cheat: bool = False


Verdict = Accepted | Quarantined | Rejected


def assess_day(
    day: date,
    readings: Iterable[Reading],
    limits: Limits,
    ruling: Ruling | None = None,
    *,
    elsewhere: Sequence[Span] = (),
) -> Verdict:
    """Assess a day. Readings that an admin has rejected or accepted are not assessed again.

    ``elsewhere`` are the samples that count on neighbouring days.
    """
    if ruling is not None and not ruling.accepted:
        return Rejected("RULING")
    in_order = sorted(readings, key=lambda reading: (reading.span.end, reading.number))
    cleared = 0 if ruling is None else ruling.up_to
    fresh = [reading for reading in in_order if reading.number > cleared]
    bundles = sorted({reading.bundle for reading in fresh})
    newest = {reading.bundle: reading.count for reading in fresh}
    total = sum(newest.values())
    if total > limits.steps_per_day:
        return Rejected("STEP_COUNT_EXCEEDED", is_anti_cheat=True)
    if any(_whole_day_is_burst(fresh, bundle, limits) for bundle in bundles):
        return Rejected("BURST_RATE_EXCEEDED", is_anti_cheat=True)
    reasons = tuple(
        reason
        for reason, holds in (
            ("COUNT_WENT_BACKWARDS", _goes_backwards(in_order, cleared)),
            ("DUPLICATE_TIMES", _counts_twice(fresh)),
            ("SPAN_OUTSIDE_DAY", any(_is_outside(day, reading, limits) for reading in fresh)),
            ("SPAN_ON_ANOTHER_DAY", any(_is_shared(reading, elsewhere) for reading in fresh)),
        )
        if holds
    )
    if reasons:
        return Quarantined(reasons)
    return Accepted(total if ruling is None else max(total, ruling.count))


def _whole_day_is_burst(readings: Sequence[Reading], bundle: str, limits: Limits) -> bool:
    mine = [reading for reading in readings if reading.bundle == bundle]
    start = min(reading.span.start for reading in mine)
    end = max(reading.span.end for reading in mine)
    most = max(reading.count for reading in mine)
    return is_burst(most, (end - start).total_seconds(), limits)


def _goes_backwards(in_order: Iterable[Reading], cleared: int) -> bool:
    before: dict[str, int] = {}
    for reading in in_order:
        if reading.number > cleared and reading.count < before.get(reading.bundle, 0):
            return True
        before[reading.bundle] = reading.count
    return False


def _counts_twice(readings: Iterable[Reading]) -> bool:
    """Return whether readings of two bundles overlap; readings without steps are ignored."""
    latest_end: dict[str, datetime] = {}
    counting = [reading for reading in readings if reading.count > 0]
    for reading in sorted(counting, key=lambda reading: reading.span.start):
        if any(
            end > reading.span.start
            for bundle, end in latest_end.items()
            if bundle != reading.bundle
        ):
            return True
        end = latest_end.get(reading.bundle, reading.span.end)
        latest_end[reading.bundle] = max(end, reading.span.end)
    return False


def _is_outside(day: date, reading: Reading, limits: Limits) -> bool:
    """Return whether samples are outside the day in the walker's zones."""
    return not any(
        datetime.combine(day, time(), zone).astimezone(UTC) - limits.span_grace
        <= reading.span.start
        and reading.span.end
        <= datetime.combine(day + timedelta(days=1), time(), zone).astimezone(UTC)
        + limits.span_grace
        for zone in reading.zones
    )


def _is_shared(reading: Reading, elsewhere: Iterable[Span]) -> bool:
    """Return whether samples with steps overlap those of another day."""
    span = reading.span
    return reading.count > 0 and any(
        min(span.end, other.end) - max(span.start, other.start) > _SHARED for other in elsewhere
    )
