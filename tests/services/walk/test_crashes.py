"""A server that dies at any instant: all of an action is there, or none of it."""

from typing import Any

import pytest

from holdfast.server.intake import FAULT_POINTS

from .walking import OpenWorld, World, new_key, ok

ROOT = "node.even-stride"


class Fuse:
    """Raises at one point, once."""

    def __init__(self) -> None:
        self.at: str | None = None

    async def reach(self, point: str) -> None:
        if point == self.at:
            self.at = None
            raise RuntimeError(f"died at {point}")


async def everything(world: World) -> Any:
    tables = ("walkers", "tree_allocations", "quest_progress", "energy_ledger", "walker_events")
    order = {"walkers": "tenant", "tree_allocations": "seq", "quest_progress": "quest_id"}
    return {
        table: [
            dict(row)
            for row in await world.rows(f"SELECT * FROM {table} ORDER BY {order.get(table, 'seq')}")
        ]
        for table in tables
    }


@pytest.mark.parametrize("point", FAULT_POINTS)
@pytest.mark.parametrize("way", ["allocate", "complete", "advance", "start"])
async def test_a_death_at_any_instant_leaves_an_action_whole_or_not_there(
    open_world: OpenWorld, point: str, way: str
) -> None:
    fuse = Fuse()

    def prepare(app: Any) -> None:
        app.state.holdfast.intake.faults = fuse

    key = new_key()

    async def act(world: World) -> Any:
        match way:
            case "allocate":
                return await world.ada.allocate(ROOT, key=key)
            case "complete":
                return await world.ada.complete("quest.003", key=key)
            case "advance":
                return await world.ada.advance("quest.002", 1, key=key)
            case _:
                return await world.ada.start("quest.004", key=key)

    async with open_world(prepare=prepare) as world:
        await world.ada.finish("quest.001")
        if way == "start":
            await world.ada.finish("quest.002")
        else:
            ok(await world.ada.start("quest.002"))
        ok(await world.ada.start("quest.003"))
        for step in (1, 2, 3):
            ok(await world.ada.advance("quest.003", step))
        before = await everything(world)
        fuse.at = point
        assert (await act(world)).status_code == 500
        after_death = await everything(world)
        answer = await act(world)
        after = await everything(world)
        assert ok(answer)
        assert after != before
        # Either the whole action was there already, and the retry is told so, or none of it was.
        replayed = "idempotency-replayed" in answer.headers
        assert replayed is (point == "after_commit")
        assert after_death == (after if replayed else before)
        await act(world)
        assert await everything(world) == after
