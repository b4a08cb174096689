"""The energy ledger: credits, debits, refusals; the balance is its sum, whatever happens."""

from typing import Any

import pytest

from holdfast.errors import ServiceError
from holdfast_services.walk.ledger import book, credit, debit
from holdfast_services.walk.walkers import lock_walker

from .fixtures import HeldClock, OpenWorld, World, new_key, ok, refused

ROOT, CHILD = "node.even-stride", "node.long-breath"


async def give(world: World, amount: int, reference: str = "a day", walker: str = "ada") -> int:
    """Credit energy as reconciliation does."""
    async with world.transaction() as tx:
        await lock_walker(tx, walker, world.clock.at)
        return await credit(
            tx, walker, amount, reason="steps", reference=reference, now=world.clock.at
        )


# -- the ledger itself ----------------------------------------------------------------------------


async def test_the_balance_is_the_sum_of_credits_and_debits(world: World) -> None:
    now = world.clock.at
    assert await give(world, 700) == 700
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", now)
        assert await debit(tx, "ada", 500, reason="allocation", reference="1", now=now) == 200
        assert await credit(tx, "ada", 50, reason="refund", reference="1", now=now) == 250
    assert await world.balance_is_the_sum() == 250
    assert (await world.ada.me())["energyBalance"] == 250


async def test_the_same_reason_and_reference_is_booked_once(world: World) -> None:
    now = world.clock.at
    assert await give(world, 700) == 700
    assert await give(world, 700) == 700
    assert await give(world, 999) == 700
    assert await give(world, 1, "another day") == 701
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", now)
        for _ in range(2):
            assert await debit(tx, "ada", 600, reason="allocation", reference="1", now=now) == 101
    assert await world.balance_is_the_sum() == 101
    assert await world.count("energy_ledger") == 3


async def test_a_debit_beyond_the_balance_is_refused_and_writes_nothing(world: World) -> None:
    await give(world, 10)
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        with pytest.raises(ServiceError) as caught:
            await debit(tx, "ada", 11, reason="allocation", reference="1", now=world.clock.at)
        assert (caught.value.status, caught.value.code) == (422, "INSUFFICIENT_ENERGY")
        assert caught.value.details == {"energyRequired": 11, "energyBalance": 10}
    assert await world.balance_is_the_sum() == 10


async def test_a_correction_may_go_below_zero_and_the_sum_still_holds(world: World) -> None:
    await give(world, 10)
    async with world.transaction() as tx:
        await lock_walker(tx, "ada", world.clock.at)
        balance = await book(
            tx, "ada", -25, reason="correction", reference="a day", now=world.clock.at
        )
    assert balance == await world.balance_is_the_sum() == -15


@pytest.mark.parametrize("book_it", [credit, debit])
async def test_a_sign_that_does_not_fit_is_the_callers_mistake(
    sqlite_world: World, book_it: Any
) -> None:
    async with sqlite_world.transaction() as tx:
        await lock_walker(tx, "ada", sqlite_world.clock.at)
        with pytest.raises(ValueError, match="cannot be negative"):
            await book_it(tx, "ada", -1, reason="x", reference="x", now=sqlite_world.clock.at)


async def test_a_walker_who_was_not_locked_is_the_callers_mistake(world: World) -> None:
    async with world.transaction() as tx:
        with pytest.raises(LookupError, match="lock_walker"):
            await credit(tx, "ada", 1, reason="x", reference="x", now=world.clock.at)


async def test_walkers_have_ledgers_of_their_own(world: World) -> None:
    await give(world, 5, walker="ada")
    await give(world, 7, walker="eve")
    assert await world.balance_is_the_sum("ada") == 5
    assert await world.balance_is_the_sum("eve") == 7
    assert (await world.device("bob").me())["energyBalance"] == 0


# -- what allocations take ------------------------------------------------------------------------


async def test_without_the_setting_energy_is_counted_and_never_taken(world: World) -> None:
    await give(world, 600)
    await world.ada.finish("quest.001")
    assert {node["energyCost"] for node in (await world.ada.tree())["nodes"]} == {0}
    answer = ok(await world.ada.allocate(ROOT, CHILD))
    assert answer["energyBalance"] == 600
    assert await world.balance_is_the_sum() == 600
    assert await world.count("energy_ledger") == 1


async def test_with_the_setting_an_allocation_takes_energy_too(open_world: OpenWorld) -> None:
    async with open_world(walk_energy_required=True) as world:
        await give(world, 1800)
        await world.ada.finish("quest.001")
        answer = ok(await world.ada.allocate(ROOT, CHILD))
        assert (answer["pointsBanked"], answer["energyBalance"]) == (0, 300)
        assert await world.balance_is_the_sum() == 300
        entries = await world.rows(
            "SELECT delta, reason, reference FROM energy_ledger ORDER BY seq"
        )
        assert [tuple(entry.values()) for entry in entries] == [
            (1800, "steps", "a day"),
            (-500, "allocation", "1"),
            (-1000, "allocation", "2"),
        ]
        costs = {node["nodeId"]: node["energyCost"] for node in answer["nodes"]}
        assert (costs[ROOT], costs[CHILD]) == (500, 1000)


async def test_with_the_setting_too_little_energy_is_refused_whole(open_world: OpenWorld) -> None:
    async with open_world(walk_energy_required=True) as world:
        await give(world, 1499)
        await world.ada.finish("quest.001")
        details = refused(await world.ada.allocate(ROOT, CHILD), 422, "INSUFFICIENT_ENERGY")
        assert details == {"energyRequired": 1500, "energyBalance": 1499}
        assert await world.ada.allocated() == []
        assert await world.balance_is_the_sum() == 1499
        ok(await world.ada.allocate(ROOT))
        assert await world.balance_is_the_sum() == 999


async def test_points_are_asked_for_before_energy(open_world: OpenWorld) -> None:
    async with open_world(walk_energy_required=True) as world:
        refused(await world.ada.allocate(ROOT), 422, "INSUFFICIENT_POINTS")
        assert await world.count("walkers") == 0


async def test_a_replay_never_takes_energy_again(open_world: OpenWorld) -> None:
    async with open_world(walk_energy_required=True) as world:
        await give(world, 1200)
        await world.ada.finish("quest.001")
        key = new_key()
        first = await world.ada.allocate(ROOT, key=key)
        await give(world, 1, "another day")
        for _ in range(3):
            again = await world.ada.allocate(ROOT, key=key)
            assert (again.content, ok(again)["energyBalance"]) == (first.content, 700)
        assert await world.balance_is_the_sum() == 701


async def test_energy_goes_in_the_order_of_the_actions(open_world: OpenWorld) -> None:
    async with open_world(HeldClock(), walk_energy_required=True) as world:
        await give(world, 999)
        await world.ada.finish("quest.001")
        ok(await world.ada.allocate(ROOT))
        refused(await world.ada.allocate("node.light-pack"), 422, "INSUFFICIENT_ENERGY")
        assert await world.ada.allocated() == [ROOT]
        assert await world.balance_is_the_sum() == 499
