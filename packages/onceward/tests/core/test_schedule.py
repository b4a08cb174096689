"""Slots of periodic jobs: every process computes the same ones."""

from datetime import UTC, datetime, time, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.errors import ConfigurationError
from onceward.jobs.schedule import Daily, Every

INSTANTS = st.datetimes(
    min_value=datetime(1971, 1, 1),  # noqa: DTZ001 - hypothesis wants it so
    max_value=datetime(2200, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("now", "slot"),
    [
        ("2026-03-01T02:59:59.999999", "2026-02-28T03:00:00"),
        ("2026-03-01T03:00:00", "2026-03-01T03:00:00"),
        ("2026-03-01T03:00:00.000001", "2026-03-01T03:00:00"),
        ("2026-03-01T23:59:59.999999", "2026-03-01T03:00:00"),
        ("2026-03-02T00:00:00", "2026-03-01T03:00:00"),
        ("2026-01-01T00:00:00", "2025-12-31T03:00:00"),
        ("2024-03-01T01:00:00", "2024-02-29T03:00:00"),
        # Daylight saving time begins in Europe; UTC has none.
        ("2026-03-29T02:30:00", "2026-03-28T03:00:00"),
    ],
)
def test_daily_slot_starts_at_its_time(now: str, slot: str) -> None:
    daily = Daily(time(3))
    assert daily.slot(at(now)) == at(slot)
    assert daily.next_slot(at(now)) == at(slot) + timedelta(days=1)


def test_daily_slot_does_not_depend_on_the_local_zone() -> None:
    east = timezone(timedelta(hours=14))
    now = at("2026-03-01T02:59:59").astimezone(east)
    assert now.day == 1
    assert Daily(time(3)).slot(now) == at("2026-02-28T03:00:00")
    assert Daily(time(3)).slot(now + timedelta(seconds=1)) == at("2026-03-01T03:00:00")


def test_daily_time_with_another_zone_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="UTC"):
        Daily(time(3, tzinfo=timezone(timedelta(hours=1))))
    assert Daily(time(3, tzinfo=UTC)).slot(at("2026-03-01T04:00:00")) == at("2026-03-01T03:00:00")


@pytest.mark.parametrize(
    ("seconds", "now", "slot"),
    [
        (60, "2026-03-01T12:00:59.999999", "2026-03-01T12:00:00"),
        (60, "2026-03-01T12:01:00", "2026-03-01T12:01:00"),
        (3600, "2026-03-01T12:59:59", "2026-03-01T12:00:00"),
        (1, "2026-03-01T12:00:00.5", "2026-03-01T12:00:00"),
        (1.5, "2026-03-01T12:00:01", "2026-03-01T12:00:00"),
        (1.5, "2026-03-01T12:00:02", "2026-03-01T12:00:01.5"),
    ],
)
def test_intervals_are_counted_from_1970(seconds: float, now: str, slot: str) -> None:
    every = Every(seconds)
    assert every.slot(at(now)) == at(slot)
    assert every.next_slot(at(now)) == at(slot) + timedelta(seconds=seconds)


@given(INSTANTS, st.integers(1, 10_000_000))
def test_now_is_between_its_slot_and_the_next(now: datetime, seconds: int) -> None:
    for schedule in (Every(seconds), Daily(time(3)), Daily(time(23, 59, 59, 999_999))):
        slot, following = schedule.slot(now), schedule.next_slot(now)
        assert slot <= now < following
        assert schedule.slot(slot) == slot, "a slot is its own"
        assert schedule.slot(following) == following
        assert slot.utcoffset() == timedelta(0)


@given(INSTANTS, INSTANTS, st.floats(1, 1e6))
def test_slots_do_not_decrease_with_time(one: datetime, other: datetime, seconds: float) -> None:
    early, late = sorted((one, other))
    for schedule in (Every(seconds), Daily(time(3))):
        assert schedule.slot(early) <= schedule.slot(late)


@pytest.mark.parametrize("seconds", [0, 0.5, -60, float("nan"), float("inf")])
def test_interval_that_is_not_positive_is_rejected(seconds: Any) -> None:
    with pytest.raises(ConfigurationError):
        Every(seconds)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Every(1), "every second"),
        (Every(90), "every 90 seconds"),
        (Every(1.5), "every 1.5 seconds"),
        (Every(300), "every 5 minutes"),
        (Every(3600), "every hour"),
        (Every(86_400), "every day"),
        (Every(2 * 86_400), "every 2 days"),
        (Daily(time(3)), "every day at 03:00 UTC"),
        (Daily(time(23, 59, 30, tzinfo=UTC)), "every day at 23:59:30 UTC"),
    ],
)
def test_schedule_is_described_in_words(schedule: Every | Daily, words: str) -> None:
    assert schedule.describe() == words
