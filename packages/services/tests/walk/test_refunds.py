"""What reconciliation does to allocations: confirmed, or given back after a grace."""

from datetime import timedelta
from typing import Any

import pytest

from holdfast_services.walk import tree
from holdfast_services.walk.ledger import credit
from holdfast_services.walk.walkers import lock_walker

from .fixtures import OpenWorld, World, ok, refused

PACK, READER, DOWSER = "node.light-pack", "node.trail-reader", "keystone.dowser"
STRIDE, BREATH = "node.even-stride", "node.long-breath"
HIDDEN = "quest.hidden-spring"
DAY = timedelta(days=1)


class Steps:
    """Whether there are days nobody has looked at, as a test wants it."""

    are_pending = True


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    told = Steps()

    async def has_pending_steps(_tx: Any, _tenant: str) -> bool:
        return told.are_pending

    monkeypatch.setattr(tree, "has_pending_steps", has_pending_steps)
    return told


async def schedule(world: World, *node_ids: str, due: timedelta = DAY) -> list[str]:
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        return await tree.schedule_refund(tx, "ada", node_ids, world.clock.at + due)


async def confirm(world: World, *node_ids: str) -> list[str]:
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        return await tree.confirm_allocations(tx, "ada", node_ids, world.clock.at)


async def refund(world: World) -> list[str]:
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        return await tree.refund_due_allocations(tx, "ada", world.clock.at)


async def provisional(world: World) -> list[str]:
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        return [a.node_id for a in await tree.provisional_allocations(tx, "ada")]


def told(events: list[Any], type_: str) -> list[Any]:
    return [event["data"] for event in events if event["type"] == type_]


async def test_what_is_taken_while_steps_are_pending_is_provisional(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    steps.are_pending = False
    ok(await world.ada.allocate(PACK))
    marks = {a["nodeId"]: a["provisional"] for a in (await world.ada.tree())["allocations"]}
    assert marks == {STRIDE: True, PACK: False}
    assert await provisional(world) == [STRIDE]
    assert [data["provisional"] for data in told(await world.ada.events(), "tree.allocated")] == [
        True,
        False,
    ]


async def test_what_stands_on_something_provisional_is_provisional(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    steps.are_pending = False
    ok(await world.ada.allocate(BREATH))
    assert await provisional(world) == [STRIDE, BREATH]


async def test_a_confirmed_allocation_stands_for_good(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE, PACK))
    assert await confirm(world, STRIDE, PACK) == [STRIDE, PACK]
    assert await confirm(world, STRIDE, PACK) == []
    assert await provisional(world) == []
    world.clock.move(30 * DAY)
    assert await refund(world) == []
    assert await world.ada.allocated() == [STRIDE, PACK]
    assert told(await world.ada.events(), "allocation.confirmed") == [{"nodeIds": [STRIDE, PACK]}]


async def test_a_refund_comes_at_its_time_and_not_before(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE, PACK))
    assert await schedule(world, STRIDE) == [STRIDE]
    world.clock.move(DAY - timedelta(microseconds=1))
    assert await refund(world) == []
    world.clock.move(timedelta(microseconds=1))
    assert await refund(world) == [STRIDE]
    assert await world.ada.allocated() == [PACK]
    assert await world.ada.points() == 1
    assert told(await world.ada.events(), "allocation.reverted") == [
        {
            "nodeId": STRIDE,
            "kind": "node",
            "reason": "steps_rejected",
            "pointsReturned": 1,
            "energyReturned": 0,
            "pointsBanked": 1,
        }
    ]


async def test_a_refund_happens_once_however_often_it_is_tried(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    await schedule(world, STRIDE)
    world.clock.move(7 * DAY)
    assert [await refund(world) for _ in range(3)] == [[STRIDE], [], []]
    assert await world.ada.points() == 2
    assert len(told(await world.ada.events(), "allocation.reverted")) == 1


async def test_what_stands_on_a_refunded_node_falls_with_it(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001", "quest.002")
    ok(await world.ada.allocate(PACK, STRIDE))
    await confirm(world, STRIDE, PACK)
    ok(await world.ada.allocate(READER))
    assert await schedule(world, PACK) == [PACK, READER]
    # Even what was taken after that, on top of it, while no steps were pending.
    steps.are_pending = False
    world.clock.move(DAY / 2)
    ok(await world.ada.allocate("node.rain-cloak"))
    assert await provisional(world) == [PACK, READER, "node.rain-cloak"]
    world.clock.move(DAY / 2)
    assert await refund(world) == ["node.rain-cloak", READER, PACK]
    assert await world.ada.allocated() == [STRIDE]
    assert await world.ada.points() == 3
    reasons = [e["reason"] for e in told(await world.ada.events(), "allocation.reverted")]
    assert reasons == ["steps_rejected"] * 3


async def test_what_stands_on_it_falls_even_where_nobody_has_scheduled_it(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE, BREATH))
    await schedule(world, STRIDE)
    assert await confirm(world, BREATH) == [BREATH]
    world.clock.move(DAY)
    assert await refund(world) == [BREATH, STRIDE]
    reasons = [e["reason"] for e in told(await world.ada.events(), "allocation.reverted")]
    assert reasons == ["prerequisite_reverted", "steps_rejected"]
    assert await world.ada.points() == 2


async def test_confirming_takes_a_scheduled_refund_back(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    await schedule(world, STRIDE)
    await confirm(world, STRIDE)
    world.clock.move(2 * DAY)
    assert await refund(world) == []
    assert await world.ada.allocated() == [STRIDE]


async def test_a_second_rejection_does_not_prolong_the_grace(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    assert await schedule(world, STRIDE) == [STRIDE]
    assert await schedule(world, STRIDE, due=2 * DAY) == []
    assert await schedule(world, STRIDE, due=DAY / 2) == [STRIDE]
    world.clock.move(DAY / 2)
    assert await refund(world) == [STRIDE]


async def test_a_refunded_node_may_be_taken_again(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001")
    for _ in range(3):
        ok(await world.ada.allocate(STRIDE))
        await schedule(world, STRIDE)
        world.clock.move(DAY)
        assert await refund(world) == [STRIDE]
    steps.are_pending = False
    ok(await world.ada.allocate(STRIDE))
    assert await world.ada.allocated() == [STRIDE]
    assert await world.ada.points() == 1
    assert await world.count("tree_allocations") == 1
    refunds = await world.rows("SELECT seq, node_id, reason FROM tree_refunds ORDER BY seq")
    assert [tuple(row.values()) for row in refunds] == [
        (number, STRIDE, "steps_rejected") for number in (1, 2, 3)
    ]


async def test_energy_that_was_taken_comes_back_and_energy_that_was_not_does_not(
    open_world: OpenWorld, steps: Steps
) -> None:
    async with open_world() as world:
        await world.ada.finish("quest.001")
        ok(await world.ada.allocate(STRIDE))
    async with open_world(walk_energy_required=True) as world:
        async with world.transaction() as tx:
            await lock_walker(tx, "ada", world.clock.at)
            await credit(tx, "ada", 500, reason="steps", reference="a day", now=world.clock.at)
        ok(await world.ada.allocate(PACK))
        assert await world.balance_is_the_sum() == 0
        await schedule(world, STRIDE, PACK)
        world.clock.move(DAY)
        assert await refund(world) == [PACK, STRIDE]
        assert await world.balance_is_the_sum() == 500
        returned = {
            data["nodeId"]: data["energyReturned"]
            for data in told(await world.ada.events(), "allocation.reverted")
        }
        assert returned == {PACK: 500, STRIDE: 0}


# -- the quest a keystone reveals -----------------------------------------------------------------


async def lose_the_keystone(world: World) -> None:
    await schedule(world, DOWSER)
    world.clock.move(DAY)
    assert await refund(world) == [DOWSER]


async def test_a_quest_nobody_reveals_any_more_is_hidden_again(world: World, steps: Steps) -> None:
    await world.ada.finish("quest.001", "quest.002")
    ok(await world.ada.allocate(PACK, READER, DOWSER))
    await lose_the_keystone(world)
    assert HIDDEN not in await world.ada.quests()
    refused(await world.ada.start(HIDDEN), 422, "PREREQUISITES_NOT_MET")
    assert told(await world.ada.events(), "quest.hidden") == [{"questId": HIDDEN}]


async def test_a_quest_under_way_waits_for_its_keystone_and_goes_on_where_it_was(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001", "quest.002")
    ok(await world.ada.allocate(PACK, READER, DOWSER))
    ok(await world.ada.start(HIDDEN))
    ok(await world.ada.advance(HIDDEN, 1))
    await lose_the_keystone(world)
    refused(await world.ada.advance(HIDDEN, 2), 422, "PREREQUISITES_NOT_MET")
    refused(await world.ada.complete(HIDDEN), 422, "PREREQUISITES_NOT_MET")
    assert HIDDEN not in await world.ada.quests()
    ok(await world.ada.allocate(DOWSER))
    assert (await world.ada.quests())[HIDDEN]["currentStep"] == 2
    ok(await world.ada.advance(HIDDEN, 2))


async def test_what_a_hidden_quest_has_awarded_stays_and_is_not_awarded_again(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001", "quest.002")
    ok(await world.ada.allocate(PACK, READER, DOWSER))
    assert await world.ada.finish(HIDDEN) == 3
    await lose_the_keystone(world)
    assert await world.ada.points() == 3 + 2
    assert (await world.ada.quests())[HIDDEN]["status"] == "completed"
    ok(await world.ada.allocate(DOWSER))
    refused(await world.ada.start(HIDDEN), 409, "QUEST_ALREADY_COMPLETED")
    refused(await world.ada.complete(HIDDEN), 409, "QUEST_ALREADY_COMPLETED")
    assert await world.ada.points() == 3


async def test_a_job_that_dies_before_its_commit_has_given_nothing_back(
    world: World, steps: Steps
) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(STRIDE))
    await schedule(world, STRIDE)
    world.clock.move(DAY)
    before = await world.ada.tree(), await world.ada.events()
    unit = await world.store.begin()
    await lock_walker(unit.transaction, "ada", world.clock.at)
    assert await tree.refund_due_allocations(unit.transaction, "ada", world.clock.at) == [STRIDE]
    await unit.rollback()  # as the database does for whoever dies
    assert (await world.ada.tree(), await world.ada.events()) == before
    assert await refund(world) == [STRIDE]
