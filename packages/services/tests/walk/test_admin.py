"""What admins see and do: evidence, filters, suspension, the webhook about new reviews."""

import asyncio
import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward.jobs.context import JobContext
from onceward.observability.metrics import PrometheusMetrics
from onceward_services.settings import load_settings
from onceward_services.walk.review_gauge import OpenReviews
from onceward_services.webhooks.signature import is_signed, new_secret
from packages.services.tests.conftest import Serve
from packages.services.tests.support.receiver import Receiver, receiving

from .fixtures import OpenGame, new_key, ok, opener, refused
from .step_fixtures import PHONE, Stepping, stepping
from .test_reconcile_crashes import Killed, KilledOnce
from .test_reviews import cheat, quarantine

SECRET = new_secret()


async def get(steps: Stepping, path: str, *roles: str) -> Any:
    return await steps.client.get(path, headers=steps.signed_in("boss", *roles))


# -- the evidence ---------------------------------------------------------------------------------


async def test_a_review_shows_reports_attestations_and_the_walker(steps: Stepping) -> None:
    device = steps.game.device()
    stale = await device.allocate("node.even-stride", at=steps.clock.at - timedelta(days=9))
    refused(stale, 422, "STALE_ACTION")
    await cheat(steps)
    review_id = await quarantine(steps)
    refused(await get(steps, f"/admin/review-queue/{review_id}"), 403, "FORBIDDEN")
    found = ok(await get(steps, f"/admin/review-queue/{review_id}", "admin"))
    assert (found["kind"], found["walkerId"], found["status"]) == ("quarantined_day", "ada", "open")
    assert [(r["number"], r["count"], r["sourceBundleId"]) for r in found["reports"]] == [
        (2, 3000, PHONE),
        (1, 5000, PHONE),
    ]
    assert found["reports"][0]["sampleSpan"]["end"] == "2026-05-22T11:00:00Z"
    # All of them have the same time here, so their order is not defined.
    assert sorted(
        (a["verdict"], a["code"] or "", a["antiCheat"]) for a in found["attestations"]
    ) == [
        ("ACCEPTED", "", False),
        ("ACCEPTED", "", False),
        ("QUARANTINED", "COUNT_WENT_BACKWARDS", False),
        ("REJECTED", "STEP_COUNT_EXCEEDED", True),
    ]
    assert (found["walker"]["staleActions"], found["walker"]["openReviews"]) == (1, 1)
    unknown = "0190163d-8694-739b-aea5-966c26f8ad91"
    refused(await get(steps, f"/admin/review-queue/{unknown}", "admin"), 404, "NOT_FOUND")
    refused(await get(steps, "/admin/review-queue/x", "admin"), 404, "NOT_FOUND")


async def test_the_queue_is_filtered(steps: Stepping) -> None:
    await quarantine(steps)
    await cheat(steps, 5, walker="eve")
    assert len(await steps.reviews()) == 2
    for query, walker in (
        ("?kind=anti_cheat", "eve"),
        ("?walkerId=ada", "ada"),
        ("?day=2026-05-22", "ada"),
        ("?kind=quarantined_day&walkerId=ada&day=2026-05-22", "ada"),
    ):
        assert [r["walkerId"] for r in await steps.reviews(query)] == [walker]
    assert await steps.reviews("?walkerId=eve&day=2026-05-22") == []
    refused(await get(steps, "/admin/review-queue?kind=x", "admin"), 422, "BAD_REQUEST")
    refused(await get(steps, "/admin/review-queue?walkerId=%00", "admin"), 422, "BAD_REQUEST")


# -- suspension -----------------------------------------------------------------------------------


async def test_a_suspended_walker_cannot_act_until_reinstated(steps: Stepping) -> None:
    device = steps.game.device()
    await device.finish("quest.001")
    review_id = await quarantine(steps)
    resolved = ok(await steps.resolve(review_id, "suspend", note="three phones"))
    assert resolved["decision"] == "suspend"
    assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    again = refused(await steps.resolve(review_id, "accept"), 409, "REVIEW_ALREADY_RESOLVED")
    assert again["decision"] == "suspend"
    for response in (
        await device.allocate("node.even-stride"),
        await device.start("quest.002"),
        await steps.report(count=7000),
        await device.post(
            "/energy/spend", {"sink": "craft", "amount": 1} | device.times(), key=new_key()
        ),
    ):
        details = refused(response, 403, "WALKER_SUSPENDED")
        assert details == {"suspendedAt": "2026-05-22T12:00:00+00:00"}
    assert (await device.me())["pointsBanked"] == 2
    walker = ok(await get(steps, "/admin/walkers/ada", "admin"))
    assert walker["suspendedAt"] == "2026-05-22T12:00:00Z"
    path = "/admin/walkers/ada/reinstate"
    headers = steps.signed_in("boss", "admin")
    responses = await asyncio.gather(
        *(
            steps.client.post(path, headers=headers | {"Idempotency-Key": new_key()})
            for _ in range(2)
        )
    )
    assert sorted(r.status_code for r in responses) == [200, 409]
    ok(await device.allocate("node.even-stride"))
    types = await steps.event_types()
    assert (types.count("walker.suspended"), types.count("walker.reinstated")) == (1, 1)
    unknown = "/admin/walkers/unknown/reinstate"
    headers["Idempotency-Key"] = new_key()
    refused(await steps.client.post(unknown, headers=headers), 404, "NOT_FOUND")


# -- the metric -----------------------------------------------------------------------------------


async def test_open_reviews_are_counted(steps: Stepping) -> None:
    metrics = PrometheusMetrics()
    gauge = OpenReviews(steps.game.store, metrics.registry)
    await gauge.report()
    assert b'onceward_reviews_open{kind="anti_cheat"} 0.0' in metrics.exposition()[0]
    await cheat(steps, 5)
    await gauge.report(max_age_seconds=60)
    assert b'onceward_reviews_open{kind="anti_cheat"} 0.0' in metrics.exposition()[0]
    await gauge.report()
    assert b'onceward_reviews_open{kind="anti_cheat"} 1.0' in metrics.exposition()[0]
    served = (await steps.client.get("/metrics")).text
    assert 'onceward_reviews_open{kind="anti_cheat"} 1.0' in served


# -- the webhook ----------------------------------------------------------------------------------


def hooked(open_game: OpenGame, receiver: Receiver) -> Any:
    return stepping(
        open_game,
        walk_review_webhook_url=receiver.url,
        walk_review_webhook_secret=SECRET,
        webhook_allowed_networks="127.0.0.1",
    )


async def dead_letters(steps: Stepping) -> list[str]:
    rows = await steps.game.rows("SELECT error FROM onceward_dead_letters ORDER BY error")
    return [row["error"] for row in rows]


async def test_an_opened_review_is_announced_once(open_game: OpenGame) -> None:
    async with receiving() as receiver, hooked(open_game, receiver) as steps:
        await asyncio.gather(*(cheat(steps) for _ in range(7)))
        await quarantine(steps, walker="eve")
        await steps.work()
        reviews = {review["id"]: review for review in await steps.reviews()}
        assert len(reviews) == len(receiver.received) == 2
        for request in receiver.received:
            assert is_signed(SECRET, request.headers, request.body, steps.clock.at)
            assert request.json["type"] == "review.opened"
            data = request.json["data"]
            review = reviews[data["id"]]
            assert data == {name: review[name] for name in data}
            assert set(data) == {"id", "kind", "walkerId", "day", "reasons", "openedAt"}


async def test_a_receiver_that_is_gone_dead_letters_the_job(open_game: OpenGame) -> None:
    async with receiving() as receiver, hooked(open_game, receiver) as steps:
        receiver.responses = [410]
        await cheat(steps, 5)
        await steps.work()
        assert await dead_letters(steps) == ["NonRetryableError: the response was 410"]
        assert len(receiver.received) == 1


async def test_an_internal_receiver_is_refused(serve: Serve, sqlite_url: str) -> None:
    async with (
        receiving() as receiver,
        stepping(
            opener(serve, sqlite_url),
            walk_review_webhook_url=receiver.url,
            walk_review_webhook_secret=SECRET,
        ) as steps,
    ):
        await cheat(steps, 5)
        await steps.work()
        assert await dead_letters(steps) == [
            "NonRetryableError: 127.0.0.1 has the internal address 127.0.0.1"
        ]
        assert receiver.received == []


async def test_a_killed_job_sends_again_with_the_same_id_or_not_at_all(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as receiver, hooked(opener(serve, sqlite_url), receiver) as steps:
        await cheat(steps, 5)
        original = JobContext.record_step
        killed: list[bool] = []

        async def once(self: JobContext, *args: Any) -> None:
            if not killed:
                killed.append(True)
                raise Killed
            await original(self, *args)

        # Between the delivery and its record: it is sent again.
        monkeypatch.setattr(JobContext, "record_step", once)
        # After the record, before the commit: it is not sent a third time.
        faults = KilledOnce("job_before_commit")
        await steps.work(faults=faults, lease_seconds=1)
        assert (killed, faults.has_killed) == ([True], True)
        first, second = receiver.received
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert json.loads(first.body)["data"] == json.loads(second.body)["data"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("walk_review_webhook_url", "ftp://x"),
        ("walk_review_webhook_secret", "short"),
        ("webhook_allowed_networks", "10.0.0.0/99"),
        ("webhook_timeout_seconds", "0"),
    ],
)
def test_invalid_settings_are_named_without_secrets(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ONCEWARD_{name.upper()} should be") as caught:
        load_settings(**{name: value})
    assert ("short" in str(caught.value)) is False
    with suppress(ConfigurationError):
        load_settings(walk_review_webhook_url="https://example.com/")
        pytest.fail("a URL without a secret was accepted")
