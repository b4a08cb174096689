"""Connections that stay open and never deliver: time-outs, lanes, repeats, the time box."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward.errors import ConfigurationError
from onceward_outbox import Event, EventKind, OutboxQueue, Profile, QueueSettings
from onceward_outbox.backoff import RoundTrips
from onceward_outbox.drain import Drain
from onceward_outbox.drain_run import LeaseRenewer
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Reason, Status
from onceward_outbox.exchanges import Exchanges
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response
from onceward_protocol.retry import Jitter, RetryPolicy
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    CuttingProxy,
    Scripted,
    activity,
    all_entries,
    drain,
    response,
    titles_of,
    token_of,
)
from packages.outbox.tests.queue_harness import Lab
from packages.services.tests.cli.conftest import Server

FIFO = Profile(name="fifo", strict_order=True)
SILENCE = NoResponse("no response: the server took too long")
SOON_OUT = QueueSettings(response_floor_seconds=0.4, response_ceiling_seconds=6, batch=False)
LATER = RetryPolicy(first_seconds=0.2, ceiling_seconds=0.5, jitter=Jitter.UP_TO)


@pytest.fixture
def user() -> str:
    return f"user-{uuid4()}"


@pytest.fixture
def queue(tmp_path: Path, user: str) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", settings=SOON_OUT, profiles=[FIFO]) as queue:
        queue.add_user(user)
        yield queue


class Parallel:
    """A transport for several requests at once, with a function that may block."""

    connections = 8

    def __init__(self, reply: Callable[[Request], Response | NoResponse]) -> None:
        self._reply = reply
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        self.timeouts: list[float] = []
        self.running = self.most = 0

    def send(self, request: Request, *, timeout_seconds: float = 30.0) -> Response | NoResponse:
        with self._lock:
            self.requests.append(request)
            self.timeouts.append(timeout_seconds)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self._reply(request)
        finally:
            with self._lock:
                self.running -= 1

    def titles(self) -> list[str]:
        return [title_of(request) for request in self.requests]


def title_of(request: Request) -> str:
    return str(json.loads(request.body or b"{}").get("title"))


def created(_: Request) -> Response:
    return response(201, {"id": 1})


@pytest.mark.parametrize(("profile", "most_seconds"), [("default", 15), ("fifo", 15)])
def test_every_entry_has_one_effect_though_every_third_response_is_swallowed(
    server: Server, queue: OutboxQueue, user: str, profile: str, most_seconds: float
) -> None:
    titles = [f"visit {number}" for number in range(8)]
    queue.enqueue_many([activity(user, title, profile=profile) for title in titles])
    with (
        CuttingProxy(server.url, swallows=True) as proxy,
        HttpTransport(proxy.url) as transport,
    ):
        report = drain(queue, user, transport, token_of, max_seconds=30, retry=LATER)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 8)
    assert report.elapsed_seconds < most_seconds
    assert proxy.lost >= 3
    found = titles_of(server.url, user)
    assert sorted(found) == titles
    if profile == "fifo":
        assert found == titles
    by_key = Counter(key for _, _, key, _ in proxy.seen)
    assert set(by_key) == {entry.idempotency_key for entry in all_entries(queue, user)}


def test_the_time_box_ends_an_attempt_that_is_in_flight(queue: OutboxQueue, user: str) -> None:
    forever = threading.Event()
    queue.enqueue_many([activity(user, str(n), max_attempts=1) for n in range(3)])

    def swallow(_: Request) -> NoResponse:
        forever.wait(120)
        return SILENCE

    began = time.monotonic()
    try:
        for _ in range(2):
            report = drain(queue, user, Parallel(swallow), max_seconds=1)
    finally:
        forever.set()
    assert time.monotonic() - began < 60
    assert (report.ended, report.unsent) == (Ended.TIME_UP, 3)
    # Its outcome is unknown, and it has lost no attempt.
    first, *_ = all_entries(queue, user)
    assert (first.status, first.outcome_unknown) == (Status.PENDING, True)
    assert [attempt.code for attempt in queue.attempts(first.id)] == ["abandoned"] * 2
    assert drain(queue, user, Parallel(created)).succeeded == 3


def test_silence_for_hours_fails_no_entry(lab: Lab) -> None:
    ids = [lab.add(max_attempts=3).id for _ in range(5)]
    is_silent = True
    server = Scripted(lambda request: SILENCE if is_silent else created(request))
    worker = Drain(lab.queue, server, clock=lab.clock)
    for _ in range(40):
        worker.run("ada")
        lab.clock.pass_by(minutes=31)
        worker.wake_up()
    entries = [lab.queue.get(entry_id) for entry_id in ids]
    assert max(entry.attempt_count for entry in entries) > 10
    assert {entry.status for entry in entries} == {Status.PENDING}
    assert all(entry.outcome_unknown for entry in entries if entry.attempt_count)
    assert {one.code for one in lab.queue.attempts(ids[0])} == {"silent"}
    is_silent = False
    assert worker.run("ada").succeeded == 5
    keys = {lab.queue.get(entry_id).idempotency_key for entry_id in ids}
    assert set(server.keys) == keys


def test_an_entry_that_alone_gets_no_response_fails_after_its_attempts(lab: Lab) -> None:
    broken = lab.add(max_attempts=3)

    def reply(request: Request) -> Response | NoResponse:
        lab.clock.pass_by(seconds=1)
        is_broken = request.headers["Idempotency-Key"] == broken.idempotency_key
        return SILENCE if is_broken else created(request)

    worker = Drain(lab.queue, Scripted(reply), clock=lab.clock)
    for sends in range(1, 5):
        worker.run("ada")
        found = lab.queue.get(broken.id)
        assert found.attempt_count == sends
        assert found.status is (Status.PENDING if sends < 4 else Status.FAILED)
        lab.add()
        assert worker.run("ada").succeeded == 1  # the server responds to others meanwhile
        lab.clock.pass_by(minutes=31)
    assert (found.reason, found.outcome_unknown) == (Reason.ATTEMPTS, True)


def test_a_silent_request_holds_up_only_its_own_lane(queue: OutboxQueue, user: str) -> None:
    go_on = threading.Event()
    lanes = ["a", "a", *"bcdefghij"]
    queue.enqueue_many([activity(user, str(n), lane=lane) for n, lane in enumerate(lanes)])
    others: list[str] = []

    def reply(request: Request) -> Response:
        title = title_of(request)
        if title == "0":
            go_on.wait(20)
        elif title != "1":
            others.append(title)
            if len(others) == 9:
                go_on.set()
        return created(request)

    transport = Parallel(reply)
    report = drain(queue, user, transport, max_seconds=20)
    assert report.succeeded == 11
    assert go_on.is_set()
    assert transport.titles()[-1] == "1", "the lane lost its order"


def test_at_most_four_lanes_are_sent_at_once_and_callbacks_use_one_thread(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue_many([activity(user, str(n)) for n in range(20)])
    threads: set[int] = set()

    def token(_: str) -> str:
        threads.add(threading.get_ident())
        return "t"

    def slow(request: Request) -> Response:
        time.sleep(0.03)
        return created(request)

    transport = Parallel(slow)
    assert drain(queue, user, transport, token).succeeded == 20
    assert transport.most == 4
    assert threads == {threading.get_ident()}


def test_a_repeat_in_progress_waits_for_the_first_response(queue: OutboxQueue, user: str) -> None:
    queue.enqueue_many([activity(user, str(n), profile="fifo") for n in range(2)])
    begun, repeated = threading.Event(), threading.Event()

    def reply(request: Request) -> Response | NoResponse:
        if title_of(request) != "1":
            return created(request)
        if begun.is_set():
            repeated.set()
            return response(409, code="idempotency.in_progress")
        begun.set()
        repeated.wait(20)
        time.sleep(0.05)
        return created(request)

    transport = Parallel(reply)
    report = drain(queue, user, transport)
    assert (report.succeeded, report.retrying) == (2, 0)
    assert len(transport.requests) == 3
    assert len({request.headers["Idempotency-Key"] for request in transport.requests}) == 2


@pytest.mark.parametrize(
    "to_repeat", [response(302, None, {"location": "http://portal.example/"}), response(401)]
)
def test_a_silent_request_may_have_happened_whatever_responds_to_its_repeat(
    queue: OutboxQueue, user: str, to_repeat: Response
) -> None:
    queue.enqueue_many([activity(user, str(n), profile="fifo") for n in range(2)])
    begun, repeated = threading.Event(), threading.Event()

    def reply(request: Request) -> Response | NoResponse:
        if title_of(request) != "1":
            return created(request)
        if begun.is_set():
            repeated.set()
            return to_repeat
        begun.set()
        repeated.wait(20)
        return NoResponse("the connection was closed")

    drain(queue, user, Parallel(reply))
    entry = queue.entries(user)[1]
    assert repeated.is_set()
    assert (entry.status, entry.outcome_unknown) == ("pending", True)


def test_edits_of_one_entity_in_two_lanes_are_not_sent_at_once(
    queue: OutboxQueue, user: str
) -> None:
    def edit(lane: str) -> NewEntry:
        return NewEntry(
            user_id=user,
            operation="patch",
            entity_type="note",
            endpoint="/notes/7",
            payload={lane: 1},
            lane=lane,
            base_version='"1"',
        )

    queue.enqueue_many([activity(user, "warm"), edit("a"), edit("b")])
    versions: list[str | None] = []

    def reply(request: Request) -> Response:
        if request.method == "PATCH":
            versions.append(request.headers.get("If-Match"))
            time.sleep(0.1)
            return response(200, {"id": 7}, {"etag": f'"{len(versions) + 1}"'})
        return created(request)

    assert drain(queue, user, Parallel(reply)).succeeded == 3
    assert versions == ['"1"', '"2"']


def test_a_server_that_is_down_is_probed_by_one_request(queue: OutboxQueue, user: str) -> None:
    queue.enqueue_many([activity(user, str(n)) for n in range(20)])

    stop = threading.Event()

    def down(_: Request) -> Response:
        time.sleep(0.03)
        if len(transport.requests) >= 3:
            stop.set()
        return response(503)

    transport = Parallel(down)
    report = Drain(queue, transport, retry=SOON).run(user, max_seconds=60, stop=stop)
    assert report.ended in (Ended.STOPPED, Ended.HELD)
    assert len(transport.requests) > 1
    assert transport.most == 1


def test_an_error_of_the_transport_returns_everything_to_the_queue(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue_many([activity(user, str(n)) for n in range(9)])
    go_on = threading.Event()

    def reply(request: Request) -> Response:
        if title_of(request) == "5":
            raise RuntimeError("a bug in the transport")
        if title_of(request) in "34":
            go_on.wait(5)
        return created(request)

    with pytest.raises(RuntimeError, match="a bug"):
        drain(queue, user, Parallel(reply))
    go_on.set()
    counts = queue.stats(user).counts
    assert counts[Status.IN_FLIGHT] == 0
    assert counts[Status.PENDING] >= 5


def test_lost_claim_does_not_hide_the_error_of_the_transport(queue: OutboxQueue, user: str) -> None:
    queue.enqueue(activity(user, "one"))

    def reply(_: Request) -> Response:
        with queue.transaction() as connection:  # as if another process had claimed it
            connection.execute("UPDATE offline_sync_queue SET claim_number = claim_number + 1")
        raise RuntimeError("a bug in the transport")

    with pytest.raises(RuntimeError, match="a bug"):
        drain(queue, user, Scripted(reply))


def test_stop_waits_for_what_is_in_flight(queue: OutboxQueue, user: str) -> None:
    queue.enqueue_many([activity(user, str(n)) for n in range(9)])
    stop = threading.Event()

    def reply(request: Request) -> Response:
        if title_of(request) == "3":
            stop.set()
            time.sleep(0.1)
        return created(request)

    report = drain(queue, user, Parallel(reply), stop=stop)
    assert report.ended is Ended.STOPPED
    counts = queue.stats(user).counts
    assert (counts[Status.IN_FLIGHT], counts[Status.SUCCEEDED]) == (0, report.succeeded)
    assert report.succeeded >= 4


def test_a_silent_request_is_not_repeated_while_the_server_is_held(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue_many([activity(user, "silent"), activity(user, "other")])

    def reply(request: Request) -> Response:
        if title_of(request) == "other":
            return response(503, headers={"retry-after": "60"})
        time.sleep(3.5)  # it would be repeated after half of its time-out
        return created(request)

    server, round_trips = Parallel(reply), RoundTrips(floor_seconds=6, ceiling_seconds=6)
    report = drain(queue, user, server, max_seconds=20, round_trips=round_trips)
    assert sorted(server.titles()) == ["other", "silent"]
    assert report.succeeded == 1


def test_error_to_a_repeat_does_not_end_a_hold_that_begins_after_it(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue_many([activity(user, "silent"), activity(user, "other")])
    begun, repeated, held = threading.Event(), threading.Event(), threading.Event()
    heard: list[Event] = []

    def reply(request: Request) -> Response | NoResponse:
        if title_of(request) == "other":
            repeated.wait(20)
            time.sleep(0.1)
            held.set()
            return response(429, headers={"retry-after": "60"})
        if begun.is_set():
            repeated.set()
            return response(500)
        begun.set()
        held.wait(20)
        time.sleep(0.2)
        return SILENCE

    queue.subscribe(heard.append)
    server = Parallel(reply)
    drain(queue, user, server, max_seconds=20)
    kinds = [event.kind for event in heard]
    assert (server.titles().count("silent"), server.titles().count("other")) == (2, 1)
    assert EventKind.HELD in kinds
    assert EventKind.RESUMED not in kinds


def test_silent_requests_are_repeated_one_at_a_time_after_a_hold(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue_many([activity(user, title) for title in ("a", "b", "other")])
    sends, repeats, lock = Counter[str](), Counter[str](), threading.Lock()
    are_repeated = threading.Event()

    def reply(request: Request) -> Response | NoResponse:
        title = title_of(request)
        with lock:
            sends[title] += 1
            is_first = sends[title] == 1
        if title == "other":
            return response(503) if is_first else created(request)
        if is_first:
            are_repeated.wait(10)
            return created(request)
        with lock:
            repeats["now"] += 1
            repeats["most"] = max(repeats["most"], repeats["now"])
        time.sleep(0.7)
        with lock:
            repeats["now"] -= 1
        threading.Timer(1.0, are_repeated.set).start()
        return response(409, code="idempotency.in_progress")

    report = drain(queue, user, Parallel(reply), max_seconds=20, retry=LATER)
    assert report.succeeded == 3
    assert repeats["most"] == 1


def test_entry_whose_lease_expired_while_it_was_sent_is_sent_once_more(
    tmp_path: Path, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QueueSettings(lease_seconds=0.3, response_ceiling_seconds=6, batch=False)
    monkeypatch.setattr(LeaseRenewer, "_renew_all", lambda _: None)
    path, commits, sends = tmp_path / "leases.db", Counter[str](), Counter[str]()
    with OutboxQueue.open(path, settings=settings) as queue, OutboxQueue.open(path) as other:
        queue.add_user(user)
        queue.enqueue_many([activity(user, str(n), lane=str(n)) for n in range(2)])
        commit = queue.transaction

        def transaction(**options: Any) -> Any:
            commits["all"] += 1
            return commit(**options)

        def reply(request: Request) -> Response | NoResponse:
            title = title_of(request)
            sends[title] += 1
            if sends[title] == 1:
                time.sleep(0.5)
                other.watchdog()
                time.sleep(1)
            return created(request)

        monkeypatch.setattr(queue, "transaction", transaction)
        drain(queue, user, Parallel(reply), max_seconds=10)
        assert {entry.status for entry in queue.entries(user)} == {Status.SUCCEEDED}
    assert commits["all"] < 50, "it does not wait"


def test_a_drain_that_is_over_waits_for_a_silent_request_without_a_loop(
    queue: OutboxQueue, user: str
) -> None:
    queue.enqueue(activity(user, "silent"))
    stop, receives = threading.Event(), Counter[str]()
    silent_seconds = 1.5  # the request would be repeated after half of its time-out, one second

    def reply(request: Request) -> Response:
        stop.set()
        time.sleep(silent_seconds)
        return created(request)

    class Counting(Exchanges):
        def receive(self, seconds: float) -> Any:
            receives["calls"] += 1
            return super().receive(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onceward_outbox.drain.Exchanges", Counting)
        report = drain(queue, user, Parallel(reply), stop=stop)
    assert report.ended is Ended.STOPPED
    assert receives["calls"] < 4 * silent_seconds


def test_time_outs_follow_the_round_trips() -> None:
    trips = RoundTrips(floor_seconds=2, ceiling_seconds=30)
    assert trips.timeout_seconds("/notes") == 10, "nothing is known yet"
    for _ in range(20):
        trips.observe("/notes", 0.1)
        trips.observe("/photos/1", 5.0)
    assert trips.timeout_seconds("/notes") == 2
    assert 5 < trips.timeout_seconds("/photos/2") < 7
    assert trips.timeout_seconds("/notes", silent=2) == 8
    assert trips.timeout_seconds("/notes", silent=50) == 30
    assert trips.timeout_seconds("/notes", size=163_840) == 12


def test_a_profile_has_its_own_limits_of_time_outs(tmp_path: Path, user: str) -> None:
    reports = Profile(name="reports", response_floor_seconds=40, response_ceiling_seconds=90)
    patient = Profile(name="patient", response_ceiling_seconds=60)
    fixed = Profile(name="fixed", response_floor_seconds=12, response_ceiling_seconds=12)
    profiles = [patient, reports, fixed]
    entries = [activity(user, one.name, profile=one.name, lane="a") for one in profiles]
    with OutboxQueue.open(tmp_path / "slow.db", profiles=profiles) as queue:
        queue.add_user(user)
        queue.enqueue_many(entries)
        transport = Parallel(created)
        assert drain(queue, user, transport).succeeded == 3
    # Before the first response a third of the ceiling, after that the floor.
    assert [round(seconds) for seconds in transport.timeouts] == [20, 40, 12]
    with pytest.raises(ConfigurationError, match=r"^profile x: 0 < response_floor_seconds"):
        Profile(name="x", response_floor_seconds=3, response_ceiling_seconds=2)
    with pytest.raises(ConfigurationError):
        Profile(name="x", response_ceiling_seconds=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"parallel_lanes": 0},
        {"response_floor_seconds": 0},
        {"response_floor_seconds": 40},
        {"max_probe_seconds": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        QueueSettings(**wrong)
