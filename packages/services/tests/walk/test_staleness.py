"""How old an action may be, over HTTP, on a clock the tests hold."""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from holdfast.ports import RecordQuery

from .fixtures import Device, HeldClock, OpenWorld, World, new_key, ok, refused, text

CAP, GRACE = timedelta(days=7), timedelta(hours=6)
TICK = timedelta(microseconds=1)
HOUR = timedelta(hours=1)
QUEST = "quest.001"
ROOT = "node.even-stride"

Act = Callable[..., Awaitable[httpx.Response]]


async def _allocate(device: Device, **wishes: Any) -> httpx.Response:
    return await device.allocate(ROOT, **wishes)


async def _advance(device: Device, **wishes: Any) -> httpx.Response:
    return await device.advance("quest.002", 1, **wishes)


async def _complete(device: Device, **wishes: Any) -> httpx.Response:
    return await device.complete("quest.003", **wishes)


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
    sqlite_world: World, age: timedelta
) -> None:
    ada = await prepare(sqlite_world.ada)
    for act in EACH:
        before = await snapshot(ada)
        ok(await act(ada, at=sqlite_world.clock.at - age))
        assert await snapshot(ada) != before


@pytest.mark.parametrize(("age", "days"), STALE.items(), ids=str)
async def test_an_action_beyond_them_is_stale_and_changes_nothing(
    sqlite_world: World, age: timedelta, days: int
) -> None:
    ada = await prepare(sqlite_world.ada)
    before = await snapshot(ada)
    made_at = sqlite_world.clock.at - age
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
async def test_a_zone_is_told_and_only_the_instant_counts(
    sqlite_world: World, zone: timezone
) -> None:
    await prepare(sqlite_world.ada)
    oldest = sqlite_world.clock.at - CAP - GRACE
    body = {"allocations": [{"nodeId": ROOT}]}
    stale = body | {"clientGeneratedAt": (oldest - TICK).astimezone(zone).isoformat()}
    answer = await sqlite_world.ada.post("/tree/allocate", stale, key=new_key())
    refused(answer, 422, "STALE_ACTION")
    fresh = body | {"clientGeneratedAt": oldest.astimezone(zone).isoformat()}
    ok(await sqlite_world.ada.post("/tree/allocate", fresh, key=new_key()))
    assert await sqlite_world.ada.allocated() == [ROOT]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tree/allocate", {"allocations": [{"nodeId": ROOT}]}),
        ("/quest/quest.002/step/1/advance", {}),
        ("/quest/complete", {"questId": "quest.003"}),
    ],
)
async def test_when_it_was_made_must_be_told_with_a_zone(
    sqlite_world: World, path: str, body: dict[str, Any]
) -> None:
    ada = await prepare(sqlite_world.ada)
    before = await snapshot(ada), await sqlite_world.count("idempotency_records")
    missing: list[dict[str, Any]] = [{}]
    others = [5, None, "", "yesterday", "2026-05-22", "2026-05-22T12:00:00", "2026-02-30T00:00:00Z"]
    for sent in missing + [{"clientGeneratedAt": value} for value in others]:
        answer = await ada.post(path, body | sent, key=new_key())
        assert refused(answer, 400, "BAD_REQUEST") == {"field": "clientGeneratedAt"}
    assert (await snapshot(ada), await sqlite_world.count("idempotency_records")) == before


async def test_an_action_sent_days_after_it_was_made_is_what_a_queue_is_for(
    sqlite_world: World,
) -> None:
    await prepare(sqlite_world.ada)
    now = sqlite_world.clock.at
    at = now - timedelta(days=6)
    ok(await sqlite_world.ada.allocate(ROOT, at=at, clientSubmittedAt=text(now)))
    assert await sqlite_world.ada.allocated() == [ROOT]


async def test_an_action_cannot_have_been_sent_long_before_it_was_made(
    sqlite_world: World,
) -> None:
    world = sqlite_world
    await prepare(world.ada)
    made_at = world.clock.at
    before = text(made_at - GRACE - TICK)
    answer = await world.ada.allocate(ROOT, at=made_at, clientSubmittedAt=before)
    assert refused(answer, 400, "BAD_REQUEST") == {"field": "clientSubmittedAt"}
    ok(await world.ada.allocate(ROOT, at=made_at, clientSubmittedAt=text(made_at - GRACE)))


async def test_a_time_of_sending_that_is_none_is_400(sqlite_world: World) -> None:
    await prepare(sqlite_world.ada)
    answer = await sqlite_world.ada.allocate(ROOT, clientSubmittedAt="soon")
    assert refused(answer, 400, "BAD_REQUEST") == {"field": "clientSubmittedAt"}


async def test_beginning_a_quest_is_never_stale(sqlite_world: World) -> None:
    ok(await sqlite_world.ada.start(QUEST, key=new_key()))
    sqlite_world.clock.move(timedelta(days=30))
    assert ok(await sqlite_world.ada.start("quest.002"))["status"] == "in_progress"


# -- replays --------------------------------------------------------------------------------------


@ACTIONS
async def test_what_was_accepted_is_replayed_when_the_action_has_grown_too_old(
    world: World, act: Act
) -> None:
    await prepare(world.ada)
    key, made_at = new_key(), world.clock.at - CAP
    first = await act(world.ada, key=key, at=made_at)
    world.clock.move(timedelta(days=6))
    again = await act(world.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    refused(await act(world.ada, key=new_key(), at=made_at), 422, "STALE_ACTION")


@ACTIONS
@pytest.mark.parametrize("ahead", [timedelta(), GRACE], ids=["on time", "clock ahead"])
async def test_a_record_outlives_the_time_in_which_its_action_counts(
    world: World, act: Act, ahead: timedelta
) -> None:
    await prepare(world.ada)
    key, made_at = new_key(), world.clock.at + ahead
    first = await act(world.ada, key=key, at=made_at)
    ok(first)
    world.clock.move(CAP + HOUR)  # past the seven days of a record, and not stale
    again = await act(world.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    world.clock.move(GRACE + ahead - HOUR)  # the last instant at which it counts
    again = await act(world.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    world.clock.move(timedelta(seconds=2))
    refused(await act(world.ada, key=key, at=made_at), 422, "STALE_ACTION")


async def test_a_lifetime_that_someone_has_chosen_is_obeyed(open_world: OpenWorld) -> None:
    async with open_world(walk_success_ttl_hours=0.001) as world:
        await prepare(world.ada)
        key, made_at = new_key(), world.clock.at
        ok(await _allocate(world.ada, key=key, at=made_at))
        world.clock.move(timedelta(seconds=3))
        again = await _allocate(world.ada, key=key, at=made_at)
        assert again.headers["idempotency-replayed"] == "true"
        world.clock.move(timedelta(seconds=1))
        # As if it were not there: the handler runs again, and has its own word on that.
        refused(await _allocate(world.ada, key=key, at=made_at), 409, "ALREADY_ALLOCATED")


@ACTIONS
async def test_once_its_record_has_expired_the_action_is_stale_and_done_once(
    world: World, act: Act
) -> None:
    await prepare(world.ada)
    key, made_at = new_key(), world.clock.at - GRACE - HOUR
    ok(await act(world.ada, key=key, at=made_at))
    before = await snapshot(world.ada)
    world.clock.move(CAP)
    refused(await act(world.ada, key=key, at=made_at), 422, "STALE_ACTION")
    assert await snapshot(world.ada) == before


@ACTIONS
async def test_a_stale_attempt_leaves_a_record_and_its_answer_stands(
    world: World, act: Act
) -> None:
    await prepare(world.ada)
    key, made_at = new_key(), world.clock.at - timedelta(days=8)
    first = await act(world.ada, key=key, at=made_at)
    refused(first, 422, "STALE_ACTION")
    [record] = await world.store.records(RecordQuery(tenant="ada", key=key))
    assert (record.status, record.body) == (422, first.content)
    assert record.expires_at - record.created_at == timedelta(days=7)
    world.clock.move(HOUR)
    again = await act(world.ada, key=key, at=made_at)
    assert (again.status_code, again.content) == (422, first.content)
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_stale_attempt_is_no_audit_event(sqlite_world: World) -> None:
    world = sqlite_world
    refused(await world.ada.allocate(ROOT, at=world.clock.at - 8 * CAP), 422, "STALE_ACTION")
    assert await world.count("audit_events") == 0
    assert await world.count("idempotency_records") == 1
    assert await world.count("walkers") == 0


async def test_a_changed_time_under_the_same_key_is_a_conflict_not_a_second_chance(
    sqlite_world: World,
) -> None:
    world = sqlite_world
    await prepare(world.ada)
    key = new_key()
    refused(
        await world.ada.allocate(ROOT, key=key, at=world.clock.at - 2 * CAP), 422, "STALE_ACTION"
    )
    refused(await world.ada.allocate(ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
    assert await world.ada.allocated() == []


# -- a walker who moves the clock -----------------------------------------------------------------


@pytest.mark.parametrize("off", [timedelta(days=-30), timedelta(days=30)])
async def test_a_device_whose_clock_is_a_month_off_gets_nothing_through(
    world: World, off: timedelta
) -> None:
    await prepare(world.ada)
    before = await snapshot(world.ada)
    on_the_device = world.clock.at + off
    for act in EACH:
        refused(await act(world.ada, at=on_the_device), 422, "STALE_ACTION")
    assert await snapshot(world.ada) == before
    # With the clock put right, the same person does the same things.
    for act in EACH:
        ok(await act(world.ada))


async def test_a_queue_whose_times_are_kept_fresh_by_hand_is_only_as_good_as_its_keys(
    world: World,
) -> None:
    await prepare(world.ada)
    key, made_at = new_key(), world.clock.at
    ok(await world.ada.allocate(ROOT, key=key, at=made_at))
    for days in (1, 3, 6):
        world.clock.at = made_at + timedelta(days=days)
        refused(await world.ada.allocate(ROOT, key=key), 409, "IDEMPOTENCY_CONFLICT")
        refused(await world.ada.allocate(ROOT), 409, "ALREADY_ALLOCATED")
    assert await world.ada.points() == 1


async def test_cap_and_grace_are_settings(open_world: OpenWorld) -> None:
    settings = {"walk_staleness_cap_days": 0.5, "walk_staleness_grace_hours": 0}
    async with open_world(HeldClock(), **settings) as world:
        await world.ada.finish(QUEST)
        late = world.clock.at - timedelta(hours=12)
        details = refused(await world.ada.allocate(ROOT, at=late - TICK), 422, "STALE_ACTION")
        assert (details["capDays"], details["graceHours"]) == (0.5, 0)
        ok(await world.ada.allocate(ROOT, at=late))


async def test_staleness_comes_before_the_handler_looks_at_anything(sqlite_world: World) -> None:
    """Neither the node nor the body's other fields matter where the action is too old."""
    at: datetime = sqlite_world.clock.at - 2 * CAP
    refused(await sqlite_world.ada.allocate("node.none", at=at), 422, "STALE_ACTION")
    refused(await sqlite_world.ada.complete("quest.none", at=at), 422, "STALE_ACTION")
    refused(await sqlite_world.ada.advance("quest.none", 1, at=at), 422, "STALE_ACTION")
    assert await sqlite_world.count("walkers") == 0
