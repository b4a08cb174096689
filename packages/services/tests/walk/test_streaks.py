"""Streaks: a function of the set of attested days, in any order."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_services.walk.steps.streaks import (
    AttestedDay,
    StreakRules,
    extend_streak,
    streak_on,
    today_in,
)

RULES = StreakRules(tiers=(3, 7, 14, 30), decay_tiers=1)
UTC_ZONE = ZoneInfo("UTC")
FIRST = date(2026, 1, 1)


def day(number: int) -> date:
    return FIRST + timedelta(days=number)


def last_of(numbers: Iterable[int], rules: StreakRules = RULES) -> AttestedDay | None:
    *_, last = [None, *extend_streak(None, [day(number) for number in sorted(numbers)], rules)]
    return last


def calendar(numbers: set[int], until: int, rules: StreakRules) -> tuple[int, int]:
    """Compute the streak day by day, as it is defined."""
    length = tier = 0
    for number in range(until + 1):
        if number in numbers:
            length += 1
            tier = max(tier, sum(length >= days for days in rules.tiers))
        elif number < until:  # today is missed only once it is over
            length, tier = 0, max(0, tier - rules.decay_tiers)
    return length, tier


@given(
    numbers=st.sets(st.integers(0, 60)),
    later=st.integers(0, 20),
    tiers=st.sets(st.integers(1, 12), min_size=1, max_size=4),
    decay=st.integers(0, 3),
)
def test_streak_equals_that_of_a_day_by_day_computation(
    numbers: set[int], later: int, tiers: set[int], decay: int
) -> None:
    rules = StreakRules(tuple(sorted(tiers)), decay)
    today = max(numbers, default=0) + later
    state = streak_on(last_of(numbers, rules), day(today), UTC_ZONE, rules)
    assert (state.length, state.tier) == calendar(numbers, today, rules)


@given(st.sets(st.integers(0, 40), min_size=1), st.data())
def test_it_may_be_carried_on_from_any_day_before_the_change(
    numbers: set[int], data: st.DataObject
) -> None:
    whole = list(extend_streak(None, [day(number) for number in sorted(numbers)], RULES))
    cut = data.draw(st.integers(0, len(whole)))
    before = whole[cut - 1] if cut else None
    assert list(extend_streak(before, [each.day for each in whole[cut:]], RULES)) == whole[cut:]


@pytest.mark.parametrize(("days", "tier"), [(1, 0), (2, 0), (3, 1), (7, 2), (14, 3), (30, 4)])
def test_tiers_are_reached_on_their_day(days: int, tier: int) -> None:
    last = last_of(range(days))
    assert last == AttestedDay(day(days - 1), days, tier)


def test_missed_day_ends_the_streak_and_costs_one_tier() -> None:
    state = streak_on(last_of(range(7)), day(8), UTC_ZONE, RULES)
    assert (state.length, state.tier, state.last_attested) == (0, 1, day(6))


def test_today_is_not_missed_before_it_is_over() -> None:
    state = streak_on(last_of(range(7)), day(7), UTC_ZONE, RULES)
    assert (state.length, state.tier) == (7, 2)


def test_decay_comes_at_the_end_of_the_next_day_and_then_every_midnight() -> None:
    last = last_of(range(7))
    on_time = streak_on(last, day(6), UTC_ZONE, RULES)
    assert on_time.decay_at == datetime(2026, 1, 9, tzinfo=UTC)
    late = streak_on(last, day(8), UTC_ZONE, RULES)
    assert late.decay_at == datetime(2026, 1, 10, tzinfo=UTC)
    gone = streak_on(last, day(30), UTC_ZONE, RULES)
    assert (gone.tier, gone.decay_at) == (0, None)


def test_walker_without_attested_days_has_an_empty_streak() -> None:
    state = streak_on(None, FIRST, UTC_ZONE, RULES)
    assert (state.length, state.tier, state.decay_at, state.last_attested) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("zone", "now", "today"),
    [
        ("Pacific/Kiritimati", datetime(2026, 5, 22, 10, 0, tzinfo=UTC), date(2026, 5, 23)),
        ("Pacific/Kiritimati", datetime(2026, 5, 22, 9, 59, tzinfo=UTC), date(2026, 5, 22)),
        ("Etc/GMT+12", datetime(2026, 5, 22, 11, 59, tzinfo=UTC), date(2026, 5, 21)),
        # Summer time begins on 29 March 2026 in Warsaw: midnight is at 23:00, then at 22:00 UTC.
        ("Europe/Warsaw", datetime(2026, 3, 28, 22, 59, tzinfo=UTC), date(2026, 3, 28)),
        ("Europe/Warsaw", datetime(2026, 3, 29, 21, 59, tzinfo=UTC), date(2026, 3, 29)),
        ("Europe/Warsaw", datetime(2026, 3, 29, 22, 0, tzinfo=UTC), date(2026, 3, 30)),
    ],
)
def test_day_is_in_the_walkers_time_zone(zone: str, now: datetime, today: date) -> None:
    assert today_in(ZoneInfo(zone), now) == today


def test_decay_is_at_the_walkers_midnight_on_a_day_of_23_hours() -> None:
    last = AttestedDay(date(2026, 3, 28), 5, 1)
    state = streak_on(last, date(2026, 3, 28), ZoneInfo("Europe/Warsaw"), RULES)
    assert state.decay_at == datetime(2026, 3, 29, 22, 0, tzinfo=UTC)


def test_where_clocks_skip_midnight_the_day_begins_with_the_first_instant_there_is() -> None:
    # Cairo, 24 April 2026: after 23:59:59 comes 01:00.
    last = AttestedDay(date(2026, 4, 22), 5, 1)
    state = streak_on(last, date(2026, 4, 22), ZoneInfo("Africa/Cairo"), RULES)
    assert state.decay_at == datetime(2026, 4, 23, 22, 0, tzinfo=UTC)
