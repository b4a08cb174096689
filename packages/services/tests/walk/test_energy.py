"""The energy ledger: credits, debits and errors. The balance is always the sum."""

import re
from importlib.resources import files
from typing import Any

import pytest

from onceward.errors import ServiceError
from onceward_services.walk.ledger import book, credit, debit
from onceward_services.walk.walkers import lock_walker, update_walker

from .fixtures import Game, HeldClock, OpenGame, new_key, ok, refused

ROOT, CHILD = "node.even-stride", "node.long-breath"


async def give(game: Game, amount: int, reference: str = "a day", walker: str = "ada") -> int:
    """Credit energy as reconciliation does."""
    async with game.transaction() as tx:
        await lock_walker(tx, walker, game.clock.at)
        return await credit(
            tx, walker, amount, reason="steps", reference=reference, now=game.clock.at
        )


# -- the ledger itself ----------------------------------------------------------------------------


async def test_the_balance_is_the_sum_of_credits_and_debits(game: Game) -> None:
    now = game.clock.at
    assert await give(game, 700) == 700
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", now)
        assert await debit(tx, "ada", 500, reason="allocation", reference="1", now=now) == 200
        assert await credit(tx, "ada", 50, reason="refund", reference="1", now=now) == 250
    assert await game.balance_is_the_sum() == 250
    assert (await game.ada.me())["energyBalance"] == 250


async def test_the_same_reason_and_reference_is_booked_once(game: Game) -> None:
    now = game.clock.at
    assert await give(game, 700) == 700
    assert await give(game, 700) == 700
    assert await give(game, 999) == 700
    assert await give(game, 1, "another day") == 701
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", now)
        for _ in range(2):
            assert await debit(tx, "ada", 600, reason="allocation", reference="1", now=now) == 101
    assert await game.balance_is_the_sum() == 101
    assert await game.count("energy_ledger") == 3


async def test_a_debit_beyond_the_balance_is_refused_and_writes_nothing(game: Game) -> None:
    await give(game, 10)
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        with pytest.raises(ServiceError) as caught:
            await debit(tx, "ada", 11, reason="allocation", reference="1", now=game.clock.at)
        assert (caught.value.status, caught.value.code) == (422, "INSUFFICIENT_ENERGY")
        assert caught.value.details == {
            "energyRequired": 11,
            "energyBalance": 10,
            "energySpendable": 10,
        }
    assert await game.balance_is_the_sum() == 10


async def test_a_correction_beyond_the_balance_is_a_debt_that_credits_pay(game: Game) -> None:
    await give(game, 10)
    for _ in range(2):  # the second one is the first one again
        async with game.transaction() as tx:
            await lock_walker(tx, "ada", game.clock.at)
            balance = await book(
                tx, "ada", -25, reason="correction", reference="a day", now=game.clock.at
            )
        assert balance == await game.balance_is_the_sum() == 0
    assert await give(game, 12, "another day") == 0
    assert await give(game, 12, "a third day") == await game.balance_is_the_sum() == 9
    entries = await game.rows("SELECT delta, reason FROM energy_ledger ORDER BY seq")
    assert [tuple(entry.values()) for entry in entries] == [
        (10, "steps"),
        (-10, "correction"),
        (12, "steps"),
        (-12, "debt"),
        (12, "steps"),
        (-3, "debt"),
    ]


async def test_no_booking_makes_the_balance_negative(game: Game) -> None:
    await give(game, 10)
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        with pytest.raises(LookupError, match="below zero"):
            await update_walker(tx, "ada", game.clock.at, energy=-11, entries=1)
    assert await game.balance_is_the_sum() == 10


@pytest.mark.parametrize("book_it", [credit, debit])
async def test_negative_amount_raises(sqlite_game: Game, book_it: Any) -> None:
    async with sqlite_game.transaction() as tx:
        await lock_walker(tx, "ada", sqlite_game.clock.at)
        with pytest.raises(ValueError, match="cannot be negative"):
            await book_it(tx, "ada", -1, reason="x", reference="x", now=sqlite_game.clock.at)


async def test_ledger_without_a_locked_walker_raises(game: Game) -> None:
    async with game.transaction() as tx:
        with pytest.raises(LookupError, match="lock_walker"):
            await credit(tx, "ada", 1, reason="x", reference="x", now=game.clock.at)


async def test_walkers_have_separate_ledgers(game: Game) -> None:
    await give(game, 5, walker="ada")
    await give(game, 7, walker="eve")
    assert await game.balance_is_the_sum("ada") == 5
    assert await game.balance_is_the_sum("eve") == 7
    assert (await game.device("bob").me())["energyBalance"] == 0


# -- what allocations take ------------------------------------------------------------------------


async def test_without_the_setting_energy_is_counted_and_never_charged(game: Game) -> None:
    await give(game, 600)
    await game.ada.finish("quest.001")
    assert {node["energyCost"] for node in (await game.ada.tree())["nodes"]} == {0}
    response = ok(await game.ada.allocate(ROOT, CHILD))
    assert response["energyBalance"] == 600
    assert await game.balance_is_the_sum() == 600
    assert await game.count("energy_ledger") == 1


async def test_with_the_setting_an_allocation_costs_energy(open_game: OpenGame) -> None:
    async with open_game(walk_energy_required=True) as game:
        await give(game, 1800)
        await game.ada.finish("quest.001")
        response = ok(await game.ada.allocate(ROOT, CHILD))
        assert (response["pointsBanked"], response["energyBalance"]) == (0, 300)
        assert await game.balance_is_the_sum() == 300
        entries = await game.rows("SELECT delta, reason, reference FROM energy_ledger ORDER BY seq")
        assert [tuple(entry.values()) for entry in entries] == [
            (1800, "steps", "a day"),
            (-500, "allocation", "1"),
            (-1000, "allocation", "2"),
        ]
        costs = {node["nodeId"]: node["energyCost"] for node in response["nodes"]}
        assert (costs[ROOT], costs[CHILD]) == (500, 1000)


async def test_with_the_setting_insufficient_energy_rejects_the_whole_batch(
    open_game: OpenGame,
) -> None:
    async with open_game(walk_energy_required=True) as game:
        await give(game, 1499)
        await game.ada.finish("quest.001")
        details = refused(await game.ada.allocate(ROOT, CHILD), 422, "INSUFFICIENT_ENERGY")
        assert details == {
            "energyRequired": 1500,
            "energyBalance": 1499,
            "energySpendable": 1499,
        }
        assert await game.ada.allocated() == []
        assert await game.balance_is_the_sum() == 1499
        ok(await game.ada.allocate(ROOT))
        assert await game.balance_is_the_sum() == 999


async def test_points_are_checked_before_energy(open_game: OpenGame) -> None:
    async with open_game(walk_energy_required=True) as game:
        refused(await game.ada.allocate(ROOT), 422, "INSUFFICIENT_POINTS")
        assert await game.count("walkers") == 0


async def test_a_replay_never_takes_energy_again(open_game: OpenGame) -> None:
    async with open_game(walk_energy_required=True) as game:
        await give(game, 1200)
        await game.ada.finish("quest.001")
        key = new_key()
        first = await game.ada.allocate(ROOT, key=key)
        await give(game, 1, "another day")
        for _ in range(3):
            again = await game.ada.allocate(ROOT, key=key)
            assert (again.content, ok(again)["energyBalance"]) == (first.content, 700)
        assert await game.balance_is_the_sum() == 701


async def test_energy_goes_in_the_order_of_the_actions(open_game: OpenGame) -> None:
    async with open_game(HeldClock(), walk_energy_required=True) as game:
        await give(game, 999)
        await game.ada.finish("quest.001")
        ok(await game.ada.allocate(ROOT))
        refused(await game.ada.allocate("node.light-pack"), 422, "INSUFFICIENT_ENERGY")
        assert await game.ada.allocated() == [ROOT]
        assert await game.balance_is_the_sum() == 499


# -- older databases ------------------------------------------------------------------------------


async def test_upgrade_turns_a_balance_below_zero_into_a_debt(game: Game) -> None:
    await give(game, 10)
    await give(game, 1, walker="eve")
    directory = "postgres" if game.store.name == "postgresql" else "sqlite"
    package = files(f"onceward_services.walk.migrations.{directory}")
    script = package.joinpath("0004_provisional_energy.sql").read_text(encoding="utf-8")
    async with game.transaction() as tx:
        # As an older version left it.
        await tx.execute(
            "UPDATE walkers SET energy_balance = -15, ledger_seq = 2 WHERE tenant = 'ada'"
        )
        await tx.execute(
            "INSERT INTO energy_ledger VALUES ('ada', 2, -25, 'steps', 'd#2', -15, :now)",
            {"now": game.clock.at},
        )
        for statement in script.split(";"):
            plain = re.sub(r"--[^\n]*", "", statement).strip()
            if plain.startswith(("INSERT INTO energy_ledger", "UPDATE walkers\n")):
                await tx.execute(plain)
    assert await game.balance_is_the_sum() == 0
    assert await game.balance_is_the_sum("eve") == 1
    rows = await game.rows("SELECT tenant, energy_debt FROM walkers ORDER BY tenant")
    assert [tuple(row.values()) for row in rows] == [("ada", 15), ("eve", 0)]
    assert await give(game, 20, "later") == 5
