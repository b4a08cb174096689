"""Reconciliation run twice, weeks late, and by a killed worker."""

from datetime import date, timedelta
from functools import wraps
from typing import Any

import pytest

from onceward.jobs.executor import FAULT_POINTS
from onceward_services.walk import provisional
from onceward_services.walk.steps import reconcile
from onceward_services.walk.steps.ingest import RECONCILE
from packages.services.tests.conftest import Serve

from .fixtures import opener
from .settlement_fixtures import NODE, allocations, outcome, take
from .step_fixtures import TODAY, Stepping, days_ago, stepping


async def settle_again(steps: Stepping, day: date = TODAY) -> None:
    """Run the job of a day again, as after a second delivery."""
    onceward = steps.game.onceward
    handler = onceward.jobs.find(RECONCILE)
    assert handler is not None

    async def enqueue(*_args: Any, **_options: Any) -> None:
        """The first delivery has enqueued what follows."""

    async with steps.game.transaction() as tx:
        run: Any = type("Run", (), {"transaction": tx, "tenant": "ada"})()
        run.enqueue = enqueue
        run.payload = {"day": day.isoformat()}
        await handler.handler(run)


async def test_reconciling_again_changes_nothing(steps: Stepping) -> None:
    await steps.walk()
    await take(steps)
    await steps.work()
    before = await outcome(steps, "ada"), await steps.event_types(), await steps.verdicts()
    for _ in range(3):
        await settle_again(steps)
    after = await outcome(steps, "ada"), await steps.event_types(), await steps.verdicts()
    assert after == before


async def test_day_without_reports_is_skipped(steps: Stepping) -> None:
    await steps.walk()
    await steps.work()
    before = await outcome(steps, "ada")
    await settle_again(steps, days_ago(5))
    assert await outcome(steps, "ada") == before


async def test_a_day_is_settled_weeks_late_as_it_would_have_been_in_time(steps: Stepping) -> None:
    await steps.walk()
    await take(steps)
    steps.clock.move(timedelta(days=20))
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "ACCEPTED"
    assert await steps.energy() == 3000
    assert await allocations(steps) == [(NODE, False)]
    streak = await steps.streak()
    assert (streak["current_length_days"], streak["last_attested_date"]) == (0, "2026-05-22")


class Killed(BaseException):
    """Not an ``Exception``, so that no handler catches it."""


class KilledOnce:
    """Raises ``Killed`` at the first pass of a fault point."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.has_killed = False

    async def reach(self, point: str) -> None:
        if point == self._point and not self.has_killed:
            self.has_killed = True
            raise Killed


async def expected_in_the_end(steps: Stepping) -> None:
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 3000)
    assert await steps.energy() == 3000
    assert await steps.game.count("energy_ledger") == 1
    assert (await steps.streak())["total_lifetime_steps"] == 3000
    assert (await steps.event_types()).count("steps.accepted") == 1
    assert await allocations(steps) == [(NODE, False)]


@pytest.mark.parametrize("point", [point for point in FAULT_POINTS if point != "job_before_retry"])
async def test_a_worker_killed_at_any_point_leaves_all_or_nothing(
    steps: Stepping, point: str
) -> None:
    await steps.walk()
    await take(steps)
    faults = KilledOnce(point)
    await steps.work(faults=faults, lease_seconds=1)
    assert faults.has_killed
    await expected_in_the_end(steps)


STEPS = (
    "refund_due",
    "find_day",
    "readings_of",
    "book",
    "settle_day_log",
    "set_streak_of_day",
    "save_streak",
    "add_event",
    "confirm_quest",
    "confirm_allocations",
    "settle_provisional",
    "next_due_at",
)


@pytest.mark.parametrize("step", STEPS)
async def test_a_worker_killed_after_any_step_does_it_all_again(
    serve: Serve, sqlite_url: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepping(opener(serve, sqlite_url)) as steps:
        await killed_after(steps, step, monkeypatch)


@pytest.mark.parametrize("step", ["book", "confirm_allocations"])
async def test_on_postgresql(
    serve: Serve, postgres_url: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepping(opener(serve, postgres_url)) as steps:
        await killed_after(steps, step, monkeypatch)


async def killed_after(steps: Stepping, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await steps.walk()
    await take(steps)
    module: Any = reconcile if hasattr(reconcile, step) else provisional
    original = getattr(module, step)
    killed: list[str] = []

    @wraps(original)
    async def once(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        if not killed:
            killed.append(step)
            raise Killed
        return result

    monkeypatch.setattr(module, step, once)
    await steps.work(lease_seconds=1)
    assert killed == [step]
    await expected_in_the_end(steps)
