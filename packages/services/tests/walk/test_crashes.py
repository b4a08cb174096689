"""A server killed at any point leaves an action complete or absent."""

from typing import Any

import httpx
import pytest

from onceward.guard.idempotency import FAULT_POINTS

from .fixtures import Device, Game, OpenGame, new_key, ok

ROOT = "node.even-stride"


class Fuse:
    """Raises once at one fault point."""

    def __init__(self) -> None:
        self.at: str | None = None

    async def reach(self, point: str) -> None:
        if point == self.at:
            self.at = None
            raise RuntimeError(f"died at {point}")


async def everything(game: Game) -> Any:
    tables = ("walkers", "tree_allocations", "quest_progress", "energy_ledger", "walker_events")
    order = {"walkers": "tenant", "tree_allocations": "seq", "quest_progress": "quest_id"}
    return {
        table: [
            dict(row)
            for row in await game.rows(f"SELECT * FROM {table} ORDER BY {order.get(table, 'seq')}")
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
async def test_process_killed_at_any_point_leaves_an_action_complete_or_absent(
    open_game: OpenGame, point: str
) -> None:
    fuse = Fuse()

    def light(app: Any) -> None:
        app.state.onceward.runtime.idempotency.faults = fuse

    async with open_game(prepare=light) as game:
        ada = game.ada
        await prepare(ada)
        for act in (_start, _advance, _complete, _allocate):
            key = new_key()
            before = await everything(game)
            fuse.at = point
            assert (await act(ada, key)).status_code == 500
            after_death = await everything(game)
            response = await act(ada, key)
            after = await everything(game)
            assert ok(response)
            assert after != before
            # Either the action was complete and the retry is a replay, or nothing was written.
            replayed = "idempotency-replayed" in response.headers
            assert replayed is (point == "after_commit")
            assert after_death == (after if replayed else before)
            ok(await act(ada, key))
            assert await everything(game) == after
