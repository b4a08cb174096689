"""Checks of one report, and the assessment of a day. No server."""

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_services.walk.steps.day_assessment import (
    Accepted,
    Quarantined,
    Reading,
    Rejected,
    Ruling,
    Verdict,
    assess_day,
)
from onceward_services.walk.steps.rules import (
    LastSync,
    Limits,
    Report,
    Span,
    find_rejection,
    find_zone,
    provisional_credit,
    scaled,
)

PHONE, WATCH = "phone", "watch"
LIMITS = Limits(bundles=frozenset({PHONE, WATCH}))
DAY = date(2026, 5, 22)
NOON = datetime(2026, 5, 22, 12, 0, tzinfo=UTC)


def at(hour: float, day: date = DAY) -> datetime:
    return datetime.combine(day, time(), UTC) + timedelta(hours=hour)


def a_report(**changes: object) -> Report:
    usual = Report(DAY, 3000, find_zone("UTC"), Span(at(6), at(11)), PHONE)
    return replace(usual, **changes)  # type: ignore[arg-type]


def code(report: Report, last: LastSync | None = None, now: datetime = NOON) -> str | None:
    fault = find_rejection(report, LIMITS, last, now)
    return None if fault is None else fault.code


# -- one report ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "found"), [(50_000, None), (50_001, "STEP_COUNT_EXCEEDED")])
def test_a_day_has_at_most_so_many_steps(count: int, found: str | None) -> None:
    assert code(a_report(count=count)) == found


@pytest.mark.parametrize(
    ("count", "seconds", "found"),
    [
        (900, 100, None),  # three times three a second, exactly
        (901, 100, "BURST_RATE_EXCEEDED"),
        (0, 0, None),
        (1, 0, "BURST_RATE_EXCEEDED"),
    ],
)
def test_step_rate_is_limited(count: int, seconds: int, found: str | None) -> None:
    span = Span(NOON, NOON + timedelta(seconds=seconds))
    assert code(a_report(count=count, span=span)) == found


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("UTC", "Pacific/Tarawa", None),  # twelve hours, exactly
        ("UTC", "Pacific/Tongatapu", "TZ_JUMP"),  # thirteen
        ("Pacific/Tongatapu", "UTC", "TZ_JUMP"),
        ("Europe/Lisbon", "Europe/London", None),
        # Neighbours on both sides of the date line: a day apart by offset.
        ("Pacific/Kiritimati", "Pacific/Honolulu", "TZ_JUMP"),
        ("America/New_York", "Asia/Kolkata", None),  # nine and a half
    ],
)
def test_time_zones_are_compared_by_their_offset(
    before: str, after: str, found: str | None
) -> None:
    then = NOON - timedelta(hours=1)
    offset = then.astimezone(find_zone(before)).utcoffset()
    assert offset is not None
    assert code(a_report(zone=find_zone(after)), LastSync(then, offset)) == found


@pytest.mark.parametrize(("hours", "found"), [(24, "TZ_JUMP"), (24.001, None)])
def test_a_jump_counts_only_within_a_day_of_the_last_sync(hours: float, found: str | None) -> None:
    last = LastSync(NOON - timedelta(hours=hours), timedelta(hours=-7))
    assert code(a_report(zone=find_zone("Pacific/Auckland")), last) == found


def test_daylight_saving_change_is_not_a_time_zone_jump() -> None:
    warsaw = find_zone("Europe/Warsaw")
    before = datetime(2026, 3, 29, 0, 59, tzinfo=UTC)
    offset = before.astimezone(warsaw).utcoffset()
    assert offset == timedelta(hours=1)
    now = before + timedelta(minutes=2)
    report = a_report(day=date(2026, 3, 29), zone=warsaw, span=Span(at(0, now.date()), now))
    assert code(report, LastSync(before, offset), now) is None


@pytest.mark.parametrize(
    ("zone", "day", "found"),
    [
        ("UTC", date(2026, 5, 23), None),
        ("UTC", date(2026, 5, 24), "FUTURE_DATED"),
        ("UTC", date(2026, 5, 15), None),
        ("UTC", date(2026, 5, 14), "OFFLINE_CAP_EXCEEDED"),
        # It is the 23rd there already.
        ("Pacific/Kiritimati", date(2026, 5, 24), None),
        ("Pacific/Kiritimati", date(2026, 5, 25), "FUTURE_DATED"),
        ("Pacific/Kiritimati", date(2026, 5, 15), "OFFLINE_CAP_EXCEEDED"),
        # It is still the 21st there, at one in the morning UTC.
        ("Pacific/Pago_Pago", date(2026, 5, 14), None),
        ("Pacific/Pago_Pago", date(2026, 5, 23), "FUTURE_DATED"),
        ("UTC", date(1, 1, 1), "OFFLINE_CAP_EXCEEDED"),
        ("UTC", date(9999, 12, 31), "FUTURE_DATED"),
    ],
)
def test_age_of_a_day_is_checked_in_the_walkers_time_zone(
    zone: str, day: date, found: str | None
) -> None:
    now = at(1) if zone == "Pacific/Pago_Pago" else NOON
    span = Span(now - timedelta(hours=1), now)
    assert code(a_report(zone=find_zone(zone), day=day, span=span), now=now) == found


def test_unknown_source_is_checked_first_and_is_not_anti_cheat() -> None:
    fault = find_rejection(a_report(bundle="fake", count=10**9), LIMITS, None, NOON)
    assert fault is not None
    assert (fault.status, fault.code, fault.is_anti_cheat) == (403, "SOURCE_NOT_ALLOWED", False)


@pytest.mark.parametrize(
    "name",
    [
        *("", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "Europe", "localtime", "zone.tab"),
        *("right/Europe/Paris", "posix/Europe/Paris", "Europe/Warsaw\0", "Factory", "a" * 300),
    ],
)
def test_only_iana_time_zones_are_accepted(name: str) -> None:
    with pytest.raises(ValueError, match="IANA"):
        find_zone(name)


@pytest.mark.parametrize(
    ("count", "prior", "credit"),
    [(3000, None, 3000), (3000, 2000, 3000), (3001, 2000, 3000), (10, 0, 0), (10, 5, 7)],
)
def test_provisional_credit_is_limited_by_the_previous_count(
    count: int, prior: int | None, credit: int
) -> None:
    assert provisional_credit(count, prior, 1.5) == credit


def test_factors_are_decimal() -> None:
    assert scaled(30, 0.1) == 3


# -- a day -----------------------------------------------------------------------------------------


def reading(
    number: int, count: int, start: float = 6, end: float = 11, bundle: str = PHONE
) -> Reading:
    return Reading(number, bundle, count, Span(at(start), at(end)))


def verdict(*readings: Reading, ruling: Ruling | None = None) -> Verdict:
    return assess_day(DAY, readings, LIMITS, ruling)


def test_a_counter_that_grows_is_accepted_with_its_newest_count() -> None:
    grown = verdict(reading(1, 1000, end=8), reading(2, 2500, end=9), reading(3, 2500, end=11))
    assert grown == Accepted(2500)


@given(st.permutations(range(5)))
def test_late_report_is_ordered_by_its_samples(order: list[int]) -> None:
    readings = [reading(number, 1000 * hour, end=7 + hour) for number, hour in enumerate(order, 1)]
    assert verdict(*readings) == Accepted(4000)


def test_the_same_report_twice_is_one() -> None:
    assert verdict(reading(1, 3000), reading(2, 3000)) == Accepted(3000)


@pytest.mark.parametrize("end", [11, 12])
def test_a_counter_that_goes_backwards_is_quarantined(end: float) -> None:
    backwards = verdict(reading(1, 5000), reading(2, 3000, end=end))
    assert backwards == Quarantined(("COUNT_WENT_BACKWARDS",))


def test_two_bundles_over_the_same_time_are_quarantined() -> None:
    twice = verdict(reading(1, 3000), reading(2, 2000, 9, 13, WATCH))
    assert twice == Quarantined(("DUPLICATE_TIMES",))


def test_an_overlap_is_found_behind_a_reading_in_between() -> None:
    readings = [
        reading(1, 3000, 6, 12),
        reading(2, 3000, 7, 8),
        reading(3, 500, 11, 13, WATCH),
    ]
    assert isinstance(verdict(*readings), Quarantined)


def test_two_bundles_one_after_the_other_add_up() -> None:
    assert verdict(reading(1, 3000, 6, 9), reading(2, 2000, 9, 13, WATCH)) == Accepted(5000)


def test_a_bundle_that_counted_nothing_counts_nothing_twice() -> None:
    assert verdict(reading(1, 3000), reading(2, 0, 6, 11, WATCH)) == Accepted(3000)


def test_bundles_that_add_up_to_too_much_are_rejected() -> None:
    both = verdict(reading(1, 30_000, 6, 9), reading(2, 30_000, 9, 13, WATCH))
    assert both == Rejected("STEP_COUNT_EXCEEDED", is_anti_cheat=True)


def test_samples_outside_the_day_in_the_walkers_zones_are_quarantined() -> None:
    assert verdict(reading(1, 3000, -6, 30)) == Accepted(3000)
    for start, end in (-6.1, 10), (6, 30.1):
        outside = verdict(reading(1, 3000, start, end))
        assert outside == Quarantined(("SPAN_OUTSIDE_DAY",))
    # A traveller has been in two zones: six hours before UTC's midnight it was that day in Tokyo.
    zones = (find_zone("UTC"), find_zone("Asia/Tokyo"))
    assert verdict(replace(reading(1, 3000, -9, 10), zones=zones)) == Accepted(3000)


@pytest.mark.parametrize(
    ("hours", "found"),
    [
        ((10, 12), Quarantined(("SPAN_ON_ANOTHER_DAY",))),
        ((5, 6.25), Accepted(3000)),  # a sample that ends a quarter of an hour after midnight
        ((5, 6.26), Quarantined(("SPAN_ON_ANOTHER_DAY",))),
        ((11, 12), Accepted(3000)),
    ],
)
def test_samples_count_on_one_day(hours: tuple[float, float], found: Verdict) -> None:
    elsewhere = [Span(at(hours[0]), at(hours[1]))]
    assert assess_day(DAY, [reading(1, 3000)], LIMITS, elsewhere=elsewhere) == found
    assert assess_day(DAY, [reading(1, 0)], LIMITS, elsewhere=elsewhere) == Accepted(0)


@pytest.mark.parametrize(
    ("minutes", "found"), [(0, None), (5, None), (5.1, "FUTURE_DATED"), (600, "FUTURE_DATED")]
)
def test_samples_do_not_end_in_the_future(minutes: float, found: str | None) -> None:
    end = NOON + timedelta(minutes=minutes)
    rejection = find_rejection(a_report(span=Span(at(6), end)), LIMITS, None, NOON)
    assert (None if rejection is None else rejection.code) == found
    if rejection is not None:
        assert not rejection.is_anti_cheat
        passes_at = datetime.fromisoformat(rejection.details["passesAt"])
        assert passes_at == end - timedelta(minutes=5)
        assert code(a_report(span=Span(at(6), end)), now=passes_at) is None


@pytest.mark.parametrize(
    ("bundle", "found"),
    [
        ("com.apple.health", None),
        ("com.apple.health.6D1F8B2C-0000", None),
        ("com.apple.health.", "SOURCE_NOT_ALLOWED"),
        ("com.apple.healthy", "SOURCE_NOT_ALLOWED"),
        ("com.apple.health.x\ny", "SOURCE_NOT_ALLOWED"),
        ("org.com.apple.health.x", "SOURCE_NOT_ALLOWED"),
        ("comXappleXhealth.x", "SOURCE_NOT_ALLOWED"),
    ],
)
def test_bundles_are_matched_by_pattern(bundle: str, found: str | None) -> None:
    limits = replace(LIMITS, bundles=frozenset({"com.apple.health", "com.apple.health.*"}))
    rejection = find_rejection(a_report(bundle=bundle), limits, None, NOON)
    assert (None if rejection is None else rejection.code) == found
    if rejection is not None:
        assert rejection.details == {
            "received": bundle,
            "allowed": ["com.apple.health", "com.apple.health.*"],
        }


@pytest.mark.parametrize(
    ("before", "after", "hours", "is_mark"),
    [
        ("America/Los_Angeles", "Pacific/Auckland", 13, False),  # a flight over the date line
        ("Pacific/Auckland", "America/Los_Angeles", 12, False),
        ("Pacific/Kiritimati", "Pacific/Honolulu", 3, False),
        ("America/Los_Angeles", "Asia/Tokyo", 4.1, False),
        ("America/Los_Angeles", "Asia/Tokyo", 3.9, True),  # faster than a plane
        ("UTC", "Pacific/Kiritimati", 0, True),
    ],
)
def test_a_flight_is_not_an_anti_cheat_mark(
    before: str, after: str, hours: float, is_mark: bool
) -> None:
    then = NOON - timedelta(hours=hours)
    offset = then.astimezone(find_zone(before)).utcoffset()
    assert offset is not None
    found = find_rejection(a_report(zone=find_zone(after)), LIMITS, LastSync(then, offset), NOON)
    assert found is not None
    assert (found.code, found.is_anti_cheat) == ("TZ_JUMP", is_mark)
    passes_at = datetime.fromisoformat(found.details["passesAt"])
    later = a_report(zone=find_zone(after), day=passes_at.astimezone(find_zone(after)).date())
    assert code(later, LastSync(then, offset), passes_at) is None


@pytest.mark.parametrize(
    ("changes", "details"),
    [
        ({"count": 50_001}, {"received": 50_001, "limit": 50_000, "maxStepsPerDay": 50_000}),
        (
            {"count": 2000, "span": Span(at(6), at(6) + timedelta(seconds=100))},
            {
                "received": 2000,
                "limit": 900,
                "spanSeconds": 100.0,
                "minSpanSeconds": pytest.approx(222.2, abs=0.1),
                "maxStepsPerSecond": 3.0,
                "tolerance": 3.0,
            },
        ),
        (
            {"day": date(2026, 5, 24), "zone": find_zone("Europe/Warsaw")},
            {
                "received": "2026-05-24",
                "today": "2026-05-22",
                "limit": "2026-05-23",
                "passesAt": "2026-05-22T22:00:00Z",
            },
        ),
        (
            {"day": date(2026, 5, 14)},
            {
                "received": "2026-05-14",
                "today": "2026-05-22",
                "limit": "2026-05-15",
                "capDays": 7,
                "passesAt": None,
            },
        ),
    ],
)
def test_rejections_say_what_was_received_and_what_would_pass(
    changes: dict[str, object], details: dict[str, object]
) -> None:
    found = find_rejection(a_report(**changes), LIMITS, None, NOON)
    assert found is not None
    assert found.details == details


def test_a_first_sync_of_few_steps_does_not_limit_the_day_to_them() -> None:
    assert provisional_credit(6000, 20, 1.5, floor=2000) == 2000
    assert provisional_credit(1500, 20, 1.5, floor=2000) == 1500
    assert provisional_credit(9000, 4000, 1.5, floor=2000) == 6000


def test_readings_accepted_by_an_admin_are_not_assessed_again() -> None:
    readings = [reading(1, 5000), reading(2, 3000, end=12)]
    ruling = Ruling(accepted=True, up_to=2, count=4500)
    assert verdict(*readings, ruling=ruling) == Accepted(4500)
    assert verdict(*readings, reading(3, 4000, end=13), ruling=ruling) == Accepted(4500)
    assert verdict(*readings, reading(3, 6000, end=13), ruling=ruling) == Accepted(6000)
    again = verdict(*readings, reading(3, 2000, end=13), ruling=ruling)
    assert again == Quarantined(("COUNT_WENT_BACKWARDS",))


def test_day_rejected_by_an_admin_stays_rejected() -> None:
    ruling = Ruling(accepted=False, up_to=1, count=0)
    assert verdict(reading(1, 3000), reading(2, 4000), ruling=ruling) == Rejected("RULING")
