"""Two devices of one walker at once, each through a separate server on the same database."""

import asyncio
import os
import random
from collections import Counter
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import httpx
import pytest

from onceward_services.walk.ledger import credit
from onceward_services.walk.walkers import lock_walker

from .fixtures import CATALOGUE, Device, Game, OpenGame, new_key, ok

# The number of random runs; the long run sets a larger one.
ROUNDS = max(4, int(os.environ.get("ONCEWARD_TEST_ROUNDS", "200")) // 20)

Action = tuple[str, Any, str]

# The possible responses to a valid action. Any other is a bug.
ANSWERS: dict[int, set[str | None]] = {
    200: {None},
    409: {"ALREADY_ALLOCATED", "QUEST_ALREADY_IN_PROGRESS", "QUEST_ALREADY_COMPLETED"},
    422: {
        "INSUFFICIENT_POINTS",
        "INSUFFICIENT_ENERGY",
        "PREREQUISITES_NOT_MET",
        "QUEST_NOT_IN_PROGRESS",
        "QUEST_INCOMPLETE",
        "STEP_OUT_OF_ORDER",
    },
}


def a_days_actions(dice: random.Random) -> list[Action]:
    """Generate the actions of a day, each with a key; some of them are invalid."""
    actions: list[Action] = []
    for quest in dice.sample(list(CATALOGUE.quests.values()), k=4):
        actions.append(("start", quest.id, new_key()))
        steps = range(1, quest.steps + 1)
        actions += [("advance", (quest.id, step), new_key()) for step in steps]
        actions.append(("complete", quest.id, new_key()))
    nodes = list(CATALOGUE.nodes)
    for _ in range(8):
        batch = dice.sample(nodes, k=dice.choice([1, 1, 1, 2, 3]))
        at = dice.randrange(len(actions) + 1)
        actions.insert(at, ("allocate", batch, new_key()))
    return actions


async def do(device: Device, action: Action, at: datetime) -> httpx.Response:
    kind, what, key = action
    if kind == "start":
        return await device.start(what, key=key)
    if kind == "advance":
        return await device.advance(*what, key=key, at=at)
    if kind == "complete":
        return await device.complete(what, key=key, at=at)
    return await device.allocate(*what, key=key, at=at)


async def spend_the_day(
    device: Device, actions: list[Action], dice: random.Random, at: datetime
) -> list[tuple[Action, httpx.Response]]:
    """Send actions in order, some repeatedly, with random pauses."""
    responses = []
    for action in actions:
        for _ in range(dice.choice([1, 1, 2])):
            if dice.random() < 0.5:
                await asyncio.sleep(dice.random() * 0.002)
            responses.append((action, await do(device, action, at)))
    return responses


async def everything_adds_up(game: Game, walker: str) -> None:
    """Check a walker's rows against one another."""
    device = game.device(walker)
    tree = await device.tree()
    allocated = [each["nodeId"] for each in tree["allocations"]]
    quests = await device.quests()
    completed = [id_ for id_, quest in quests.items() if quest["status"] == "completed"]
    awarded = sum(CATALOGUE.quests[id_].points for id_ in completed)
    spent = sum(CATALOGUE.nodes[id_].points for id_ in allocated)
    assert tree["pointsBanked"] == awarded - spent >= 0
    assert len(set(allocated)) == len(allocated)
    for position, id_ in enumerate(allocated):
        assert set(CATALOGUE.nodes[id_].requires) <= set(allocated[:position])

    events = await device.events()
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    done = Counter(
        event["data"]["questId"] for event in events if event["type"] == "quest.completed"
    )
    assert done == dict.fromkeys(completed, 1)
    announced = [
        id_ for e in events if e["type"] == "tree.allocated" for id_ in e["data"]["nodeIds"]
    ]
    assert announced == allocated

    balance = await game.balance_is_the_sum(walker)
    energy = sum(CATALOGUE.nodes[id_].energy for id_ in allocated)
    assert balance == START_ENERGY - energy >= 0


START_ENERGY = 9000


async def test_two_devices_at_once_never_spend_or_earn_a_point_twice(
    open_game: OpenGame,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_game(walk_energy_required=True))
        second = await stack.enter_async_context(open_game(first.clock, walk_energy_required=True))
        now = first.clock.at
        answered = Counter[int]()
        for number in range(ROUNDS):
            walker, dice = f"walker {number}", random.Random(number)
            async with first.transaction() as tx:
                await lock_walker(tx, walker, now)
                await credit(tx, walker, START_ENERGY, reason="steps", reference="d", now=now)
            mine, theirs = a_days_actions(dice), a_days_actions(dice)
            # Some actions reach both servers, for example after a queue was copied to a new device.
            for action in dice.sample(mine, k=6):
                theirs.insert(dice.randrange(len(theirs) + 1), action)
            both = await asyncio.gather(
                spend_the_day(first.device(walker), mine, random.Random(-number), now),
                spend_the_day(second.device(walker), theirs, random.Random(number), now),
            )
            done: dict[str, bytes] = {}
            for (_, _, key), response in both[0] + both[1]:
                answered[response.status_code] += 1
                code = None if response.status_code == 200 else response.json()["error"]
                assert code in ANSWERS[response.status_code], response.text
                if response.status_code == 200:  # a replay
                    assert done.setdefault(key, response.content) == response.content
            await everything_adds_up(first, walker)
        assert min(answered[200], answered[409], answered[422]) > 0


async def test_the_same_action_from_both_devices_at_once_is_one_action(
    open_game: OpenGame,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_game())
        second = await stack.enter_async_context(open_game(first.clock))
        for number in range(ROUNDS):
            one, other = first.device(f"w{number}"), second.device(f"w{number}")
            ok(await one.start("quest.001"))
            ok(await one.advance("quest.001", 1))
            ok(await one.advance("quest.001", 2))
            key = new_key()
            responses = await asyncio.gather(
                *(d.complete("quest.001", key=key) for d in (one, other, one, other))
            )
            assert {response.status_code for response in responses} == {200}
            assert len({response.content for response in responses}) == 1
            assert await one.points() == 2


async def test_one_of_two_concurrent_actions_spends_the_last_points(open_game: OpenGame) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_game())
        second = await stack.enter_async_context(open_game(first.clock))
        for number in range(ROUNDS):
            one, other = first.device(f"w{number}"), second.device(f"w{number}")
            await one.finish("quest.001")
            ok(await one.allocate("node.even-stride"))
            responses = await asyncio.gather(
                one.allocate("node.light-pack"), other.allocate("node.long-breath")
            )
            assert sorted(response.status_code for response in responses) == [200, 422]
            assert await one.points() == 0
            assert len(await other.allocated()) == 2


@pytest.mark.parametrize("way", ["start", "complete", "allocate"])
async def test_twenty_concurrent_requests_with_different_keys_execute_once(
    game: Game, way: str
) -> None:
    ada = game.ada
    if way == "allocate":
        await ada.finish("quest.001")
        responses = await asyncio.gather(*(ada.allocate("node.even-stride") for _ in range(20)))
    elif way == "start":
        responses = await asyncio.gather(*(ada.start("quest.001") for _ in range(20)))
    else:
        ok(await ada.start("quest.001"))
        ok(await ada.advance("quest.001", 1))
        ok(await ada.advance("quest.001", 2))
        responses = await asyncio.gather(*(ada.complete("quest.001") for _ in range(20)))
    assert Counter(response.status_code for response in responses) == {200: 1, 409: 19}
    expected = {"allocate": 1, "start": 0, "complete": 2}[way]
    assert await ada.points() == expected


async def in_line(game: Game) -> int:
    """Count waiters: for the walker's row on PostgreSQL, for the write lock on SQLite."""
    if game.store.name == "sqlite":
        store: Any = game.store
        return len(store._writer._waiting)
    rows = await game.rows(
        "SELECT count(*) AS n FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return int(rows[0]["n"])


# On Citus they wait on the node that has the row, where this test does not look.
@pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)
async def test_actions_commit_in_the_order_they_get_in_line(game: Game) -> None:
    """A walker's row is locked first, so the second action waits for the first."""
    await game.ada.finish("quest.001")
    unit = await game.store.begin()
    await lock_walker(unit.transaction, "ada", game.clock.at)
    waiting = []
    for number, node in enumerate(("node.even-stride", "node.light-pack"), 1):
        waiting.append(asyncio.create_task(game.ada.allocate(node)))
        async with asyncio.timeout(30):
            while await in_line(game) < number:
                await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    # Another walker does not wait on PostgreSQL; SQLite has one writer.
    if game.store.name == "postgresql":
        ok(await game.device("eve").start("quest.001"))
    await unit.rollback()
    for task in waiting:
        ok(await task)
    assert await game.ada.allocated() == ["node.even-stride", "node.light-pack"]
