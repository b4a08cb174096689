"""Events: one for every change, after its commit, in order, never with a payload."""

import logging
import threading
from pathlib import Path

import msgspec
import pytest

from onceward_outbox import Event, EventKind, OutboxQueue, QueueSettings, Reason, Resolution
from packages.outbox.tests.outcomes import fail, record_conflict, release, retry_later, succeed
from packages.outbox.tests.queue_harness import Lab, local, new, walk

SECRET = "xyzzy-plugh"


def test_each_change_emits_one_event_with_the_status_after_it(lab: Lab) -> None:
    queue = lab.queue
    entry = lab.add(payload={"note": SECRET}, max_attempts=2)
    retry_later(queue, lab.claim(), delay_seconds=0, error=SECRET, http_status=503)
    release(queue, lab.claim())
    record_conflict(queue, lab.claim(), theirs={"note": SECRET})
    queue.resolve(entry.id, Resolution.CLIENT_WINS)
    fail(queue, lab.claim(), error=SECRET, http_status=422)
    queue.retry(entry.id)
    queue.edit_payload(entry.id, {"note": SECRET})
    queue.park(entry.id, reason=Reason.REBUILD)
    queue.discard(entry.id)
    told = [(event.kind.value, event.status) for event in lab.events]
    assert told == [
        ("enqueued", "pending"),
        ("claimed", "in_flight"),
        ("retrying", "pending"),
        ("claimed", "in_flight"),
        ("released", "pending"),
        ("claimed", "in_flight"),
        ("conflict", "conflict"),
        ("resolved", "pending"),
        ("claimed", "in_flight"),
        ("failed", "failed"),
        ("retried", "pending"),
        ("edited", "pending"),
        ("failed", "failed"),
        ("discarded", "discarded"),
    ]
    assert {event.entry_id for event in lab.events} == {entry.id}
    assert {event.user_id for event in lab.events} == {"ada"}
    assert lab.events[2].delay_seconds == 0
    assert (lab.events[9].http_status, lab.events[12].reason) == (422, Reason.REBUILD)


def test_no_event_carries_a_payload_a_header_or_a_response_body(lab: Lab) -> None:
    lab.add(payload={"note": SECRET}, headers={"X-Note": SECRET})
    fail(lab.queue, lab.claim(), error=SECRET)
    assert len(lab.events) == 3
    for event in lab.events:
        assert SECRET.encode() not in msgspec.json.encode(event)


def test_an_event_is_delivered_after_its_commit(lab: Lab) -> None:
    seen = []

    def look(event: Event) -> None:
        with lab.open(listeners=[]) as other:  # another connection sees what is committed
            seen.append((event.kind.value, len(other.entries())))

    lab.queue.subscribe(look)
    lab.add()
    with lab.queue.transaction():
        lab.add()
        lab.add()
    assert seen == [("enqueued", 1), ("enqueued", 3), ("enqueued", 3)]


def test_rolled_back_changes_emit_no_events(lab: Lab) -> None:
    class Cut:
        def reach(self, point: str) -> None:
            if point == "enqueue.before_commit":
                raise ZeroDivisionError

    lab.reopen(fault_points=Cut())
    with pytest.raises(ZeroDivisionError):
        lab.add()
    assert (lab.events, lab.queue.entries()) == ([], [])


def test_every_commit_has_named_fault_points(lab: Lab) -> None:
    reached: list[str] = []

    class Watch:
        def reach(self, point: str) -> None:
            reached.append(point)

    lab.reopen(fault_points=Watch())
    reached.clear()
    lab.add()
    lab.send()
    with lab.queue.transaction():
        lab.add()
    assert reached == [
        "enqueue.before_commit",
        "enqueue.after_commit",
        "claim.before_commit",
        "claim.after_commit",
        "record.before_commit",
        "record.after_commit",
        "enqueue.before_commit",
        "transaction.before_commit",
        "transaction.after_commit",
    ]


def test_a_listener_may_use_the_queue_and_gets_its_events_afterwards(lab: Lab) -> None:
    heard = []

    def follow(event: Event) -> None:
        heard.append(event.kind.value)
        if event.kind is EventKind.ENQUEUED and len(heard) < 5:
            claimed = lab.queue.claim("ada")
            assert claimed is not None
            succeed(lab.queue, claimed)

    lab.queue.subscribe(follow)
    lab.add()
    assert heard == ["enqueued", "claimed", "succeeded"]


def test_a_listener_that_raises_is_logged_and_the_others_get_the_event(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def fail(_event: Event) -> None:
        raise RuntimeError("the window is closed")

    lab.queue.subscribe(fail)
    lab.queue.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        entry = lab.add(payload={"note": SECRET})
    assert [event.entry_id for event in heard] == [entry.id]
    assert "the window is closed" in caplog.text
    assert SECRET not in caplog.text


def test_a_listener_can_be_unsubscribed(lab: Lab) -> None:
    heard: list[Event] = []
    end = lab.queue.subscribe(heard.append)
    lab.add()
    end()
    lab.add()
    assert len(heard) == 1


def test_events_of_several_threads_are_in_commit_order(quick_path: Path) -> None:
    numbers: list[int] = []
    queue = OutboxQueue.open(quick_path / "q.db")
    queue.add_user("ada")

    def note(event: Event) -> None:
        assert event.entry_id is not None
        numbers.append(queue.get(event.entry_id).sequence_number)

    queue.subscribe(note)
    threads = [
        threading.Thread(target=lambda: [queue.enqueue(new()) for _ in range(40)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == list(range(1, 161))
    queue.close()


def test_emit_delivers_events_of_the_drain(lab: Lab) -> None:
    event = Event(kind=EventKind.DRAINED, at=lab.clock.now(), user_id="ada", count=3)
    lab.queue.emit(event)
    assert lab.events == [event]


def test_without_listeners_nothing_is_kept(quick_path: Path) -> None:
    with OutboxQueue.open(quick_path / "q.db", settings=QueueSettings()) as queue:
        queue.add_user("ada")
        queue.enqueue(new(local_id=local()))
        heard: list[Event] = []
        queue.subscribe(heard.append)
        assert heard == []
        queue.claim("ada")
        assert [event.kind for event in heard] == [EventKind.CLAIMED]


def test_an_event_carries_what_an_app_needs_to_react(lab: Lab) -> None:
    entry = lab.queue.enqueue(walk(endpoint="/tree/allocate", local_id=local()))
    lab.clock.pass_by(hours=3)
    retry_later(lab.queue, lab.claim(), delay_seconds=0, http_status=503, code="BUSY")
    fail(lab.queue, lab.claim(), http_status=422, code="INSUFFICIENT_POINTS")
    lab.queue.retry(entry.id)
    lab.send(http_status=201)
    by_kind = {event.kind.value: event for event in lab.events}
    for event in lab.events:
        assert (event.entity_type, event.endpoint) == ("quest", "/tree/allocate")
        assert event.local_id == entry.local_id
    assert {event.age_seconds for event in lab.events} == {0, 3 * 3600}

    def about(kind: str) -> tuple[int | None, str | None, str | None]:
        event = by_kind[kind]
        return event.http_status, event.code, event.cause

    assert about("retrying") == (503, "BUSY", None)
    assert about("failed") == (422, "INSUFFICIENT_POINTS", "points_changed")
    # A person's decision is about the last response.
    assert about("retried") == (422, "INSUFFICIENT_POINTS", None)
    assert about("succeeded") == (201, None, None)


@pytest.mark.parametrize(
    ("reason", "response", "cause"),
    [
        (Reason.RESPONSE, (422, "PREREQUISITES_NOT_MET"), "prerequisites"),
        (Reason.RESPONSE, (422, "INSUFFICIENT_ENERGY"), "energy_changed"),
        (Reason.RESPONSE, (409, "IDEMPOTENCY_CONFLICT"), "payload_mismatch"),
        (Reason.RESPONSE, (422, "idempotency.payload_mismatch"), "payload_mismatch"),
        (Reason.RESPONSE, (400, None), "bad_request"),
        (Reason.RESPONSE, (403, "NOT_YOURS"), "forbidden"),
        (Reason.RESPONSE, (418, "TEAPOT"), "refused"),
        (Reason.ATTEMPTS, (422, "PREREQUISITES_NOT_MET"), "attempts"),
        (Reason.REBUILD, (422, "STEP_OUT_OF_ORDER"), "out_of_order"),
        (Reason.UNKNOWN, (None, None), "unknown"),
    ],
)
def test_a_failure_has_a_class_of_cause(
    lab: Lab,
    caplog: pytest.LogCaptureFixture,
    reason: Reason,
    response: tuple[int | None, str | None],
    cause: str,
) -> None:
    entry = lab.queue.enqueue(walk(payload={"note": SECRET}, endpoint="/quest/1?note=plugh"))
    status, code = response
    fail(lab.queue, lab.claim(), reason=reason, http_status=status, code=code, error=SECRET)
    assert lab.events[-1].cause == cause
    # An error of the app is for its developers.
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == (cause in {"payload_mismatch", "bad_request"})
    assert all(entry.id in record.getMessage() for record in errors)
    assert "plugh" not in caplog.text


def test_a_parked_dependent_fails_because_of_a_dependency(lab: Lab) -> None:
    parent = lab.add()
    lab.add(depends_on=(parent.id,))
    fail(lab.queue, lab.claim(), http_status=403)
    assert [event.cause for event in lab.events[-2:]] == ["forbidden", "dependency"]


def test_users_are_warned_once_a_day_before_entries_expire(lab: Lab) -> None:
    def warnings() -> list[tuple[int | None, object, float | None]]:
        found = [event for event in lab.events if event.kind is EventKind.EXPIRING]
        lab.events.clear()
        return [(one.count, one.counts, one.delay_seconds) for one in found]

    lab.queue.add_user("bo")
    lab.add()
    lab.add(entity_type="expense")
    lab.add(user_id="bo")
    lab.clock.pass_by(hours=1)
    lab.add(entity_type="expense")
    lab.clock.pass_by(days=4, hours=22)
    lab.queue.expire_stale("ada")
    assert warnings() == []  # 49 hours are left
    lab.clock.pass_by(minutes=90)
    lab.queue.expire_stale("ada")
    assert warnings() == [(2, {"activity": 1, "expense": 1}, 47.5 * 3600)]
    lab.queue.expire_stale("ada")
    lab.reopen()
    lab.clock.pass_by(hours=23)
    lab.queue.expire_stale("ada")
    assert warnings() == []
    lab.clock.pass_by(hours=1)
    lab.queue.expire_stale("ada")
    assert warnings() == [(3, {"activity": 1, "expense": 2}, 23.5 * 3600)]
    # Also on a device that has no network, where nothing is drained.
    lab.queue.prune_if_due()
    assert warnings() == [(1, {"activity": 1}, 23.5 * 3600)]  # of bo
