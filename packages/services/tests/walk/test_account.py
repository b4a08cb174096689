"""The walker's account: the ledger, spending, everything in one read."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward.errors import ConfigurationError
from onceward_services.app import create_app
from onceward_services.settings import load_settings
from onceward_services.walk.ledger import credit
from onceward_services.walk.walkers import lock_walker
from packages.services.tests.conftest import SECRET

from .fixtures import Device, Game, OpenGame, new_key, ok, refused


async def give(game: Game, amount: int, reference: str = "a day") -> None:
    async with game.transaction() as tx:
        await lock_walker(tx, "ada", game.clock.at)
        await credit(tx, "ada", amount, reason="steps", reference=reference, now=game.clock.at)


async def spend(
    device: Device, amount: Any, sink: str = "combat", *, key: str | None = None
) -> httpx.Response:
    body = {"sink": sink, "amount": amount} | device.times()
    return await device.post("/energy/spend", body, key=key or new_key())


# -- spending -------------------------------------------------------------------------------------


async def test_spending_debits_once_and_a_replay_has_the_same_bytes(game: Game) -> None:
    await give(game, 100)
    key = new_key()
    first = await spend(game.ada, 30, key=key)
    again = await spend(game.ada, 30, key=key)
    assert ok(first)["energyBalance"] == 70
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert await game.balance_is_the_sum() == 70
    (event,) = await game.ada.events()
    assert event["type"] == "energy.spent"
    assert event["data"] == {
        "spendId": first.json()["spendId"],
        "sink": "combat",
        "amount": 30,
        "energyBalance": 70,
        "provisional": False,
    }


async def test_spending_is_refused_without_energy_and_for_an_unknown_sink(game: Game) -> None:
    await give(game, 10)
    details = refused(await spend(game.ada, 11), 422, "INSUFFICIENT_ENERGY")
    assert details == {"energyRequired": 11, "energyBalance": 10, "energySpendable": 10}
    details = refused(await spend(game.ada, 1, "gambling"), 422, "UNKNOWN_SINK")
    assert details == {"sinks": ["combat", "craft", "harvest"]}
    for amount in (0, -5, 10**10):
        refused(await spend(game.ada, amount), 422, "BAD_REQUEST")
    refused(await spend(game.ada, 1.5), 400, "BAD_REQUEST")
    stale = {"sink": "craft", "amount": 1} | game.ada.times(game.clock.at - timedelta(days=8))
    refused(await game.ada.post("/energy/spend", stale, key=new_key()), 422, "STALE_ACTION")
    assert await game.balance_is_the_sum() == 10


async def test_concurrent_spending_never_goes_below_zero(game: Game) -> None:
    await give(game, 100)
    results = await asyncio.gather(*(spend(game.ada, 30) for _ in range(8)))
    assert sorted(r.status_code for r in results) == [200] * 3 + [422] * 5
    assert await game.balance_is_the_sum() == 10


async def test_a_deployment_names_its_sinks(open_game: OpenGame) -> None:
    async with open_game(walk_energy_sinks="forge") as game:
        await give(game, 10)
        assert ok(await spend(game.ada, 4, "forge"))["energyBalance"] == 6
        refused(await spend(game.ada, 4), 422, "UNKNOWN_SINK")


@pytest.mark.parametrize("sinks", ["", "Combat", "a,a", "a,,b", "x" * 41])
def test_invalid_names_of_sinks_are_refused_at_the_start(sinks: str) -> None:
    if sinks == "":  # unset: the default
        assert load_settings(walk_energy_sinks=sinks).energy_sinks
        return
    with pytest.raises(ConfigurationError, match="ONCEWARD_WALK_ENERGY_SINKS should be"):
        load_settings(walk_energy_sinks=sinks)


# -- the ledger -----------------------------------------------------------------------------------


async def test_the_ledger_is_listed_newest_first_in_pages(game: Game) -> None:
    assert ok(await game.ada.get("/walker/energy")) == {
        "energyBalance": 0,
        "items": [],
        "next": None,
    }
    await give(game, 100)
    ok(await spend(game.ada, 10))
    ok(await spend(game.ada, 20, "craft"))
    first = ok(await game.ada.get("/walker/energy?limit=2"))
    assert first["energyBalance"] == 70
    assert [(e["id"], e["delta"], e["reason"], e["balanceAfter"]) for e in first["items"]] == [
        (3, -20, "spend.craft", 70),
        (2, -10, "spend.combat", 90),
    ]
    rest = ok(await game.ada.get(f"/walker/energy?limit=2&after={first['next']}"))
    assert [(e["id"], e["reason"], e["reference"]) for e in rest["items"]] == [
        (1, "steps", "a day")
    ]
    assert rest["next"] is None
    assert ok(await game.device("eve").get("/walker/energy"))["items"] == []
    refused(await game.ada.get("/walker/energy?after=0"), 422, "BAD_REQUEST")


async def test_the_tree_has_the_balance_and_the_version_of_the_catalogue(game: Game) -> None:
    await give(game, 12)
    tree = await game.ada.tree()
    assert tree["energyBalance"] == 12
    assert len(tree["catalogueVersion"]) == 16


# -- everything at once ---------------------------------------------------------------------------


async def test_sync_has_what_the_single_requests_have(game: Game) -> None:
    await give(game, 500)
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate("node.even-stride"))
    ok(await spend(game.ada, 7))
    found = ok(await game.ada.get("/sync?after=3"))
    me, events = await game.ada.me(), await game.ada.events(3)
    assert found["tree"] == await game.ada.tree()
    assert found["quests"] == list((await game.ada.quests()).values())
    assert found["energy"]["energyBalance"] == me["energyBalance"] == 493
    assert found["streakState"] == me["streakState"]
    assert (found["events"], found["next"]) == (events, None)
    assert found["lastEventId"] == me["lastEventId"] == events[-1]["id"]
    page = ok(await game.ada.get("/sync?after=0&limit=2"))
    assert ([e["id"] for e in page["events"]], page["next"]) == ([1, 2], 2)


async def test_sync_of_an_unknown_walker_is_empty(game: Game) -> None:
    found = ok(await game.device("new").get("/sync"))
    assert (found["lastEventId"], found["events"], found["tree"]["allocations"]) == (0, [], [])
    assert [q["status"] for q in found["quests"]] == ["available"] * len(found["quests"])
    assert await game.count("walkers") == 0


async def test_sync_is_of_one_instant_under_concurrent_writers(game: Game) -> None:
    await give(game, 1000)
    devices = [game.device() for _ in range(3)]

    async def write(device: Device) -> None:
        for _ in range(3):
            ok(await spend(device, 1))

    async def read() -> int:
        seen = 0
        while seen < 9:
            found = ok(await game.ada.get("/sync?after=0&limit=500"))
            seen = found["lastEventId"]
            assert [event["id"] for event in found["events"]] == list(range(1, seen + 1))
            assert found["energy"]["energyBalance"] == found["tree"]["energyBalance"] == 1000 - seen
        return seen

    *_, seen = await asyncio.gather(*map(write, devices), read())
    assert seen == 9


# -- another catalogue ----------------------------------------------------------------------------

NODES = '[[node]]\nid = "n"\nkind = "node"\ntitle = "N"\npoints = 1\n'
QUESTS = '[[quest]]\nid = "q"\ntitle = "Q"\nsteps = 1\npoints = 1\n'


async def test_the_catalogue_of_a_directory_replaces_the_bundled_one(
    open_game: OpenGame, tmp_path: Path
) -> None:
    directory = tmp_path / "catalogue"
    directory.mkdir()
    (directory / "nodes.toml").write_text(NODES)
    (directory / "quests.toml").write_text(QUESTS)
    async with open_game(walk_catalogue_dir=directory) as game:
        tree = await game.ada.tree()
        assert [node["nodeId"] for node in tree["nodes"]] == ["n"]
        assert list(await game.ada.quests()) == ["q"]
        ok(await game.ada.start("q"))
        ok(await game.ada.advance("q", 1))
        ok(await game.ada.complete("q"))
        assert ok(await game.ada.allocate("n"))["pointsBanked"] == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "nodes.toml").write_text(NODES.replace('"N"', '"M"'))
    (other / "quests.toml").write_text(QUESTS)
    async with open_game(walk_catalogue_dir=other) as game:
        changed = await game.ada.tree()
    assert changed["catalogueVersion"] != tree["catalogueVersion"]
    assert [each["nodeId"] for each in changed["allocations"]] == ["n"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (None, "cannot read .*nodes.toml: No such file"),
        ("[[node]]\nid = 1\n", "nodes.toml: node 1"),
    ],
)
def test_a_directory_without_a_catalogue_is_refused_at_the_start(
    tmp_path: Path, nodes: str | None, expected: str
) -> None:
    (tmp_path / "quests.toml").write_text(QUESTS)
    if nodes is not None:
        (tmp_path / "nodes.toml").write_text(nodes)
    settings = load_settings(jwt_secret=SECRET, walk_catalogue_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=f"^ONCEWARD_WALK_CATALOGUE_DIR.*{expected}"):
        create_app(settings)
