"""Reports of steps over HTTP: responses and rows."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import date, datetime, timedelta
from typing import Any

import pytest

from onceward_services.walk.steps.model import StreakView
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.steps.streak_view import read_streak
from packages.services.tests.conftest import Serve

from .fixtures import HeldClock, OpenGame, new_key, ok, opener, refused, text
from .step_fixtures import PHONE, TODAY, WATCH, Stepping, days_ago, stepping


@pytest.fixture
async def sqlite_steps(serve: Serve, sqlite_url: str) -> AsyncIterator[Stepping]:
    async with stepping(opener(serve, sqlite_url)) as opened:
        yield opened


# -- what is taken ---------------------------------------------------------------------------------


async def test_report_is_accepted_with_a_provisional_response(steps: Stepping) -> None:
    assert await steps.walk(count=4200) == {
        "provisional": True,
        "provisionalEnergy": 4200,
        "streakState": {
            "currentLengthDays": 1,
            "lastAttestedDate": "2026-05-22",
            "bonusTier": 0,
            "decayAt": "2026-05-24T00:00:00Z",
            "totalLifetimeSteps": 0,
        },
        "challenge": None,
    }
    day = await steps.day()
    assert (day["reconciliationStatus"], day["reportedCount"], day["acceptedCount"]) == (
        "PENDING",
        4200,
        0,
    )
    assert day["sampleSpan"] == {"start": "2026-05-22T06:00:00Z", "end": "2026-05-22T11:00:00Z"}
    (row,) = await steps.attestations()
    assert (row["verdict"], row["code"], row["day"]) == ("ACCEPTED", None, "2026-05-22")


async def test_attestation_log_has_the_token_id_and_not_the_token(steps: Stepping) -> None:
    token = steps.token(jti="the-id")
    ok(await steps.send(steps.body(), token=token))
    (row,) = await steps.attestations()
    assert row["token_id"] == "the-id"
    assert json.loads(row["summary"])["sub"] == "1:42:android:1"
    assert token.split(".")[2] not in str(row)


async def test_provisional_credit_of_later_reports_is_limited(steps: Stepping) -> None:
    energies = [
        (await steps.walk(count=count))["provisionalEnergy"] for count in (2000, 2500, 9000)
    ]
    assert energies == [2000, 2500, 3750]
    assert (await steps.walk(days_ago(1), 9000))["provisionalEnergy"] == 9000
    assert (await steps.day())["reportedCount"] == 9000
    assert await steps.game.count("step_logs") == 2
    assert await steps.game.count("step_reports") == 4


async def test_provisional_streak_counts_the_reported_day_as_attested(steps: Stepping) -> None:
    lengths = [
        (await steps.walk(days_ago(ago)))["streakState"]["currentLengthDays"]
        for ago in (3, 1, 2, 0)
    ]
    # Three days ago alone: a day was missed since. Then each report closes a gap.
    assert lengths == [0, 1, 3, 4]
    assert (await steps.walk(count=1))["streakState"]["bonusTier"] == 1


async def test_replay_is_the_same_response_and_needs_no_new_token(steps: Stepping) -> None:
    body = steps.body()
    first = await steps.send(body)
    steps.clock.move(timedelta(minutes=30))
    again = await steps.send(
        body | {"clientSubmittedAt": text(steps.clock.now()), "attestationToken": "stale"},
        token=None,
    )
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert await steps.game.count("step_reports") == 1
    assert len(await steps.attestations()) == 1


async def test_one_key_for_two_reports_is_a_conflict(steps: Stepping) -> None:
    key = new_key()
    await steps.walk(count=3000, key=key)
    details = refused(await steps.report(count=4000, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert set(details) == {"expectedHash", "receivedHash"}
    assert (await steps.day())["reportedCount"] == 3000


async def test_twenty_concurrent_reports_with_one_key_are_one_report(steps: Stepping) -> None:
    body = steps.body()
    responses = await asyncio.gather(*(steps.send(body) for _ in range(20)))
    assert {response.status_code for response in responses} == {200}
    assert len({response.content for response in responses}) == 1
    assert await steps.game.count("step_reports") == 1


async def test_many_reports_of_one_walker_at_once_are_all_kept(steps: Stepping) -> None:
    responses = await asyncio.gather(*(steps.report(count=100 * n) for n in range(1, 11)))
    assert [response.status_code for response in responses] == [200] * 10
    rows = await steps.game.rows("SELECT number FROM step_reports ORDER BY number")
    assert [row["number"] for row in rows] == list(range(1, 11))


async def test_two_walkers_never_see_each_others_days(steps: Stepping) -> None:
    await steps.walk(count=3000)
    assert await steps.log("eve") == {"items": [], "next": None}
    same_key = new_key()
    await steps.walk(count=2000, walker="eve", key=same_key)
    await steps.walk(days_ago(1), 2500, key=same_key)
    assert [d["reportedCount"] for d in (await steps.days("eve")).values()] == [2000]
    assert [d["reportedCount"] for d in (await steps.days()).values()] == [3000, 2500]


async def test_a_queue_may_add_when_the_action_was_made(sqlite_steps: Stepping) -> None:
    old = text(sqlite_steps.clock.now() - timedelta(days=30))
    assert (await sqlite_steps.walk(clientGeneratedAt=old))["provisional"] is True


async def test_the_fiftieth_request_of_a_minute_passes_and_the_next_does_not(
    serve: Serve, sqlite_url: str
) -> None:
    async with stepping(opener(serve, sqlite_url), step_ingest_rate_limit="50/minute") as steps:
        statuses = [(await steps.report(count=n)).status_code for n in range(51)]
        assert statuses == [200] * 50 + [429]
        assert (await steps.report(walker="eve")).status_code == 200


# -- what is not, row by row -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "is_anti_cheat", "changes"),
    [
        (403, "SOURCE_NOT_ALLOWED", 0, {"sourceBundleId": "com.example.fake"}),
        (422, "STEP_COUNT_EXCEEDED", 1, {"count": 50_001}),
        (422, "STEP_COUNT_EXCEEDED", 1, {"count": 10**30}),
        (422, "BURST_RATE_EXCEEDED", 1, {"hours": (6, 6.01)}),
        (422, "BURST_RATE_EXCEEDED", 1, {"hours": (6, 6)}),
        (422, "FUTURE_DATED", 0, {"day": date(2026, 5, 24)}),
        (422, "OFFLINE_CAP_EXCEEDED", 0, {"day": date(2026, 5, 14)}),
    ],
)
async def test_a_rejected_report_leaves_a_row_in_the_log_and_nothing_else(
    steps: Stepping, status: int, code: str, is_anti_cheat: int, changes: dict[str, Any]
) -> None:
    key = new_key()
    refused(await steps.report(key=key, **changes), status, code)
    (row,) = await steps.attestations()
    assert (row["verdict"], row["code"], row["anti_cheat"]) == ("REJECTED", code, is_anti_cheat)
    for table in ("step_logs", "step_reports", "streak_states", "onceward_jobs"):
        assert await steps.game.count(table) == 0, table
    # Nothing is stored under the key, so a retry may succeed.
    ok(await steps.report(key=key))
    assert await steps.verdicts() == ["ACCEPTED", "REJECTED"]


async def test_a_jump_of_more_than_twelve_hours_within_a_day_is_rejected(steps: Stepping) -> None:
    await steps.walk(tz="America/Los_Angeles")
    steps.clock.move(timedelta(hours=20))
    details = refused(await steps.report(tz="Pacific/Auckland"), 422, "TZ_JUMP")
    assert details == {
        "received": "Pacific/Auckland",
        "jumpHours": 19.0,
        "maxJumpHours": 12.0,
        "limit": 12.0,
        "lastOffsetHours": -7.0,
        "passesAt": "2026-05-23T12:00:00.000001Z",
    }
    # The last report was from Los Angeles: a rejected report does not change the time zone.
    refused(await steps.report(tz="Pacific/Auckland"), 422, "TZ_JUMP")
    steps.clock.move(timedelta(hours=4, seconds=1))
    await steps.walk(tz="Pacific/Auckland")
    assert await steps.verdicts() == ["ACCEPTED", "ACCEPTED", "REJECTED", "REJECTED"]


async def test_unauthenticated_request_writes_nothing(steps: Stepping) -> None:
    headers = {"Authorization": "Bearer nonsense", "X-Firebase-AppCheck": steps.token()}
    response = await steps.client.post("/step/ingest", json=steps.body(), headers=headers)
    refused(response, 401, "UNAUTHENTICATED")
    assert await steps.game.count("attestation_logs") == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"day": "2026-02-30"}, "day"),
        ({"day": "22.05.2026"}, "day"),
        ({"day": 20260522}, "day"),
        ({"count": "3000"}, "count"),
        ({"count": 3000.0}, "count"),
        ({"count": True}, "count"),
        ({"source": 1}, "source"),
        ({"tz": None}, "tz"),
        ({"sampleSpan": {"start": "2026-05-22T06:00:00Z"}}, "sampleSpan.end"),
        ({"sampleSpan": {"start": "2026-05-22T06:00:00", "end": "x"}}, "sampleSpan.start"),
        ({"sourceBundleId": None}, "sourceBundleId"),
        ({"clientSubmittedAt": None}, "clientSubmittedAt"),
        ({"clientSubmittedAt": "yesterday"}, "clientSubmittedAt"),
        ({"attestationToken": 5}, "attestationToken"),
        ({"steps": 5}, "steps"),
    ],
)
async def test_missing_unknown_or_mistyped_field_is_400(
    sqlite_steps: Stepping, change: dict[str, Any], field: str
) -> None:
    body = sqlite_steps.body() | change
    response = await sqlite_steps.send({n: v for n, v in body.items() if v is not None})
    details = refused(response, 400, "BAD_REQUEST")
    assert details["fields"][0]["field"] == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"count": -1}, "count"),
        ({"source": "Pedometer"}, "source"),
        ({"tz": "Mars/Olympus"}, "tz"),
        ({"tz": "../../etc/passwd"}, "tz"),
        ({"tz": "Europe/Warsaw\u0000"}, "tz"),
        ({"sourceBundleId": ""}, "sourceBundleId"),
        ({"sourceBundleId": "a\u0000b"}, "sourceBundleId"),
        ({"hours": (11, 6)}, "sampleSpan"),
    ],
)
async def test_a_value_that_is_not_allowed_is_422(
    sqlite_steps: Stepping, change: dict[str, Any], field: str
) -> None:
    details = refused(await sqlite_steps.report(**change), 422, "BAD_REQUEST")
    assert details["fields"][0]["field"] == field


@pytest.mark.parametrize(
    ("key", "code"),
    [
        (None, "IDEMPOTENCY_KEY_REQUIRED"),
        ("nope", "IDEMPOTENCY_KEY_INVALID"),
        ("7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10", "IDEMPOTENCY_KEY_INVALID"),
        (5, "IDEMPOTENCY_KEY_INVALID"),
    ],
)
async def test_the_key_is_a_field_of_the_body_and_a_uuid(
    sqlite_steps: Stepping, key: Any, code: str
) -> None:
    body = sqlite_steps.body() | {"idempotencyKey": key}
    response = await sqlite_steps.send({n: v for n, v in body.items() if v is not None})
    refused(response, 400, code)
    assert await sqlite_steps.game.count("attestation_logs") == 0


async def test_one_walk_counts_once_and_never_in_advance(steps: Stepping) -> None:
    """The same two hours of the night, reported for both days that they may belong to."""
    night = {"start": "2026-05-21T23:00:00Z", "end": "2026-05-22T01:00:00Z"}
    for day in (days_ago(1), TODAY):
        await steps.walk(day, 3000, sampleSpan=night)
    await steps.work()
    assert await steps.energy() == 3000
    statuses = sorted(day["reconciliationStatus"] for day in (await steps.days()).values())
    assert statuses == ["ACCEPTED", "QUARANTINED"]
    (review,) = await steps.reviews()
    assert review["reasons"] == [{"code": "SPAN_ON_ANOTHER_DAY"}]
    # At noon, the steps until midnight.
    details = refused(await steps.report(count=49_999, hours=(0, 23.98)), 422, "FUTURE_DATED")
    assert details["serverNow"] == "2026-05-22T12:00:00Z"
    assert details["passesAt"] == "2026-05-22T23:53:48Z"


async def test_two_days_with_the_same_samples_settled_at_once_count_once(steps: Stepping) -> None:
    night = {"start": "2026-05-21T23:00:00Z", "end": "2026-05-22T01:00:00Z"}
    walkers = [f"w{number}" for number in range(4)]
    await asyncio.gather(
        *(
            steps.report(day, 3000, sampleSpan=night, walker=walker)
            for walker in walkers
            for day in (days_ago(1), TODAY)
        )
    )
    await steps.work()
    assert [await steps.energy(walker) for walker in walkers] == [3000] * len(walkers)


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off", "code"), [(-30, "OFFLINE_CAP_EXCEEDED"), (30, "FUTURE_DATED")], ids=["slow", "fast"]
)
async def test_reports_of_a_device_with_a_clock_thirty_days_off_are_rejected(
    steps: Stepping, off: int, code: str
) -> None:
    its_today = TODAY + timedelta(days=off)
    its_now = steps.clock.now() + timedelta(days=off)
    refused(await steps.report(its_today, clientSubmittedAt=text(its_now)), 422, code)
    # Only the day counts; the time of sending is ignored.
    await steps.walk(TODAY, clientSubmittedAt=text(its_now))


async def test_days_are_counted_in_the_walkers_zone(steps: Stepping) -> None:
    """At noon UTC it is the 23rd on Kiritimati and the 22nd on Pago Pago."""
    tomorrow, after_that = TODAY + timedelta(days=1), TODAY + timedelta(days=2)
    there: dict[str, Any] = {"tz": "Pacific/Kiritimati"}
    # The samples are from an hour ago.
    response = await steps.walk(tomorrow, hours=(-13, -12.5), **there)
    # Their day ends at ten in the morning, UTC.
    assert response["streakState"]["decayAt"] == "2026-05-24T10:00:00Z"
    await steps.walk(after_that, hours=(-37, -36.5), **there)
    refused(await steps.report(after_that + timedelta(days=1), **there), 422, "FUTURE_DATED")
    refused(await steps.report(days_ago(7), **there), 422, "OFFLINE_CAP_EXCEEDED")
    await steps.walk(days_ago(6), **there)

    here: dict[str, Any] = {"tz": "Pacific/Pago_Pago", "walker": "eve"}
    await steps.walk(days_ago(7), **here)
    await steps.walk(tomorrow, hours=(-13, -12.5), **here)
    refused(await steps.report(after_that, **here), 422, "FUTURE_DATED")


async def test_a_day_of_25_hours_is_one_day(open_game: OpenGame) -> None:
    """In Warsaw the 25th of October 2026 lasts from 22:00 to 23:00 UTC of the next day."""
    last_minute = HeldClock(datetime.fromisoformat("2026-10-25T22:59:00+00:00"))
    async with stepping(open_game, clock=last_minute) as steps:
        day = date(2026, 10, 25)
        warsaw: dict[str, Any] = {"tz": "Europe/Warsaw", "hours": (-2, 22.9)}
        response = await steps.walk(day, 20_000, **warsaw)
        assert response["streakState"]["currentLengthDays"] == 1
        assert response["streakState"]["decayAt"] == "2026-10-26T23:00:00Z"
        tomorrow = day + timedelta(days=1)
        refused(
            await steps.report(tomorrow + timedelta(days=1), tz="Europe/Warsaw"),
            422,
            "FUTURE_DATED",
        )
        steps.clock.move(timedelta(minutes=1))
        await steps.walk(tomorrow + timedelta(days=1), tz="Europe/Warsaw", hours=(-26, -25.1))
        await steps.work()
        assert (await steps.day(day))["reconciliationStatus"] == "ACCEPTED"


# -- the list --------------------------------------------------------------------------------------


async def test_days_come_newest_first_page_by_page(steps: Stepping) -> None:
    for ago in (3, 0, 7, 5):
        await steps.walk(days_ago(ago))
    first = await steps.log(query="?limit=3")
    assert [item["id"] for item in first["items"]] == ["2026-05-22", "2026-05-19", "2026-05-17"]
    rest = await steps.log(query=f"?limit=3&after={first['next']}")
    assert [item["day"] for item in rest["items"]] == ["2026-05-15"]
    assert rest["next"] is None


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "limit=x", "after=yesterday", "after=%00"]
)
async def test_invalid_page_parameters_are_rejected(sqlite_steps: Stepping, query: str) -> None:
    headers = sqlite_steps.signed_in("ada")
    response = await sqlite_steps.client.get(f"/step/log?{query}", headers=headers)
    assert response.status_code in (400, 422)
    assert response.json()["error"] == "BAD_REQUEST"


async def test_reading_needs_authentication(sqlite_steps: Stepping) -> None:
    headers = {"Authorization": "nobody"}
    response = await sqlite_steps.client.get("/step/log", headers=headers)
    refused(response, 401, "UNAUTHENTICATED")


# -- the streak ------------------------------------------------------------------------------------


async def test_settled_streak_is_computed_as_of_now(steps: Stepping) -> None:
    settings = StepSettings.model_validate({})

    async def now(walker: str = "ada") -> StreakView:
        at = steps.clock.now()
        return await read_streak(steps.game.store, walker, settings=settings, now=at)

    assert (await now("nobody")).current_length_days == 0
    for ago in (2, 1, 0):
        await steps.walk(days_ago(ago))
    assert (await now()).current_length_days == 0  # reported is not settled
    await steps.work()
    streak = await now()
    assert (streak.current_length_days, streak.bonus_tier, streak.total_lifetime_steps) == (
        3,
        1,
        9000,
    )
    steps.clock.move(timedelta(days=2))  # no report, so a day is missed
    streak = await now()
    assert (streak.current_length_days, streak.bonus_tier) == (0, 0)
    assert streak.last_attested_date == TODAY


# -- settings --------------------------------------------------------------------------------------


async def test_default_bundles_include_healthkit_with_a_suffix_and_watches(
    serve: Serve, sqlite_url: str
) -> None:
    default = StepSettings.model_validate({}).step_source_bundles
    async with stepping(opener(serve, sqlite_url), step_source_bundles=default) as steps:
        await steps.walk(sourceBundleId="com.apple.health.9F3A2D44-5B6C-4D5E-8F90-0A1B2C3D4E5F")
        watch = "com.google.android.wearable.healthservices"
        await steps.walk(days_ago(1), source="WatchNative", sourceBundleId=watch)


async def test_accepted_bundles_are_a_setting(serve: Serve, sqlite_url: str) -> None:
    async with stepping(opener(serve, sqlite_url), step_source_bundles=f" {WATCH} ,") as steps:
        refused(await steps.report(sourceBundleId=PHONE), 403, "SOURCE_NOT_ALLOWED")
        await steps.walk(sourceBundleId=WATCH)


async def test_old_logs_are_deleted_in_batches_and_younger_ones_stay(
    open_game: OpenGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward_services.walk.jobs._BATCH", 3)
    async with stepping(open_game) as steps:
        for number in range(8):
            refused(await steps.report(count=60_000 + number), 422, "STEP_COUNT_EXCEEDED")
        steps.clock.move(timedelta(days=30))
        refused(await steps.report(count=60_000), 422, "STEP_COUNT_EXCEEDED")
        steps.clock.move(timedelta(seconds=1))

        async def is_clean() -> bool:
            return len(await steps.attestations()) == 1

        await steps.work(until=is_clean)  # the first worker of a day runs the clean-up
        (row,) = await steps.attestations()
        assert row["day"] == TODAY.isoformat()
        assert row["code"] == "STEP_COUNT_EXCEEDED"
