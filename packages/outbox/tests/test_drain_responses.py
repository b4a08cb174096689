"""What each response does to the queue, with a scripted server."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward_outbox import EventKind, OutboxQueue, Profile, QueueSettings, TimestampsInBody
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import Entry, NewEntry, OnRefusal, Reason, Status
from onceward_outbox.events import Event
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_services.field.outbox_profile import PROFILE as FIELD
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    Scripted,
    activity,
    drain,
    response,
)
from packages.outbox.tests.outcomes import release

IN_A_SECOND = RetryPolicy(first_seconds=1, ceiling_seconds=1, jitter=Jitter.PLUS_MINUS)
NETWORK_DOWN = NoResponse("could not connect: refused", may_have_been_sent=False)
SILENCE = NoResponse("no response: the connection broke")


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        queue.add_user("bo")
        yield queue


@pytest.fixture
def events(queue: OutboxQueue) -> list[Event]:
    heard: list[Event] = []
    queue.subscribe(heard.append)
    return heard


def kinds(events: list[Event]) -> list[EventKind]:
    return [event.kind for event in events]


def step(number: int, quest: str = "quest.001") -> NewEntry:
    return NewEntry(
        user_id="ada",
        operation="create",
        entity_type="quest",
        endpoint=f"/quest/{quest}/step/{number}/advance",
        payload={},
        profile="walk",
    )


def created(request: Request) -> Response:
    return response(201, {"id": f"server-{json.loads(request.body or b'{}').get('title')}"})


def refusing(title: str, status: int = 400) -> Callable[[Request], Response]:
    def reply(request: Request) -> Response:
        if title in (request.body or b"").decode():
            return response(status, {"code": "request.invalid"})
        return created(request)

    return reply


# -- the request ----------------------------------------------------------------------------------


def test_a_request_has_the_key_and_the_time_of_the_action(queue: OutboxQueue) -> None:
    at = datetime(2026, 3, 1, 9, 30, tzinfo=UTC)
    entry = queue.enqueue(
        activity("ada", "visit", client_generated_at=at, headers={"X-App": "field 7"})
    )
    server = Scripted(created)
    drain(queue, "ada", server, "secret")
    (request,) = server.requests
    assert (request.method, request.target) == ("POST", "/api/v1/activities")
    assert json.loads(request.body or b"") == {"title": "visit"}
    assert request.headers == {
        "X-App": "field 7",
        "X-Correlation-ID": entry.id,
        "Idempotency-Key": entry.idempotency_key,
        "X-Client-Generated-At": "2026-03-01T09:30:00.000000Z",
        "Content-Type": "application/json",
        "Authorization": "Bearer secret",
    }


def test_timestamps_in_the_body_replace_the_header_and_only_the_second_changes(
    tmp_path: Path,
) -> None:
    shop = Profile(
        name="shop",
        payload_must_be_object=True,
        request_format=TimestampsInBody(key_in_body=frozenset({"/orders"})),
    )
    with OutboxQueue.open(tmp_path / "shop.db", profiles=[shop]) as queue:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="create",
                entity_type="order",
                endpoint="/orders",
                payload={"n": 1},
                profile="shop",
            )
        )
        server = Scripted([SILENCE, response(200, {})])
        drain(queue, "ada", server, max_seconds=5, retry=SOON)
    first, second = (json.loads(request.body or b"") for request in server.requests)
    assert set(first) == {"n", "clientGeneratedAt", "clientSubmittedAt", "idempotencyKey"}
    assert first["idempotencyKey"] == entry.idempotency_key
    assert first["clientGeneratedAt"] == second["clientGeneratedAt"]
    assert first["clientSubmittedAt"] < second["clientSubmittedAt"]
    assert "X-Client-Generated-At" not in server.requests[0].headers


def test_operations_are_sent_as_their_methods(queue: OutboxQueue) -> None:
    for operation in ("create", "update", "patch", "delete"):
        queue.enqueue(
            NewEntry(
                user_id="ada",
                operation=operation,
                entity_type="activity",
                endpoint=f"/api/v1/activities/{operation}",
            )
        )
    server = Scripted(lambda _: response(204))
    drain(queue, "ada", server)
    assert [request.method for request in server.requests] == ["POST", "PUT", "PATCH", "DELETE"]
    assert all(request.body is None for request in server.requests)


# -- the scenarios of stress ----------------------------------------------------------------------


def test_an_action_that_the_server_finds_stale_expires_with_an_event(
    queue: OutboxQueue, events: list[Event]
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=30)
    entry = queue.enqueue(
        NewEntry(
            user_id="ada",
            operation="create",
            entity_type="quest",
            endpoint="/quest/complete",
            payload={"questId": "quest.001"},
            profile="walk",
            client_generated_at=long_ago,
        )
    )
    server = Scripted([response(422, {"error": "STALE_ACTION"})])
    report = drain(queue, "ada", server)
    assert len(server.requests) == 1, "the device judged by its own clock"
    assert (report.expired, queue.get(entry.id).status) == (1, Status.EXPIRED)
    assert EventKind.EXPIRED in kinds(events)


def test_a_connection_lost_in_the_middle_keeps_the_keys_of_the_rest(
    queue: OutboxQueue,
) -> None:
    entries = queue.enqueue_many([step(number) for number in range(1, 6)])
    server = Scripted([response(200, {}), response(200, {}), SILENCE])
    report = drain(queue, "ada", server, retry=IN_A_SECOND)
    assert (report.ended, report.succeeded, report.unsent) == (Ended.WAITING, 2, 3)
    left = [queue.get(entry.id) for entry in entries[2:]]
    assert [entry.attempt_count for entry in left] == [1, 0, 0]
    assert left[0].outcome_unknown
    again = Scripted(lambda _: response(200, {}))
    assert drain(queue, "ada", again, max_seconds=10).succeeded == 3
    assert again.keys == [entry.idempotency_key for entry in entries[2:]]


def test_the_same_key_enqueued_twice_is_sent_once(queue: OutboxQueue) -> None:
    key = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    first = queue.enqueue(activity("ada", "visit", key=key))
    assert queue.enqueue(activity("ada", "visit", key=key)).id == first.id
    server = Scripted(created)
    drain(queue, "ada", server)
    assert server.keys == [key]


def test_a_payload_mismatch_fails_the_entry(queue: OutboxQueue, events: list[Event]) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    drain(queue, "ada", Scripted([response(409, code="idempotency.payload_mismatch")]))
    failed = queue.get(entry.id)
    assert (failed.status, failed.last_error_code) == (Status.FAILED, 409)
    assert EventKind.FAILED in kinds(events)


def test_a_replayed_success_is_a_success(queue: OutboxQueue) -> None:
    queue.enqueue(activity("ada", "visit"))
    replay = response(201, {"id": "a"}, {"idempotency-replayed": "true"})
    assert drain(queue, "ada", Scripted([replay])).ended is Ended.EMPTY


def test_five_errors_in_a_row_are_delayed_5_10_20_40_and_80_seconds(
    queue: OutboxQueue, events: list[Event]
) -> None:
    queue.enqueue(step(1))
    delays = []
    for _ in range(5):
        claimed = queue.claim("ada")
        assert claimed is not None
        release(queue, claimed)  # only to see that the entry is due
        drain(queue, "ada", Scripted([response(500)]))
        delays.append([e.delay_seconds for e in events if e.kind is EventKind.RETRYING][-1])
        _make_due(queue)
    assert delays == [5, 10, 20, 40, 80]


def _make_due(queue: OutboxQueue) -> None:
    with queue.transaction() as connection:
        connection.execute("UPDATE offline_sync_queue SET due_ms = NULL, next_retry_at = NULL")


def test_after_twelve_attempts_of_one_wake_up_an_entry_stays_queued(
    queue: OutboxQueue,
) -> None:
    entry = queue.enqueue(step(1))
    server = Scripted(lambda _: response(500))
    worker = Drain(queue, server)
    for _ in range(13):
        _make_due(queue)
        report = worker.run("ada")
    assert len(server.requests) == 12
    assert (report.ended, queue.get(entry.id).status) == (Ended.WAITING, Status.PENDING)
    worker.wake_up()
    _make_due(queue)
    worker.run("ada")
    assert len(server.requests) == 13


# -- transient failures ---------------------------------------------------------------------------


def test_an_entry_fails_after_max_attempts(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit", max_attempts=3))
    server = Scripted(lambda _: response(500))
    report = drain(queue, "ada", server, max_seconds=5, retry=SOON)
    assert (len(server.requests), report.failed) == (3, 1)
    assert queue.get(entry.id).reason is Reason.ATTEMPTS
    assert len(set(server.keys)) == 1


def test_being_offline_fails_no_entry(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit", max_attempts=2))
    for _ in range(6):
        report = drain(queue, "ada", Scripted([NETWORK_DOWN]))
        assert report.ended is Ended.OFFLINE
    waiting = queue.get(entry.id)
    assert (waiting.status, waiting.outcome_unknown) == (Status.PENDING, False)
    drain(queue, "ada", Scripted([response(500)]))
    assert queue.get(entry.id).status is Status.PENDING, "offline attempts were counted"
    _make_due(queue)
    assert drain(queue, "ada", Scripted(created)).succeeded == 1


def test_without_a_network_one_entry_is_tried_and_not_all_of_them(queue: OutboxQueue) -> None:
    queue.enqueue_many([activity("ada", f"visit {number}") for number in range(5)])
    server = Scripted(lambda _: NETWORK_DOWN)
    report = drain(queue, "ada", server)
    assert len(server.requests) == 1
    assert (report.tried, report.sent, report.unsent) == (1, 0, 5)


def test_refused_connections_are_tried_and_not_sent(
    queue: OutboxQueue, events: list[Event]
) -> None:
    queue.enqueue(activity("ada", "visit"))
    server = Scripted([NETWORK_DOWN] * 3 + [response(201, {"id": "1"})])
    report = drain(queue, "ada", server, max_seconds=10, retry=SOON)
    assert (report.ended, report.tried, report.sent) == (Ended.EMPTY, 4, 1)
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.SENT) == 1
    assert [event.count for event in events if event.kind is EventKind.DRAINED] == [1]


def test_refused_entry_is_not_unsent_and_does_not_block_later_drains(queue: OutboxQueue) -> None:
    queue.enqueue(activity("ada", "poison"))
    for failed in (1, 0):
        report = drain(queue, "ada", Scripted(refusing("poison")))
        assert (report.ended, report.failed) == (Ended.EMPTY, failed)
        assert (report.unsent, report.refused) == (0, 1)


def test_three_sends_without_a_response_hold_the_drain(queue: OutboxQueue) -> None:
    queue.enqueue_many([activity("ada", f"visit {number}") for number in range(9)])
    server = Scripted(lambda _: SILENCE)
    report = drain(queue, "ada", server)
    assert report.ended is Ended.OFFLINE
    assert len(server.requests) == 3
    assert (report.tried, report.sent) == (3, 3)


def test_retry_after_is_a_floor(queue: OutboxQueue, events: list[Event]) -> None:
    queue.enqueue(activity("ada", "visit"))
    report = drain(queue, "ada", Scripted([response(429, headers={"retry-after": "60"})]))
    assert [e.delay_seconds for e in events if e.kind is EventKind.RETRYING] == [60]
    assert report.next_due_seconds == pytest.approx(60, abs=5)


def test_a_redirect_is_not_followed_and_fails_no_entry(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many([activity("ada", str(number)) for number in range(5)])
    server = Scripted(lambda _: response(302, headers={"location": "https://evil.example/"}))
    report = drain(queue, "ada", server)
    # Three in a row are a hotel's sign-in page, and the rest is not tried.
    assert (report.ended, len(server.requests)) == (Ended.OFFLINE, 3)
    assert "redirect" in (report.detail or "")
    assert {queue.get(entry.id).status for entry in entries} == {Status.PENDING}
    (attempt,) = queue.attempts(entries[0].id)
    assert (attempt.status, attempt.code) == (302, "unreachable")


def test_a_redirect_of_one_endpoint_does_not_hold_other_entries(queue: OutboxQueue) -> None:
    moved = queue.enqueue(activity("ada", "moved"))
    queue.enqueue(activity("ada", "here"))

    def reply(request: Request) -> Response:
        if b"moved" in (request.body or b""):
            return response(307, headers={"location": "https://elsewhere.example/"})
        return created(request)

    report = drain(queue, "ada", Scripted(reply))
    assert (report.ended, report.succeeded) == (Ended.WAITING, 1)
    assert queue.get(moved.id).status is Status.PENDING


@pytest.mark.parametrize(
    "location", ["/api/v1/activities/", "http://HERE:8000/base/api/v1/Activities/?x=1"]
)
def test_a_redirect_to_another_path_of_the_server_fails_the_entry(
    queue: OutboxQueue, location: str
) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    server = Scripted([response(307, headers={"location": location})])
    server.origin = "http://here:8000"  # type: ignore[attr-defined]
    assert drain(queue, "ada", server).failed == 1
    assert location in (queue.get(entry.id).last_error or "")


@pytest.mark.parametrize(
    "location", ["https://here:8000/api/v1/activities", "/login?next=/api/v1/activities", "", "//["]
)
def test_a_redirect_to_another_host_fails_no_entry(queue: OutboxQueue, location: str) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    server = Scripted([response(302, headers={"location": location})])
    server.origin = "http://here:8000"  # type: ignore[attr-defined]
    assert drain(queue, "ada", server).failed == 0
    assert queue.get(entry.id).status is Status.PENDING


def test_an_unknown_422_is_retried_once_whatever_comes_between(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    odd, busy = response(422, code="surprise"), response(503)
    tokens = iter("abcdefgh")
    server = Scripted([odd, busy, response(401), odd])
    drain(queue, "ada", server, lambda _: next(tokens), max_seconds=20, retry=SOON)
    assert (len(server.requests), queue.get(entry.id).status) == (4, Status.FAILED)


def test_an_unknown_422_is_sent_once_more_and_then_fails(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    server = Scripted(lambda _: response(422, code="surprise"))
    drain(queue, "ada", server, max_seconds=5, retry=SOON)
    assert len(server.requests) == 2
    assert queue.get(entry.id).status is Status.FAILED


def test_a_transport_that_raises_leaves_the_entry_pending(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))

    def broken(_: Request) -> Response:
        raise RuntimeError("a bug in the transport")

    with pytest.raises(RuntimeError):
        drain(queue, "ada", Scripted(broken))
    back = queue.get(entry.id)
    assert (back.status, back.outcome_unknown) == (Status.PENDING, True)


# -- signing in -----------------------------------------------------------------------------------


def test_401_pauses_the_queue_and_is_no_failure_of_the_entry(
    queue: OutboxQueue, events: list[Event]
) -> None:
    entries = queue.enqueue_many([activity("ada", "one"), activity("ada", "two")])
    server = Scripted([response(401, code="auth.required")])
    report = drain(queue, "ada", server, "old-token")
    assert (report.ended, report.unsent) == (Ended.SIGNED_OUT, 2)
    assert [queue.get(entry.id).status for entry in entries] == [Status.PENDING] * 2
    assert queue.get(entries[0].id).attempt_count == 0
    assert EventKind.PAUSED in kinds(events)


def test_a_token_that_was_renewed_meanwhile_is_used_at_once(queue: OutboxQueue) -> None:
    queue.enqueue(activity("ada", "visit"))
    tokens = iter(["old", "new", "new"])

    def reply(request: Request) -> Response:
        is_new = request.headers["Authorization"] == "Bearer new"
        return created(request) if is_new else response(401)

    server = Scripted(reply)
    report = drain(queue, "ada", server, lambda _: next(tokens))
    assert (report.ended, len(server.requests)) == (Ended.EMPTY, 2)
    assert len(set(server.keys)) == 1


def test_a_second_refused_token_ends_the_drain(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    minted = iter(range(1000))
    server = Scripted(lambda _: response(401, headers={"x-request-id": "r"}, code="auth.required"))
    report = drain(queue, "ada", server, lambda _: f"token-{next(minted)}", max_seconds=20)
    assert (report.ended, len(server.requests)) == (Ended.SIGNED_OUT, 2)
    assert queue.get(entry.id).attempt_count == 0
    told = [(one.status, one.code, one.request_id) for one in queue.attempts(entry.id)]
    assert told == [(401, "auth.required", "r")] * 2


def test_a_token_function_that_raises_after_a_response_releases_the_entry(
    queue: OutboxQueue,
) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    tokens = iter(["old"])
    with pytest.raises(StopIteration):
        drain(queue, "ada", Scripted([response(401)]), lambda _: next(tokens))
    assert (queue.get(entry.id).status, queue.get(entry.id).attempt_count) == (Status.PENDING, 0)


def test_a_user_without_a_token_sends_nothing(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))
    server = Scripted([])
    assert drain(queue, "ada", server, lambda _: None).ended is Ended.SIGNED_OUT
    assert queue.attempts(entry.id) == []


def test_a_token_function_that_raises_releases_the_entry(queue: OutboxQueue) -> None:
    entry = queue.enqueue(activity("ada", "visit"))

    def broken(_: str) -> str:
        raise RuntimeError("the key store is locked")

    with pytest.raises(RuntimeError):
        drain(queue, "ada", Scripted([]), broken)
    assert (queue.get(entry.id).status, queue.get(entry.id).attempt_count) == (Status.PENDING, 0)


def test_no_token_is_ever_in_the_file(queue: OutboxQueue, tmp_path: Path) -> None:
    queue.enqueue_many([activity("ada", "one"), activity("ada", "two")])
    secret = "eyJ-a-token-to-look-for"
    drain(queue, "ada", Scripted([response(201, {"id": 1}), response(401)]), secret)
    queue.close()
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"/api/v1/activities" in files
    assert secret.encode() not in files


# -- a poisoned head ------------------------------------------------------------------------------


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[OutboxQueue]:
    """A queue whose lanes stop at a refused entry."""
    profile = dataclasses.replace(FIELD, on_refusal=OnRefusal.STOP)
    with OutboxQueue.open(tmp_path / "stopping.db", profiles=[profile]) as queue:
        queue.add_user("ada")
        queue.add_user("bo")
        yield queue


def test_a_refused_entry_does_not_stop_its_lane(queue: OutboxQueue) -> None:
    head, *behind = (
        queue.enqueue(activity("ada", name, lane="a")) for name in ("poison", "b", "c")
    )
    report = drain(queue, "ada", Scripted(refusing("poison")))
    assert (report.failed, report.succeeded) == (1, 2)
    assert {queue.get(entry.id).status for entry in behind} == {Status.SUCCEEDED}
    assert queue.get(head.id).status is Status.FAILED


def poisoned(queue: OutboxQueue) -> tuple[Entry, Entry]:
    head = queue.enqueue(activity("ada", "poison", lane="a"))
    behind = queue.enqueue(activity("ada", "behind", lane="a"))
    queue.enqueue(activity("ada", "other lane", lane="b"))
    queue.enqueue(activity("bo", "other user"))
    server = Scripted(refusing("poison"))
    report = drain(queue, "ada", server)
    assert (report.ended, report.failed, report.succeeded) == (Ended.BLOCKED, 1, 1)
    assert drain(queue, "bo", server).ended is Ended.EMPTY
    assert queue.get(behind.id).status is Status.PENDING
    assert [entry.id for entry in queue.blocked_by("ada")] == [head.id]
    return head, behind


def test_a_poisoned_head_stops_its_chain_only_and_retry_unblocks_it(stopping: OutboxQueue) -> None:
    head, behind = poisoned(stopping)
    retried = stopping.retry(head.id)
    assert retried.idempotency_key != head.idempotency_key  # its refusal may be stored
    server = Scripted(created)
    assert drain(stopping, "ada", server).ended is Ended.EMPTY
    assert server.keys == [retried.idempotency_key, behind.idempotency_key]


def test_edit_unblocks_a_poisoned_head_with_a_new_key(stopping: OutboxQueue) -> None:
    head, behind = poisoned(stopping)
    edited = stopping.edit_payload(head.id, {"title": "cured"})
    server = Scripted(refusing("poison"))
    assert drain(stopping, "ada", server).ended is Ended.EMPTY
    assert server.keys == [edited.idempotency_key, behind.idempotency_key]
    assert edited.idempotency_key != head.idempotency_key


def test_discard_unblocks_a_poisoned_head(stopping: OutboxQueue) -> None:
    head, behind = poisoned(stopping)
    stopping.discard(head.id)
    server = Scripted(created)
    assert drain(stopping, "ada", server).ended is Ended.EMPTY
    assert server.keys == [behind.idempotency_key]


def test_dependents_of_a_failed_entry_are_parked_and_revived_with_it(
    queue: OutboxQueue,
) -> None:
    local = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    parent = queue.enqueue(activity("ada", "poison", local_id=local))
    child = queue.enqueue(
        NewEntry(
            user_id="ada",
            operation="patch",
            entity_type="activity",
            endpoint=f"/api/v1/activities/{{local:{local}}}",
            payload={"done": True},
        )
    )
    drain(queue, "ada", Scripted(refusing("poison")))
    assert queue.get(child.id).reason is Reason.DEPENDENCY
    queue.retry(parent.id)
    server = Scripted([response(201, {"id": 77}), response(200, {"id": 77})])
    assert drain(queue, "ada", server).ended is Ended.EMPTY
    assert server.requests[1].target == "/api/v1/activities/77"


# -- time -----------------------------------------------------------------------------------------


def test_max_seconds_ends_the_drain_between_entries(queue: OutboxQueue) -> None:
    queue.enqueue_many([activity("ada", f"visit {number}") for number in range(5)])
    server = Scripted(created)
    report = drain(queue, "ada", server, max_seconds=0)
    assert (report.ended, report.sent, report.unsent) == (Ended.TIME_UP, 0, 5)


def test_a_lease_is_renewed_while_a_send_takes_long(tmp_path: Path) -> None:
    settings = QueueSettings(lease_seconds=1.5)
    with (
        OutboxQueue.open(tmp_path / "slow.db", settings=settings) as queue,
        OutboxQueue.open(tmp_path / "slow.db", settings=settings) as other,
    ):
        queue.add_user("ada")
        queue.enqueue(activity("ada", "visit"))
        stolen: list[Any] = []

        def lease() -> float:
            left = other.lease_seconds_left("ada")
            assert left is not None
            return left[0]

        def slow(request: Request) -> Response:
            renewals, before, end = 0, lease(), time.monotonic() + 60
            while renewals < 2 and time.monotonic() < end:
                time.sleep(0.02)
                now = lease()
                if now > before:
                    renewals += 1
                    stolen.extend(other.watchdog())
                before = now
            assert renewals == 2
            return created(request)

        report = drain(queue, "ada", Scripted(slow))
    assert (report.succeeded, report.lost, stolen) == (1, 0, [])


def test_the_age_of_what_is_queued_does_not_follow_the_devices_clock(tmp_path: Path) -> None:
    class Clock:
        wall = datetime(2026, 3, 1, tzinfo=UTC)
        seconds = 1000.0

        def now(self) -> datetime:
            return self.wall

        def monotonic(self) -> float:
            return self.seconds

        def boot_id(self) -> str:
            return "boot"

    clock = Clock()
    settings = QueueSettings(stale_after=timedelta(days=7))
    with OutboxQueue.open(tmp_path / "clock.db", clock=clock, settings=settings) as queue:
        queue.add_user("ada")
        old = queue.enqueue(activity("ada", "old"))
        clock.wall += timedelta(days=400)  # somebody plays with the clock
        assert drain(queue, "ada", Scripted([NETWORK_DOWN])).expired == 0
        clock.wall -= timedelta(days=800)
        clock.seconds += timedelta(days=7, seconds=1).total_seconds()  # a week really goes by
        young = queue.enqueue(activity("ada", "young"))
        server = Scripted(created)
        report = drain(queue, "ada", server)
        assert (report.expired, report.succeeded) == (1, 1)
        assert queue.get(old.id).status is Status.EXPIRED
        assert server.keys == [young.idempotency_key]
