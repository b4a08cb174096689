"""The tree over HTTP, on SQLite and on PostgreSQL."""

from typing import Any

import pytest

from .fixtures import CATALOGUE, Device, Game, OpenGame, new_key, ok, refused, text

ROOT = "node.even-stride"
CHILD = "node.long-breath"


async def test_a_new_walker_has_nothing_and_sees_every_node(game: Game) -> None:
    tree = await game.ada.tree()
    assert set(tree) == {
        "walkerId",
        "pointsBanked",
        "energyBalance",
        "spendableEnergy",
        "catalogueVersion",
        "allocations",
        "nodes",
    }
    assert (tree["walkerId"], tree["pointsBanked"], tree["allocations"]) == ("ada", 0, [])
    assert [node["nodeId"] for node in tree["nodes"]] == list(CATALOGUE.nodes)
    assert tree["nodes"][2] == {
        "nodeId": CHILD,
        "kind": "node",
        "title": "Long breath",
        "pointsCost": 1,
        "energyCost": 0,
        "prerequisites": [ROOT],
        "revealsQuest": False,
    }


async def test_reading_the_tree_writes_nothing(game: Game) -> None:
    await game.ada.tree()
    await game.ada.quests()
    await game.ada.me()
    await game.ada.events()
    assert await game.count("walkers") == 0
    assert await game.count("onceward_idempotency_records") == 0


async def test_allocation_costs_points_and_returns_the_tree(game: Game) -> None:
    await game.ada.finish("quest.001")
    response = ok(await game.ada.allocate(ROOT))
    assert response["pointsBanked"] == 1
    assert response["allocations"] == [
        {
            "nodeId": ROOT,
            "kind": "node",
            # Today is not settled.
            "provisional": True,
            "allocatedAt": text(game.clock.at),
            "refundDueAt": None,
        }
    ]
    assert response == await game.ada.tree()


async def test_allocations_are_listed_in_the_order_they_were_made(game: Game) -> None:
    await game.ada.finish("quest.001", "quest.002")
    await game.ada.allocate("node.light-pack")
    await game.ada.allocate(ROOT, CHILD)
    assert await game.ada.allocated() == ["node.light-pack", ROOT, CHILD]


async def test_keystone_has_its_kind(game: Game) -> None:
    await game.ada.finish("quest.001", "quest.002")
    ok(await game.ada.allocate("node.light-pack", "node.trail-reader", "keystone.dowser"))
    kinds = [each["kind"] for each in (await game.ada.tree())["allocations"]]
    assert kinds == ["node", "node", "keystone"]


async def test_batch_may_contain_prerequisites_in_order(game: Game) -> None:
    await game.ada.finish("quest.001")
    details = refused(await game.ada.allocate(CHILD, ROOT), 422, "PREREQUISITES_NOT_MET")
    assert details == {"nodeId": CHILD, "missing": [ROOT]}
    assert await game.ada.allocated() == []
    ok(await game.ada.allocate(ROOT, CHILD))
    assert await game.ada.allocated() == [ROOT, CHILD]
    assert await game.ada.points() == 0


@pytest.mark.parametrize(
    ("nodes", "status", "code", "details"),
    [
        (["node.none"], 422, "UNKNOWN_NODE", {"nodeIds": ["node.none"]}),
        (["node.light-pack", "x", "y"], 422, "UNKNOWN_NODE", {"nodeIds": ["x", "y"]}),
        ([ROOT], 409, "ALREADY_ALLOCATED", {"nodeIds": [ROOT]}),
        (["node.light-pack", ROOT], 409, "ALREADY_ALLOCATED", {"nodeIds": [ROOT]}),
        (
            ["node.hill-legs"],
            422,
            "PREREQUISITES_NOT_MET",
            {"nodeId": "node.hill-legs", "missing": ["node.second-wind", "node.sure-foot"]},
        ),
        (
            ["node.light-pack", "node.sure-foot"],
            422,
            "INSUFFICIENT_POINTS",
            {"pointsRequired": 2, "pointsBanked": 1},
        ),
    ],
)
async def test_batch_with_one_invalid_node_changes_nothing(
    game: Game, nodes: list[str], status: int, code: str, details: Any
) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(ROOT))
    before = await game.ada.tree(), await game.ada.events()
    assert refused(await game.ada.allocate(*nodes), status, code) == details
    assert (await game.ada.tree(), await game.ada.events()) == before


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([ROOT], "INSUFFICIENT_POINTS"),
        ([CHILD], "PREREQUISITES_NOT_MET"),
        ([CHILD, "node.none"], "UNKNOWN_NODE"),
    ],
)
async def test_prerequisites_are_checked_before_points(
    sqlite_game: Game, nodes: list[str], code: str
) -> None:
    refused(await sqlite_game.ada.allocate(*nodes), 422, code)
    assert await sqlite_game.count("walkers") == 0


# -- the same action again ------------------------------------------------------------------------


async def test_replay_is_the_first_response_byte_for_byte_and_costs_nothing(game: Game) -> None:
    await game.ada.finish("quest.001")
    key = new_key()
    first = await game.ada.allocate(ROOT, key=key)
    ok(await game.ada.allocate(CHILD))  # the tree has changed meanwhile
    again = await game.ada.allocate(ROOT, key=key)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-original-request-id"] == first.headers["x-request-id"]
    assert await game.ada.points() == 0
    assert await game.ada.allocated() == [ROOT, CHILD]


async def test_the_same_key_with_other_nodes_is_a_conflict(game: Game) -> None:
    await game.ada.finish("quest.001")
    key = new_key()
    ok(await game.ada.allocate(ROOT, key=key))
    details = refused(
        await game.ada.allocate("node.light-pack", key=key), 409, "IDEMPOTENCY_CONFLICT"
    )
    assert set(details) == {"expectedHash", "receivedHash"}
    assert details["expectedHash"] != details["receivedHash"]
    assert await game.ada.allocated() == [ROOT]


async def test_the_time_of_sending_is_not_part_of_the_action(game: Game) -> None:
    await game.ada.finish("quest.001")
    key = new_key()
    at = text(game.clock.at)
    first = await game.ada.allocate(ROOT, key=key, clientSubmittedAt=at)
    later = await game.ada.allocate(ROOT, key=key, clientSubmittedAt="2026-05-23T00:00:00Z")
    assert later.content == first.content
    assert later.headers["idempotency-replayed"] == "true"


async def test_another_node_order_is_another_request(sqlite_game: Game) -> None:
    ada = sqlite_game.ada
    await ada.finish("quest.001")
    key = new_key()
    ok(await ada.allocate(ROOT, "node.light-pack", key=key))
    refused(await ada.allocate("node.light-pack", ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert await ada.allocated() == [ROOT, "node.light-pack"]


async def test_a_second_allocation_under_its_own_key_is_refused_as_allocated(game: Game) -> None:
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(ROOT))
    refused(await game.ada.allocate(ROOT), 409, "ALREADY_ALLOCATED")
    assert await game.ada.points() == 1


async def test_error_is_not_stored_so_the_same_key_may_succeed_later(game: Game) -> None:
    key, at = new_key(), game.clock.at
    refused(await game.ada.allocate(ROOT, key=key, at=at), 422, "INSUFFICIENT_POINTS")
    assert await game.count("onceward_idempotency_records") == 0
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate(ROOT, key=key, at=at))
    assert await game.ada.allocated() == [ROOT]


async def test_an_allocation_needs_a_key(sqlite_game: Game) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_game.ada.times()}
    response = await sqlite_game.ada.post("/tree/allocate", body)
    refused(response, 400, "IDEMPOTENCY_KEY_REQUIRED")
    assert await sqlite_game.count("walkers") == 0


@pytest.mark.parametrize("key", ["nope", "", "7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10"])
async def test_a_malformed_key_is_refused(sqlite_game: Game, key: str) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_game.ada.times()}
    response = await sqlite_game.ada.post("/tree/allocate", body, key=key)
    refused(response, 400, "IDEMPOTENCY_KEY_INVALID")
    assert await sqlite_game.count("walkers") == 0


# -- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"allocations": None}, 400, "allocations"),
        ({"allocations": ROOT}, 400, "allocations"),
        ({"allocations": [ROOT]}, 400, "allocations[0]"),
        ({"allocations": [{}]}, 400, "allocations[0].nodeId"),
        ({"allocations": [{"nodeId": 5}]}, 400, "allocations[0].nodeId"),
        ({"allocations": [{"nodeId": ROOT, "kind": "node"}]}, 400, "allocations[0].kind"),
        ({"points": 0}, 400, "points"),
        ({"allocations": []}, 422, "allocations"),
        ({"allocations": [{"nodeId": ""}]}, 422, "allocations[0].nodeId"),
        ({"allocations": [{"nodeId": "x" * 65}]}, 422, "allocations[0].nodeId"),
        ({"allocations": [{"nodeId": ROOT}, {"nodeId": ROOT}]}, 422, "allocations"),
        ({"allocations": [{"nodeId": f"n{n}"} for n in range(101)]}, 422, "allocations"),
    ],
)
async def test_invalid_body_is_rejected(
    sqlite_game: Game, change: Any, status: int, field: str
) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_game.ada.times()} | change
    response = await sqlite_game.ada.post("/tree/allocate", body, key=new_key())
    details = refused(response, status, "BAD_REQUEST")
    assert details["fields"][0]["field"] == field
    assert await sqlite_game.count("onceward_idempotency_records") == 0


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
async def test_a_body_that_is_no_object_is_400(sqlite_game: Game, body: Any) -> None:
    response = await sqlite_game.ada.post("/tree/allocate", body, key=new_key())
    refused(response, 400, "BAD_REQUEST")
    assert await sqlite_game.count("onceward_idempotency_records") == 0


# -- who ------------------------------------------------------------------------------------------


async def test_tree_of_another_walker_is_neither_readable_nor_writable(game: Game) -> None:
    eve = game.device("eve")
    await game.ada.finish("quest.001")
    key = new_key()
    ok(await game.ada.allocate(ROOT, key=key))
    before = await game.ada.tree(), await game.ada.events()
    assert (await eve.tree())["allocations"] == []
    assert await eve.points() == 0
    assert await eve.events() == []
    # Eve gets neither a replay of Ada's response nor Ada's points.
    refused(await eve.allocate(ROOT, key=key), 422, "INSUFFICIENT_POINTS")
    assert (await game.ada.tree(), await game.ada.events()) == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tree/state"),
        ("POST", "/tree/allocate"),
        ("GET", "/quest/available"),
        ("POST", "/quest/start"),
        ("POST", "/quest/quest.001/step/1/advance"),
        ("POST", "/quest/complete"),
        ("GET", "/walker/me"),
        ("GET", "/walker/events"),
    ],
)
async def test_every_operation_needs_authentication(
    sqlite_game: Game, method: str, path: str
) -> None:
    response = await sqlite_game.client.request(
        method, path, headers={"Authorization": "Bearer nonsense"}, json={}
    )
    refused(response, 401, "UNAUTHENTICATED")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_the_audit_names_the_walker_and_what_was_done_once(game: Game) -> None:
    await game.ada.finish("quest.001")
    key = new_key()
    await game.ada.allocate(ROOT, key=key)
    await game.ada.allocate(ROOT, key=key)
    found = await game.rows(
        "SELECT actor, resource, status FROM onceward_audit_events WHERE endpoint = 'tree.allocate'"
    )
    assert [dict(row) for row in found] == [
        {"actor": "ada", "resource": "walker:ada", "status": 200}
    ]


async def test_the_rate_limit_of_walk_holds(open_game: OpenGame) -> None:
    async with open_game(walk_rate_limit="2/minute") as game:
        ada: Device = game.ada
        responses = [await ada.allocate(ROOT) for _ in range(3)]
        assert [response.status_code for response in responses] == [422, 422, 429]
        refused(responses[2], 429, "RATE_LIMITED")
