"""The maximum age of actions, over HTTP, with a fake clock."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from onceward.ports import RecordQuery

from .fixtures import Device, Game, HeldClock, OpenGame, new_key, ok, refused, text

CAP, GRACE = timedelta(days=7), timedelta(hours=6)
TICK = timedelta(microseconds=1)
HOUR = timedelta(hours=1)
QUEST = "quest.001"
ROOT = "node.even-stride"

Act = Callable[..., Awaitable[httpx.Response]]


async def _allocate(device: Device, **options: Any) -> httpx.Response:
    return await device.allocate(ROOT, **options)


async def _advance(device: Device, **options: Any) -> httpx.Response:
    return await device.advance("quest.002", 1, **options)


async def _complete(device: Device, **options: Any) -> httpx.Response:
    return await device.complete("quest.003", **options)


EACH: tuple[Act, ...] = (_allocate, _advance, _complete)
ACTIONS = pytest.mark.parametrize("act", EACH)


async def prepare(device: Device) -> Device:
    """Make each of the three actions possible, once."""
    await device.finish(QUEST)
    ok(await device.start("quest.002"))
    ok(await device.start("quest.003"))
    for step in (1, 2, 3):
        ok(await device.advance("quest.003", step))
    return device


async def snapshot(device: Device) -> Any:
    return await device.tree(), await device.quests(), await device.events()


PASSING = [
    timedelta(0),
    CAP,
    CAP + 5 * HOUR,
    CAP + GRACE - TICK,
    CAP + GRACE,
    -HOUR,
    -GRACE + TICK,
    -GRACE,
]
STALE = {
    CAP + GRACE + TICK: 7,
    CAP + 7 * HOUR: 7,
    timedelta(days=8): 8,
    timedelta(days=30): 30,
    timedelta(days=365): 365,
    -GRACE - TICK: -1,
    -12 * HOUR: -1,
    timedelta(days=-30): -30,
}


@pytest.mark.parametrize("age", PASSING, ids=str)
async def test_an_action_within_the_cap_and_the_grace_passes(
    sqlite_game: Game, age: timedelta
) -> None:
    ada = await prepare(sqlite_game.ada)
    for act in EACH:
        before = await snapshot(ada)
        ok(await act(ada, at=sqlite_game.clock.at - age))
        assert await snapshot(ada) != before


@pytest.mark.parametrize(("age", "days"), STALE.items(), ids=str)
async def test_an_action_beyond_them_is_stale_and_changes_nothing(
    sqlite_game: Game, age: timedelta, days: int
) -> None:
    ada = await prepare(sqlite_game.ada)
    before = await snapshot(ada)
    made_at = sqlite_game.clock.at - age
    for act in EACH:
        details = refused(await act(ada, at=made_at), 422, "STALE_ACTION")
        assert details.pop("clientGeneratedAt").startswith(f"{made_at:%Y-%m-%dT%H:%M:%S}")
        assert details == {
            "serverNow": "2026-05-22T12:00:00.000Z",
            "ageDays": days,
            "capDays": 7,
            "graceHours": 6,
        }
    assert await snapshot(ada) == before


@pytest.mark.parametrize("zone", [timezone(timedelta(hours=2)), timezone(timedelta(hours=-11))])
async def test_instants_with_different_offsets_are_equal(sqlite_game: Game, zone: timezone) -> None:
    await prepare(sqlite_game.ada)
    oldest = sqlite_game.clock.at - CAP - GRACE
    body = {"allocations": [{"nodeId": ROOT}]}
    stale = body | {"clientGeneratedAt": (oldest - TICK).astimezone(zone).isoformat()}
    response = await sqlite_game.ada.post("/tree/allocate", stale, key=new_key())
    refused(response, 422, "STALE_ACTION")
    fresh = body | {"clientGeneratedAt": oldest.astimezone(zone).isoformat()}
    ok(await sqlite_game.ada.post("/tree/allocate", fresh, key=new_key()))
    assert await sqlite_game.ada.allocated() == [ROOT]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tree/allocate", {"allocations": [{"nodeId": ROOT}]}),
        ("/quest/quest.002/step/1/advance", {}),
        ("/quest/complete", {"questId": "quest.003"}),
    ],
)
async def test_client_generated_at_needs_a_zone(
    sqlite_game: Game, path: str, body: dict[str, Any]
) -> None:
    ada = await prepare(sqlite_game.ada)
    before = await snapshot(ada), await sqlite_game.count("onceward_idempotency_records")
    missing: list[dict[str, Any]] = [{}]
    others = [5, None, "", "yesterday", "2026-05-22", "2026-05-22T12:00:00", "2026-02-30T00:00:00Z"]
    for sent in missing + [{"clientGeneratedAt": value} for value in others]:
        response = await ada.post(path, body | sent, key=new_key())
        assert refused(response, 400, "BAD_REQUEST") == {"field": "clientGeneratedAt"}
    assert (await snapshot(ada), await sqlite_game.count("onceward_idempotency_records")) == before


async def test_action_sent_days_later_is_accepted(
    sqlite_game: Game,
) -> None:
    await prepare(sqlite_game.ada)
    now = sqlite_game.clock.at
    at = now - timedelta(days=6)
    ok(await sqlite_game.ada.allocate(ROOT, at=at, clientSubmittedAt=text(now)))
    assert await sqlite_game.ada.allocated() == [ROOT]


async def test_an_action_cannot_have_been_sent_long_before_it_was_made(
    sqlite_game: Game,
) -> None:
    game = sqlite_game
    await prepare(game.ada)
    made_at = game.clock.at
    before = text(made_at - GRACE - TICK)
    response = await game.ada.allocate(ROOT, at=made_at, clientSubmittedAt=before)
    assert refused(response, 400, "BAD_REQUEST") == {"field": "clientSubmittedAt"}
    ok(await game.ada.allocate(ROOT, at=made_at, clientSubmittedAt=text(made_at - GRACE)))


async def test_a_time_of_sending_that_is_none_is_400(sqlite_game: Game) -> None:
    await prepare(sqlite_game.ada)
    response = await sqlite_game.ada.allocate(ROOT, clientSubmittedAt="soon")
    assert refused(response, 400, "BAD_REQUEST") == {"field": "clientSubmittedAt"}


async def test_starting_a_quest_is_never_stale(sqlite_game: Game) -> None:
    ok(await sqlite_game.ada.start(QUEST, key=new_key()))
    sqlite_game.clock.move(timedelta(days=30))
    assert ok(await sqlite_game.ada.start("quest.002"))["status"] == "in_progress"


# -- replays --------------------------------------------------------------------------------------


@ACTIONS
async def test_accepted_action_is_replayed_after_it_became_stale(game: Game, act: Act) -> None:
    await prepare(game.ada)
    key, made_at = new_key(), game.clock.at - CAP
    first = await act(game.ada, key=key, at=made_at)
    game.clock.move(timedelta(days=6))
    again = await act(game.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    refused(await act(game.ada, key=new_key(), at=made_at), 422, "STALE_ACTION")


@ACTIONS
@pytest.mark.parametrize("ahead", [timedelta(), GRACE], ids=["on time", "clock ahead"])
async def test_a_record_outlives_the_time_in_which_its_action_counts(
    game: Game, act: Act, ahead: timedelta
) -> None:
    await prepare(game.ada)
    key, made_at = new_key(), game.clock.at + ahead
    first = await act(game.ada, key=key, at=made_at)
    ok(first)
    game.clock.move(CAP + HOUR)  # past the seven days of a record, and not stale
    again = await act(game.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    game.clock.move(GRACE + ahead - HOUR)  # the last instant before it is stale
    again = await act(game.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    game.clock.move(timedelta(seconds=2))
    refused(await act(game.ada, key=key, at=made_at), 422, "STALE_ACTION")


async def test_lifetime_chosen_by_the_operator_is_used(open_game: OpenGame) -> None:
    async with open_game(walk_success_ttl_hours=0.001) as game:
        await prepare(game.ada)
        key, made_at = new_key(), game.clock.at
        ok(await _allocate(game.ada, key=key, at=made_at))
        game.clock.move(timedelta(seconds=3))
        again = await _allocate(game.ada, key=key, at=made_at)
        assert again.headers["idempotency-replayed"] == "true"
        game.clock.move(timedelta(seconds=1))
        # As if the record did not exist: the handler runs again and returns its own error.
        refused(await _allocate(game.ada, key=key, at=made_at), 409, "ALREADY_ALLOCATED")


@ACTIONS
async def test_once_its_record_has_expired_the_action_is_stale_and_done_once(
    game: Game, act: Act
) -> None:
    await prepare(game.ada)
    key, made_at = new_key(), game.clock.at - GRACE - HOUR
    ok(await act(game.ada, key=key, at=made_at))
    before = await snapshot(game.ada)
    game.clock.move(CAP)
    refused(await act(game.ada, key=key, at=made_at), 422, "STALE_ACTION")
    assert await snapshot(game.ada) == before


@ACTIONS
async def test_stale_attempt_is_recorded_and_replayed(game: Game, act: Act) -> None:
    await prepare(game.ada)
    key, made_at = new_key(), game.clock.at - timedelta(days=8)
    first = await act(game.ada, key=key, at=made_at)
    refused(first, 422, "STALE_ACTION")
    [record] = await game.store.records(RecordQuery(tenant="ada", key=key))
    assert (record.status, record.body) == (422, first.content)
    assert record.expires_at - record.created_at == timedelta(days=7)
    game.clock.move(HOUR)
    again = await act(game.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (422, first.content)
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_stale_attempt_is_no_audit_event(sqlite_game: Game) -> None:
    game = sqlite_game
    refused(await game.ada.allocate(ROOT, at=game.clock.at - 8 * CAP), 422, "STALE_ACTION")
    assert await game.count("onceward_audit_events") == 0
    assert await game.count("onceward_idempotency_records") == 1
    assert await game.count("walkers") == 0


async def test_a_changed_time_under_the_same_key_is_a_conflict_not_a_second_chance(
    sqlite_game: Game,
) -> None:
    game = sqlite_game
    await prepare(game.ada)
    key = new_key()
    refused(await game.ada.allocate(ROOT, key=key, at=game.clock.at - 2 * CAP), 422, "STALE_ACTION")
    refused(await game.ada.allocate(ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert await game.ada.allocated() == []


# -- a walker who moves the clock -----------------------------------------------------------------


@pytest.mark.parametrize("off", [timedelta(days=-30), timedelta(days=30)])
async def test_actions_of_a_device_with_a_clock_a_month_off_are_rejected(
    game: Game, off: timedelta
) -> None:
    await prepare(game.ada)
    before = await snapshot(game.ada)
    on_the_device = game.clock.at + off
    for act in EACH:
        refused(await act(game.ada, at=on_the_device), 422, "STALE_ACTION")
    assert await snapshot(game.ada) == before
    # With the clock put right, the same person does the same things.
    for act in EACH:
        ok(await act(game.ada))


async def test_client_that_refreshes_times_is_protected_only_while_records_live(
    game: Game,
) -> None:
    await prepare(game.ada)
    key, made_at = new_key(), game.clock.at
    ok(await game.ada.allocate(ROOT, key=key, at=made_at))
    for days in (1, 3, 6):
        game.clock.at = made_at + timedelta(days=days)
        refused(await game.ada.allocate(ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
        refused(await game.ada.allocate(ROOT), 409, "ALREADY_ALLOCATED")
    assert await game.ada.points() == 1


async def test_cap_and_grace_are_settings(open_game: OpenGame) -> None:
    settings = {"walk_staleness_cap_days": 0.5, "walk_staleness_grace_hours": 0}
    async with open_game(HeldClock(), **settings) as game:
        await game.ada.finish(QUEST)
        late = game.clock.at - timedelta(hours=12)
        details = refused(await game.ada.allocate(ROOT, at=late - TICK), 422, "STALE_ACTION")
        assert (details["capDays"], details["graceHours"]) == (0.5, 0)
        ok(await game.ada.allocate(ROOT, at=late))


async def test_staleness_is_checked_before_the_handler_runs(sqlite_game: Game) -> None:
    """Staleness is checked before the node and the other fields."""
    at: datetime = sqlite_game.clock.at - 2 * CAP
    refused(await sqlite_game.ada.allocate("node.none", at=at), 422, "STALE_ACTION")
    refused(await sqlite_game.ada.complete("quest.none", at=at), 422, "STALE_ACTION")
    refused(await sqlite_game.ada.advance("quest.none", 1, at=at), 422, "STALE_ACTION")
    assert await sqlite_game.count("walkers") == 0
