"""Drains that send several entries in one request, against a real server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from holdfast.core.outbox_entry import Entry, NewEntry
from holdfast.core.retry import Jitter, RetryPolicy
from holdfast.outbox import EventKind, OutboxQueue, QueueSettings
from holdfast.outbox.batch_offer import BatchOffer
from holdfast.outbox.drain import Drain
from holdfast.outbox.drain_state import DrainReport, Ended
from holdfast.outbox.transport import HttpTransport, NoResponse, Request, Response
from packages.holdfast.tests.support.outbox_harness import (
    reader,
    response,
    titles_of,
    token_of,
)
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
