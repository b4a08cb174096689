"""Steps and tree together: allocations depend on the steps they were made with."""

from datetime import timedelta

from .fixtures import OpenGame, ok
from .step_fixtures import TODAY, days_ago, stepping

STRIDE, PACK = "node.even-stride", "node.light-pack"
DAY = timedelta(days=1)


async def test_allocation_is_confirmed_once_the_day_is_settled(open_game: OpenGame) -> None:
    async with stepping(open_game) as steps:
        ada = steps.game.ada
        await ada.finish("quest.001")
        await steps.walk()
        ok(await ada.allocate(STRIDE))
        assert [a["provisional"] for a in (await ada.tree())["allocations"]] == [True]
        await steps.work()
        assert [a["provisional"] for a in (await ada.tree())["allocations"]] == [False]
        types = [event["type"] for event in await ada.events()]
        assert types[-3:] == ["steps.accepted", "quest.confirmed", "allocation.confirmed"]
        ok(await ada.allocate(PACK))
        assert [a["provisional"] for a in (await ada.tree())["allocations"]] == [False, False]


async def test_energy_comes_from_settled_days_and_goes_into_nodes(open_game: OpenGame) -> None:
    async with stepping(open_game, walk_energy_required=True) as steps:
        ada = steps.game.ada
        await ada.finish("quest.001")
        await steps.walk(count=3000)
        await steps.work()
        assert ok(await ada.allocate(STRIDE, PACK))["energyBalance"] == 2000
        assert await steps.energy() == 2000


async def test_a_walker_sees_their_streak_as_it_is_today(open_game: OpenGame) -> None:
    async with stepping(open_game) as steps:
        for days in (3, 2, 1, 0):
            await steps.walk(days_ago(days), 2500)
        await steps.work()
        me = await steps.game.ada.me()
        assert me["energyBalance"] == 10_000
        assert me["streakState"] == {
            "currentLengthDays": 4,
            "lastAttestedDate": TODAY.isoformat(),
            "bonusTier": 1,
            "decayAt": "2026-05-24T00:00:00Z",
            "totalLifetimeSteps": 10_000,
        }
        steps.clock.move(2 * DAY)
        later = (await steps.game.ada.me())["streakState"]
        assert (later["currentLengthDays"], later["bonusTier"]) == (0, 0)
        assert later["lastAttestedDate"] == TODAY.isoformat()
