"""Energy, points and nodes of days that are not settled yet: spent, confirmed, taken back."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import date, timedelta
from functools import wraps
from typing import Any

import pytest

from onceward_services.walk import jobs, provisional, quests
from onceward_services.walk.steps import reconcile
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.walkers import lock_walker
from packages.services.tests.conftest import Serve

from .fixtures import CATALOGUE, Device, Game, OpenGame, new_key, ok, opener, refused
from .settlement_fixtures import backwards
from .step_fixtures import PHONE, TODAY, WATCH, Stepping, days_ago, stepping

STRIDE, PACK, BREATH = "node.even-stride", "node.light-pack", "node.long-breath"
DAY = timedelta(days=1)
SETTINGS = StepSettings.model_validate({})
ENERGY: dict[str, Any] = {"walk_energy_required": True}
ROUNDS = max(2, int(os.environ.get("ONCEWARD_TEST_ROUNDS", "200")) // 100)


@pytest.fixture
async def energy_steps(serve: Serve, sqlite_url: str) -> AsyncIterator[Stepping]:
    """Energy is required. For rules that do not depend on the database."""
    async with stepping(opener(serve, sqlite_url), **ENERGY) as opened:
        yield opened


@pytest.fixture
async def free_steps(serve: Serve, sqlite_url: str) -> AsyncIterator[Stepping]:
    """The same, and energy is not required."""
    async with stepping(opener(serve, sqlite_url)) as opened:
        yield opened


async def nodes_of(device: Device) -> dict[str, bool]:
    return {each["nodeId"]: each["provisional"] for each in (await device.tree())["allocations"]}


async def settle(steps: Stepping, day: date = TODAY, walker: str = "ada") -> None:
    """Settle a day without a worker."""
    now = steps.clock.now()
    async with steps.game.transaction() as tx:
        await lock_walker(tx, walker, now)
        await reconcile.settle_day(tx, walker, day, settings=SETTINGS, now=now)


async def refund(steps: Stepping, walker: str = "ada") -> None:
    """Do what the job does that runs when something is due."""
    now = steps.clock.now()
    async with steps.game.transaction() as tx:
        await lock_walker(tx, walker, now)
        await provisional.refund_due(tx, walker, settings=SETTINGS, now=now)
        await provisional.settle_provisional(tx, walker, settings=SETTINGS, now=now)


async def reject(steps: Stepping, day: date = TODAY) -> None:
    """Quarantine a day that has a report, and reject it as an admin."""
    await steps.walk(day, 10, hours=(6, 11.5))
    await settle(steps, day)
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))


# -- energy ----------------------------------------------------------------------------------------


async def test_energy_of_an_open_day_can_be_spent(open_game: OpenGame) -> None:
    async with stepping(open_game, **ENERGY) as steps:
        ada = steps.game.ada
        await ada.finish("quest.001")
        await steps.walk(count=1600)
        me = await ada.me()
        assert (me["energyBalance"], me["provisionalEnergy"], me["spendableEnergy"]) == (
            0,
            1600,
            1600,
        )
        spent = ok(await ada.allocate(STRIDE, BREATH))
        assert (spent["energyBalance"], spent["spendableEnergy"]) == (0, 100)
        assert {each["provisional"] for each in spent["allocations"]} == {True}
        details = refused(await ada.allocate(PACK), 422, "INSUFFICIENT_POINTS")
        await ada.finish("quest.002")
        details = refused(await ada.allocate(PACK), 422, "INSUFFICIENT_ENERGY")
        assert details == {"energyRequired": 500, "energyBalance": 0, "energySpendable": 100}
        assert await steps.energy() == 0
        await steps.work()
        # The day has paid, in the order of the actions.
        assert await steps.energy() == 100
        entries = await steps.game.rows("SELECT delta, reason FROM energy_ledger ORDER BY seq")
        assert [tuple(entry.values()) for entry in entries] == [
            (1600, "steps"),
            (-500, "allocation"),
            (-1000, "allocation"),
        ]
        assert await nodes_of(ada) == {STRIDE: False, BREATH: False}
        assert await steps.game.count("energy_holds") == 0


async def test_energy_of_an_open_day_is_spent_on_sinks_and_returned_with_it(
    open_game: OpenGame,
) -> None:
    async with stepping(open_game) as steps:
        ada = steps.game.ada
        await steps.walk(count=600)

        async def spend(amount: int) -> Any:
            body = {"sink": "combat", "amount": amount} | ada.times()
            return await ada.post("/energy/spend", body, key=new_key())

        spent = ok(await spend(500))
        assert (spent["energyBalance"], spent["provisional"]) == (0, True)
        refused(await spend(101), 422, "INSUFFICIENT_ENERGY")
        synced = ok(await ada.get("/sync?after=0"))
        assert synced["energy"] == {
            "energyBalance": 0,
            "provisionalEnergy": 600,
            "spendableEnergy": 100,
        }
        assert synced["tree"]["spendableEnergy"] == (await ada.tree())["spendableEnergy"] == 100
        await reject(steps)
        steps.clock.move(DAY)
        await refund(steps)
        (event,) = [e for e in await ada.events() if e["type"] == "energy.refunded"]
        assert (event["data"]["reference"], event["data"]["amount"]) == (spent["spendId"], 500)
        assert (await ada.me())["spendableEnergy"] == 0
        assert await steps.game.count("energy_holds") == 0


async def test_energy_spent_on_a_sink_is_confirmed_when_its_day_has_paid(
    free_steps: Stepping,
) -> None:
    steps, ada = free_steps, free_steps.game.ada
    await steps.walk(count=600)
    bodies: list[dict[str, Any]] = [
        {"sink": sink, "amount": 200, **ada.times()} for sink in ("combat", "craft")
    ]
    spent = [ok(await ada.post("/energy/spend", body, key=new_key())) for body in bodies]
    await settle(steps)
    events = [e["data"] for e in await ada.events() if e["type"] == "energy.confirmed"]
    assert events == [
        {"reason": f"spend.{one['sink']}", "reference": one["spendId"], "amount": 200}
        for one in spent
    ]
    # What the balance pays is final at once.
    body = {"sink": "craft", "amount": 50, **ada.times()}
    assert ok(await ada.post("/energy/spend", body, key=new_key()))["provisional"] is False
    await settle(steps)
    assert [e["type"] for e in await ada.events()].count("energy.confirmed") == 2


async def test_what_a_rejected_day_has_paid_is_refunded_with_it(
    energy_steps: Stepping,
) -> None:
    steps = energy_steps
    ada = steps.game.ada
    await steps.walk(days_ago(1), 600)
    await steps.work()
    await ada.finish("quest.001")
    ok(await ada.allocate(STRIDE))  # the settled day pays
    await steps.walk(count=5000, hours=(6, 10))
    ok(await ada.allocate(BREATH))  # today has to pay
    await reject(steps)
    assert await steps.energy() == 100
    assert (await ada.me())["spendableEnergy"] == 0
    assert await nodes_of(ada) == {STRIDE: True, BREATH: True}
    steps.clock.move(DAY)
    await steps.work()
    assert await nodes_of(ada) == {}
    assert await steps.energy() == 600
    assert (await ada.me())["spendableEnergy"] == 600


async def test_energy_that_a_day_promised_and_did_not_bring_is_refunded(
    energy_steps: Stepping,
) -> None:
    steps = energy_steps
    ada = steps.game.ada
    await ada.finish("quest.001")
    await backwards(steps)  # promises 3000
    ok(await ada.allocate(STRIDE))
    ok(await ada.allocate(BREATH))
    await settle(steps)
    # In quarantine nothing is refunded, and nothing more can be spent.
    assert (await ada.me())["spendableEnergy"] == 0
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept", acceptedCount=700))
    assert await steps.energy() == 200
    assert await nodes_of(ada) == {STRIDE: False, BREATH: True}
    steps.clock.move(DAY - timedelta(microseconds=1))
    await refund(steps)
    assert await nodes_of(ada) == {STRIDE: False, BREATH: True}
    steps.clock.move(timedelta(microseconds=1))
    await refund(steps)
    assert await nodes_of(ada) == {STRIDE: False}
    assert await steps.energy() == 200
    reverted = [e for e in await ada.events() if e["type"] == "allocation.reverted"]
    assert [e["data"]["reason"] for e in reverted] == ["energy_missing"]


async def test_energy_that_comes_before_the_grace_ends_keeps_the_node(
    energy_steps: Stepping,
) -> None:
    steps = energy_steps
    ada = steps.game.ada
    await ada.finish("quest.001")
    await backwards(steps)
    ok(await ada.allocate(STRIDE, BREATH))
    await settle(steps)
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "accept", acceptedCount=700))
    await steps.walk(days_ago(1), 900)
    await settle(steps, days_ago(1))
    assert await nodes_of(ada) == {STRIDE: False, BREATH: False}
    assert await steps.energy() == 100


# -- which days count ------------------------------------------------------------------------------


async def test_an_allocation_sent_before_its_steps_is_provisional(
    free_steps: Stepping,
) -> None:
    steps = free_steps
    ada = steps.game.ada
    two_days_ago = steps.clock.now() - 2 * DAY
    for quest_step in (1, 2):
        if quest_step == 1:
            ok(await ada.start("quest.001"))
        ok(await ada.advance("quest.001", quest_step, at=two_days_ago))
    ok(await ada.complete("quest.001", at=two_days_ago))
    ok(await ada.allocate(STRIDE, at=two_days_ago))
    assert await nodes_of(ada) == {STRIDE: True}
    assert (await ada.me())["pointsProvisional"] == 2
    # Today's start of the quest is the only action since: yesterday and today do not matter.
    await steps.walk(days_ago(1))
    await settle(steps, days_ago(1))
    assert await nodes_of(ada) == {STRIDE: True}
    await steps.walk(days_ago(2))
    await settle(steps, days_ago(2))
    assert await nodes_of(ada) == {STRIDE: False}
    assert (await ada.me())["pointsProvisional"] == 0
    assert (await ada.quests())["quest.001"]["provisional"] is False
    types = await steps.event_types()
    assert types[-3:] == ["steps.accepted", "quest.confirmed", "allocation.confirmed"]


async def test_a_rejected_day_takes_back_what_was_done_since_it_and_not_before(
    steps: Stepping,
) -> None:
    ada, now = steps.game.ada, steps.clock.now()
    for quest, ago in (("quest.001", 2), ("quest.002", 0)):
        ok(await ada.start(quest))
        for step in range(1, CATALOGUE.quests[quest].steps + 1):
            # The first step of the second quest was made before the rejected day.
            at = now - (2 if step == 1 else ago) * DAY
            ok(await ada.advance(quest, step, at=at))
        ok(await ada.complete(quest, at=now - ago * DAY))
    ok(await ada.allocate(STRIDE, at=now - 2 * DAY))
    ok(await ada.allocate(PACK, BREATH, at=now))
    await steps.walk(days_ago(1))
    await reject(steps, days_ago(1))
    steps.clock.move(DAY)
    await steps.work()
    assert await nodes_of(ada) == {STRIDE: True}
    board = await ada.quests()
    assert (board["quest.001"]["status"], board["quest.002"]["status"]) == (
        "completed",
        "in_progress",
    )
    assert board["quest.002"]["currentStep"] == 2
    assert await ada.points() == 1
    (reverted,) = [e["data"] for e in await ada.events() if e["type"] == "quest.reverted"]
    assert reverted == {
        "questId": "quest.002",
        "reason": "steps_rejected",
        "currentStep": 2,
        "pointsTaken": 2,
        "pointsBanked": 1,
    }
    # It can be done again, and awards its points once.
    for step in (2, 3):
        ok(await ada.advance("quest.002", step))
    assert ok(await ada.complete("quest.002"))["pointsBanked"] == 3


async def test_points_that_are_taken_back_were_never_final(
    free_steps: Stepping,
) -> None:
    """An allocation claims to be older than the quest that paid for it."""
    steps = free_steps
    ada, now = steps.game.ada, steps.clock.now()
    await steps.walk(days_ago(1))
    await settle(steps, days_ago(1))
    await steps.walk()
    await ada.finish("quest.001")
    ok(await ada.allocate(STRIDE, BREATH, at=now - DAY))
    assert await nodes_of(ada) == {STRIDE: True, BREATH: True}
    await reject(steps)
    steps.clock.move(DAY)
    await refund(steps)
    assert await nodes_of(ada) == {}
    assert await ada.points() == 0
    reasons = [
        e["data"]["reason"] for e in await ada.events() if e["type"] == "allocation.reverted"
    ]
    assert reasons == ["points_reverted"] * 2


async def test_a_day_without_a_report_is_settled_as_empty_after_its_time(
    free_steps: Stepping,
) -> None:
    steps = free_steps
    ada = steps.game.ada
    await ada.finish("quest.001")
    ok(await ada.allocate(STRIDE))
    steps.clock.move(timedelta(hours=12) + 7 * DAY + timedelta(hours=6, microseconds=-1))
    await refund(steps)
    assert await nodes_of(ada) == {STRIDE: True}
    steps.clock.move(timedelta(microseconds=1))
    await steps.work()  # the job was enqueued with the first action
    assert await nodes_of(ada) == {STRIDE: False}
    assert (await ada.quests())["quest.001"]["provisional"] is False


async def test_days_are_those_of_the_walkers_zone(
    free_steps: Stepping,
) -> None:
    steps = free_steps
    ada = steps.game.ada
    # At noon UTC it is the 23rd on Kiritimati.
    tomorrow = TODAY + DAY
    await steps.walk(TODAY, tz="Pacific/Kiritimati", hours=(-10, 9))
    await ada.finish("quest.001")
    await settle(steps)
    assert (await ada.quests())["quest.001"]["provisional"] is True
    await steps.walk(tomorrow, tz="Pacific/Kiritimati", hours=(-13, -12.5), count=100)
    await settle(steps, tomorrow)
    assert (await ada.quests())["quest.001"]["provisional"] is False


# -- several devices, in any order -----------------------------------------------------------------


async def everything_adds_up(game: Game, walker: str) -> None:
    balance = await game.balance_is_the_sum(walker)
    lowest = await game.rows(
        "SELECT min(balance_after) AS n FROM energy_ledger WHERE tenant = :tenant", tenant=walker
    )
    assert (lowest[0]["n"] or 0) >= 0
    for row in await game.rows("SELECT * FROM walkers WHERE tenant = :tenant", tenant=walker):
        holds = await game.rows(
            "SELECT reference, amount FROM energy_holds WHERE tenant = :tenant", tenant=walker
        )
        assert row["energy_held"] == sum(hold["amount"] for hold in holds)
        assert min(row["energy_debt"], row["points_banked"], row["points_provisional"]) >= 0
        assert not (balance and row["energy_debt"])
        owned = await game.rows(
            "SELECT node_id, seq, points_cost, energy_cost, provisional FROM tree_allocations"
            " WHERE tenant = :tenant ORDER BY seq",
            tenant=walker,
        )
        for position, each in enumerate(owned):
            earlier = {other["node_id"] for other in owned[:position]}
            assert set(CATALOGUE.nodes[each["node_id"]].requires) <= earlier
        held = {hold["reference"] for hold in holds}
        assert held <= {str(each["seq"]) for each in owned if each["provisional"]}
        awarded = await game.rows(
            "SELECT points_awarded AS n, unsettled FROM quest_progress WHERE tenant = :tenant",
            tenant=walker,
        )
        total = sum(quest["n"] for quest in awarded)
        assert row["points_banked"] + sum(each["points_cost"] for each in owned) == total
        assert row["points_provisional"] == sum(q["n"] for q in awarded if q["unsettled"])
        # Ledger entries: what days were credited with, minus what is paid, plus what is owed.
        credited = await game.rows(
            "SELECT coalesce(sum(credited_energy), 0) AS n FROM step_logs WHERE tenant = :tenant",
            tenant=walker,
        )
        paid = sum(e["energy_cost"] for e in owned if str(e["seq"]) not in held)
        assert balance == credited[0]["n"] - paid + row["energy_debt"]


WAYS = [
    *("ingest", "ingest", "ingest", "quest", "allocate", "allocate"),
    *("settle", "settle", "rule", "refund"),
]


async def act(steps: Stepping, dice: random.Random, walker: str) -> None:
    """One step of a walker, a device, a worker or an admin."""
    device, now = steps.game.device(walker), steps.clock.now()
    ago = dice.randrange(4)
    match dice.choice(WAYS):
        case "ingest":
            bundle, hour = dice.choice([(PHONE, 6), (WATCH, 9)])
            hours = (hour, hour + dice.choice([1.5, 2, 2.5]))
            count = dice.choice([100, 700, 2500, 30_000])
            day = steps.clock.now().date() - timedelta(days=ago)
            await steps.report(day, count, walker=walker, sourceBundleId=bundle, hours=hours)
        case "quest":
            quest = dice.choice(list(CATALOGUE.quests.values()))
            await device.start(quest.id)
            at = now - timedelta(days=ago)
            for step in range(1, quest.steps + 1):
                await device.advance(quest.id, step, at=at)
            await device.complete(quest.id, at=at)
        case "allocate":
            chosen = dice.sample(list(CATALOGUE.nodes), k=dice.choice([1, 2]))
            await device.allocate(*chosen, at=now - timedelta(days=ago))
        case "settle":
            await settle(steps, now.date() - timedelta(days=ago), walker)
        case "rule":
            reviews = [r for r in await steps.reviews() if r["walkerId"] == walker]
            for review in reviews[:1]:
                await steps.resolve(review["id"], dice.choice(["accept", "reject"]))
        case _:
            steps.clock.move(timedelta(hours=dice.choice([1, 9, 24])))
            await refund(steps, walker)


async def test_energy_adds_up_whatever_the_order(open_game: OpenGame) -> None:
    async with stepping(open_game, **ENERGY) as steps:
        for number in range(ROUNDS):
            dice, walker = random.Random(number), f"walker-{number}"
            for quest in ("quest.001", "quest.002"):
                await steps.game.device(walker).finish(quest)
            for _ in range(8):
                # Two at a time: two devices, or a device and a worker.
                await asyncio.gather(*(act(steps, dice, walker) for _ in range(2)))
                await everything_adds_up(steps.game, walker)
            # At the end nothing is open, and nothing is held.
            steps.clock.move(timedelta(days=20))
            for ago in range(19, 40):
                await settle(steps, steps.clock.now().date() - timedelta(days=ago), walker)
            for review in [r for r in await steps.reviews() if r["walkerId"] == walker]:
                ok(await steps.resolve(review["id"], dice.choice(["accept", "reject"])))
            for _ in range(2):
                steps.clock.move(2 * DAY)
                await refund(steps, walker)
            await everything_adds_up(steps.game, walker)
            (row,) = await steps.game.rows(
                "SELECT energy_held, points_provisional FROM walkers WHERE tenant = :tenant",
                tenant=walker,
            )
            assert tuple(row.values()) == (0, 0)


async def test_two_devices_do_not_spend_the_same_open_day_twice(open_game: OpenGame) -> None:
    async with AsyncExitStack() as stack:
        steps = await stack.enter_async_context(stepping(open_game, **ENERGY))
        second = await stack.enter_async_context(open_game(steps.clock, **ENERGY))
        for number in range(ROUNDS):
            walker = f"w{number}"
            one, other = steps.game.device(walker), second.device(walker)
            await one.finish("quest.001")
            await steps.walk(count=999, walker=walker)
            responses = await asyncio.gather(
                one.allocate(STRIDE), other.allocate(PACK), settle(steps, walker=walker)
            )
            assert sorted(r.status_code for r in responses[:2]) == [200, 422]
            await settle(steps, walker=walker)
            assert await steps.energy(walker) == 499
            await everything_adds_up(steps.game, walker)


# -- kills -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an ``Exception``, so that no handler catches it."""


REFUND_STEPS = [
    (provisional, "refund_due_allocations"),
    (quests, "refund_for_points"),
    (provisional, "revert_due_quests"),
    (provisional, "pay_holds"),
    (provisional, "confirm_allocations"),
    (jobs, "settle_provisional"),
    (jobs, "next_due_at"),
]


async def run_refund_job(steps: Stepping) -> None:
    """Run the handler in one transaction, which a kill rolls back as the database does."""
    handler = steps.game.onceward.jobs.find(jobs.REFUND)
    assert handler is not None

    async def enqueue(*_args: Any, **_options: Any) -> None:
        """The queue is part of the transaction."""

    async with steps.game.transaction() as tx:
        run: Any = type("Run", (), {"transaction": tx, "tenant": "ada", "payload": {}})()
        run.enqueue = enqueue
        await handler.handler(run)


async def everything(game: Game) -> Any:
    tables = ["walkers", "tree_allocations", "tree_refunds", "quest_progress", "energy_ledger"]
    tables += ["energy_holds", "walker_events"]
    return {
        table: sorted(str(dict(row)) for row in await game.rows(f"SELECT * FROM {table}"))
        for table in tables
    }


async def test_a_refund_killed_after_any_step_is_done_again_from_the_start(
    open_game: OpenGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepping(open_game, **ENERGY) as steps:
        ada, now = steps.game.ada, steps.clock.now()
        await ada.start("quest.001")
        for number in (1, 2):
            ok(await ada.advance("quest.001", number, at=now - DAY))
        ok(await ada.complete("quest.001", at=now - DAY))
        await steps.walk(days_ago(1), 600)
        await settle(steps, days_ago(1))
        await steps.walk(count=5000, hours=(6, 10))
        await ada.finish("quest.002")
        ok(await ada.allocate(STRIDE, BREATH))  # 500 paid, 1000 held
        ok(await ada.allocate(PACK, at=now - DAY))  # held
        await reject(steps)
        steps.clock.move(DAY)
        before = await everything(steps.game)
        for module, name in REFUND_STEPS:
            original = getattr(module, name)

            def killed_after(original: Any = original) -> Any:
                @wraps(original)
                async def once(*args: Any, **kwargs: Any) -> Any:
                    await original(*args, **kwargs)
                    raise Killed

                return once

            with monkeypatch.context() as patched:
                patched.setattr(module, name, killed_after())
                with pytest.raises(Killed):
                    await run_refund_job(steps)
            assert await everything(steps.game) == before, name
        for _ in range(2):
            await run_refund_job(steps)
            assert await nodes_of(ada) == {PACK: False}
            assert await ada.points() == 1
            # The refund of the first node pays for the third.
            assert await steps.energy() == 100
        types = await steps.event_types()
        assert (types.count("allocation.reverted"), types.count("quest.reverted")) == (2, 1)
        await everything_adds_up(steps.game, "ada")
