"""Entries of walk: how they are sent, and what a day of them comes to on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from onceward_outbox import OutboxQueue, QueueSettings
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry
from onceward_outbox.transport import HttpTransport, NoResponse
from packages.onceward.tests.support.outbox_harness import (
    SINGLY,
    SOON,
    CuttingProxy,
    Scripted,
    all_entries,
    drain,
    reader,
    response,
    token_of,
)
from packages.services.tests.cli.conftest import Server

SILENCE = NoResponse("no response: the connection broke")


@pytest.fixture
def user() -> str:
    return f"user-{uuid4()}"


@pytest.fixture
def queue(tmp_path: Path, user: str) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        queue.add_user(user)
        yield queue


def step(number: int, quest: str = "quest.001") -> NewEntry:
    return NewEntry(
        user_id="ada",
        operation="create",
        entity_type="quest",
        endpoint=f"/quest/{quest}/step/{number}/advance",
        payload={},
        profile="walk",
    )


def test_a_walk_request_has_its_times_in_the_body_and_only_the_second_changes(
    queue: OutboxQueue,
) -> None:
    queue.enqueue(step(1))
    server = Scripted([SILENCE, response(200, {})])
    drain(queue, "ada", server, max_seconds=5, retry=SOON)
    first, second = (json.loads(request.body or b"") for request in server.requests)
    assert set(first) == {"clientGeneratedAt", "clientSubmittedAt"}
    assert first["clientGeneratedAt"] == second["clientGeneratedAt"]
    assert first["clientSubmittedAt"] < second["clientSubmittedAt"]
    assert "X-Client-Generated-At" not in server.requests[0].headers


def test_a_report_of_steps_has_its_key_in_the_body(queue: OutboxQueue) -> None:
    entry = queue.enqueue(
        NewEntry(
            user_id="ada",
            operation="create",
            entity_type="steps",
            endpoint="/step/ingest",
            payload={"count": 1},
            profile="walk",
        )
    )
    server = Scripted([response(200, {})])
    drain(queue, "ada", server, at_send=lambda _: {"X-Firebase-AppCheck": "fresh"})
    assert json.loads(server.requests[0].body or b"")["idempotencyKey"] == entry.idempotency_key
    assert server.requests[0].headers["X-Firebase-AppCheck"] == "fresh"


@pytest.mark.parametrize("settings", [SINGLY, QueueSettings()], ids=["singly", "in batches"])
def test_a_walkers_day_is_sent_in_order_and_awards_points_once(
    server: Server, tmp_path: Path, user: str, settings: QueueSettings
) -> None:
    def action(endpoint: str, **payload: object) -> NewEntry:
        return NewEntry(
            user_id=user,
            operation="create",
            entity_type="quest",
            endpoint=endpoint,
            payload=payload,
            profile="walk",
        )

    queue = OutboxQueue.open(tmp_path / "outbox.db", settings=settings)
    queue.add_user(user)
    queue.enqueue_many(
        [
            action("/quest/start", questId="quest.001"),
            action("/quest/quest.001/step/1/advance"),
            action("/quest/quest.001/step/2/advance"),
            action("/quest/complete", questId="quest.001"),
            action("/tree/allocate", allocations=[{"nodeId": "node.even-stride"}]),
        ]
    )
    with CuttingProxy(server.url, every=2) as proxy, HttpTransport(proxy.url) as transport:
        report = drain(queue, user, transport, token_of, max_seconds=20, retry=SOON)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 5), list(all_entries(queue, user))
    queue.close()
    firsts = list(dict.fromkeys(path for _, path, _, _ in proxy.seen))
    in_order = [
        "/quest/start",
        "/quest/quest.001/step/1/advance",
        "/quest/quest.001/step/2/advance",
        "/quest/complete",
        "/tree/allocate",
    ]
    if settings.batch:
        assert firsts[:2] == ["/quest/start", "/batch"]
    else:
        assert firsts == in_order
    with reader(server.url, user) as client:
        tree = client.get("/tree/state").json()
    assert tree["pointsBanked"] == 1
    assert [node["nodeId"] for node in tree["allocations"]] == ["node.even-stride"]


def test_a_device_is_registered_through_the_queue(
    server: Server, queue: OutboxQueue, user: str
) -> None:
    queue.enqueue(
        NewEntry(
            user_id=user,
            operation="create",
            entity_type="device",
            endpoint="/walker/devices",
            payload={"platform": "android", "token": f"token-of-{user}"},
            profile="walk",
        )
    )
    with HttpTransport(server.url) as transport:
        report = drain(queue, user, transport, token_of, max_seconds=20, retry=SOON)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 1), list(all_entries(queue, user))
    with reader(server.url, user) as client:
        assert [device["platform"] for device in client.get("/walker/devices").json()["items"]] == [
            "android"
        ]
