"""Conflicts with each strategy, against a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import EventKind, OutboxQueue
from onceward_outbox.conflicts import resolve_conflict
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import ConflictResolutionName, Entry, NewEntry, Resolution, Status
from onceward_outbox.transport import HttpTransport, NoResponse, Request
from onceward_protocol.operation import OperationName
from packages.onceward.tests.support.outbox_harness import (
    SOON,
    Scripted,
    drain,
    reader,
    response,
    token_of,
)
from packages.services.tests.cli.conftest import Server


class Scene:
    """A contact of which a device has version 1 and the server version 2."""

    def __init__(self, server: Server, queue: OutboxQueue) -> None:
        self.server = server
        self.queue = queue
        self.user = f"user-{uuid4()}"
        queue.add_user(self.user)
        with reader(server.url, self.user) as client:
            key = {"Idempotency-Key": str(uuid4())}
            base = {"title": "Bo", "phone": "1", "city": "Bern"}
            made = client.post("/api/v1/contacts", json=base, headers=key)
            self.path = made.headers["location"]
            key = {"Idempotency-Key": str(uuid4())}
            client.patch(self.path, json={"city": "Basel"}, headers=key)

    def change(
        self,
        strategy: ConflictResolutionName | None,
        operation: OperationName = "update",
        **more: Any,
    ) -> Entry:
        entry = NewEntry(
            user_id=self.user,
            operation=operation,
            entity_type="contact",
            endpoint=self.path,
            payload={"title": "Bo", "phone": "2", "city": "Bern"},
            headers={"If-Match": '"1"'},
            conflict_resolution=strategy,
            base={"title": "Bo", "phone": "1", "city": "Bern"},
            base_version='"1"',
        )
        fields = {name: getattr(entry, name) for name in entry.__struct_fields__} | more
        return self.queue.enqueue(NewEntry(**fields))

    def drain(self, **options: Any) -> DrainReport:
        with HttpTransport(self.server.url) as transport:
            return drain(self.queue, self.user, transport, token_of, **options)

    def contact(self) -> dict[str, Any]:
        with reader(self.server.url, self.user) as client:
            found: dict[str, Any] = client.get(self.path).json()
        return found


@pytest.fixture
def scene(server: Server, tmp_path: Path) -> Iterator[Scene]:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        yield Scene(server, queue)


def test_server_wins_discards_the_change(scene: Scene) -> None:
    entry = scene.change("server_wins")
    report = scene.drain()
    assert (report.ended, report.resolved) == (Ended.EMPTY, 1)
    assert scene.queue.get(entry.id).status is Status.DISCARDED
    assert (scene.contact()["phone"], scene.contact()["city"]) == ("1", "Basel")


@pytest.mark.parametrize("operation", ["update", "patch", "delete"])
def test_client_wins_forces_the_change_once_with_a_new_key(
    scene: Scene, operation: OperationName
) -> None:
    entry = scene.change("client_wins", operation)
    report = scene.drain()
    after = scene.queue.get(entry.id)
    assert (report.ended, report.sent, after.status) == (Ended.EMPTY, 2, Status.SUCCEEDED)
    assert after.forced
    assert after.idempotency_key != entry.idempotency_key
    if operation == "delete":
        assert scene.contact()["code"] == "resource.not_found"
    else:
        assert (scene.contact()["phone"], scene.contact()["version"]) == ("2", 3)


def test_a_forced_change_has_no_version_in_the_body(scene: Scene) -> None:
    scene.change("client_wins", headers={}, payload={"title": "Bo", "phone": "2", "version": 1})
    assert scene.drain().ended is Ended.EMPTY
    assert scene.contact()["phone"] == "2"


@pytest.mark.parametrize("strategy", ["manual", None])
def test_manual_keeps_both_sides_until_the_conflict_is_resolved(
    scene: Scene, strategy: ConflictResolutionName | None
) -> None:
    heard: list[EventKind] = []
    scene.queue.subscribe(lambda event: heard.append(event.kind))
    entry = scene.change(strategy)
    report = scene.drain()
    waiting = scene.queue.get(entry.id)
    assert (report.ended, report.conflicts) == (Ended.BLOCKED, 1)
    assert (waiting.status, waiting.theirs_version) == (Status.CONFLICT, '"2"')
    assert '"Basel"' in (waiting.theirs or "")
    assert EventKind.CONFLICT in heard

    resolve_conflict(scene.queue, waiting, Resolution.CLIENT_WINS)
    assert scene.drain().ended is Ended.EMPTY
    assert (scene.contact()["phone"], scene.contact()["city"]) == ("2", "Bern")


def test_a_merged_payload_is_sent_with_the_version_that_was_read(scene: Scene) -> None:
    entry = scene.change("manual")
    scene.drain()
    merged = {"title": "Bo", "phone": "2", "city": "Basel"}
    again = resolve_conflict(
        scene.queue, scene.queue.get(entry.id), Resolution.MERGE, payload=merged
    )
    assert again.headers["If-Match"] == '"2"'
    assert scene.drain().ended is Ended.EMPTY
    assert (scene.contact()["phone"], scene.contact()["city"]) == ("2", "Basel")


def three_way(base: dict[str, Any], mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
    changed = {name: value for name, value in mine.items() if value != base.get(name)}
    return {name: theirs[name] for name in base} | changed


def test_a_function_of_the_app_merges_base_mine_and_theirs(scene: Scene) -> None:
    entry = scene.change("merge")
    report = scene.drain(merge=three_way)
    assert (report.ended, report.resolved) == (Ended.EMPTY, 1)
    assert scene.queue.get(entry.id).status is Status.SUCCEEDED
    assert (scene.contact()["phone"], scene.contact()["city"]) == ("2", "Basel")


def test_a_merge_function_may_return_a_resolution(scene: Scene) -> None:
    entry = scene.change("merge")
    scene.drain(merge=lambda *_: Resolution.SERVER_WINS)
    assert scene.queue.get(entry.id).status is Status.DISCARDED


def test_a_merge_function_that_raises_leaves_the_conflict_open(scene: Scene) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("cannot merge that")

    entry = scene.change("merge")
    assert scene.drain(merge=broken).conflicts == 1
    assert scene.queue.get(entry.id).status is Status.CONFLICT


def test_merging_ends_after_five_conflicts(tmp_path: Path) -> None:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="update",
                entity_type="contact",
                endpoint="/api/v1/contacts/1",
                payload={"title": "Bo"},
                conflict_resolution="merge",
            )
        )
        server = Scripted(
            lambda request: (
                response(200, {"title": "Bea", "version": 7})
                if request.method == "GET"
                else response(409, code="concurrency.version_mismatch")
            )
        )
        report = drain(queue, "ada", server, merge=lambda _base, mine, _theirs: mine)
        assert (report.ended, report.conflicts) == (Ended.BLOCKED, 1)
        assert queue.get(entry.id).theirs_version == '"7"'
    assert len(server.requests) == 12


def test_a_conflict_whose_server_side_is_unreachable_is_retried(tmp_path: Path) -> None:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="update",
                entity_type="contact",
                endpoint="/api/v1/contacts/1",
                payload={"title": "Bo"},
                conflict_resolution="client_wins",
            )
        )
        server = Scripted(
            [
                response(409, code="concurrency.version_mismatch"),
                NoResponse("no response: the connection broke"),
                response(409, code="concurrency.version_mismatch"),
                response(200, {"title": "Bea"}, {"etag": '"7"'}),
                response(200, {}),
            ]
        )
        report = drain(queue, "ada", server, max_seconds=5, retry=SOON)
    assert (report.ended, report.resolved) == (Ended.EMPTY, 1)
    assert [request.method for request in server.requests] == ["PUT", "GET", "PUT", "GET", "PUT"]
    assert server.requests[-1].headers["If-Match"] == '"7"'


def unreadable(
    tmp_path: Path, strategy: ConflictResolutionName | None, read: Any, **more: Any
) -> tuple[Entry, int]:
    """Cause a conflict; reading the server's side gets ``read``."""
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="update",
                entity_type="contact",
                endpoint="/api/v1/contacts/1",
                payload={"title": "Bo"},
                conflict_resolution=strategy,
                max_attempts=3,
                **more,
            )
        )

        def reply(request: Request) -> Any:
            if request.method == "GET":
                return read
            forced = request.headers.get("If-Match") == "*"
            return (
                response(200, {}) if forced else response(409, code="concurrency.version_mismatch")
            )

        server = Scripted(reply)
        drain(queue, "ada", server, max_seconds=20, retry=SOON)
        return queue.get(entry.id), len(server.requests)


@pytest.mark.parametrize("status", [302, 403, 405])
def test_a_conflict_whose_server_side_cannot_be_read_waits_for_a_decision(
    tmp_path: Path, status: int
) -> None:
    entry, sends = unreadable(tmp_path, "manual", response(status))
    assert (entry.status, entry.last_error_code, sends) == (Status.CONFLICT, 409, 2)


def test_client_wins_without_a_version_where_none_is_needed(tmp_path: Path) -> None:
    entry, sends = unreadable(tmp_path, "client_wins", response(405))
    assert (entry.status, sends) == (Status.SUCCEEDED, 3)


@pytest.mark.parametrize("profile", ["default", "planning"])
def test_client_wins_sends_the_version_that_the_conflict_names(
    tmp_path: Path, profile: str
) -> None:
    """If the entity cannot be read, or its ETag is weak and its body has no version."""
    for read in (response(405), response(200, {"title": "Bea"}, {"etag": 'W/"9"'})):
        body = {"code": "concurrency.version_mismatch", "details": {"currentVersion": 7}}
        server = Scripted([response(409, body), read, response(200, {})])
        with OutboxQueue.open(tmp_path / f"{read.status}.db") as queue:
            queue.add_user("ada")
            entry = queue.enqueue(
                NewEntry(
                    user_id="ada",
                    operation="update",
                    entity_type="contact",
                    endpoint="/api/v1/contacts/1",
                    payload={"title": "Bo", "version": 3},
                    conflict_resolution="client_wins",
                    profile=profile,
                )
            )
            drain(queue, "ada", server)
            assert queue.get(entry.id).status is Status.SUCCEEDED
        assert server.requests[-1].headers["If-Match"] == '"7"'
        assert server.requests[-1].body == b'{"title":"Bo"}'


def test_client_wins_waits_for_a_decision_where_a_version_is_needed(tmp_path: Path) -> None:
    entry, _ = unreadable(tmp_path, "client_wins", response(405), profile="planning")
    assert entry.status is Status.CONFLICT


def test_a_conflict_that_stays_unreadable_waits_for_a_decision(tmp_path: Path) -> None:
    entry, sends = unreadable(tmp_path, "client_wins", NoResponse("no answer"))
    assert (entry.status, sends) == (Status.CONFLICT, 6)


def test_a_refused_token_while_reading_a_conflict_releases_the_entry(tmp_path: Path) -> None:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="update",
                entity_type="contact",
                endpoint="/api/v1/contacts/1",
                payload={"title": "Bo"},
                conflict_resolution="client_wins",
                max_attempts=1,
            )
        )
        server = Scripted([response(409, code="concurrency.version_mismatch"), response(401)])
        assert drain(queue, "ada", server, "old-token").ended is Ended.SIGNED_OUT
        assert queue.get(entry.id).status is Status.PENDING
