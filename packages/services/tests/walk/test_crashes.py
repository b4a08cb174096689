"""A server that dies at any instant: all of an action is there, or none of it."""

from typing import Any

import httpx
import pytest

from holdfast.server.idempotency import FAULT_POINTS

from .fixtures import Device, OpenWorld, World, new_key, ok

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


async def prepare(device: Device) -> None:
    """Make each of the four actions possible, once."""
    await device.finish("quest.001")
    ok(await device.start("quest.003"))
    for step in (1, 2, 3):
        ok(await device.advance("quest.003", step))


async def _start(device: Device, key: str) -> httpx.Response:
    return await device.start("quest.002", key=key)


async def _advance(device: Device, key: str) -> httpx.Response:
    return await device.advance("quest.002", 1, key=key)


async def _complete(device: Device, key: str) -> httpx.Response:
    return await device.complete("quest.003", key=key)


async def _allocate(device: Device, key: str) -> httpx.Response:
    return await device.allocate(ROOT, key=key)


@pytest.mark.parametrize("point", FAULT_POINTS)
async def test_a_death_at_any_instant_leaves_an_action_whole_or_not_there(
    open_world: OpenWorld, point: str
) -> None:
    fuse = Fuse()

    def light(app: Any) -> None:
        app.state.holdfast.idempotency.faults = fuse

    async with open_world(prepare=light) as world:
        ada = world.ada
        await prepare(ada)
        for act in (_start, _advance, _complete, _allocate):
            key = new_key()
            before = await everything(world)
            fuse.at = point
            assert (await act(ada, key)).status_code == 500
            after_death = await everything(world)
            answer = await act(ada, key)
            after = await everything(world)
            assert ok(answer)
            assert after != before
            # Either the whole action was there, and the retry is told so, or none of it was.
            replayed = "idempotency-replayed" in answer.headers
            assert replayed is (point == "after_commit")
            assert after_death == (after if replayed else before)
            ok(await act(ada, key))
            assert await everything(world) == after
