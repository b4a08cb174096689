"""Quests over HTTP, on SQLite and on PostgreSQL."""

from typing import Any

import pytest

from .fixtures import Game, new_key, ok, refused

QUEST = "quest.001"
HIDDEN = "quest.hidden-spring"
TO_THE_KEYSTONE = ("node.light-pack", "node.trail-reader", "keystone.dowser")


async def test_a_new_walker_sees_the_quests_that_are_open_and_no_others(game: Game) -> None:
    board = ok(await game.ada.get("/quest/available"))
    assert board == {
        "quests": [
            {
                "questId": QUEST,
                "title": "First light",
                "steps": 2,
                "currentStep": 0,
                "status": "available",
                "pointsAwarded": 2,
                "provisional": False,
            },
            {
                "questId": "quest.002",
                "title": "The mill path",
                "steps": 3,
                "currentStep": 0,
                "status": "available",
                "pointsAwarded": 2,
                "provisional": False,
            },
        ]
    }


async def test_a_quest_goes_from_its_start_step_by_step_to_its_points(game: Game) -> None:
    ada = game.ada
    view = {"questId": QUEST, "title": "First light", "steps": 2, "pointsAwarded": 2}
    begun = {"status": "in_progress", "currentStep": 1, "provisional": False}
    assert ok(await ada.start(QUEST)) == view | begun
    # Today is not settled.
    view |= {"provisional": True}
    assert ok(await ada.advance(QUEST, 1)) == view | {"status": "in_progress", "currentStep": 2}
    assert ok(await ada.advance(QUEST, 2)) == view | {"status": "in_progress", "currentStep": 3}
    assert await ada.points() == 0
    completed = ok(await ada.complete(QUEST))
    assert completed == view | {"status": "completed", "currentStep": 3, "pointsBanked": 2}
    assert await ada.points() == 2
    assert (await ada.quests())[QUEST]["status"] == "completed"


async def test_a_completed_quest_opens_those_that_require_it(game: Game) -> None:
    refused(await game.ada.start("quest.003"), 422, "PREREQUISITES_NOT_MET")
    await game.ada.finish(QUEST)
    assert set(await game.ada.quests()) == {QUEST, "quest.002", "quest.003"}
    ok(await game.ada.start("quest.003"))


async def test_a_quest_that_requires_others_names_them(sqlite_game: Game) -> None:
    details = refused(await sqlite_game.ada.start("quest.006"), 422, "PREREQUISITES_NOT_MET")
    assert details == {"questId": "quest.006", "missing": ["quest.004", "quest.005"]}


async def test_every_quest_can_be_completed_and_pays_once(game: Game) -> None:
    order = ["quest.001", "quest.002", "quest.003", "quest.004", "quest.005", "quest.006"]
    assert await game.ada.finish(*order) == 2 + 2 + 3 + 3 + 4 + 5
    paid = [e["data"] for e in await game.ada.events() if e["type"] == "quest.completed"]
    assert [each["questId"] for each in paid] == order


# -- the hidden one -------------------------------------------------------------------------------


async def test_a_keystone_reveals_a_hidden_quest(game: Game) -> None:
    ada = game.ada
    await ada.finish("quest.001", "quest.002")
    assert HIDDEN not in await ada.quests()
    details = refused(await ada.start(HIDDEN), 422, "PREREQUISITES_NOT_MET")
    assert details == {"questId": HIDDEN, "missing": ["keystone.dowser"]}

    ok(await ada.allocate(*TO_THE_KEYSTONE))
    assert (await ada.quests())[HIDDEN]["status"] == "available"
    last = (await ada.events())[-2:]
    assert [(event["type"], event["data"].get("questId")) for event in last] == [
        ("tree.allocated", None),
        ("quest.revealed", HIDDEN),
    ]
    assert await ada.finish(HIDDEN) == 3


async def test_one_walkers_keystone_reveals_nothing_to_another(sqlite_game: Game) -> None:
    await sqlite_game.ada.finish("quest.001", "quest.002")
    ok(await sqlite_game.ada.allocate(*TO_THE_KEYSTONE))
    eve = sqlite_game.device("eve")
    assert HIDDEN not in await eve.quests()
    refused(await eve.start(HIDDEN), 422, "PREREQUISITES_NOT_MET")


# -- refusals -------------------------------------------------------------------------------------


async def test_a_second_start_is_refused_with_a_key_and_without(game: Game) -> None:
    ok(await game.ada.start(QUEST))
    refused(await game.ada.start(QUEST), 409, "QUEST_ALREADY_IN_PROGRESS")
    details = refused(await game.ada.start(QUEST, key=new_key()), 409, "QUEST_ALREADY_IN_PROGRESS")
    assert details == {"questId": QUEST}


async def test_retried_start_is_a_replay(game: Game) -> None:
    key = new_key()
    first = await game.ada.start(QUEST, key=key)
    ok(await game.ada.advance(QUEST, 1))
    again = await game.ada.start(QUEST, key=key)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert (await game.ada.quests())[QUEST]["currentStep"] == 2


async def test_a_start_without_a_key_leaves_no_record(sqlite_game: Game) -> None:
    ok(await sqlite_game.ada.start(QUEST))
    assert await sqlite_game.count("onceward_idempotency_records") == 0
    assert await sqlite_game.count("onceward_audit_events") == 1


async def test_start_accepts_times_and_ignores_their_age(
    sqlite_game: Game,
) -> None:
    body = {
        "questId": QUEST,
        "clientGeneratedAt": "2001-01-01T00:00:00Z",
        "clientSubmittedAt": "2026-05-22T12:00:00Z",
    }
    ok(await sqlite_game.ada.post("/quest/start", body, key=new_key()))
    malformed = body | {"questId": "quest.002", "clientGeneratedAt": "yesterday"}
    response = await sqlite_game.ada.post("/quest/start", malformed)
    assert refused(response, 400, "BAD_REQUEST")["fields"][0]["field"] == "clientGeneratedAt"


async def test_a_completed_quest_cannot_be_started_advanced_or_completed_again(
    game: Game,
) -> None:
    await game.ada.finish(QUEST)
    refused(await game.ada.start(QUEST), 409, "QUEST_ALREADY_COMPLETED")
    refused(await game.ada.advance(QUEST, 1), 409, "QUEST_ALREADY_COMPLETED")
    refused(await game.ada.complete(QUEST), 409, "QUEST_ALREADY_COMPLETED")
    assert await game.ada.points() == 2


async def test_a_quest_that_is_not_started_cannot_be_advanced_or_completed(game: Game) -> None:
    refused(await game.ada.advance(QUEST, 1), 422, "QUEST_NOT_IN_PROGRESS")
    refused(await game.ada.complete(QUEST), 422, "QUEST_NOT_IN_PROGRESS")
    assert await game.count("quest_progress") == 0


async def test_a_quest_with_steps_left_cannot_be_completed(game: Game) -> None:
    ok(await game.ada.start(QUEST))
    ok(await game.ada.advance(QUEST, 1))
    details = refused(await game.ada.complete(QUEST), 422, "QUEST_INCOMPLETE")
    assert details == {"questId": QUEST, "currentStep": 2, "steps": 2}
    assert await game.ada.points() == 0


@pytest.mark.parametrize("step", [0, 1, 3, 4, -1, 10**30])
async def test_only_the_next_step_can_be_done(game: Game, step: int) -> None:
    ok(await game.ada.start("quest.002"))
    ok(await game.ada.advance("quest.002", 1))
    details = refused(await game.ada.advance("quest.002", step), 422, "STEP_OUT_OF_ORDER")
    assert details == {"questId": "quest.002", "step": step, "currentStep": 2, "steps": 3}
    assert (await game.ada.quests())["quest.002"]["currentStep"] == 2


async def test_there_is_no_step_after_the_last(sqlite_game: Game) -> None:
    ok(await sqlite_game.ada.start(QUEST))
    ok(await sqlite_game.ada.advance(QUEST, 1))
    ok(await sqlite_game.ada.advance(QUEST, 2))
    refused(await sqlite_game.ada.advance(QUEST, 3), 422, "STEP_OUT_OF_ORDER")
    assert ok(await sqlite_game.ada.complete(QUEST))["status"] == "completed"


@pytest.mark.parametrize(
    "step",
    [
        "one",
        "1.5",
        "%20",
        "٣",
        "01",
        "+1",
        "%2B1",
        "%201",
        "1%20",
        "1.0",
        "1_0",
        "1e0",
        "-0",
    ],
)
async def test_step_must_be_a_canonical_whole_number(sqlite_game: Game, step: str) -> None:
    ok(await sqlite_game.ada.start(QUEST))
    refused(await sqlite_game.ada.advance(QUEST, step), 400, "BAD_REQUEST")
    assert (await sqlite_game.ada.quests())[QUEST]["currentStep"] == 1


@pytest.mark.parametrize("quest_id", ["quest.999", "x", "node.even-stride", "a\0b", "🌲"])
async def test_an_unknown_quest_is_not_found(game: Game, quest_id: str) -> None:
    refused(await game.ada.start(quest_id), 404, "NOT_FOUND")
    refused(await game.ada.complete(quest_id), 404, "NOT_FOUND")
    if quest_id.isprintable():
        refused(await game.ada.advance(quest_id, 1), 404, "NOT_FOUND")
    assert await game.count("walkers") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/quest/start", {}),
        ("/quest/start", {"questId": 1}),
        ("/quest/start", {"questId": QUEST, "step": 1}),
        ("/quest/complete", {"clientGeneratedAt": "2026-05-22T12:00:00Z"}),
        (
            "/quest/complete",
            {"questId": QUEST, "clientGeneratedAt": "2026-05-22T12:00:00Z", "points": 9},
        ),
        (
            f"/quest/{QUEST}/step/1/advance",
            {"step": 1, "clientGeneratedAt": "2026-05-22T12:00:00Z"},
        ),
    ],
)
async def test_invalid_body_is_400(sqlite_game: Game, path: str, body: Any) -> None:
    response = await sqlite_game.ada.post(path, body, key=new_key())
    assert refused(response, 400, "BAD_REQUEST")["fields"]


# -- the same action again ------------------------------------------------------------------------


async def test_retried_completion_is_replayed_and_awards_points_once(
    game: Game,
) -> None:
    ok(await game.ada.start(QUEST))
    ok(await game.ada.advance(QUEST, 1))
    ok(await game.ada.advance(QUEST, 2))
    key = new_key()
    first = await game.ada.complete(QUEST, key=key)
    ok(await game.ada.allocate("node.even-stride"))
    again = await game.ada.complete(QUEST, key=key)
    assert ok(again)["pointsAwarded"] == 2
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert await game.ada.points() == 1


async def test_retried_step_is_replayed_and_counts_once(
    game: Game,
) -> None:
    ok(await game.ada.start(QUEST))
    key = new_key()
    first = await game.ada.advance(QUEST, 1, key=key)
    again = await game.ada.advance(QUEST, 1, key=key)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert (await game.ada.quests())[QUEST]["currentStep"] == 2


async def test_the_same_key_on_another_step_or_another_quest_is_a_conflict(game: Game) -> None:
    ok(await game.ada.start(QUEST))
    ok(await game.ada.start("quest.002"))
    key = new_key()
    ok(await game.ada.advance(QUEST, 1, key=key))
    refused(await game.ada.advance(QUEST, 2, key=key), 409, "IDEMPOTENCY_CONFLICT")
    refused(await game.ada.advance("quest.002", 1, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert (await game.ada.quests())["quest.002"]["currentStep"] == 1


async def test_the_same_key_on_another_operation_is_another_action(game: Game) -> None:
    key = new_key()
    ok(await game.ada.start(QUEST, key=key))
    ok(await game.ada.advance(QUEST, 1, key=key))
    ok(await game.ada.advance(QUEST, 2))
    ok(await game.ada.complete(QUEST, key=key))
    ok(await game.ada.allocate("node.even-stride", key=key))
    assert await game.ada.points() == 1


async def test_a_step_refused_as_out_of_order_may_come_again_under_its_key(game: Game) -> None:
    ok(await game.ada.start(QUEST))
    key = new_key()
    refused(await game.ada.advance(QUEST, 2, key=key), 422, "STEP_OUT_OF_ORDER")
    ok(await game.ada.advance(QUEST, 1))
    ok(await game.ada.advance(QUEST, 2, key=key))
    assert (await game.ada.quests())[QUEST]["currentStep"] == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [("/quest/complete", {"questId": QUEST}), (f"/quest/{QUEST}/step/1/advance", {})],
)
async def test_steps_and_completions_need_a_key(sqlite_game: Game, path: str, body: Any) -> None:
    response = await sqlite_game.ada.post(path, body | sqlite_game.ada.times())
    refused(response, 400, "IDEMPOTENCY_KEY_REQUIRED")
    assert await sqlite_game.count("walkers") == 0


async def test_bodies_may_repeat_the_key_and_the_step(sqlite_game: Game) -> None:
    """As queued payloads do: both are out of the hash, and refused only if they contradict."""
    ada, key = sqlite_game.ada, new_key()
    ok(await ada.post("/quest/start", {"questId": QUEST, "idempotencyKey": key}, key=key))
    path = f"/quest/{QUEST}/step/1/advance"
    body = ada.times()
    other = {"idempotencyKey": new_key()}
    refused(await ada.post(path, body | other, key=key), 400, "IDEMPOTENCY_KEY_INVALID")
    refused(await ada.post(path, body | {"stepIndex": 2}, key=key), 400, "BAD_REQUEST")
    refused(await ada.post(path, body | {"stepIndex": "1"}, key=key), 400, "BAD_REQUEST")
    both = {"idempotencyKey": key, "stepIndex": 1}
    first = await ada.post(path, body | both, key=key)
    again = await ada.post(path, body, key=key)
    assert (ok(first)["currentStep"], again.content) == (2, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    key = new_key()
    ok(await ada.post(f"/quest/{QUEST}/step/2/advance", body | {"idempotencyKey": key}, key=key))
    done = {"questId": QUEST} | body
    refused(
        await ada.post("/quest/complete", done | other, key=key), 400, "IDEMPOTENCY_KEY_INVALID"
    )
    ok(await ada.post("/quest/complete", done | {"idempotencyKey": key}, key=key))
    nodes = {"allocations": [{"nodeId": "node.even-stride"}]} | body
    refused(
        await ada.post("/tree/allocate", nodes | other, key=key), 400, "IDEMPOTENCY_KEY_INVALID"
    )
    ok(await ada.post("/tree/allocate", nodes | {"idempotencyKey": key}, key=key))
