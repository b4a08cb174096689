"""The tree over HTTP, on SQLite and on PostgreSQL."""

from typing import Any

import pytest

from .fixtures import CATALOGUE, Device, OpenWorld, World, new_key, ok, refused, text

ROOT = "node.even-stride"
CHILD = "node.long-breath"


async def test_a_new_walker_has_nothing_and_sees_every_node(world: World) -> None:
    tree = await world.ada.tree()
    assert set(tree) == {"walkerId", "pointsBanked", "allocations", "nodes"}
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


async def test_looking_at_the_tree_writes_nothing(world: World) -> None:
    await world.ada.tree()
    await world.ada.quests()
    await world.ada.me()
    await world.ada.events()
    assert await world.count("walkers") == 0
    assert await world.count("idempotency_records") == 0


async def test_an_allocation_takes_points_and_answers_with_the_tree(world: World) -> None:
    await world.ada.finish("quest.001")
    answer = ok(await world.ada.allocate(ROOT))
    assert answer["pointsBanked"] == 1
    assert answer["allocations"] == [
        {
            "nodeId": ROOT,
            "kind": "node",
            "provisional": False,
            "allocatedAt": text(world.clock.at),
        }
    ]
    energy = answer.pop("energyBalance")
    assert (energy, answer) == (0, await world.ada.tree())


async def test_allocations_are_listed_in_the_order_they_were_made(world: World) -> None:
    await world.ada.finish("quest.001", "quest.002")
    await world.ada.allocate("node.light-pack")
    await world.ada.allocate(ROOT, CHILD)
    assert await world.ada.allocated() == ["node.light-pack", ROOT, CHILD]


async def test_a_keystone_is_told_apart(world: World) -> None:
    await world.ada.finish("quest.001", "quest.002")
    ok(await world.ada.allocate("node.light-pack", "node.trail-reader", "keystone.dowser"))
    kinds = [each["kind"] for each in (await world.ada.tree())["allocations"]]
    assert kinds == ["node", "node", "keystone"]


async def test_a_batch_may_bring_what_it_requires_in_order(world: World) -> None:
    await world.ada.finish("quest.001")
    details = refused(await world.ada.allocate(CHILD, ROOT), 422, "PREREQUISITES_NOT_MET")
    assert details == {"nodeId": CHILD, "missing": [ROOT]}
    assert await world.ada.allocated() == []
    ok(await world.ada.allocate(ROOT, CHILD))
    assert await world.ada.allocated() == [ROOT, CHILD]
    assert await world.ada.points() == 0


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
async def test_a_batch_that_cannot_be_had_whole_changes_nothing(
    world: World, nodes: list[str], status: int, code: str, details: Any
) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(ROOT))
    before = await world.ada.tree(), await world.ada.events()
    assert refused(await world.ada.allocate(*nodes), status, code) == details
    assert (await world.ada.tree(), await world.ada.events()) == before


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([ROOT], "INSUFFICIENT_POINTS"),
        ([CHILD], "PREREQUISITES_NOT_MET"),
        ([CHILD, "node.none"], "UNKNOWN_NODE"),
    ],
)
async def test_a_walker_without_points_is_told_what_is_wrong_first(
    sqlite_world: World, nodes: list[str], code: str
) -> None:
    refused(await sqlite_world.ada.allocate(*nodes), 422, code)
    assert await sqlite_world.count("walkers") == 0


# -- the same action again ------------------------------------------------------------------------


async def test_a_replay_is_the_first_answer_byte_for_byte_and_takes_nothing(world: World) -> None:
    await world.ada.finish("quest.001")
    key = new_key()
    first = await world.ada.allocate(ROOT, key=key)
    ok(await world.ada.allocate(CHILD))  # the tree has moved on since
    again = await world.ada.allocate(ROOT, key=key)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-original-request-id"] == first.headers["x-request-id"]
    assert await world.ada.points() == 0
    assert await world.ada.allocated() == [ROOT, CHILD]


async def test_the_same_key_with_other_nodes_is_a_conflict(world: World) -> None:
    await world.ada.finish("quest.001")
    key = new_key()
    ok(await world.ada.allocate(ROOT, key=key))
    details = refused(
        await world.ada.allocate("node.light-pack", key=key), 409, "IDEMPOTENCY_CONFLICT"
    )
    assert set(details) == {"expectedHash", "receivedHash"}
    assert details["expectedHash"] != details["receivedHash"]
    assert await world.ada.allocated() == [ROOT]


async def test_the_time_of_sending_is_not_part_of_the_action(world: World) -> None:
    await world.ada.finish("quest.001")
    key = new_key()
    at = text(world.clock.at)
    first = await world.ada.allocate(ROOT, key=key, clientSubmittedAt=at)
    later = await world.ada.allocate(ROOT, key=key, clientSubmittedAt="2026-05-23T00:00:00Z")
    assert later.content == first.content
    assert later.headers["idempotency-replayed"] == "true"


async def test_another_node_order_is_another_request(sqlite_world: World) -> None:
    ada = sqlite_world.ada
    await ada.finish("quest.001")
    key = new_key()
    ok(await ada.allocate(ROOT, "node.light-pack", key=key))
    refused(await ada.allocate("node.light-pack", ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert await ada.allocated() == [ROOT, "node.light-pack"]


async def test_a_second_allocation_under_its_own_key_is_refused_as_allocated(world: World) -> None:
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(ROOT))
    refused(await world.ada.allocate(ROOT), 409, "ALREADY_ALLOCATED")
    assert await world.ada.points() == 1


async def test_a_refusal_is_not_remembered_so_the_same_key_may_succeed_later(world: World) -> None:
    key, at = new_key(), world.clock.at
    refused(await world.ada.allocate(ROOT, key=key, at=at), 422, "INSUFFICIENT_POINTS")
    assert await world.count("idempotency_records") == 0
    await world.ada.finish("quest.001")
    ok(await world.ada.allocate(ROOT, key=key, at=at))
    assert await world.ada.allocated() == [ROOT]


async def test_an_allocation_needs_a_key(sqlite_world: World) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_world.ada.times()}
    answer = await sqlite_world.ada.post("/tree/allocate", body)
    refused(answer, 400, "IDEMPOTENCY_KEY_REQUIRED")
    assert await sqlite_world.count("walkers") == 0


@pytest.mark.parametrize("key", ["nope", "", "7F0F5BD0-4C0A-4B2E-9B0E-0D6D3F9C9A10"])
async def test_a_malformed_key_is_refused(sqlite_world: World, key: str) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_world.ada.times()}
    answer = await sqlite_world.ada.post("/tree/allocate", body, key=key)
    refused(answer, 400, "IDEMPOTENCY_KEY_INVALID")
    assert await sqlite_world.count("walkers") == 0


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
async def test_a_body_that_is_not_as_agreed_is_refused(
    sqlite_world: World, change: Any, status: int, field: str
) -> None:
    body = {"allocations": [{"nodeId": ROOT}], **sqlite_world.ada.times()} | change
    answer = await sqlite_world.ada.post("/tree/allocate", body, key=new_key())
    details = refused(answer, status, "BAD_REQUEST")
    assert details["fields"][0]["field"] == field
    assert await sqlite_world.count("idempotency_records") == 0


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
async def test_a_body_that_is_no_object_is_400(sqlite_world: World, body: Any) -> None:
    answer = await sqlite_world.ada.post("/tree/allocate", body, key=new_key())
    refused(answer, 400, "BAD_REQUEST")
    assert await sqlite_world.count("idempotency_records") == 0


# -- who ------------------------------------------------------------------------------------------


async def test_another_walkers_tree_is_out_of_sight_and_out_of_reach(world: World) -> None:
    eve = world.device("eve")
    await world.ada.finish("quest.001")
    key = new_key()
    ok(await world.ada.allocate(ROOT, key=key))
    before = await world.ada.tree(), await world.ada.events()
    assert (await eve.tree())["allocations"] == []
    assert await eve.points() == 0
    assert await eve.events() == []
    # Ada's key is nothing to Eve: no replay of Ada's answer, and no points of Ada's either.
    refused(await eve.allocate(ROOT, key=key), 422, "INSUFFICIENT_POINTS")
    assert (await world.ada.tree(), await world.ada.events()) == before


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
async def test_everything_takes_a_sign_in(sqlite_world: World, method: str, path: str) -> None:
    answer = await sqlite_world.client.request(
        method, path, headers={"Authorization": "Bearer nonsense"}, json={}
    )
    refused(answer, 401, "UNAUTHENTICATED")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_the_audit_names_the_walker_and_what_was_done_once(world: World) -> None:
    await world.ada.finish("quest.001")
    key = new_key()
    await world.ada.allocate(ROOT, key=key)
    await world.ada.allocate(ROOT, key=key)
    found = await world.rows(
        "SELECT actor, resource, status FROM audit_events WHERE endpoint = 'tree.allocate'"
    )
    assert [dict(row) for row in found] == [
        {"actor": "ada", "resource": "walker:ada", "status": 200}
    ]


async def test_the_rate_limit_of_walk_holds(open_world: OpenWorld) -> None:
    async with open_world(walk_rate_limit="2/minute") as world:
        ada: Device = world.ada
        answers = [await ada.allocate(ROOT) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [422, 422, 429]
        refused(answers[2], 429, "RATE_LIMITED")
