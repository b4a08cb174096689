"""The drain against a real server that loses responses: one effect per entry, in order."""

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event as Flag
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import EventKind, OutboxQueue, QueueSettings
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Status
from onceward_outbox.events import Event
from onceward_outbox.transport import HttpTransport
from onceward_protocol.operation import OperationName
from packages.onceward.tests.support.outbox_harness import (
    SINGLY,
    SOON,
    CuttingProxy,
    activity,
    all_entries,
    drain,
    fork_server,
    reader,
    titles_of,
    token_of,
)
from packages.outbox.tests.queue_harness import PocketClock
from packages.services.tests.cli.conftest import Server


@pytest.fixture
def user() -> str:
    return f"user-{uuid4()}"


@pytest.fixture
def queue(tmp_path: Path, user: str) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", settings=SINGLY) as queue:
        queue.add_user(user)
        yield queue


def test_every_entry_has_one_effect_in_order_though_every_third_answer_is_lost(
    server: Server, queue: OutboxQueue, user: str
) -> None:
    titles = [f"visit {number}" for number in range(20)]
    queue.enqueue_many([activity(user, title, lane="one after the other") for title in titles])
    with CuttingProxy(server.url) as proxy, HttpTransport(proxy.url) as transport:
        report = drain(queue, user, transport, token_of, max_seconds=20, retry=SOON)
    assert (report.ended, report.succeeded, report.unsent) == (Ended.EMPTY, 20, 0)
    assert proxy.lost == report.retrying >= 6
    assert titles_of(server.url, user) == titles
    by_key = Counter(key for _, _, key, _ in proxy.seen)
    assert set(by_key) == {entry.idempotency_key for entry in all_entries(queue, user)}
    assert max(by_key.values()) > 1, "nothing was sent again"


def test_what_was_created_changed_and_deleted_offline_finds_its_ids(
    server: Server, queue: OutboxQueue, user: str
) -> None:
    visit, contact, spent, typo = (str(uuid4()) for _ in range(4))

    def entry(operation: OperationName, kind: str, path: str = "", **more: Any) -> NewEntry:
        endpoint = f"/api/v1/{kind}{path}"
        return NewEntry(
            user_id=user, operation=operation, entity_type=kind, endpoint=endpoint, **more
        )

    queue.enqueue_many(
        [
            entry("create", "activities", local_id=visit, payload={"title": "Visit"}),
            entry("create", "contacts", local_id=contact, payload={"title": "Bo"}),
            entry(
                "create",
                "expenses",
                local_id=spent,
                payload={
                    "title": "Lunch",
                    "activity_id": visit,
                    "contact_id": f"{{local:{contact}}}",
                    "note": f"for {{local:{visit}}}",
                },
            ),
            entry("create", "contacts", local_id=typo, payload={"title": "Bbo"}),
            entry("patch", "expenses", f"/{{local:{spent}}}", payload={"amount": 12}),
            entry("update", "activities", f"/{{local:{visit}}}", payload={"title": "Long visit"}),
            entry("delete", "contacts", f"/{{local:{typo}}}"),
        ]
    )
    with CuttingProxy(server.url) as proxy, HttpTransport(proxy.url) as transport:
        report = drain(queue, user, transport, token_of, max_seconds=20, retry=SOON)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 7)
    ids = queue.mappings(user, [visit, contact, spent, typo])
    with reader(server.url, user) as client:
        expense = client.get(f"/api/v1/expenses/{ids[spent]}").json()
        assert client.get(f"/api/v1/contacts/{ids[typo]}").status_code == 404
    assert expense["activity_id"] == ids[visit]
    assert expense["contact_id"] == ids[contact]
    assert expense["note"] == f"for {ids[visit]}"
    assert (expense["amount"], expense["version"]) == (12, 2)
    assert titles_of(server.url, user) == ["Long visit"]
    assert titles_of(server.url, user, "contacts") == ["Bo"]


def test_four_processes_draining_one_file_send_nothing_twice(
    server: Server, tmp_path: Path, user: str
) -> None:
    path = tmp_path / "shared.db"
    with OutboxQueue.open(path) as queue:
        queue.add_user(user)
        queue.enqueue_many([activity(user, f"visit {number}") for number in range(60)])
    with CuttingProxy(server.url, every=0) as proxy, fork_server() as processes:
        order = {
            "path": str(path),
            "server": proxy.url,
            "user": user,
            "token": token_of(user),
            "lease_seconds": 60,
        }
        assert processes.run(*[("drain_once", order)] * 4) == [0, 0, 0, 0]
    keys = Counter(key for _, _, key, _ in proxy.seen)
    assert (len(keys), max(keys.values())) == (60, 1)
    assert len(set(titles_of(server.url, user))) == 60
    with OutboxQueue.open(path) as queue:
        assert queue.stats(user).counts[Status.SUCCEEDED] == 60
        workers = {
            attempt.outcome for e in all_entries(queue, user) for attempt in queue.attempts(e.id)
        }
        assert workers == {"succeed"}


def test_the_servers_date_corrects_the_devices_clock(
    server: Server, queue: OutboxQueue, user: str
) -> None:
    queue.enqueue(activity(user, "visit"))
    with HttpTransport(server.url) as transport:
        drain(queue, user, transport, token_of)
    with reader(server.url, user) as client:
        heard = parsedate_to_datetime(client.get("/healthz").headers["date"])
    assert abs(queue.server_now() - heard) < timedelta(minutes=1)


def test_a_drain_stops_between_entries_and_is_resumed(
    server: Server, queue: OutboxQueue, user: str
) -> None:
    stop = Flag()
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.SUCCEEDED:
            stop.set()

    queue.subscribe(listen)
    queue.enqueue_many([activity(user, f"visit {number}") for number in range(3)])
    with HttpTransport(server.url) as transport:
        first = drain(queue, user, transport, token_of, stop=stop)
        # The next one was claimed in the commit that told of the first.
        assert (first.ended, first.succeeded) in {(Ended.STOPPED, 1), (Ended.STOPPED, 2)}
        assert queue.stats(user).counts[Status.IN_FLIGHT] == 0
        second = drain(queue, user, transport, token_of)
    assert first.succeeded + second.succeeded == 3
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.SENT) == kinds.count(EventKind.SUCCEEDED) == 3
    assert kinds.count(EventKind.DRAINED) == 2


def test_an_entry_left_in_flight_is_sent_after_its_lease(
    server: Server, tmp_path: Path, user: str
) -> None:
    settings, clock = QueueSettings(lease_seconds=0.2), PocketClock()
    with OutboxQueue.open(tmp_path / "outbox.db", settings=settings, clock=clock) as queue:
        queue.add_user(user)
        queue.enqueue(activity(user, "visit"))
        assert queue.claim(user) is not None  # and then this process dies
        with HttpTransport(server.url) as transport:
            at_once = drain(queue, user, transport, token_of)
            assert (at_once.ended, at_once.sent) == (Ended.WAITING, 0)
            assert at_once.detail is not None
            assert at_once.detail.startswith(
                "1 entry is claimed by another process, for at most 1 s"
            )
            assert 0 <= (at_once.next_due_seconds or 0) <= settings.lease_seconds
            clock.pass_by(seconds=0.3)
            later = drain(queue, user, transport, token_of, max_seconds=30)
    assert (later.revived, later.succeeded) == (1, 1)


def test_a_lane_drained_by_two_processes_stays_in_order(
    server: Server, tmp_path: Path, user: str
) -> None:
    path = tmp_path / "shared.db"
    titles = [f"visit {number}" for number in range(20)]
    with OutboxQueue.open(path) as queue:
        queue.add_user(user)
        queue.enqueue_many([activity(user, title, lane="one") for title in titles])
    with CuttingProxy(server.url) as proxy, fork_server() as processes:
        order = {
            "path": str(path),
            "server": proxy.url,
            "user": user,
            "token": token_of(user),
            "lease_seconds": 60,
        }
        assert processes.run(*[("drain_once", order)] * 2) == [0, 0]
    assert titles_of(server.url, user) == titles
