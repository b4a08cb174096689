"""Reviews: opened once, listed and resolved by admins only."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from .fixtures import OpenGame, new_key, ok, refused
from .step_fixtures import PHONE, TODAY, WATCH, Stepping, days_ago, stepping


async def cheat(steps: Stepping, times: int = 1, **fields: Any) -> None:
    for _ in range(times):
        refused(await steps.report(count=60_000, **fields), 422, "STEP_COUNT_EXCEEDED")


async def quarantine(steps: Stepping, **fields: Any) -> str:
    """Quarantine a day; returns the id of its review."""
    await steps.walk(count=5000, hours=(6, 10), **fields)
    await steps.walk(count=3000, hours=(6, 11), **fields)
    await steps.work()
    return str((await steps.reviews())[-1]["id"])


# -- rejections pile up ----------------------------------------------------------------------------


async def test_the_fifth_rejection_within_a_day_opens_a_review(steps: Stepping) -> None:
    await cheat(steps, 4)
    assert await steps.reviews() == []
    await cheat(steps)
    (review,) = await steps.reviews()
    assert (review["kind"], review["walkerId"], review["day"], review["status"]) == (
        "anti_cheat",
        "ada",
        None,
        "open",
    )
    assert [reason["code"] for reason in review["reasons"]] == ["STEP_COUNT_EXCEEDED"] * 5
    await cheat(steps, 7)
    assert len(await steps.reviews()) == 1


async def test_all_kinds_of_cheating_count_and_other_rejections_do_not(steps: Stepping) -> None:
    await steps.walk(tz="UTC")
    await cheat(steps, 2)
    for _ in range(2):
        refused(await steps.report(hours=(6, 6.001)), 422, "BURST_RATE_EXCEEDED")
    for _ in range(3):
        refused(await steps.report(days_ago(8)), 422, "OFFLINE_CAP_EXCEEDED")
        refused(await steps.report(days_ago(-2)), 422, "FUTURE_DATED")
        refused(await steps.report(sourceBundleId="fake"), 403, "SOURCE_NOT_ALLOWED")
    assert await steps.reviews() == []
    refused(await steps.report(tz="Pacific/Kiritimati"), 422, "TZ_JUMP")
    (review,) = await steps.reviews()
    codes = sorted(reason["code"] for reason in review["reasons"])
    assert codes == [*["BURST_RATE_EXCEEDED"] * 2, *["STEP_COUNT_EXCEEDED"] * 2, "TZ_JUMP"]


async def test_five_at_once_open_one_review(steps: Stepping) -> None:
    responses = await asyncio.gather(*(steps.report(count=60_000) for _ in range(5)))
    assert {response.status_code for response in responses} == {422}
    assert len(await steps.reviews()) == 1
    assert len((await steps.reviews())[0]["reasons"]) == 5


async def test_twenty_at_once_of_two_walkers_open_one_review_each(steps: Stepping) -> None:
    await asyncio.gather(
        *(steps.report(count=60_000, walker=w) for w in ("ada", "eve") for _ in range(10))
    )
    assert sorted(review["walkerId"] for review in await steps.reviews()) == ["ada", "eve"]
    assert len(await steps.attestations()) == 10


async def test_only_calendar_days_are_accepted(steps: Stepping) -> None:
    await cheat(steps, 4)
    steps.clock.move(timedelta(hours=24, seconds=1))
    await cheat(steps, 4)
    assert await steps.reviews() == []
    steps.clock.move(timedelta(hours=23))
    await cheat(steps)
    assert len(await steps.reviews()) == 1


async def test_the_same_report_sent_again_is_the_same_rejection(steps: Stepping) -> None:
    """The response was lost, so the device sends the report again."""
    key = new_key()
    await cheat(steps, 6, key=key)
    assert await steps.reviews() == []
    assert len(await steps.attestations()) == 6


async def test_reviewed_rejections_do_not_count_again(steps: Stepping) -> None:
    await cheat(steps, 5)
    (review,) = await steps.reviews()
    steps.clock.move(timedelta(minutes=1))
    ok(await steps.resolve(review["id"], "accept"))
    steps.clock.move(timedelta(minutes=1))
    await cheat(steps, 4)
    assert await steps.reviews() == []
    await cheat(steps)
    assert len(await steps.reviews()) == 1


async def test_days_rejected_by_reconciliation_count_too(open_game: OpenGame) -> None:
    async with stepping(open_game, step_review_rejections=2) as steps:
        for ago in (1, 0):
            await steps.walk(days_ago(ago), 30_000, sourceBundleId=PHONE, hours=(6, 8))
            await steps.walk(days_ago(ago), 30_000, sourceBundleId=WATCH, hours=(9, 11))
        await steps.work()
        (review,) = await steps.reviews()
        assert review["kind"] == "anti_cheat"


# -- the queue -------------------------------------------------------------------------------------


async def test_reviews_need_the_admin_role(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    for roles in ((), ("walker",), ("Admin",)):
        who = steps.signed_in("ada", *roles)
        refused(await steps.client.get("/admin/review-queue", headers=who), 403, "FORBIDDEN")
        response = await steps.client.post(
            f"/admin/review-queue/{review_id}/resolve",
            json={"decision": "accept"},
            headers=who | {"Idempotency-Key": new_key()},
        )
        refused(response, 403, "FORBIDDEN")
    invalid = {"Authorization": "Bearer nonsense"}
    refused(await steps.client.get("/admin/review-queue", headers=invalid), 401, "UNAUTHENTICATED")
    (review,) = await steps.reviews()
    assert review["status"] == "open"


async def test_admin_does_not_resolve_a_review_of_their_own_walks(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    (review,) = await steps.reviews()
    for who, status in ((review["walkerId"], 403), ("boss", 200)):
        response = await steps.client.post(
            f"/admin/review-queue/{review_id}/resolve",
            json={"decision": "accept"},
            headers=steps.signed_in(who, "admin") | {"Idempotency-Key": new_key()},
        )
        assert response.status_code == status, response.text


async def test_the_queue_is_read_page_by_page_open_or_resolved(steps: Stepping) -> None:
    for walker in ("ada", "bob", "cyd"):
        await quarantine(steps, walker=walker)
        steps.clock.move(timedelta(seconds=1))
    headers = steps.signed_in("boss", "admin")
    first = ok(await steps.client.get("/admin/review-queue?limit=2", headers=headers))
    assert [item["walkerId"] for item in first["items"]] == ["ada", "bob"]
    path = f"/admin/review-queue?limit=2&after={first['next']}"
    rest = ok(await steps.client.get(path, headers=headers))
    assert ([item["walkerId"] for item in rest["items"]], rest["next"]) == (["cyd"], None)
    ok(await steps.resolve(first["items"][0]["id"], "reject", note="a treadmill"))
    assert [r["walkerId"] for r in await steps.reviews()] == ["bob", "cyd"]
    (resolved,) = await steps.reviews("?status=resolved")
    assert (resolved["decision"], resolved["resolvedBy"], resolved["note"]) == (
        "reject",
        "boss",
        "a treadmill",
    )


@pytest.mark.parametrize("query", ["status=all", "limit=0", "after=x", "after=%00"])
async def test_invalid_page_parameters_are_rejected(steps: Stepping, query: str) -> None:
    headers = steps.signed_in("boss", "admin")
    response = await steps.client.get(f"/admin/review-queue?{query}", headers=headers)
    assert response.status_code in (400, 422)
    assert response.json()["error"] == "BAD_REQUEST"


# -- decisions -------------------------------------------------------------------------------------


async def test_an_accepted_day_counts_with_its_highest_reading(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    resolved = ok(await steps.resolve(review_id, "accept"))
    assert (resolved["status"], resolved["decision"]) == ("resolved", "accept")
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"], day["attested"]) == (
        "ACCEPTED",
        5000,
        True,
    )
    assert await steps.energy() == 5000
    assert (await steps.streak())["current_length_days"] == 1
    assert await steps.event_types() == [
        "steps.quarantined",
        "steps.reread_requested",
        "steps.accepted",
    ]
    # A counter that continues from the accepted value is not quarantined again.
    await steps.walk(count=6000, hours=(6, 11.5))
    await steps.work()
    assert (await steps.day())["acceptedCount"] == 6000
    assert await steps.reviews() == []


async def test_an_admin_may_accept_less_than_was_reported(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    ok(await steps.resolve(review_id, "accept", acceptedCount=1500))
    day = await steps.day()
    assert (day["acceptedCount"], day["attested"]) == (1500, False)
    assert await steps.energy() == 1500


async def test_a_rejected_day_stays_rejected_whatever_is_reported_then(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    ok(await steps.resolve(review_id, "reject"))
    response = await steps.walk(count=9000, hours=(6, 11.5))
    assert response["provisionalEnergy"] == 0
    assert response["streakState"]["currentLengthDays"] == 0
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("REJECTED", 0)
    assert await steps.energy() == 0
    assert await steps.event_types() == [
        "steps.quarantined",
        "steps.reread_requested",
        "steps.rejected",
    ]


async def test_rejection_reverses_steps_accepted_before(steps: Stepping) -> None:
    for ago in (2, 1, 0):
        await steps.walk(days_ago(ago), 4000)
    await steps.work()
    assert (await steps.streak())["current_length_days"] == 3
    await steps.walk(days_ago(1), 1000, hours=(6, 12))
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["total_lifetime_steps"]) == (1, 8000)
    assert await steps.energy() == 8000


async def test_a_review_of_a_walker_is_closed_and_changes_nothing_else(steps: Stepping) -> None:
    await steps.walk(count=3000)
    await steps.work()
    await cheat(steps, 5)
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    assert await steps.reviews() == []
    assert await steps.energy() == 3000
    assert (await steps.day())["reconciliationStatus"] == "ACCEPTED"


async def test_second_resolution_reports_the_first(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    key = new_key()
    first = await steps.resolve(review_id, "accept", key=key)
    again = await steps.resolve(review_id, "accept", key=key)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    details = refused(await steps.resolve(review_id, "reject"), 409, "REVIEW_ALREADY_RESOLVED")
    assert (details["decision"], details["resolvedBy"]) == ("accept", "boss")
    assert (await steps.day())["reconciliationStatus"] == "ACCEPTED"


async def test_one_of_two_concurrent_resolutions_wins(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    responses = await asyncio.gather(
        *(steps.resolve(review_id, decision) for decision in ("accept", "reject") * 3)
    )
    assert sorted(response.status_code for response in responses) == [200] + [409] * 5
    (resolved,) = await steps.reviews("?status=resolved")
    status = "ACCEPTED" if resolved["decision"] == "accept" else "REJECTED"
    assert (await steps.day())["reconciliationStatus"] == status


@pytest.mark.parametrize("review_id", ["0190163d-8694-739b-aea5-966c26f8ad91", "1", "x" * 300])
async def test_unknown_review_is_not_found(steps: Stepping, review_id: str) -> None:
    refused(await steps.resolve(review_id, "accept"), 404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"decision": 1}, 400),
        ({"decision": "maybe"}, 422),
        ({"decision": "accept", "acceptedCount": -1}, 422),
        ({"decision": "accept", "acceptedCount": 50_001}, 422),
        ({"decision": "reject", "acceptedCount": 1}, 422),
        ({"decision": "accept", "note": "\u0000"}, 422),
        ({"decision": "accept", "why": "x"}, 400),
    ],
)
async def test_invalid_decision_changes_nothing(
    steps: Stepping, body: dict[str, Any], status: int
) -> None:
    review_id = await quarantine(steps)
    headers = steps.signed_in("boss", "admin") | {"Idempotency-Key": new_key()}
    path = f"/admin/review-queue/{review_id}/resolve"
    refused(await steps.client.post(path, json=body, headers=headers), status, "BAD_REQUEST")
    assert [review["id"] for review in await steps.reviews()] == [review_id]
    assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"


async def test_resolution_needs_a_key(steps: Stepping) -> None:
    review_id = await quarantine(steps)
    path = f"/admin/review-queue/{review_id}/resolve"
    headers = steps.signed_in("boss", "admin")
    response = await steps.client.post(path, json={"decision": "accept"}, headers=headers)
    refused(response, 400, "IDEMPOTENCY_KEY_REQUIRED")
    assert (await steps.day(TODAY))["reconciliationStatus"] == "QUARANTINED"
