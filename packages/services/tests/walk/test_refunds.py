"""Confirmation and refunds of allocations."""

from datetime import date, datetime, timedelta
from typing import Any

import pytest

from onceward_services.walk import quests, tree
from onceward_services.walk.ledger import credit
from onceward_services.walk.steps.open_days import OpenDays
from onceward_services.walk.steps.rules import find_zone
from onceward_services.walk.walkers import lock_walker

from .fixtures import CATALOGUE, Game, OpenGame, ok, refused

PACK, READER, DOWSER = "node.light-pack", "node.trail-reader", "keystone.dowser"
STRIDE, BREATH = "node.even-stride", "node.long-breath"
HIDDEN = "quest.hidden-spring"
DAY = timedelta(days=1)


class Steps:
    """A switch: whether a day is open when nodes are allocated. Quests are final."""

    are_pending = True


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    expected = Steps()

    def open_days(now: datetime, *, is_open: bool) -> OpenDays:
        statuses: dict[date, Any] = {now.date(): "PENDING"} if is_open else {}
        return OpenDays(find_zone("UTC"), now, None, timedelta(days=7), statuses)

    async def for_allocations(*_args: Any, now: datetime, **_others: Any) -> OpenDays:
        return open_days(now, is_open=expected.are_pending)

    async def for_quests(*_args: Any, now: datetime, **_others: Any) -> OpenDays:
        return open_days(now, is_open=False)

    monkeypatch.setattr(tree, "read_open_days", for_allocations)
    monkeypatch.setattr(quests, "read_open_days", for_quests)
    return expected


async def schedule(game: Game, *node_ids: str, due: timedelta = DAY) -> list[str]:
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        return await tree.schedule_refund(
            tx,
            "ada",
            node_ids,
            game.clock.at + due,
            catalogue=CATALOGUE,
            now=game.clock.at,
        )


async def confirm(game: Game, *node_ids: str) -> list[str]:
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        return await tree.confirm_allocations(tx, "ada", node_ids, game.clock.at)


async def refund(game: Game) -> list[str]:
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        return await tree.refund_due_allocations(tx, "ada", game.clock.at, CATALOGUE)


async def provisional(game: Game) -> list[str]:
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        return [a.node_id for a in await tree.provisional_allocations(tx, "ada")]


def expected(events: list[Any], type_: str) -> list[Any]:
    return [event["data"] for event in events if event["type"] == type_]


async def test_allocation_is_provisional_while_steps_are_pending(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    steps.are_pending = False
    ok(await game.ada.allocate(PACK))
    marks = {a["nodeId"]: a["provisional"] for a in (await game.ada.tree())["allocations"]}
    assert marks == {STRIDE: True, PACK: False}
    assert await provisional(game) == [STRIDE]
    assert [
        data["provisional"] for data in expected(await game.ada.events(), "tree.allocated")
    ] == [
        True,
        False,
    ]


async def test_dependent_of_a_provisional_allocation_is_provisional(
    game: Game, steps: Steps
) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    steps.are_pending = False
    ok(await game.ada.allocate(BREATH))
    assert await provisional(game) == [STRIDE, BREATH]


async def test_confirmed_allocation_is_final(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE, PACK))
    assert await confirm(game, STRIDE, PACK) == [STRIDE, PACK]
    assert await confirm(game, STRIDE, PACK) == []
    assert await provisional(game) == []
    game.clock.move(30 * DAY)
    assert await refund(game) == []
    assert await game.ada.allocated() == [STRIDE, PACK]
    assert expected(await game.ada.events(), "allocation.confirmed") == [
        {"nodeIds": [STRIDE, PACK]}
    ]


async def test_a_refund_comes_at_its_time_and_not_before(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE, PACK))
    assert await schedule(game, STRIDE) == [STRIDE]
    game.clock.move(DAY - timedelta(microseconds=1))
    assert await refund(game) == []
    game.clock.move(timedelta(microseconds=1))
    assert await refund(game) == [STRIDE]
    assert await game.ada.allocated() == [PACK]
    assert await game.ada.points() == 1
    assert expected(await game.ada.events(), "allocation.reverted") == [
        {
            "nodeId": STRIDE,
            "kind": "node",
            "reason": "steps_rejected",
            "pointsReturned": 1,
            "energyReturned": 0,
            "pointsBanked": 1,
        }
    ]


async def test_a_refund_happens_once_however_often_it_is_tried(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    await schedule(game, STRIDE)
    game.clock.move(7 * DAY)
    assert [await refund(game) for _ in range(3)] == [[STRIDE], [], []]
    assert await game.ada.points() == 2
    assert len(expected(await game.ada.events(), "allocation.reverted")) == 1


async def test_dependents_of_a_refunded_node_are_refunded(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001", "quest.002")
    ok(await game.ada.allocate(PACK, STRIDE))
    await confirm(game, STRIDE, PACK)
    ok(await game.ada.allocate(READER))
    assert await schedule(game, PACK) == [PACK, READER]
    # Also dependents allocated later, while no steps were pending.
    steps.are_pending = False
    game.clock.move(DAY / 2)
    ok(await game.ada.allocate("node.rain-cloak"))
    assert await provisional(game) == [PACK, READER, "node.rain-cloak"]
    game.clock.move(DAY / 2)
    assert await refund(game) == ["node.rain-cloak", READER, PACK]
    assert await game.ada.allocated() == [STRIDE]
    assert await game.ada.points() == 3
    reasons = [e["reason"] for e in expected(await game.ada.events(), "allocation.reverted")]
    assert reasons == ["steps_rejected"] * 3


async def test_dependents_are_refunded_without_a_schedule_of_their_own(
    game: Game, steps: Steps
) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE, BREATH))
    await schedule(game, STRIDE)
    assert await confirm(game, BREATH) == [BREATH]
    game.clock.move(DAY)
    assert await refund(game) == [BREATH, STRIDE]
    reasons = [e["reason"] for e in expected(await game.ada.events(), "allocation.reverted")]
    assert reasons == ["prerequisite_reverted", "steps_rejected"]
    assert await game.ada.points() == 2


async def test_confirming_takes_a_scheduled_refund_back(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    await schedule(game, STRIDE)
    await confirm(game, STRIDE)
    game.clock.move(2 * DAY)
    assert await refund(game) == []
    assert await game.ada.allocated() == [STRIDE]


async def test_a_second_rejection_does_not_prolong_the_grace(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    assert await schedule(game, STRIDE) == [STRIDE]
    assert await schedule(game, STRIDE, due=2 * DAY) == []
    assert await schedule(game, STRIDE, due=DAY / 2) == [STRIDE]
    game.clock.move(DAY / 2)
    assert await refund(game) == [STRIDE]


async def test_a_refunded_node_may_be_taken_again(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    for _ in range(3):
        ok(await game.ada.allocate(STRIDE))
        await schedule(game, STRIDE)
        game.clock.move(DAY)
        assert await refund(game) == [STRIDE]
    steps.are_pending = False
    ok(await game.ada.allocate(STRIDE))
    assert await game.ada.allocated() == [STRIDE]
    assert await game.ada.points() == 1
    assert await game.count("tree_allocations") == 1
    refunds = await game.rows("SELECT seq, node_id, reason FROM tree_refunds ORDER BY seq")
    assert [tuple(row.values()) for row in refunds] == [
        (number, STRIDE, "steps_rejected") for number in (1, 2, 3)
    ]


async def test_refund_returns_the_energy_that_was_charged(
    open_game: OpenGame, steps: Steps
) -> None:
    async with open_game() as game:
        await game.ada.finish("quest.001")
        ok(await game.ada.allocate(STRIDE))
    async with open_game(walk_energy_required=True) as game:
        async with game.transaction() as tx:
            await lock_walker(tx, "ada", game.clock.at)
            await credit(tx, "ada", 500, reason="steps", reference="a day", now=game.clock.at)
        ok(await game.ada.allocate(PACK))
        assert await game.balance_is_the_sum() == 0
        await schedule(game, STRIDE, PACK)
        game.clock.move(DAY)
        assert await refund(game) == [PACK, STRIDE]
        assert await game.balance_is_the_sum() == 500
        returned = {
            data["nodeId"]: data["energyReturned"]
            for data in expected(await game.ada.events(), "allocation.reverted")
        }
        assert returned == {PACK: 500, STRIDE: 0}


# -- the quest a keystone reveals -----------------------------------------------------------------


async def lose_the_keystone(game: Game) -> None:
    await schedule(game, DOWSER)
    game.clock.move(DAY)
    assert await refund(game) == [DOWSER]


async def test_quest_without_a_revealing_keystone_is_hidden_again(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001", "quest.002")
    ok(await game.ada.allocate(PACK, READER, DOWSER))
    await lose_the_keystone(game)
    assert HIDDEN not in await game.ada.quests()
    refused(await game.ada.start(HIDDEN), 422, "PREREQUISITES_NOT_MET")
    assert expected(await game.ada.events(), "quest.hidden") == [{"questId": HIDDEN}]


async def test_quest_in_progress_needs_its_keystone_and_keeps_its_progress(
    game: Game, steps: Steps
) -> None:
    await game.ada.finish("quest.001", "quest.002")
    ok(await game.ada.allocate(PACK, READER, DOWSER))
    ok(await game.ada.start(HIDDEN))
    ok(await game.ada.advance(HIDDEN, 1))
    await lose_the_keystone(game)
    refused(await game.ada.advance(HIDDEN, 2), 422, "PREREQUISITES_NOT_MET")
    refused(await game.ada.complete(HIDDEN), 422, "PREREQUISITES_NOT_MET")
    assert HIDDEN not in await game.ada.quests()
    ok(await game.ada.allocate(DOWSER))
    assert (await game.ada.quests())[HIDDEN]["currentStep"] == 2
    ok(await game.ada.advance(HIDDEN, 2))


async def test_points_of_a_hidden_quest_stay_and_are_awarded_once(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001", "quest.002")
    ok(await game.ada.allocate(PACK, READER, DOWSER))
    assert await game.ada.finish(HIDDEN) == 3
    await lose_the_keystone(game)
    assert await game.ada.points() == 3 + 2
    assert (await game.ada.quests())[HIDDEN]["status"] == "completed"
    ok(await game.ada.allocate(DOWSER))
    refused(await game.ada.start(HIDDEN), 409, "QUEST_ALREADY_COMPLETED")
    refused(await game.ada.complete(HIDDEN), 409, "QUEST_ALREADY_COMPLETED")
    assert await game.ada.points() == 3


async def test_job_killed_before_its_commit_refunds_nothing(game: Game, steps: Steps) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(STRIDE))
    await schedule(game, STRIDE)
    game.clock.move(DAY)
    before = await game.ada.tree(), await game.ada.events()
    unit = await game.store.begin()
    await lock_walker(unit.transaction, "ada", game.clock.at)
    assert await tree.refund_due_allocations(unit.transaction, "ada", game.clock.at, CATALOGUE) == [
        STRIDE
    ]
    await unit.rollback()  # as the database does for a killed process
    assert (await game.ada.tree(), await game.ada.events()) == before
    assert await refund(game) == [STRIDE]
