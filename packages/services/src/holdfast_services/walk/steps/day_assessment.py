"""What the reports of one day say together. Pure: all of them in, one verdict out.

Counts of one bundle are readings of one counter, so they only grow. Readings are put in the order
of the samples they end with, not of their arrival: what a device sent late is no fraud. Readings of
two bundles over the same time are the same steps counted twice, most likely by a phone and a
watch. Neither can be judged by a program, so the day is quarantined and a person looks at it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from holdfast_services.walk.steps.rules import Limits, Span, is_burst

__all__ = ["Accepted", "Quarantined", "Reading", "Rejected", "Ruling", "Verdict", "judge"]

# Somewhere on Earth it is that day from 14 hours before it begins in UTC until 12 hours after it
# ends there.
_FIRST_DAWN = timedelta(hours=14)
_LAST_DUSK = timedelta(days=1, hours=12)


@dataclass(frozen=True, slots=True)
class Reading:
    """One report as the server recorded it. ``number`` counts the reports of the day."""

    number: int
    bundle: str
    count: int
    span: Span


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a person decided about the readings up to a number."""

    accepted: bool
    up_to: int
    count: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The day counts, with so many steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A person has to look."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The day does not count."""

    reason: str
    is_anti_cheat: bool = False


Verdict = Accepted | Quarantined | Rejected


def judge(
    day: date, readings: Iterable[Reading], limits: Limits, ruling: Ruling | None = None
) -> Verdict:
    """Decide about a day. A rejection by a person stands; what a person accepted is not doubted."""
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
        for reason, is_so in (
            ("COUNT_WENT_BACKWARDS", _goes_backwards(in_order, cleared)),
            ("DUPLICATE_TIMES", _counts_twice(fresh)),
            ("SPAN_OUTSIDE_DAY", any(_is_outside(day, reading.span) for reading in fresh)),
        )
        if is_so
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
    """Tell whether readings of two bundles overlap. One of no steps counts nothing twice."""
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


def _is_outside(day: date, span: Span) -> bool:
    """Tell whether the samples were taken when it was that day nowhere on Earth."""
    begins_at = datetime.combine(day, time(), UTC)
    return span.start < begins_at - _FIRST_DAWN or span.end > begins_at + _LAST_DUSK
