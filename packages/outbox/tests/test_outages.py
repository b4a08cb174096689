"""Outages hold the server or an endpoint, never fail an entry, and end by themselves."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from onceward_outbox import Event, EventKind, OutboxQueue
from onceward_outbox.backoff import Outages, is_outage, path_template
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Status, UnknownBase, statement
from onceward_outbox.outbox import Outbox
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_protocol.retry import Jitter, RetryPolicy
from packages.onceward.tests.support.outbox_harness import (
    Scripted,
    activity,
    drain,
    response,
)
from packages.outbox.tests.outcomes import retry_later
from packages.outbox.tests.queue_harness import Lab

PAGE = {"content-type": "text/html; charset=utf-8"}
GATEWAY_PAGE = Response(500, PAGE, b"<html>origin is unreachable</html>")
OUTAGES = [
    response(429),
    response(503, {"code": "busy"}),
    response(502),
    response(504),
    GATEWAY_PAGE,
]
QUICK = RetryPolicy(first_seconds=0.15, ceiling_seconds=0.15, jitter=Jitter.UP_TO)

SLOW = RetryPolicy(first_seconds=60, ceiling_seconds=60, jitter=Jitter.UP_TO)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        queue.add_user("bo")
        yield queue


def forty(queue: OutboxQueue, user: str = "ada") -> list[str]:
    entries = queue.enqueue_many([activity(user, str(n), max_attempts=1) for n in range(40)])
    return [entry.id for entry in entries]


def expense(user: str = "ada") -> NewEntry:
    return replace_path(activity(user, "lunch"), "/api/v1/expenses")


def replace_path(new: NewEntry, endpoint: str) -> NewEntry:
    return msgspec.structs.replace(new, endpoint=endpoint)


def created(_: Request) -> Response:
    return response(201, {"id": 1})


def statuses(queue: OutboxQueue, ids: list[str]) -> set[Status]:
    return {queue.get(entry_id).status for entry_id in ids}


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda found: str(found.status))
def test_an_outage_costs_one_request_and_no_attempt(queue: OutboxQueue, outage: Response) -> None:
    ids = forty(queue)
    server = Scripted(lambda _: outage)
    worker = Drain(queue, server, retry=replace(SLOW, attempts=1))
    for _ in range(3):
        report = worker.run("ada")
    assert len(server.requests) == 1
    assert report.ended in (Ended.HELD, Ended.WAITING)
    assert report.next_due_seconds is not None
    with queue.transaction() as connection:
        connection.execute("UPDATE offline_sync_queue SET due_ms = NULL, next_retry_at = NULL")
    stop = threading.Event()

    def outage_until_it_has_probed(_: Request) -> Response:
        if len(server.requests) >= 4:
            stop.set()
        return outage

    server._reply = outage_until_it_has_probed
    worker = Drain(queue, server, retry=replace(QUICK, attempts=1))
    worker.run("ada", max_seconds=60, stop=stop)
    assert 4 <= len(server.requests) < 8, "it probes, one request each time"
    assert statuses(queue, ids) == {Status.PENDING}
    server._reply = created
    assert worker.run("ada", max_seconds=20).succeeded == 40


def test_retry_after_of_503_holds_the_server_for_all_users(
    queue: OutboxQueue,
) -> None:
    forty(queue)
    queue.enqueue(activity("bo", "one"))
    server = Scripted([response(503, headers={"retry-after": "60"})])
    worker = Drain(queue, server)
    heard: list[Event] = []
    queue.subscribe(heard.append)
    for user in ("ada", "bo"):
        report = worker.run(user, max_seconds=20)
        assert report.ended is Ended.HELD
        assert report.next_due_seconds == pytest.approx(60, abs=5)
        assert "503" in (report.detail or "")
    held = [event for event in heard if event.kind is EventKind.HELD]
    assert [(event.http_status, event.user_id) for event in held] == [(503, None)]
    assert held[0].delay_seconds is not None
    assert held[0].delay_seconds >= 60
    # Also for a process that starts meanwhile.
    assert drain(queue, "bo", Scripted([])).ended is Ended.HELD


def test_429_holds_its_endpoint_and_others_go_on(queue: OutboxQueue) -> None:
    ids = forty(queue)
    other = queue.enqueue(expense())
    server = Scripted(
        lambda request: (
            response(429, headers={"retry-after": "60"})
            if request.target == "/api/v1/activities"
            else created(request)
        )
    )
    report = drain(queue, "ada", server)
    assert (report.ended, report.succeeded) == (Ended.WAITING, 1)
    assert report.next_due_seconds == pytest.approx(60, abs=5)
    assert queue.get(other.id).status is Status.SUCCEEDED
    assert len(server.requests) == 2
    assert statuses(queue, ids) == {Status.PENDING}
    # A later process sends what is queued for other endpoints meanwhile.
    queue.enqueue(expense())
    assert drain(queue, "ada", Scripted(created)).succeeded == 1


def test_an_entry_that_alone_meets_gateway_errors_does_not_stop_the_others(
    queue: OutboxQueue,
) -> None:
    ids = forty(queue)
    fatal = queue.get(ids[0]).idempotency_key
    done, stop = [], threading.Event()

    def reply(request: Request) -> Response:
        if request.headers["Idempotency-Key"] == fatal:
            return response(502)
        done.append(request)
        if len(done) == 39:
            stop.set()
        return created(request)

    report = drain(queue, "ada", Scripted(reply), max_seconds=20, retry=QUICK, stop=stop)
    assert report.succeeded == 39
    assert queue.get(ids[0]).status is Status.PENDING


def test_the_background_sender_resumes_by_itself_with_one_pair_of_events(
    queue: OutboxQueue,
) -> None:
    is_up = threading.Event()
    heard: list[Event] = []
    server = Scripted(lambda _: response(201, {"id": 1}) if is_up.is_set() else response(503))
    queue.subscribe(heard.append)
    with Outbox(queue, server, "t", retry=QUICK) as outbox:
        forty(queue)
        outbox.start()
        deadline = time.monotonic() + 30
        while not any(event.kind is EventKind.HELD for event in heard):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(server.requests) < 10, "a wake-up loop"
        is_up.set()
        deadline = time.monotonic() + 30
        while outbox.queue.stats().counts[Status.SUCCEEDED] < 40:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    about = [event.kind for event in heard if event.kind in (EventKind.HELD, EventKind.RESUMED)]
    assert about == [EventKind.HELD, EventKind.RESUMED]


def test_a_read_that_meets_an_outage_holds_the_server_too(queue: OutboxQueue) -> None:
    edit = replace_path(activity("ada", "x", max_attempts=1), "/api/v1/activities/7")
    entry = queue.enqueue(msgspec.structs.replace(edit, operation="patch"))
    conflict = response(409, {"code": "concurrency.version_mismatch"})
    server = Scripted(lambda r: response(503) if r.method == "GET" else conflict)
    worker = Drain(queue, server, retry=QUICK)
    assert worker.run("ada").ended is Ended.HELD
    worker.run("ada", max_seconds=0.3)
    assert queue.get(entry.id).status is Status.PENDING


def test_a_probe_that_gets_no_response_leaves_the_hold(queue: OutboxQueue) -> None:
    forty(queue)
    silent = NoResponse("could not connect", may_have_been_sent=False)
    server = Scripted([response(503), silent])
    worker = Drain(queue, server, retry=QUICK)
    assert worker.run("ada").ended is Ended.HELD
    time.sleep(0.2)
    assert worker.run("ada").ended is Ended.OFFLINE
    assert len(server.requests) == 2


def test_online_probes_at_once_unless_the_server_has_named_a_time() -> None:
    now = 0.0
    outages = Outages(lambda: now)
    for after, left in ((None, 0.0), (60.0, 60.0)):
        outages.begin("e", "/notes", response(503), delay=lambda _: 30.0, retry_after_seconds=after)
        outages.probe_now()
        assert outages.server_seconds() == left
    # Each failed probe is further away, up to the limit of the caller.
    assert outages.end("e", "/notes", at=now) == [""]
    assert outages.server_seconds() == 0


def test_response_that_came_before_a_hold_does_not_end_it() -> None:
    now = 10.0
    outages = Outages(lambda: now)
    outages.begin("e", "/notes", response(429), delay=lambda _: 30.0, retry_after_seconds=None)
    assert outages.end("other", "/notes", at=9.0) == []
    assert outages.is_held("/notes")
    assert outages.end("other", "/notes", at=10.0) == ["/notes"]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda found: str(found.status))
def test_an_outage_met_by_the_read_before_an_entry_holds_the_entry_too(
    lab: Lab, outage: Response
) -> None:
    lab.queue.learn_server_time(lab.clock.now())
    lab.add()
    retry_later(lab.queue, lab.claim(), delay_seconds=0, outcome_unknown=True)
    # How long the device was off is read from the server before the entry is sent again.
    lab.clock.restart(hours=1)
    server = Scripted(lambda _: outage)
    report = drain(lab.queue, "ada", server, retry=SLOW, clock=lab.clock)
    assert [request.method for request in server.requests] == ["GET"]
    assert report.ended in (Ended.HELD, Ended.WAITING)
    assert report.next_due_seconds == pytest.approx(60, abs=10)
    lab.clock.pass_by(minutes=2)
    server._reply = created
    assert drain(lab.queue, "ada", server, retry=SLOW, clock=lab.clock).succeeded == 1


def test_an_outage_met_by_a_read_delays_the_entry_no_longer_than_the_hold(lab: Lab) -> None:
    lab.queue.learn_server_time(lab.clock.now())
    lab.add()
    for _ in range(12):  # its own delay would be half an hour by now
        retry_later(lab.queue, lab.claim(), delay_seconds=0, give_up=False, outcome_unknown=True)
    lab.clock.restart(hours=1)
    server = Scripted(lambda _: response(429))
    report = drain(lab.queue, "ada", server, clock=lab.clock)
    assert [request.method for request in server.requests] == ["GET"]
    assert report.next_due_seconds is not None
    assert report.next_due_seconds < 10


def test_an_outage_met_by_the_read_of_a_conflict_delays_the_entry_no_longer_than_the_hold(
    lab: Lab,
) -> None:
    edit = lab.add(operation="patch", endpoint="/api/v1/activities/7")
    for _ in range(12):
        retry_later(lab.queue, lab.claim(), delay_seconds=0, give_up=False)
    conflict = response(409, {"code": "concurrency.version_mismatch"})
    server = Scripted(lambda r: response(503) if r.method == "GET" else conflict)
    report = drain(lab.queue, "ada", server, clock=lab.clock)
    assert [request.method for request in server.requests] == ["PATCH", "GET"]
    assert report.next_due_seconds is not None
    assert report.next_due_seconds < 10
    assert lab.queue.get(edit.id).status is Status.PENDING


def test_an_outage_met_by_the_read_of_a_base_delays_the_entry_no_longer_than_the_hold(
    lab: Lab,
) -> None:
    reads = replace(lab.queue.profiles.get("field"), name="reads", unknown_base=UnknownBase.READ)
    queue = lab.reopen(profiles=[reads])
    lab.add(operation="patch", endpoint="/api/v1/activities/7", profile="reads")
    for _ in range(12):
        retry_later(queue, lab.claim(), delay_seconds=0, give_up=False)
    server = Scripted(lambda _: response(503))
    report = drain(queue, "ada", server, clock=lab.clock)
    assert [request.method for request in server.requests] == ["GET"]
    assert report.next_due_seconds is not None
    assert report.next_due_seconds < 10


@pytest.mark.parametrize(
    "nothing", [NoResponse("the server took too long"), Response(200, PAGE, b"<html>")]
)
def test_a_send_that_says_nothing_about_the_entry_delays_it_no_longer_than_a_probe(
    lab: Lab, nothing: Response | NoResponse
) -> None:
    lab.add(max_attempts=50)
    for _ in range(12):
        retry_later(lab.queue, lab.claim(), delay_seconds=0, give_up=False)
    server = Scripted(lambda _: nothing)
    report = drain(lab.queue, "ada", server, clock=lab.clock)
    assert len(server.requests) == 1
    assert report.next_due_seconds == lab.queue.settings.max_probe_seconds
    # The time of an attempt that is about the entry is its own.
    lab.clock.pass_by(minutes=6)
    server._reply = lambda _: response(500, {"code": "internal"})
    report = drain(lab.queue, "ada", server, clock=lab.clock)
    assert report.next_due_seconds == 1800


class PassesAfterTheClaim(Outages):
    """Holds the endpoint of activities at the first claim, and none from then on."""

    is_first = True

    def paths(self) -> Mapping[str, float]:
        held = {"/api/v1/activities": 0.001} if self.is_first else {}
        self.is_first = False
        return held


@pytest.mark.parametrize("wait", [True, False])
def test_a_hold_that_passes_after_the_claim_does_not_end_the_drain(
    queue: OutboxQueue, wait: bool
) -> None:
    queue.enqueue(activity("ada", "one"))
    server = Scripted(created)
    outages = PassesAfterTheClaim(time.monotonic)
    report = drain(queue, "ada", server, outages=outages, max_seconds=5, wait=wait)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 1)


@pytest.mark.parametrize(
    ("endpoint", "template"),
    [
        ("/api/v1/activities?x=/1/2", "/api/v1/activities"),
        ("/api/v1/activities/7/lines", "/api/v1/activities/*/lines"),
        ("/quest/quest.001/step/3/advance", "/quest/*/step/*/advance"),
    ],
)
def test_path_templates_have_no_ids(queue: OutboxQueue, endpoint: str, template: str) -> None:
    assert path_template(endpoint) == template
    queue.enqueue(replace_path(activity("ada", "x"), endpoint))
    assert queue.claim_some("ada", 1, held_paths=[template]) == []
    deeper, shorter = f"{template}/*", template.rpartition("/")[0]
    assert queue.claim_some("ada", 1, held_paths=[deeper, shorter, "/other"]) != []


@pytest.mark.parametrize("name", ["claim_some", "behind"])
def test_held_patterns_are_read_once_and_not_for_each_entry(queue: OutboxQueue, name: str) -> None:
    """Otherwise a claim parses them for each of a hundred thousand held entries."""
    sql = statement(name)
    parameters = dict.fromkeys(re.findall(r":(\w+)", sql))
    with queue.transaction() as connection:
        found = connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()
    assert "MATERIALIZE held" in [row[3] for row in found]


def test_a_local_id_is_an_id() -> None:
    assert path_template("/notes/{local:7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10}") == "/notes/*"


def test_responses_of_the_service_are_no_outage() -> None:
    assert not is_outage(response(500))
    assert not is_outage(Response(500, PAGE | {"x-request-id": "r"}, b"<html>"))
    assert not is_outage(Response(404, PAGE, b"<html>"))
