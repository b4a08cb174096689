"""Drains that send several entries in one request, against a real server."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import EventKind, OutboxQueue, QueueSettings
from onceward_outbox.batch_offer import Batches, BatchOffer, parse_offer
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import Entry, NewEntry, Reason, Status
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_testing.fork_server import ForkServer
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    CuttingProxy,
    activity,
    all_entries,
    fork_server,
    reader,
    response,
    titles_of,
    token_of,
)
from packages.outbox.tests.outcomes import retry_later
from packages.outbox.tests.queue_harness import PocketClock
from packages.services.tests.cli.conftest import Server

OFFER = BatchOffer("/batch", 200, 86_400)
AT_ONCE = RetryPolicy(first_seconds=0.001, ceiling_seconds=0.001, jitter=Jitter.PLUS_MINUS)

Reply = Callable[[Request], Response | NoResponse]


class Device:
    """A device with its queue, whose requests pass a function of the test."""

    def __init__(self, url: str, path: Path, **settings: Any) -> None:
        self.url = url
        self.path = path
        self.user = f"user-{uuid4()}"
        self.requests: list[Request] = []
        self.queue = OutboxQueue.open(path, settings=QueueSettings(**settings))
        self.queue.add_user(self.user)
        self.queue.save_batch_offer("", OFFER)
        self.events: list[tuple[str, EventKind]] = []
        self.queue.subscribe(lambda event: self.events.append((event.entry_id or "", event.kind)))

    def add(self, operation: str, kind: str, path: str = "", **fields: Any) -> Entry:
        return self.queue.enqueue(
            NewEntry(
                user_id=self.user,
                operation=operation,  # type: ignore[arg-type]
                entity_type=kind,
                endpoint=f"/api/v1/{kind}{path}",
                **fields,
            )
        )

    def drain(
        self,
        watch: Callable[[Request, Reply], Response | NoResponse] | None = None,
        *,
        token: Any = token_of,
        max_seconds: float | None = None,
        wait: bool | None = None,
        **options: Any,
    ) -> DrainReport:
        with HttpTransport(self.url) as transport:
            device = self

            class Through:
                def send(self, request: Request) -> Response | NoResponse:
                    device.requests.append(request)
                    return (
                        transport.send(request) if watch is None else watch(request, transport.send)
                    )

            worker = Drain(self.queue, Through(), token, **{"retry": AT_ONCE, **options})
            return worker.run(self.user, max_seconds=max_seconds, wait=wait)

    @property
    def batches(self) -> list[list[dict[str, Any]]]:
        """The items of each batch that was sent."""
        return [
            json.loads(request.body or b"")["items"]
            for request in self.requests
            if request.target == "/batch"
        ]

    def statuses(self) -> list[str]:
        return [str(entry.status) for entry in self.queue.entries(self.user)]

    def read(self, path: str) -> Any:
        with reader(self.url, self.user) as client:
            return client.get(path).json()


@pytest.fixture
def device(server: Server, quick_path: Path) -> Iterator[Device]:
    device = Device(server.url, quick_path / "outbox.db")
    yield device
    device.queue.close()


def created_and_edited(device: Device) -> list[Entry]:
    """A contact, two edits of it, and an expense that refers to it in both ways."""
    contact, spent = str(uuid4()), str(uuid4())
    path = f"/{{local:{contact}}}"
    return [
        device.add("create", "contacts", local_id=contact, payload={"title": "Bo", "phone": "0"}),
        device.add("patch", "contacts", path, payload={"phone": "1"}),
        device.add("update", "contacts", f"/{contact}", payload={"title": "Bea", "phone": "2"}),
        device.add(
            "create",
            "expenses",
            local_id=spent,
            payload={
                "title": "Lunch",
                "contact_id": contact,
                "note": f"for {{local:{contact}}}",
            },
        ),
    ]


def test_create_and_edits_of_it_travel_in_one_request(device: Device) -> None:
    entries = created_and_edited(device)
    report = device.drain()
    assert (report.ended, report.sent, report.succeeded) == (Ended.EMPTY, 4, 4)
    assert [request.target for request in device.requests] == ["/batch"]
    local_id = entries[0].local_id or ""
    made = device.queue.mappings(device.user, [local_id])[local_id]
    contact = device.read(f"/api/v1/contacts/{made}")
    assert (contact["title"], contact["phone"], contact["version"]) == ("Bea", "2", 3)
    expense = device.read(f"/api/v1/expenses/{device.queue.get(entries[3].id).server_id}")
    assert (expense["contact_id"], expense["note"]) == (made, f"for {made}")
    attempts = [device.queue.attempts(entry.id) for entry in entries]
    assert [len(each) for each in attempts] == [1] * 4
    assert {each[0].outcome for each in attempts} == {"succeed"}
    # The versions are those that the server has put in: a later edit is based on the last.
    assert device.add("patch", "contacts", f"/{made}", payload={"phone": "3"}).base_version == '"3"'
    for entry in entries:
        kinds = [kind for entry_id, kind in device.events if entry_id == entry.id]
        assert kinds == ["enqueued", "claimed", "sent", "succeeded"]


def test_lost_response_of_a_batch_is_one_effect_of_each_item(device: Device) -> None:
    entries = created_and_edited(device)
    lost: list[Request] = []

    def lose(request: Request, send: Reply) -> Response | NoResponse:
        found = send(request)
        if not lost:
            lost.append(request)
            return NoResponse("no response: the connection broke")
        return found

    report = device.drain(lose, max_seconds=60)
    assert (report.ended, report.succeeded, report.retrying) == (Ended.EMPTY, 4, 4)
    first, *again = device.batches
    assert [item["key"] for item in first] == [entry.idempotency_key for entry in entries]
    # Smaller after a response that did not come; the same requests, and only replays.
    assert [len(items) for items in again] == [2, 2]
    assert titles_of(device.url, device.user, "contacts") == ["Bea"]
    assert titles_of(device.url, device.user, "expenses") == ["Lunch"]
    made = device.queue.get(entries[0].id).server_id
    assert device.read(f"/api/v1/contacts/{made}")["version"] == 3
    assert {attempt.code for e in entries for attempt in device.queue.attempts(e.id)[:-1]} == {
        "silent"
    }


def test_entries_of_a_lost_batch_replay_when_they_are_sent_alone(device: Device) -> None:
    created_and_edited(device)
    replayed: list[bool] = []

    def lose(request: Request, send: Reply) -> Response | NoResponse:
        found = send(request)
        if request.target == "/batch":
            return NoResponse("no response: the connection broke")
        assert isinstance(found, Response)
        replayed.append("idempotency-replayed" in found.headers)
        return found

    # One batch, then half of it, then one by one.
    report = device.drain(lose, max_seconds=60)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 4)
    assert replayed == [True] * 4
    assert [len(items) for items in device.batches] == [4, 2]


@pytest.mark.parametrize("status", [404, 405])
def test_endpoint_that_is_not_there_is_forgotten(device: Device, status: int) -> None:
    for number in range(3):
        device.add("create", "activities", payload={"title": str(number)})

    def missing(request: Request, send: Reply) -> Response | NoResponse:
        return response(status) if request.target == "/batch" else send(request)

    assert device.drain(missing).succeeded == 3
    assert [request.target for request in device.requests] == ["/batch"] + [
        "/api/v1/activities"
    ] * 3
    # Also by the next process, though the server goes on to offer it.
    device.requests.clear()
    for number in range(2):
        device.add("create", "activities", payload={"title": str(number)})
    assert device.drain(missing).succeeded == 2
    assert device.batches == []


def test_offer_of_a_response_is_remembered_by_the_next_process(device: Device) -> None:
    device.queue.save_batch_offer("", None)
    device.add("create", "activities", payload={"title": "first"})
    device.drain()
    assert device.queue.server_state("", "")[1] is not None
    for number in range(3):
        device.add("create", "activities", payload={"title": str(number)})
    device.queue.close()
    device.queue = OutboxQueue.open(device.path)
    device.requests.clear()
    device.drain()
    assert [len(items) for items in device.batches] == [3]


def test_conflict_with_an_entity_that_the_same_batch_has_created(device: Device) -> None:
    contact = str(uuid4())
    device.add("create", "contacts", local_id=contact, payload={"title": "Bo"})
    device.add(
        "patch",
        "contacts",
        f"/{{local:{contact}}}",
        payload={"title": "Bea"},
        conflict_resolution="client_wins",
    )

    def with_conflict(request: Request, send: Reply) -> Response | NoResponse:
        found = send(request)
        if request.target != "/batch" or isinstance(found, NoResponse):
            return found
        body = json.loads(found.body)
        refusal = {"code": "concurrency.version_mismatch", "details": {}}
        body["results"][1] |= {"status": 409, "body": refusal, "headers": {}}
        return response(200, body)

    report = device.drain(with_conflict)
    assert [len(batch) for batch in device.batches] == [2]
    assert (report.succeeded, report.unsent) == (2, 0)
    assert [item["title"] for item in device.read("/api/v1/contacts")["items"]] == ["Bea"]


def test_edit_behind_one_of_another_version_is_not_in_its_batch(device: Device) -> None:
    contact = str(uuid4())
    device.add("create", "contacts", local_id=contact, payload={"title": "Bo"})
    device.drain()
    path = f"/{{local:{contact}}}"
    stale = {"If-Match": '"999"'}
    device.add("patch", "contacts", path, payload={"title": "Bea"}, headers=stale)
    device.add("patch", "contacts", path, payload={"phone": "1"})
    device.drain()
    assert device.batches == []
    assert device.statuses() == ["succeeded", "conflict", "pending"]


def test_refusal_in_the_middle_parks_dependents_and_the_rest_goes_on(device: Device) -> None:
    """The refused one is about a contact that does not exist."""
    first = device.add("create", "activities", payload={"title": "first"}, lane="one")
    bad = device.add("patch", "contacts", f"/{uuid4()}", payload={"phone": "1"}, lane="one")
    child = device.add("create", "contacts", payload={"title": "child"}, depends_on=(bad.id,))
    other = device.add("create", "contacts", payload={"title": "other"}, depends_on=(child.id,))
    last = device.add("create", "activities", payload={"title": "last"}, lane="one")
    report = device.drain()
    found = [device.queue.get(e.id) for e in (first, bad, child, other, last)]
    assert [entry.status for entry in found] == [
        Status.SUCCEEDED,
        Status.FAILED,
        Status.FAILED,
        Status.FAILED,
        Status.SUCCEEDED,
    ]
    assert [entry.reason for entry in found[1:4]] == ["answer", "dependency", "dependency"]
    assert (report.ended, report.failed, report.succeeded) == (Ended.BLOCKED, 1, 2)
    # What was skipped has no attempt in its history, and lost none.
    assert [len(device.queue.attempts(entry.id)) for entry in found] == [1, 1, 0, 0, 1]
    assert found[4].attempt_count == 1
    assert [len(items) for items in device.batches] == [5]
    assert titles_of(device.url, device.user) == ["first", "last"]


def test_conflict_in_the_middle_is_one_conflict_with_both_sides(device: Device) -> None:
    with reader(device.url, device.user) as client:
        key = {"Idempotency-Key": str(uuid4())}
        body = {"title": "Bo", "phone": "0"}
        path = client.post("/api/v1/contacts", json=body, headers=key).headers["location"]
    for number in range(2):
        device.add("patch", "contacts", path[16:], payload={"phone": str(number)}, base_version=1)
    stale = device.add(
        "patch", "contacts", path[16:], payload={"phone": "stale"}, base_version=7, lane="stale"
    )
    visit = device.add("create", "activities", payload={"title": "visit"})
    report = device.drain()
    assert (report.succeeded, report.conflicts) == (3, 1)
    conflict = device.queue.get(stale.id)
    assert conflict.status is Status.CONFLICT
    assert json.loads(conflict.theirs or "")["phone"] == "1"
    assert device.queue.get(visit.id).status is Status.SUCCEEDED
    resolved = device.queue.resolve(stale.id, "client_wins")
    assert resolved.idempotency_key != conflict.idempotency_key
    device.drain()
    assert device.read(path)["phone"] == "stale"


def test_prefix_is_continued_after_the_time_that_the_server_names(device: Device) -> None:
    titles = [str(number) for number in range(6)]
    device.queue.enqueue_many([activity(device.user, title, lane="one") for title in titles])
    cut: list[int] = []

    def prefix(request: Request, send: Reply) -> Response | NoResponse:
        found = send(request)
        assert isinstance(found, Response)
        if request.target != "/batch" or cut:
            return found
        # As if the server had not got to the rest; it did, so these are replays later.
        body = json.loads(found.body)
        cut.append(2)
        short = {"results": body["results"][:2], "retry_after": 3600}
        return Response(200, found.headers, json.dumps(short).encode())

    report = device.drain(prefix)
    assert (report.ended, report.succeeded, report.retrying) == (Ended.WAITING, 2, 0)
    assert 0 < (report.next_due_seconds or 0) <= 300
    assert [e.attempt_count for e in device.queue.entries(device.user)] == [1, 1, 0, 0, 0, 0]
    # Another drain is not bound by it.
    assert device.drain(prefix).succeeded == 4
    assert [len(items) for items in device.batches] == [6, 4]
    assert titles_of(device.url, device.user) == titles


@pytest.mark.parametrize(
    ("reply", "sizes", "singles"),
    [
        # The response is that of the batch as a whole: the next one is smaller, or there is none.
        (response(413, code="batch.too_large"), [8, 4, 4], 0),
        (response(400, code="request.body_invalid"), [8], 8),
        (response(403), [8], 8),
        (response(302, headers={"location": "/batch/"}), [8], 8),
        (response(500), [8, 4, 4], 0),
        (response(200, {"results": []}), [8, 4, 4], 0),
        (response(200, {"results": [{"status": 1, "headers": {}}]}), [8, 4, 4], 0),
        (Response(200, {"content-type": "text/html"}, b"<html>sign in</html>"), [8, 4, 4], 0),
        (Response(200, {}, b'{"results": [{"stat', cut_short=True), [8, 4, 4], 0),
    ],
    ids=["413", "400", "403", "302", "500", "empty", "status", "page", "cut"],
)
def test_batch_that_is_refused_as_a_whole_loses_no_entry(
    device: Device, reply: Response, sizes: list[int], singles: int
) -> None:
    titles = [str(number) for number in range(8)]
    device.queue.enqueue_many([activity(device.user, title, lane="one") for title in titles])

    def refuse(request: Request, send: Reply) -> Response | NoResponse:
        return reply if len(device.requests) == 1 else send(request)

    report = device.drain(refuse, max_seconds=60)
    assert (report.ended, report.succeeded, report.failed) == (Ended.EMPTY, 8, 0)
    assert [len(items) for items in device.batches] == sizes
    assert len(device.requests) - len(sizes) == singles
    assert titles_of(device.url, device.user) == titles


def test_unavailable_server_is_held_and_probed_with_one_request(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(4)])
    busy = response(503, headers={"retry-after": "30"})
    assert device.drain(lambda *_: busy).ended is Ended.HELD
    assert [len(items) for items in device.batches] == [4]
    entries = list(all_entries(device.queue, device.user))
    assert {entry.outcome_unknown for entry in entries} == {True}
    # A later process is held, too.
    assert device.drain().sent == 0


def test_items_that_meet_an_outage_wait_for_the_hold_and_no_longer(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(3)])
    for _ in range(12):  # their own delay would be half an hour by now
        for claimed in device.queue.claim_some(device.user, 3):
            retry_later(device.queue, claimed, delay_seconds=0, give_up=False)
    report = device.drain(lambda *_: results(503, 503, 503), retry=None)
    assert (report.ended, len(device.batches)) == (Ended.HELD, 1)
    entries = device.queue.entries(device.user)
    now = device.queue.server_now()
    delays = [entry.next_retry_at - now for entry in entries if entry.next_retry_at is not None]
    assert len(delays) == 3
    assert max(delays) < timedelta(seconds=70)  # Retry-After, and a little


def test_conflict_is_not_read_while_a_later_item_says_that_the_server_is_down(
    device: Device,
) -> None:
    edited = device.add("patch", "contacts", "/7", payload={"phone": "1"}, base_version='"1"')
    device.add("create", "activities", payload={"title": "x"})
    device.drain(lambda _request, _send: results(409, 503), token="token")
    assert [request.target for request in device.requests] == ["/batch"]
    waiting = device.queue.get(edited.id)
    assert (waiting.status, waiting.outcome_unknown) == ("pending", True)


def test_endpoint_that_is_not_there_is_tried_again_after_an_hour() -> None:
    clock = PocketClock()
    batches = Batches(QueueSettings(), clock.monotonic)
    batches.note_offer("/batch; items=20")
    batches.forget_offer()
    limits = []
    for minutes in (59, 2):
        clock.pass_by(minutes=minutes)
        batches.note_offer("/batch; items=20")
        limits.append(batches.limit)
    assert limits == [0, 20]


def test_refused_token_pauses_and_the_next_one_goes_on(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(3)])
    tokens = ["expired"]
    report = device.drain(token=lambda user: tokens.pop() if tokens else token_of(user))
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 3)
    assert [len(items) for items in device.batches] == [3, 3]
    assert device.drain(token="expired").ended is Ended.EMPTY
    device.add("create", "activities", payload={"title": "x"})
    device.add("create", "activities", payload={"title": "y"})
    assert device.drain(token="expired").ended is Ended.SIGNED_OUT
    assert device.statuses()[-2:] == ["pending", "pending"]


def results(*statuses: int, **more: Any) -> Response:
    """Return the response to a batch, with an empty result each."""
    found = [
        {
            "status": status,
            "headers": {"onceward-error": code, "retry-after": "60"}
            if (code := CODES.get(status))
            else {},
            "body": {"id": str(uuid4()), "code": CODES.get(status)},
        }
        for status in statuses
    ]
    return response(200, {"results": found, "retry_after": None, **more})


CODES = {401: "auth.invalid", 424: "batch.skipped", 429: "rate.limited", 503: "store.unavailable"}


def test_item_that_is_skipped_without_a_reason_is_sent_alone(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(4)])

    def reply(request: Request, _: Reply) -> Response | NoResponse:
        assert len(device.requests) < 20, "it is sent again and again"
        if request.target != "/batch":
            return response(424, {"code": "batch.skipped"})
        items = json.loads(request.body or b"")["items"]
        return results(424, *[201] * (len(items) - 1))

    report = device.drain(reply, token="token", retry=SOON)
    assert report.succeeded == 3
    assert sorted(device.statuses())[1:] == ["succeeded"] * 3
    assert [request.target for request in device.requests] == ["/batch", "/api/v1/activities"]


@pytest.mark.parametrize(
    ("status", "is_unknown"), [(500, True), (503, True), (429, True), (401, False), (400, False)]
)
def test_item_behind_one_that_may_still_happen_may_have_happened(
    device: Device, status: int, is_unknown: bool
) -> None:
    entries = device.queue.enqueue_many(
        [activity(device.user, str(number), lane="a") for number in range(3)]
    )

    def reply(request: Request, _: Reply) -> Response | NoResponse:
        # The first copy of the batch fails; a proxy has sent another one to another server.
        return results(status, 424, 424) if request.target == "/batch" else response(503)

    device.drain(reply, token="token", max_seconds=0.3)
    skipped = device.queue.get(entries[1].id)
    assert (skipped.status, skipped.outcome_unknown) == ("pending", is_unknown)


@pytest.mark.parametrize(
    ("statuses", "ended", "pending"),
    [
        ((201, 429, 429, 429), Ended.WAITING, 3),
        ((201, 503, 424, 424), Ended.HELD, 3),
        ((201, 401, 401, 401), Ended.SIGNED_OUT, 3),
        ((201, 424, 201, 424), Ended.EMPTY, 0),
    ],
    ids=["429", "503", "401", "424"],
)
def test_results_of_items_mean_what_single_responses_do(
    device: Device, statuses: tuple[int, ...], ended: Ended, pending: int
) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(4)])

    def reply(request: Request, _: Reply) -> Response | NoResponse:
        if request.target != "/batch":
            return response(201, {"id": "1"})
        return results(*statuses) if len(device.requests) == 1 else results(201, 201)

    report = device.drain(reply, token="token", retry=SOON)
    assert (report.ended, device.statuses().count("pending")) == (ended, pending)
    assert report.failed == 0
    for entry in device.queue.entries(device.user, status=Status.PENDING):
        # None of them counts as an attempt of the entry.
        assert all(attempt.outcome != "fail" for attempt in device.queue.attempts(entry.id))


def test_token_function_that_raises_after_a_refused_batch_releases_all_entries(
    device: Device,
) -> None:
    entries = device.queue.enqueue_many([activity(device.user, str(n)) for n in range(4)])
    tokens = iter(["old"])
    with pytest.raises(StopIteration):
        device.drain(lambda *_: response(401), token=lambda _: next(tokens), retry=SOON)
    assert [request.target for request in device.requests] == ["/batch"]
    for entry in entries:
        now = device.queue.get(entry.id)
        assert (now.status, now.attempt_count, now.outcome_unknown) == (Status.PENDING, 0, False)


def test_item_that_a_batch_refuses_is_sent_alone(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(3)])

    def refuse(request: Request, send: Reply) -> Response | NoResponse:
        if request.target == "/batch":
            return results(*[400] * len(json.loads(request.body or b"")["items"]))
        return send(request)

    report = device.drain(refuse)
    assert (report.ended, report.succeeded, report.failed) == (Ended.EMPTY, 3, 0)
    assert len(device.batches) == 1


def test_entries_that_cannot_be_in_a_batch_are_sent_alone(device: Device) -> None:
    """A text that looks like a placeholder, a body that is null, headers that differ."""
    plain = [activity(device.user, str(number)) for number in range(3)]
    odd = [
        activity(device.user, f"see {{version:{uuid4()}}}"),
        activity(device.user, "with a header", headers={"X-Colour": "red"}),
        activity(device.user, "with another", headers={"If-None-Match": "*"}),
    ]
    device.queue.enqueue_many([plain[0], odd[0], plain[1], odd[1], odd[2], plain[2]])
    report = device.drain()
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 6)
    assert [len(items) for items in device.batches] == [3]
    assert len(device.requests) == 4
    assert len(titles_of(device.url, device.user)) == 6


def test_headers_that_are_the_same_for_all_travel_with_the_batch(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(3)])
    device.drain(at_send=lambda _: {"X-Device": "7"})
    [request] = device.requests
    assert request.headers["x-device"] == "7"
    assert all("x-device" not in item["headers"] for item in device.batches[0])


def test_function_of_the_app_that_raises_leaves_all_entries_pending(device: Device) -> None:
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(3)])
    calls: list[str] = []

    def at_send(entry: Entry) -> dict[str, str]:
        calls.append(entry.id)
        if len(calls) == 2:
            raise LookupError
        return {}

    with pytest.raises(LookupError):
        device.drain(at_send=at_send)
    assert device.statuses() == ["pending"] * 3
    assert [entry.attempt_count for entry in device.queue.entries(device.user)] == [0] * 3
    assert device.requests == []


def test_edit_behind_a_response_without_a_version_is_sent_after_it(device: Device) -> None:
    """Not in the same batch: which version it has to be sent with is not known before."""
    contact = str(uuid4())
    device.add("create", "notes", local_id=contact, payload={"text": "a"})
    device.add("patch", "notes", f"/{contact}", payload={"text": "b"})
    device.add("patch", "notes", f"/{contact}", payload={"text": "c"})

    def reply(request: Request, _: Reply) -> Response | NoResponse:
        if request.target != "/batch":
            return response(200, {"id": 7})
        items = json.loads(request.body or b"")["items"]
        assert "{version:" not in json.dumps(items[0])
        return results(201, *[400] * (len(items) - 1))

    assert device.drain(reply).succeeded == 3
    assert [len(items) for items in device.batches] == [3]
    # The later ones are no batches: nothing in a batch may follow the last response.
    made = device.queue.mappings(device.user, [contact])[contact]
    assert [request.target for request in device.requests[1:]] == [f"/api/v1/notes/{made}"] * 2


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    with fork_server() as processes:
        yield processes


@pytest.mark.parametrize(
    ("point", "nth"),
    [("drain.before_send", 2), ("drain.after_send", 2), ("drain.recorded", 2)],
)
def test_process_that_is_killed_in_the_middle_of_a_batch_drain_loses_and_doubles_nothing(
    server: Server, processes: ForkServer, tmp_path: Path, point: str, nth: int
) -> None:
    device = Device(server.url, tmp_path / "outbox.db")
    titles = [str(number) for number in range(12)]
    device.queue.enqueue_many([activity(device.user, title, lane="one") for title in titles])
    device.queue.save_batch_offer(server.url, OFFER)
    device.queue.close()
    order: dict[str, Any] = {
        "path": str(device.path),
        "server": server.url,
        "user": device.user,
    }
    order |= {"token": token_of(device.user), "lease_seconds": 60, "batch_items": 4}
    assert processes.run(("drain_once", order | {"point": point, "nth": nth})) == [-9]
    # The process that has ended is recognized; two drain the rest.
    assert processes.run(*[("drain_once", order)] * 2) == [0, 0]
    assert titles_of(server.url, device.user) == titles
    with OutboxQueue.open(device.path) as queue:
        assert queue.stats(device.user).counts[Status.SUCCEEDED] == 12


def test_three_processes_with_and_without_batches_send_each_entry_once(
    server: Server, processes: ForkServer, tmp_path: Path
) -> None:
    device = Device(server.url, tmp_path / "outbox.db")
    device.queue.enqueue_many([activity(device.user, str(number)) for number in range(60)])
    device.queue.close()
    with CuttingProxy(server.url, every=0) as proxy:
        order: dict[str, Any] = {
            "path": str(device.path),
            "server": proxy.url,
            "user": device.user,
        }
        order |= {"token": token_of(device.user), "lease_seconds": 60, "batch_items": 7}
        singly = order | {"batch_items": 1}
        orders = (order, order, singly)
        assert processes.run(*(("drain_once", each) for each in orders)) == [0, 0, 0]
    assert len(set(titles_of(server.url, device.user))) == 60
    with OutboxQueue.open(device.path) as queue:
        attempts = [queue.attempts(entry.id) for entry in all_entries(queue, device.user)]
    assert [[attempt.outcome for attempt in each] for each in attempts] == [["succeed"]] * 60
    assert Counter(path for _, path, _, _ in proxy.seen)["/batch"] >= 2


# -- discovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "offer"),
    [
        ("/batch; items=200", ("/batch", 200)),
        ("/v1/batch;items=20;colour=red", ("/v1/batch", 20)),
        *((header, None) for header in ("", "/batch", "/batch; items=0", "/batch; items=many")),
        *((f"{path}; items=9", None) for path in ("//elsewhere/batch", "http://elsewhere/batch")),
        *(
            (f"{path}; items=9", None)
            for path in ("batch", "/batch?a=1", "/../batch", "/b\u00e4tch")
        ),
        ("/batch; items=9; items=8", None),
    ],
)
def test_offer_is_a_path_of_the_same_server_and_a_number_of_items(
    header: str, offer: tuple[str, int] | None
) -> None:
    found = parse_offer(header)
    assert (None if found is None else (found.path, found.items)) == offer


def test_offer_is_forgotten_after_a_day_and_stored_until_then(quick_path: Path) -> None:
    clock = PocketClock()
    batches = Batches(QueueSettings(), clock.monotonic)
    batches.note_offer("/batch; items=20")
    assert (batches.path, batches.limit, batches.is_unsaved) == ("/batch", 20, True)
    with OutboxQueue.open(quick_path / "outbox.db", clock=clock) as queue:
        queue.save_batch_offer("https://one", batches.to_store())
        clock.pass_by(hours=23)
        later = Batches(QueueSettings(batch_items=10), clock.monotonic)
        later.restore(queue.server_state("", "https://one")[1])
        assert (later.path, later.limit, later.is_unsaved) == ("/batch", 10, False)
        assert queue.server_state("", "https://other")[1] is None
        clock.pass_by(hours=2)
        assert queue.server_state("", "https://one")[1] is None
    assert (later.path, later.limit) == (None, 0)
    off = Batches(QueueSettings(batch=False), clock.monotonic)
    off.note_offer("/batch; items=20")
    assert off.limit == 0


def test_batches_shrink_after_time_outs_and_grow_again() -> None:
    batches = Batches(QueueSettings(), lambda: 0.0)
    batches.note_offer("/batch; items=200")
    sizes = [batches.limit]
    for _ in range(6):
        batches.shrink(batches.limit)
        sizes.append(batches.limit)
    assert sizes == [50, 25, 12, 6, 3, 1, 1]
    for number in range(8):
        batches.note_single_success(str(number), "/notes")
    sizes = [batches.limit]
    for _ in range(5):
        batches.grow()
        sizes.append(batches.limit)
    assert sizes == [2, 4, 8, 16, 32, 50]
    # What the server has refused as too large stays so.
    batches.shrink(50, for_good=True)
    batches.grow()
    assert batches.limit == 25


def test_edit_that_comes_back_is_sent_before_a_later_one_in_conflict(device: Device) -> None:
    contact = str(uuid4())
    device.add("create", "contacts", local_id=contact, payload={"title": "Bo"})
    path = f"/{{local:{contact}}}"
    older = device.add("patch", "contacts", path, payload={"phone": "1"})
    stale = {"If-Match": '"999"'}
    device.add("patch", "contacts", path, payload={"title": "Bea"}, headers=stale)
    device.queue.park(older.id, reason=Reason.REBUILD, error="it is made anew")
    device.drain()
    assert device.statuses() == ["succeeded", "failed", "conflict"]
    device.queue.retry(older.id)
    device.drain()
    assert device.statuses() == ["succeeded", "succeeded", "conflict"]
