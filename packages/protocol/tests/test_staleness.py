"""Staleness cap for offline actions: boundaries, zones, invalid times."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward_protocol.errors import BodyInvalidError, StaleActionError
from onceward_protocol.staleness import (
    check_not_stale,
    check_submitted_after_generated,
    parse_instant,
)

NOW = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)
DAY, HOUR, MICROSECOND = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
WARSAW_SUMMER = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    "age",
    [
        timedelta(),
        DAY,
        7 * DAY,
        7 * DAY + 5 * HOUR,
        7 * DAY + 6 * HOUR - MICROSECOND,
        7 * DAY + 6 * HOUR,
        -HOUR,
        -6 * HOUR,
    ],
    ids=str,
)
def test_action_within_cap_and_grace_is_accepted(age):
    check_not_stale(NOW - age, NOW)


@pytest.mark.parametrize(
    "age",
    [7 * DAY + 6 * HOUR + MICROSECOND, 7 * DAY + 7 * HOUR, 8 * DAY, 4000 * DAY],
    ids=str,
)
def test_older_action_is_stale(age):
    with pytest.raises(StaleActionError, match="more than 7 days and 6 hours ago"):
        check_not_stale(NOW - age, NOW)


@pytest.mark.parametrize("ahead", [6 * HOUR + MICROSECOND, 12 * HOUR, 400 * DAY], ids=str)
def test_action_from_the_future_is_stale(ahead):
    with pytest.raises(StaleActionError, match="more than 6 hours in the server's future"):
        check_not_stale(NOW + ahead, NOW)


def test_error_of_a_stale_action_has_its_age():
    with pytest.raises(StaleActionError) as caught:
        check_not_stale(NOW - 7 * DAY - 7 * HOUR, NOW)
    assert caught.value.details == {
        "clientGeneratedAt": "2026-03-22T05:00:00.000Z",
        "serverNow": "2026-03-29T12:00:00.000Z",
        "ageDays": 7,
        "capDays": 7,
        "graceHours": 6,
    }


def test_error_details_have_microseconds():
    with pytest.raises(StaleActionError) as caught:
        check_not_stale(NOW - 7 * DAY - 6 * HOUR - MICROSECOND, NOW)
    assert caught.value.details["clientGeneratedAt"] == "2026-03-22T05:59:59.999999Z"


def test_action_from_the_future_has_a_negative_age():
    with pytest.raises(StaleActionError) as caught:
        check_not_stale(NOW + 2 * DAY, NOW)
    assert caught.value.details["ageDays"] == -2


def test_fractional_cap_is_formatted_as_a_fraction():
    with pytest.raises(StaleActionError) as caught:
        check_not_stale(NOW - DAY, NOW, cap=DAY / 2, grace=HOUR / 4)
    assert caught.value.details["capDays"] == 0.5
    assert caught.value.details["graceHours"] == 0.25
    assert type(caught.value.details["ageDays"]) is int


def test_cap_and_grace_are_configurable():
    check_not_stale(NOW - DAY - HOUR, NOW, cap=DAY, grace=HOUR)
    with pytest.raises(StaleActionError):
        check_not_stale(NOW - DAY - HOUR - MICROSECOND, NOW, cap=DAY, grace=HOUR)


def test_times_of_two_zones_are_compared_as_instants():
    # 14:00 in Warsaw is 12:00 UTC. Read as 14:00 UTC, the boundary would be two hours off.
    boundary = NOW - 7 * DAY - 6 * HOUR
    check_not_stale(boundary.astimezone(WARSAW_SUMMER), NOW)
    check_not_stale(boundary, NOW.astimezone(WARSAW_SUMMER))
    with pytest.raises(StaleActionError) as caught:
        check_not_stale((boundary - MICROSECOND).astimezone(WARSAW_SUMMER), NOW)
    assert caught.value.details["clientGeneratedAt"] == "2026-03-22T05:59:59.999999Z"
    wall_clock_as_utc = boundary.astimezone(WARSAW_SUMMER).replace(tzinfo=UTC)
    check_not_stale(wall_clock_as_utc - HOUR, NOW)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-01-31T09:30:00Z", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T09:30:00.000Z", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T10:30:00+01:00", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T10:30:00+0100", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T10:30+01", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T00:00:00-09:30", datetime(2026, 1, 31, 9, 30, tzinfo=UTC)),
        ("2026-01-31T09:30:00.5Z", datetime(2026, 1, 31, 9, 30, 0, 500_000, tzinfo=UTC)),
        ("2026-01-31T09:30:00.123456789Z", datetime(2026, 1, 31, 9, 30, 0, 123_456, tzinfo=UTC)),
        ("2024-02-29T00:00:00Z", datetime(2024, 2, 29, tzinfo=UTC)),
    ],
)
def test_time_with_a_zone_is_converted_to_utc(text, instant):
    parsed = parse_instant(text, "clientGeneratedAt")
    assert parsed == instant
    assert parsed.tzinfo is UTC


@pytest.mark.parametrize(
    "value",
    [
        None,
        1767225600,
        1767225600000.0,
        True,
        ["2026-01-31T09:30:00Z"],
        b"2026-01-31T09:30:00Z",
        "",
        "yesterday",
        "1767225600",
        "2026-01-31",
        "2026-01-31T09:30:00",
        "2026-01-31 09:30:00Z",
        "2026-01-31T09:30:00 Z",
        " 2026-01-31T09:30:00Z",
        "2026-01-31T09:30:00Z\n",
        "2026-01-31T09:30:00,5Z",
        "2026-W05-6T09:30:00Z",
        "20260131T093000Z",
        "2026-02-30T09:30:00Z",
        "2026-13-01T09:30:00Z",
        "2025-02-29T00:00:00Z",
        "2026-01-31T25:00:00Z",
        "2026-01-31T09:60:00Z",
        "2026-01-31T09:30:61Z",
        "2026-01-31T09:30:00+25:00",
        "2026-01-31T09:30:00+01:99",
        "2026-01-31T09:30:00.Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+01:00",
        "9999-12-31T23:59:59-01:00",
        "10000-01-01T00:00:00Z",
        "-2026-01-31T09:30:00Z",
        "２０２６-01-31T09:30:00Z",  # noqa: RUF001
        "2026-01-31T09:30:00." + "1" * 10_000 + "Z",
    ],
)
def test_invalid_time_is_rejected_with_the_name_of_the_field(value):
    with pytest.raises(BodyInvalidError, match="clientGeneratedAt must be an ISO-8601") as caught:
        parse_instant(value, "clientGeneratedAt")
    assert "\n" not in caught.value.message
    assert caught.value.details == {"field": "clientGeneratedAt"}


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"])
def test_first_and_last_representable_times_are_stale(text):
    with pytest.raises(StaleActionError):
        check_not_stale(parse_instant(text, "clientGeneratedAt"), NOW)


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=40)
    | st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{5,12}([+-][0-9]{2}:[0-9]{2}|Z)")
    | st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
)
def test_any_text_is_a_time_or_rejected(text):
    try:
        parsed = parse_instant(text, "at")
    except BodyInvalidError:
        return
    assert parsed.tzinfo is UTC


@pytest.mark.parametrize("after", [timedelta(), 3 * DAY, 300 * DAY, -HOUR, -6 * HOUR], ids=str)
def test_submission_may_follow_the_action_or_precede_it_within_grace(after):
    check_submitted_after_generated(NOW + after, NOW)


@pytest.mark.parametrize("before", [6 * HOUR + MICROSECOND, 12 * HOUR], ids=str)
def test_submission_long_before_the_action_is_rejected(before):
    with pytest.raises(BodyInvalidError, match="clientSubmittedAt is more than 6 hours before"):
        check_submitted_after_generated(NOW - before, NOW)


def test_submission_grace_is_configurable():
    check_submitted_after_generated(NOW - 12 * HOUR, NOW, grace=12 * HOUR)
    with pytest.raises(BodyInvalidError, match="more than 1 hours"):
        check_submitted_after_generated(NOW - 2 * HOUR, NOW, grace=HOUR)
