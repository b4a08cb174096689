"""Provisional allocations: confirmed or refunded by reconciliation."""

from datetime import timedelta

import pytest

from onceward_services.walk.steps import reconcile
from onceward_services.walk.steps.settings import StepSettings

from .fixtures import OpenGame, ok
from .settlement_fixtures import NODE, allocations, backwards, take
from .step_fixtures import TODAY, WATCH, Stepping, days_ago, stepping

SETTINGS = StepSettings.model_validate({})


async def test_allocation_on_pending_steps_is_confirmed_once_the_day_is_attested(
    steps: Stepping,
) -> None:
    await steps.walk()
    await take(steps)
    await steps.work()
    assert await allocations(steps) == [(NODE, False)]
    assert "allocation.confirmed" in await steps.event_types()


async def test_it_waits_for_the_last_pending_day_whichever_that_is(steps: Stepping) -> None:
    for order in ((0, 1), (1, 0)):
        walker = f"walker-{order[0]}"
        for ago in order:
            # One day reaches the goal, the other does not.
            await steps.walk(days_ago(ago), 3000 if ago else 100, walker=walker)
        device = steps.game.device(walker)
        await device.finish("quest.001")
        ok(await device.allocate(NODE))
        await steps.work()
        (allocation,) = (await device.tree())["allocations"]
        assert allocation["provisional"] is False


async def test_a_day_below_the_goal_is_settled_too(steps: Stepping) -> None:
    await steps.walk(count=1999)
    await take(steps)
    await steps.work()
    assert (await steps.day())["attested"] is False
    assert await allocations(steps) == [(NODE, False)]


async def test_a_debt_confirms_nothing_until_it_is_paid(open_game: OpenGame) -> None:
    """Energy of a rejected day was spent on a node that is final."""
    settings = {"step_energy_per_step": 0.1, "step_attested_threshold": 1000}
    async with stepping(open_game, walk_energy_required=True, **settings) as steps:
        device = steps.game.device()
        await steps.walk(days_ago(1), 6000, hours=(6, 10))
        await steps.walk(TODAY, 100, hours=(6, 10))
        await steps.work()
        await device.finish("quest.001")
        ok(await device.allocate("node.light-pack"))
        assert await allocations(steps) == [("node.light-pack", False)]
        await steps.walk(days_ago(1), 300, hours=(6, 11))
        await steps.work()
        (review,) = await steps.reviews()
        ok(await steps.resolve(review["id"], "reject"))
        # Of 600 there are 110 left to take back.
        assert await steps.energy() == 0
    async with stepping(open_game, **settings) as steps:
        await steps.walk(count=1000, hours=(6, 11))
        ok(await steps.game.device().allocate(NODE))
        await steps.work()
        assert await steps.energy() == 0
        assert await allocations(steps) == [("node.light-pack", False), (NODE, True)]
        await steps.walk(count=6000, hours=(6, 11.5))
        await steps.work()
        assert await steps.energy() == 600 - 490 - 10
        assert await allocations(steps) == [("node.light-pack", False), (NODE, False)]


async def test_allocations_stay_provisional_while_a_day_is_quarantined(
    steps: Stepping,
) -> None:
    await backwards(steps)
    await take(steps)
    await steps.walk(days_ago(1))
    await steps.work()
    assert await allocations(steps) == [(NODE, True)]
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept"))
    assert await allocations(steps) == [(NODE, False)]


async def test_allocations_are_refunded_a_day_after_a_rejection(
    steps: Stepping,
) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    steps.clock.move(timedelta(hours=23, minutes=59))
    async with steps.game.transaction() as tx:
        await reconcile.settle_day(tx, "ada", TODAY, settings=SETTINGS, now=steps.clock.now())
    assert await allocations(steps) == [(NODE, True)]
    steps.clock.move(timedelta(minutes=1))
    await steps.work()
    assert await allocations(steps) == []
    # The quest was completed on the rejected day too.
    assert await steps.game.device().points() == 0
    assert (await steps.game.device().quests())["quest.001"]["currentStep"] == 1
    events = await steps.game.device().events()
    (reverted,) = [event for event in events if event["type"] == "allocation.reverted"]
    assert reverted["data"]["nodeId"] == NODE
    assert reverted["data"]["reason"] == "steps_rejected"


async def test_a_refund_that_comes_too_early_waits_for_its_time(steps: Stepping) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    # The database's clock is months ahead of ours, so the job is due there at once.
    await steps.work()
    assert await allocations(steps) == [(NODE, True)]
    due_in = await steps.game.onceward.runtime.job_store.due_in(["walk"])
    assert due_in == pytest.approx(24 * 3600, abs=60)


async def test_another_good_day_does_not_make_up_for_a_rejected_one(steps: Stepping) -> None:
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    await steps.walk(days_ago(1))
    await steps.work()
    assert (await steps.day(days_ago(1)))["attested"] is True
    assert await allocations(steps) == [(NODE, True)]
    steps.clock.move(timedelta(hours=25))
    async with steps.game.transaction() as tx:
        await reconcile.settle_day(tx, "ada", TODAY, settings=SETTINGS, now=steps.clock.now())
    assert await allocations(steps) == []


async def test_late_verdict_does_not_cancel_a_due_refund(
    steps: Stepping,
) -> None:
    """No worker runs for two days: due refunds come first, then the day is settled."""
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    await steps.walk(days_ago(1))
    steps.clock.move(timedelta(hours=48))
    await steps.work()
    await steps.work()
    assert await allocations(steps) == []
    assert (await steps.day(days_ago(1)))["reconciliationStatus"] == "ACCEPTED"
    reverted = [t for t in await steps.event_types() if t == "allocation.reverted"]
    assert len(reverted) == 1


async def test_day_accepted_again_cancels_the_refund(steps: Stepping) -> None:
    """A day quarantined and then rejected: an admin's acceptance ends both."""
    await backwards(steps)
    await steps.work()
    await take(steps)
    await steps.walk(count=49_000, sourceBundleId=WATCH, hours=(10, 11.9))
    await steps.work()
    assert (await steps.day())["reconciliationStatus"] == "REJECTED"
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept", acceptedCount=4000))
    day = await steps.day()
    assert (day["reconciliationStatus"], day["acceptedCount"]) == ("ACCEPTED", 4000)
    assert await allocations(steps) == [(NODE, False)]
    steps.clock.move(timedelta(hours=48))
    await steps.work()
    assert await allocations(steps) == [(NODE, False)]


async def test_negative_balance_after_a_rejection_confirms_nothing(
    open_game: OpenGame,
) -> None:
    async with stepping(open_game, walk_energy_required=True) as steps:
        await steps.walk(days_ago(1), 600, hours=(6, 10))
        await steps.work()
        await steps.walk(days_ago(1), 300, hours=(6, 11))  # quarantined from now on
        await take(steps)
        assert await steps.energy() == 100
        await steps.work()
        (review,) = await steps.reviews()
        ok(await steps.resolve(review["id"], "reject"))
        # What is left of the day's energy is taken back; the refund pays the rest.
        assert await steps.energy() == 0
        steps.clock.move(timedelta(hours=24))
        await steps.work()
        assert await steps.energy() == 0
        assert await allocations(steps) == []
