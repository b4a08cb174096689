"""Retry policies: presets, bounds, jitter, Retry-After."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward_protocol.errors import ConfigurationError
from onceward_protocol.retry import (
    CLIENT,
    DEVICE,
    PATIENT,
    QUEUE,
    WORKER,
    Jitter,
    RetryPolicy,
    is_transient,
    parse_retry_after,
    queue_policy,
)

NOW = datetime(1994, 11, 6, 8, 49, 7, tzinfo=UTC)
ALMOST_ONE = 1 - 2**-53
PRESETS = [DEVICE, QUEUE, CLIENT, WORKER, PATIENT]
chances = st.floats(0, 1, exclude_max=True)


def delays(policy, random, attempts):
    return [policy.delay_seconds(n, random=random) for n in range(1, attempts + 1)]


def test_device_delay_starts_at_5_seconds_and_doubles_up_to_5_minutes():
    expected = [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]
    assert delays(DEVICE, 0.5, 11) == expected


def test_queue_delay_doubles_up_to_30_minutes():
    expected = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800, 1800]
    assert delays(QUEUE, 0.5, 12) == expected


def test_queue_base_multiplies_the_delay():
    assert delays(queue_policy(5), 0.5, 4) == [10, 20, 40, 80]


def test_worker_delay_starts_at_1_second_and_doubles_up_to_5_minutes():
    assert delays(WORKER, 0, 11) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_first_client_delay_is_between_200_and_500_milliseconds():
    assert CLIENT.delay_seconds(1, random=0) == pytest.approx(0.2)
    assert CLIENT.delay_seconds(1, random=0.5) == pytest.approx(0.35)
    assert CLIENT.delay_seconds(1, random=ALMOST_ONE) == pytest.approx(0.5)


def test_later_client_delays_are_random_up_to_a_doubling_limit_of_5_seconds():
    assert delays(CLIENT, ALMOST_ONE, 6) == pytest.approx([0.5, 1, 2, 4, 5, 5])
    assert delays(CLIENT, 0, 6) == pytest.approx([0.2] * 6)


@pytest.mark.parametrize("policy", [DEVICE, QUEUE])
def test_jitter_is_a_quarter_in_both_directions(policy):
    plain = policy.delay_seconds(2, random=0.5)
    assert policy.delay_seconds(2, random=0) == plain * 0.75
    assert policy.delay_seconds(2, random=ALMOST_ONE) == pytest.approx(plain * 1.25)


def test_worker_jitter_adds_up_to_half():
    assert WORKER.delay_seconds(3, random=0) == 4
    assert WORKER.delay_seconds(3, random=ALMOST_ONE) == pytest.approx(6)


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("attempt", [50, 1_000, 1_024, 1_025, 10**9, 10**400])
@pytest.mark.parametrize("random", [0.5, ALMOST_ONE])
def test_delay_of_a_very_late_attempt_stays_below_the_maximum(policy, attempt, random):
    delay = policy.delay_seconds(attempt, random=random)
    assert policy.ceiling_seconds / 2 <= delay <= policy.ceiling_seconds


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PRESETS), st.integers(1, 5000), chances)
def test_jitter_stays_within_the_bounds(policy, attempt, random):
    delay = policy.delay_seconds(attempt, random=random)
    least = policy.least_seconds or policy.first_seconds * 0.75
    assert least <= delay <= policy.ceiling_seconds


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PRESETS), st.integers(1, 50), chances, st.floats(0, 1e6))
def test_jitter_does_not_shorten_retry_after(policy, attempt, random, floor):
    plain = policy.delay_seconds(attempt, random=random)
    delay = policy.delay_seconds(attempt, random=random, retry_after_seconds=floor)
    assert delay == max(plain, floor)


def test_retry_after_may_exceed_the_maximum():
    assert DEVICE.delay_seconds(1, random=0.5, retry_after_seconds=3600) == 3600


def test_attempts_count_from_one():
    with pytest.raises(ValueError, match="counts from 1"):
        DEVICE.delay_seconds(0, random=0.5)


@pytest.mark.parametrize(("policy", "attempts"), [(DEVICE, 12), (CLIENT, 5), (WORKER, 5)])
def test_preset_gives_up_after_its_last_attempt(policy, attempts):
    assert not policy.gives_up_after(attempts - 1)
    assert policy.gives_up_after(attempts)
    assert policy.gives_up_after(attempts + 1)


def test_queue_gives_up_after_the_attempts_of_the_entry():
    assert not QUEUE.gives_up_after(10**6)
    assert not QUEUE.gives_up_after(2, max_attempts=3)
    assert QUEUE.gives_up_after(3, max_attempts=3)


def test_max_attempts_overrides_the_policy():
    assert DEVICE.gives_up_after(2, max_attempts=2)
    assert not DEVICE.gives_up_after(12, max_attempts=20)


@pytest.mark.parametrize(
    "change",
    [
        {"first_seconds": -1},
        {"first_seconds": 20},
        {"least_seconds": 2},
        {"least_seconds": -1},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"jitter_fraction": 1.5},
        {"jitter_fraction": -0.1},
        {"attempts": 0},
    ],
)
def test_invalid_policy_is_rejected(change):
    fields = {"first_seconds": 1, "ceiling_seconds": 10, "jitter": Jitter.FULL} | change
    with pytest.raises(ConfigurationError):
        RetryPolicy(**fields)


def test_delay_may_be_constant():
    policy = RetryPolicy(first_seconds=3, factor=1, ceiling_seconds=3, jitter=Jitter.PLUS_MINUS)
    assert delays(policy, 0.9, 3) == [3, 3, 3]
    assert policy.delay_seconds(10**400, random=0.1) == 3


@pytest.mark.parametrize("status", [None, 408, 425, 429, 500, 501, 502, 503, 504, 599])
def test_transient_statuses(status):
    assert is_transient(status)


@pytest.mark.parametrize(
    "status", [200, 201, 301, 400, 401, 403, 404, 409, 410, 422, 428, 499, 600]
)
def test_other_statuses_are_not_transient(status):
    assert not is_transient(status)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 7\t", 7),
        ("007", 7),
        ("-5", 0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 30),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 30),
        ("Sun Nov  6 08:49:37 1994", 30),
        ("Sun, 06 Nov 1994 08:49:37 -0000", 30),
        ("Sun, 06 Nov 1994 08:49:07 GMT", 0),
        ("Sun, 06 Nov 1983 08:49:37 GMT", 0),
    ],
)
def test_retry_after_is_parsed_as_seconds_or_date(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        " ",
        "soon",
        "1.5",
        "1e3",
        "+5",
        "0x10",
        "5 seconds",
        "5, 6",
        "inf",
        "nan",
        "\u0665",
        "Sun, 31 Feb 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 25:49:37 GMT",
        "Sun, 06 Nov 99999 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 +9999999999",
    ],
)
def test_invalid_retry_after_is_ignored(value):
    assert parse_retry_after(value, NOW) is None


@pytest.mark.parametrize(
    "value", ["9" * 10, "9" * 400, "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT"]
)
def test_very_long_retry_after_can_be_added_to_a_date(value):
    seconds = parse_retry_after(value, NOW)
    assert seconds is not None
    assert NOW + timedelta(seconds=seconds) > NOW


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.text("0123456789-+:, GMTSunNovFeb", max_size=40))
def test_retry_after_of_any_text_is_seconds_or_none(text):
    seconds = parse_retry_after(text, NOW)
    assert seconds is None or seconds >= 0


def test_patient_delays_grow_by_4_to_an_hour_over_twelve_attempts():
    delays = [PATIENT.delay_seconds(attempt, random=0) for attempt in range(1, 12)]
    assert delays == [1, 4, 16, 64, 256, 1024, *[3600] * 5]
    assert not PATIENT.gives_up_after(11)
    assert PATIENT.gives_up_after(12)
    assert PATIENT.delay_seconds(2, random=0.999) < 6
    assert PATIENT.delay_seconds(9, random=0.999) == 3600
