"""Requests to read an odd day again: opened once, responded to, or settled without a response."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from functools import wraps
from typing import Any

import pytest

from onceward_services.walk import jobs
from onceward_services.walk.steps import reconcile
from onceward_services.walk.steps.challenges import Sample, sample_digest
from onceward_services.walk.steps.ingest import RECONCILE
from onceward_services.walk.steps.rules import Span
from packages.services.tests.conftest import Serve

from .fixtures import ok, opener, refused, text
from .settlement_fixtures import NODE, allocations, backwards, outcome, take
from .step_fixtures import TODAY, Stepping, days_ago, stepping

DUE = timedelta(hours=72)


async def requested(steps: Stepping) -> list[Any]:
    events = await steps.game.device().events()
    return [event["data"] for event in events if event["type"] == "steps.reread_requested"]


@pytest.fixture
async def sqlite_steps(serve: Serve, sqlite_url: str) -> AsyncIterator[Stepping]:
    """For rules that do not depend on the database."""
    async with stepping(opener(serve, sqlite_url)) as opened:
        yield opened


def reread(
    challenge_id: str, day: date = TODAY, counts: tuple[int, ...] = (1500, 2500)
) -> dict[str, Any]:
    """Return the fields of a report: an hour for each count, from six o'clock on."""
    start = datetime.combine(day, time(6), UTC)
    hours = [start + timedelta(hours=number) for number in range(len(counts) + 1)]
    samples = [
        Sample(Span(hours[number], hours[number + 1]), count) for number, count in enumerate(counts)
    ]
    return {
        "count": sum(counts),
        "sampleSpan": {"start": text(hours[0]), "end": text(hours[-1])},
        "challenge": {
            "id": challenge_id,
            "samples": [
                {"start": text(s.span.start), "end": text(s.span.end), "count": s.count}
                for s in samples
            ],
            "sampleDigest": sample_digest(challenge_id, samples),
        },
    }


async def run_jobs(steps: Stepping, *, type_: str, day: date = TODAY) -> None:
    """Run a job's handler in one transaction, which a kill rolls back as the database does."""
    handler = steps.game.onceward.jobs.find(type_)
    assert handler is not None

    async def enqueue(*_args: Any, **_options: Any) -> None:
        """The queue is part of the transaction."""

    async with steps.game.transaction() as tx:
        run: Any = type("Run", (), {"transaction": tx, "tenant": "ada"})()
        run.payload, run.enqueue = {"day": day.isoformat()}, enqueue
        await handler.handler(run)


def test_the_digest_is_the_one_that_is_documented() -> None:
    start = datetime(2026, 5, 22, 6, 0, tzinfo=UTC)
    samples = [Sample(Span(start, start + timedelta(minutes=1)), 90)]
    # printf '%s\n' c-1 '1779429600000 1779429660000 90' | sha256sum
    digest = "0a82ca0f9a2bf5cf61c1e62a10d4baf962defb5f72ab4e6b4c59f5bf7cd1dd35"
    assert sample_digest("c-1", samples) == digest


async def test_an_odd_day_is_asked_for_again_and_counts_as_it_is_read(steps: Stepping) -> None:
    await backwards(steps)
    await steps.work()
    (asked,) = await requested(steps)
    due_at = text(steps.clock.now() + DUE)
    assert asked == {
        "day": "2026-05-22",
        "challengeId": asked["challengeId"],
        "dueAt": due_at,
        "reasons": ["COUNT_WENT_BACKWARDS"],
    }
    # The next report, of any day, gets it too.
    expected = {"id": asked["challengeId"], "day": "2026-05-22", "dueAt": due_at}
    assert (await steps.walk(days_ago(1)))["challenge"] == expected
    assert (await steps.walk(**reread(asked["challengeId"])))["challenge"] is None
    await steps.work()
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 4000)
    assert await steps.energy() == 3000 + 4000
    assert await steps.reviews() == []
    (review,) = await steps.reviews("?status=resolved")
    assert (review["resolvedBy"], review["decision"]) == ("onceward", "accept")
    (row,) = await steps.game.rows(
        "SELECT sample_digest FROM step_reports WHERE sample_digest IS NOT NULL"
    )
    assert row["sample_digest"] == reread(asked["challengeId"])["challenge"]["sampleDigest"]
    # A counter that continues from there is fine, and one that shrinks is not: no second challenge.
    await steps.walk(count=4500, hours=(6, 9))
    await steps.work()
    assert (await steps.day())["acceptedCount"] == 4500
    await steps.walk(count=10, hours=(6, 10))
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"
    assert len(await requested(steps)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"id": "another"},
        {"sampleDigest": "0" * 64},
        {"samples": []},
    ],
)
async def test_an_invalid_response_changes_nothing(
    sqlite_steps: Stepping, change: dict[str, Any]
) -> None:
    steps = sqlite_steps
    await backwards(steps)
    await steps.work()
    (asked,) = await requested(steps)
    before = await outcome(steps, "ada")
    fields = reread(asked["challengeId"])
    response = await steps.report(**(fields | {"challenge": fields["challenge"] | change}))
    details = refused(response, 422, "REREAD_INVALID")
    assert set(details) == {"received", "expected"}
    refused(await steps.report(**(fields | {"count": 4001})), 422, "REREAD_INVALID")
    outside = {"sampleSpan": {"start": "2026-05-22T06:30:00Z", "end": "2026-05-22T08:00:00Z"}}
    refused(await steps.report(**(fields | outside)), 422, "REREAD_INVALID")
    too_fast = reread(asked["challengeId"], counts=(33_000, 1))
    refused(await steps.report(**too_fast), 422, "REREAD_INVALID")
    await steps.work()
    assert await outcome(steps, "ada") == before
    assert await steps.reviews() != []
    # A day that is not odd has no challenge.
    there = reread(asked["challengeId"], days_ago(1))
    refused(await steps.report(days_ago(1), **there), 422, "REREAD_INVALID")


async def test_without_a_response_a_day_is_rejected_and_an_admin_may_still_accept_it(
    sqlite_steps: Stepping,
) -> None:
    steps = sqlite_steps
    await backwards(steps)
    await take(steps)
    await steps.work()
    steps.clock.move(DUE - timedelta(microseconds=1))
    await run_jobs(steps, type_=jobs.REFUND)
    assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"
    steps.clock.move(timedelta(microseconds=1))
    for _ in range(2):
        await run_jobs(steps, type_=jobs.REFUND)
        assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    rejected = [row for row in await steps.attestations() if row["verdict"] == "REJECTED"]
    assert [(row["code"], row["anti_cheat"]) for row in rejected] == [("REREAD_UNANSWERED", 0)]
    assert await allocations(steps) == [(NODE, True)]
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept"))
    assert (await steps.day())["acceptedCount"] == 5000
    assert await allocations(steps) == [(NODE, False)]


async def test_without_a_response_steps_accepted_before_stay(sqlite_steps: Stepping) -> None:
    steps = sqlite_steps
    await steps.walk(count=2500, hours=(6, 9))
    await steps.work()
    await steps.walk(count=1000, hours=(6, 10))
    await steps.work()
    steps.clock.move(DUE)
    await run_jobs(steps, type_=jobs.REFUND)
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 2500)
    assert await steps.energy() == 2500


async def test_a_late_response_still_counts(sqlite_steps: Stepping) -> None:
    steps = sqlite_steps
    await backwards(steps)
    await steps.work()
    (asked,) = await requested(steps)
    steps.clock.move(DUE)
    await run_jobs(steps, type_=jobs.REFUND)
    assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    await steps.walk(**reread(asked["challengeId"]))
    await steps.work()
    assert (await steps.day())["acceptedCount"] == 4000


async def test_days_are_not_asked_for_again_if_it_is_switched_off(
    serve: Serve, sqlite_url: str
) -> None:
    async with stepping(opener(serve, sqlite_url), step_reread_hours=0) as steps:
        await backwards(steps)
        await steps.work()
        assert await requested(steps) == []
        steps.clock.move(timedelta(days=30))
        await run_jobs(steps, type_=jobs.REFUND)
        assert (await steps.day())["reconciliationStatus"] == "QUARANTINED"


async def test_responses_of_two_devices_and_settlement_at_once_count_once(
    steps: Stepping,
) -> None:
    await backwards(steps)
    await steps.work()
    (asked,) = await requested(steps)
    steps.clock.move(DUE)

    async def send() -> int:
        return (await steps.report(**reread(asked["challengeId"]))).status_code

    statuses = await asyncio.gather(
        *(send() for _ in range(4)),
        run_jobs(steps, type_=jobs.REFUND),
        run_jobs(steps, type_=RECONCILE),
    )
    assert statuses[:4] == [200] * 4
    await steps.work()
    assert (await steps.day())["acceptedCount"] == 4000
    assert await steps.energy() == 4000
    assert len(await requested(steps)) == 1


class Killed(BaseException):
    """Not an ``Exception``, so that no handler catches it."""


async def killed_after(
    steps: Stepping, step: str, type_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(reconcile, step)

    @wraps(original)
    async def once(*args: Any, **kwargs: Any) -> Any:
        await original(*args, **kwargs)
        raise Killed

    async def everything() -> Any:
        tables = ("walkers", "step_logs", "walk_reviews", "energy_ledger", "walker_events")
        return {
            table: [str(dict(row)) for row in await steps.game.rows(f"SELECT * FROM {table}")]
            for table in tables
        }

    before = await everything()
    with monkeypatch.context() as patched:
        patched.setattr(reconcile, step, once)
        with pytest.raises(Killed):
            await run_jobs(steps, type_=type_)
    assert await everything() == before, step


async def test_killed_after_any_step_a_challenge_is_all_or_nothing(
    steps: Stepping, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backwards(steps)
    for step in ("open_review", "add_event", "open_challenge", "next_due_at"):
        await killed_after(steps, step, RECONCILE, monkeypatch)
    await run_jobs(steps, type_=RECONCILE)
    (asked,) = await requested(steps)
    # Without a response in time.
    steps.clock.move(DUE)
    for step in ("add_attestation", "settle_day_log", "take_back", "settle_provisional"):
        await killed_after(steps, step, jobs.REFUND, monkeypatch)
    await run_jobs(steps, type_=jobs.REFUND)
    assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    # And with one after all.
    await steps.walk(**reread(asked["challengeId"]))
    for step in ("readings_of", "book", "close_reread_review"):
        await killed_after(steps, step, RECONCILE, monkeypatch)
    await run_jobs(steps, type_=RECONCILE)
    assert await steps.energy() == 4000
    assert len(await requested(steps)) == 1
