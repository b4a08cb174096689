"""Claims ahead: several entries of a lane are claimed at once and still sent in order."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
import pytest

from onceward_outbox import EventKind, OutboxQueue
from onceward_outbox.backoff import Outages
from onceward_outbox.batch_offer import Batches
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Status
from onceward_outbox.sender import Sender
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.clock import SystemClock
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    Scripted,
    activity,
    drain,
    response,
)
from packages.outbox.tests.outcomes import release, retry_later, succeed
from packages.outbox.tests.queue_harness import Lab, local, new, walk

LANE = "in order"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        yield queue


def steps(count: int) -> list[NewEntry]:
    return [
        NewEntry(
            user_id="ada",
            operation="create",
            entity_type="quest",
            endpoint=f"/quest/quest.001/step/{number}/advance",
            payload={},
            profile="walk",
        )
        for number in range(1, count + 1)
    ]


def step_of(request: Request) -> int:
    return int(request.target.split("/")[4])


def title_of(request: Request) -> str:
    return str(json.loads(request.body or b"{}")["title"])


def refusing(
    number: int, refusal: Response | NoResponse
) -> Callable[[Request], Response | NoResponse]:
    """Response everything but one step, and that one only the first time."""
    refused: list[int] = []

    def reply(request: Request) -> Response | NoResponse:
        if step_of(request) == number and not refused:
            refused.append(number)
            return refusal
        return response(200, {})

    return reply


def test_claim_some_has_the_order_of_single_claims(tmp_path: Path) -> None:
    chance = Random(14)
    news = [
        new(
            id=str(UUID(int=chance.getrandbits(128))),
            lane=chance.choice(["a", "b", "c", None]),
            priority=chance.choice([1, 5, 9]),
        )
        for _ in range(60)
    ]
    orders = []
    for name in ("one", "some"):
        with OutboxQueue.open(tmp_path / f"{name}.db") as queue:
            queue.add_user("ada")
            queue.enqueue_many(news)
            order = []
            if name == "one":
                while (claimed := queue.claim("ada")) is not None:
                    order.append(succeed(queue, claimed).id)
            else:
                for claimed in queue.claim_some("ada", 100):
                    order.append(claimed.entry.id)
                    succeed(queue, claimed)
            orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 60


def test_no_more_than_the_limit_is_claimed(lab: Lab) -> None:
    lab.queue.enqueue_many([walk() for _ in range(5)])
    first = lab.queue.claim_some("ada", 3)
    assert [claimed.entry.sequence_number for claimed in first] == [1, 2, 3]
    # The lane is held by the head of what was claimed.
    assert lab.queue.claim_some("ada", 3) == []
    assert lab.queue.claim("ada") is None
    for claimed in first:
        succeed(lab.queue, claimed)
    assert [claimed.entry.sequence_number for claimed in lab.queue.claim_some("ada", 3)] == [4, 5]


def test_an_entry_with_open_dependencies_is_not_claimed_ahead(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    lab.add(operation="update", endpoint=f"/api/v1/activities/{{local:{ref}}}")
    assert len(lab.queue.claim_some("ada", 10)) == 1


def test_an_entry_waiting_for_its_retry_ends_the_claims_of_its_lane(lab: Lab) -> None:
    lab.queue.enqueue_many([walk() for _ in range(4)])
    held = lab.queue.claim_some("ada", 2)
    retry_later(lab.queue, held[1], delay_seconds=60)
    release(lab.queue, held[0])
    assert [claimed.entry.sequence_number for claimed in lab.queue.claim_some("ada", 10)] == [1]


def test_expired_claims_of_a_lane_are_sent_again_in_order(lab: Lab) -> None:
    entries = lab.queue.enqueue_many([walk() for _ in range(4)])
    succeed(lab.queue, lab.queue.claim_some("ada", 4)[0])
    lab.clock.pass_by(minutes=2)
    assert [entry.id for entry in lab.queue.watchdog()] == [entry.id for entry in entries[1:]]
    again = lab.queue.claim_some("ada", 4)
    assert [claimed.entry.id for claimed in again] == [entry.id for entry in entries[1:]]
    assert all(claimed.entry.outcome_unknown for claimed in again)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (response(409, {"code": "concurrency.version_mismatch"}), Status.CONFLICT),
        (response(503, {}), Status.PENDING),
        (NoResponse("no response: the connection broke"), Status.PENDING),
        (response(401, {}), Status.PENDING),
        (response(302, {}), Status.PENDING),
    ],
)
def test_nothing_behind_an_entry_that_did_not_happen_is_sent(
    queue: OutboxQueue, refusal: Response | NoResponse, status: Status
) -> None:
    entries = queue.enqueue_many(steps(40))
    server = Scripted(refusing(12, refusal))
    drain(queue, "ada", server, "t")
    assert [step_of(request) for request in server.requests] == list(range(1, 13))
    assert queue.get(entries[11].id).status is status
    behind = [queue.get(entry.id) for entry in entries[12:]]
    assert {(entry.status, entry.attempt_count) for entry in behind} == {(Status.PENDING, 0)}
    assert not any(entry.outcome_unknown for entry in behind)
    assert all(queue.attempts(entry.id) == [] for entry in behind)


def test_a_lane_continues_in_order_after_a_retry(queue: OutboxQueue) -> None:
    queue.enqueue_many(steps(40))
    server = Scripted(refusing(20, NoResponse("no response: the connection broke")))
    report = drain(queue, "ada", server, max_seconds=20, retry=SOON)
    assert [step_of(request) for request in server.requests] == [
        *range(1, 21),
        *range(20, 41),
    ]
    assert (report.succeeded, report.ended) == (40, Ended.EMPTY)


@pytest.mark.parametrize("lanes", [(None,), ("a", "b", "c")])
def test_losing_every_third_response_does_not_always_hit_the_same_entry(
    queue: OutboxQueue, lanes: tuple[str | None, ...]
) -> None:
    entries = [activity("ada", f"{n}", lane=lanes[n % len(lanes)]) for n in range(30)]
    queue.enqueue_many(entries)
    sent: list[str] = []

    def reply(request: Request) -> Response | NoResponse:
        sent.append(title_of(request))
        # Three of these are what the drain does between two commits.
        time.sleep(0.017)
        if len(sent) % 3 == 0:
            return NoResponse("no response: the connection was closed")
        return response(201, {"id": title_of(request)})

    report = drain(queue, "ada", Scripted(reply), max_seconds=60, retry=SOON)
    assert (report.succeeded, report.failed) == (30, 0)
    for lane in lanes:
        order = [title for title in dict.fromkeys(sent) if entries[int(title)].lane == lane]
        if lane is not None:
            assert order == sorted(order, key=int)


def test_a_retried_entry_has_a_random_position_but_keeps_the_order_of_its_lane(
    queue: OutboxQueue,
) -> None:
    queue.enqueue_many([activity("ada", f"{n}", lane=lane) for n, lane in enumerate("ABABAB")])
    claims = queue.claim_some("ada", 6)
    tried, others = claims[2], [*claims[:2], *claims[3:]]
    assert (tried.entry.lane, [one.entry.lane for one in others]) == ("A", [*"ABBAB"])
    places = set()
    for chance in (0.0, 0.3, 0.6, 0.999):
        dispatcher = Sender(
            queue,
            Scripted([]),
            None,
            clock=SystemClock(),
            outages=Outages(SystemClock().monotonic),
            batches=Batches(queue.settings, SystemClock().monotonic),
            chance=lambda chance=chance: chance,  # type: ignore[misc]
        )
        places.add(dispatcher.retry_position(tried, others))
        assert dispatcher.retry_position(tried, []) == 0
    # Behind the first A, before the last.
    assert places == {1, 2, 3}


@pytest.mark.parametrize("code", ["PREREQUISITES_NOT_MET", "IDEMPOTENCY_CONFLICT"])
def test_nothing_of_its_chain_is_sent_behind_a_refused_entry(queue: OutboxQueue, code: str) -> None:
    entries = queue.enqueue_many(steps(40))
    other = queue.enqueue(
        msgspec.structs.replace(steps(1)[0], endpoint="/quest/quest.002/step/1/start")
    )
    server = Scripted(refusing(12, response(422, {"error": code})))
    drain(queue, "ada", server, "t")
    assert [step_of(request) for request in server.requests[:12]] == list(range(1, 13))
    assert [request.target for request in server.requests[12:]] == [other.endpoint]
    behind = [queue.get(entry.id) for entry in entries[11:]]
    assert {entry.status for entry in behind} == {Status.FAILED}
    assert all(queue.attempts(entry.id) == [] for entry in behind[1:])


def test_an_expired_entry_does_not_block_its_lane(queue: OutboxQueue) -> None:
    queue.enqueue_many(steps(30))
    server = Scripted(refusing(9, response(422, {"error": "STALE_ACTION"})))
    report = drain(queue, "ada", server)
    assert [step_of(request) for request in server.requests] == list(range(1, 31))
    assert (report.succeeded, report.expired) == (29, 1)


def test_other_lanes_continue_after_a_refusal(queue: OutboxQueue) -> None:
    queue.enqueue_many(
        [activity("ada", f"{lane} {n}", lane=lane) for n in range(15) for lane in ("a", "b")]
    )

    def reply(request: Request) -> Response:
        if title_of(request) == "a 7":
            return response(422, {"code": "request.invalid"})
        return response(201, {"id": title_of(request)})

    server = Scripted(reply)
    drain(queue, "ada", server, max_seconds=20, retry=SOON)
    sent = [title_of(request) for request in server.requests]
    assert [title for title in sent if title[0] == "b"] == [f"b {n}" for n in range(15)]
    assert list(dict.fromkeys(title for title in sent if title[0] == "a")) == [
        f"a {n}" for n in range(15)
    ]


def test_a_rebuild_includes_entries_that_were_claimed_ahead(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many(steps(20))
    board = {
        "quests": [
            {"questId": "quest.001", "currentStep": 15, "steps": 20, "status": "in_progress"}
        ]
    }
    out_of_order = response(422, {"error": "STEP_OUT_OF_ORDER"})

    def reply(request: Request) -> Response:
        if request.method == "GET":
            return response(200, board)
        return out_of_order if 9 <= step_of(request) < 15 else response(200, {})

    server = Scripted(reply)
    report = drain(queue, "ada", server)
    sent = [step_of(request) for request in server.requests if request.method == "POST"]
    assert sent == [*range(1, 10), *range(15, 21)]
    assert {queue.get(entry.id).status for entry in entries[8:14]} == {Status.DISCARDED}
    assert (report.rebuilt, report.ended) == (1, Ended.EMPTY)


def test_when_the_network_becomes_slow_claims_ahead_are_released(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many(steps(60))
    now = [0.0]

    class Clock:
        def now(self) -> object:
            return queue.server_now()

        def monotonic(self) -> float:
            return now[0]

    undone: list[str] = []

    def reply(request: Request) -> Response:
        number = step_of(request)
        if number > 16:
            now[0] += 1.0  # each response takes a second from here on
        if number == 20:
            # By then it was claimed, together with the sixteenth.
            assert queue.get(entries[28].id).claim_number == 1
            undone.append(queue.cancel(entries[28].id).id)
        return response(200, {})

    worker = Drain(queue, Scripted(reply), clock=Clock())  # type: ignore[arg-type]
    report = worker.run("ada")
    assert undone == [entries[28].id]
    assert report.succeeded == 59


def test_a_stop_releases_claims_ahead(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many(steps(40))
    heard = []
    queue.subscribe(lambda event: heard.append(event.kind))

    def reply(request: Request) -> Response:
        if step_of(request) == 10:
            raise KeyboardInterrupt
        return response(200, {})

    with pytest.raises(KeyboardInterrupt):
        drain(queue, "ada", Scripted(reply))
    statuses = [queue.get(entry.id).status for entry in entries]
    assert statuses == [Status.SUCCEEDED] * 9 + [Status.PENDING] * 31
    assert [queue.get(entry.id).outcome_unknown for entry in entries[9:12]] == [True, False, False]
    assert EventKind.RELEASED in heard
