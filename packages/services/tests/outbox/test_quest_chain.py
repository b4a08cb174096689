"""The quest chain of walk: done steps are dropped, the next ones sent, the rest parked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import EventKind, OutboxQueue
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import Entry, NewEntry, Reason, Status
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    Scripted,
    drain,
    reader,
    response,
    token_of,
)
from packages.services.tests.cli.conftest import Server

QUEST = "quest.002"


def action(user: str, endpoint: str, **payload: Any) -> NewEntry:
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="quest",
        endpoint=endpoint,
        payload=payload,
        profile="walk",
    )


def step(user: str, number: int) -> NewEntry:
    return action(user, f"/quest/{QUEST}/step/{number}/advance")


def complete(user: str) -> NewEntry:
    return action(user, "/quest/complete", questId=QUEST)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        yield queue


class Quests:
    """A server with one quest of so many steps, of which some are done."""

    def __init__(self, steps: int, current: int, status: str = "in_progress") -> None:
        self.steps, self.current, self.status = steps, current, status
        self.done: list[int] = []

    def __call__(self, request: Request) -> Response | NoResponse:
        if request.target == "/quest/available":
            quest = {
                "questId": QUEST,
                "steps": self.steps,
                "currentStep": self.current,
                "status": self.status,
            }
            return response(200, {"quests": [{"questId": "quest.001"}, quest]})
        if request.target == "/quest/complete":
            return response(200, {})
        number = int(request.target.split("/")[4])
        if number != self.current or self.status != "in_progress":
            return response(422, {"error": "STEP_OUT_OF_ORDER"})
        self.done.append(number)
        self.current += 1
        return response(200, {})


def results(queue: OutboxQueue, entries: list[Entry]) -> list[tuple[Status, Reason | None]]:
    return [(queue.get(entry.id).status, queue.get(entry.id).reason) for entry in entries]


SENT = (Status.SUCCEEDED, None)
DROPPED = (Status.DISCARDED, Reason.REBUILD)
PARKED = (Status.FAILED, Reason.REBUILD)


def test_steps_that_another_device_has_done_are_dropped_and_the_rest_is_sent(
    queue: OutboxQueue,
) -> None:
    entries = queue.enqueue_many([step("ada", number) for number in (1, 2, 3)] + [complete("ada")])
    server = Quests(steps=3, current=3)
    report = drain(queue, "ada", Scripted(server))
    assert (report.ended, report.rebuilt) == (Ended.EMPTY, 1)
    assert results(queue, entries) == [DROPPED, DROPPED, SENT, SENT]
    assert server.done == [3]


def test_a_chain_with_a_missing_step_is_parked_with_events(
    queue: OutboxQueue,
) -> None:
    heard: list[EventKind] = []
    queue.subscribe(lambda event: heard.append(event.kind))
    entries = queue.enqueue_many([step("ada", 3), step("ada", 4), complete("ada")])
    server = Scripted(Quests(steps=7, current=2))
    report = drain(queue, "ada", server)
    assert report.ended is Ended.BLOCKED
    assert [request.target for request in server.requests][1:] == ["/quest/available"]
    assert results(queue, entries) == [PARKED, PARKED, PARKED]
    assert "waits for step 2 of 7" in (queue.get(entries[1].id).last_error or "")
    assert heard.count(EventKind.FAILED) == 3
    assert EventKind.PAUSED in heard


def test_steps_queued_in_the_wrong_order_are_renumbered(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many([step("ada", 3), step("ada", 2), complete("ada")])
    server = Quests(steps=3, current=2)
    report = drain(queue, "ada", Scripted(server))
    assert report.ended is Ended.EMPTY
    assert server.done == [2, 3]
    assert results(queue, entries) == [SENT, SENT, SENT]
    renumbered = queue.get(entries[0].id)
    assert renumbered.endpoint == f"/quest/{QUEST}/step/2/advance"
    assert renumbered.idempotency_key != entries[0].idempotency_key


def test_a_step_that_is_queued_twice_is_sent_once(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many([step("ada", 2), step("ada", 1), step("ada", 1), step("ada", 2)])
    server = Quests(steps=3, current=1)
    assert drain(queue, "ada", Scripted(server)).ended is Ended.EMPTY
    assert server.done == [1, 2]
    assert results(queue, entries) == [SENT, SENT, DROPPED, DROPPED]


def test_a_quest_that_is_completed_has_nothing_left_to_send(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many([step("ada", 2), complete("ada")])
    assert drain(queue, "ada", Scripted(Quests(3, 4, "completed"))).ended is Ended.EMPTY
    assert results(queue, entries) == [DROPPED, DROPPED]


def test_other_quests_are_left_alone_and_do_not_wait_behind_what_is_parked(
    queue: OutboxQueue,
) -> None:
    parked = queue.enqueue(step("ada", 3))
    other = queue.enqueue(action("ada", "/energy/spend"))
    quests = Quests(7, 2)

    def reply(request: Request) -> Response | NoResponse:
        return response(200, {}) if request.target == other.endpoint else quests(request)

    drain(queue, "ada", Scripted(reply))
    assert queue.get(parked.id).status is Status.FAILED
    assert queue.get(other.id).status is Status.SUCCEEDED


def test_quests_that_cannot_be_read_are_read_at_the_next_attempt(queue: OutboxQueue) -> None:
    entry = queue.enqueue(step("ada", 1))
    out_of_order = response(422, {"error": "ORDERING_VIOLATION"})
    board = Quests(3, 2)(Request("GET", "/quest/available", {}))
    server = Scripted([out_of_order, response(503), out_of_order, board])
    drain(queue, "ada", server, max_seconds=5, retry=SOON)
    assert results(queue, [entry]) == [DROPPED]


def test_an_entry_fails_after_three_rebuilds(queue: OutboxQueue) -> None:
    entry = queue.enqueue(step("ada", 1))
    board = Quests(3, 1)(Request("GET", "/quest/available", {}))

    def reply(request: Request) -> Any:
        return board if request.method == "GET" else response(422, {"error": "STEP_OUT_OF_ORDER"})

    assert drain(queue, "ada", Scripted(reply)).ended is Ended.BLOCKED
    assert results(queue, [entry]) == [PARKED]


def test_two_devices_of_one_walker_finish_a_quest_together_on_a_real_server(
    queue: OutboxQueue, tmp_path: Path, server: Server
) -> None:
    user = f"walker-{uuid4()}"
    with OutboxQueue.open(tmp_path / "tablet.db") as tablet:
        for device in (queue, tablet):
            device.add_user(user)
            device.enqueue(action(user, "/quest/start", questId=QUEST))
        tablet.enqueue_many([step(user, 1), step(user, 2)])
        mine = queue.enqueue_many([*(step(user, n) for n in (1, 2, 3)), complete(user)])
        with HttpTransport(server.url) as transport:
            assert drain(tablet, user, transport, token_of).ended is Ended.EMPTY
            assert drain(queue, user, transport, token_of).ended is Ended.EMPTY
    assert results(queue, mine) == [DROPPED, DROPPED, SENT, SENT]
    with reader(server.url, user) as client:
        quests = client.get("/quest/available").json()["quests"]
    assert {q["questId"]: q["status"] for q in quests}[QUEST] == "completed"
