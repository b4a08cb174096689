"""Versions that travel with edits: against a real server, and against scripted responses."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from msgspec import UNSET

from onceward_outbox import EventKind, OutboxQueue, Profile
from onceward_outbox.conflicts import ConflictPlan, resolve_conflict
from onceward_outbox.entry import Entry, NewEntry, Reason, Resolution, Status
from onceward_outbox.errors import ClaimLostError, EntryInvalidError
from onceward_outbox.outcome import AttemptResult, Conflicted
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response
from onceward_outbox.versions import Produced
from packages.onceward.tests.support.outbox_harness import (
    SINGLY,
    SOON,
    Scripted,
    drain,
    reader,
    response,
    token_of,
)
from packages.outbox.tests.outcomes import (
    fail,
    rebase,
    record_conflict,
    release,
    retry_later,
    succeed,
)
from packages.outbox.tests.queue_harness import Lab
from packages.services.tests.cli.conftest import Server


class Device:
    """A device whose user edits a contact, and another client that does so too."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.file = path
        self.user = f"user-{uuid4()}"
        self.queue = OutboxQueue.open(path, settings=SINGLY)
        self.queue.add_user(self.user)
        self.kinds: list[EventKind] = []
        self.queue.subscribe(lambda event: self.kinds.append(event.kind))

    def make_elsewhere(self) -> str:
        """Return the path of a contact that another client has made; it has version 1."""
        body = {"title": "Bo", "phone": "0", "city": "Bern"}
        with reader(self.server.url, self.user) as client:
            key = {"Idempotency-Key": str(uuid4())}
            path: str = client.post("/api/v1/contacts", json=body, headers=key).headers["location"]
        return path

    def write_elsewhere(self, path: str, **fields: str) -> None:
        with reader(self.server.url, self.user) as client:
            key = {"Idempotency-Key": str(uuid4())}
            assert client.patch(path, json=fields, headers=key).status_code == 200

    def read(self, path: str) -> dict[str, Any]:
        with reader(self.server.url, self.user) as client:
            found: dict[str, Any] = client.get(path).json()
        return found

    def patch(self, path: str, fields: dict[str, Any], **more: Any) -> Entry:
        return self.queue.enqueue(
            NewEntry(
                user_id=self.user,
                operation="patch",
                entity_type="contact",
                endpoint=path,
                payload=fields,
                **more,
            )
        )

    def drain(self, before_send: Callable[[Request], None] | None = None, **options: Any) -> None:
        with HttpTransport(self.server.url) as transport:
            send = transport.send

            def watched(request: Request) -> Response | NoResponse:
                if before_send is not None:
                    before_send(request)
                return send(request)

            drain(self.queue, self.user, Scripted(watched), token_of, retry=SOON, **options)

    def statuses(self) -> list[str]:
        return [str(entry.status) for entry in self.queue.entries(self.user)]


@pytest.fixture
def device(server: Server, tmp_path: Path) -> Iterator[Device]:
    device = Device(server, tmp_path / "outbox.db")
    yield device
    device.queue.close()


def test_create_and_ten_offline_edits_of_it_all_succeed(device: Device) -> None:
    local = str(uuid4())
    device.queue.enqueue(
        NewEntry(
            user_id=device.user,
            operation="create",
            entity_type="contact",
            endpoint="/api/v1/contacts",
            payload={"title": "Bo", "phone": "0"},
            local_id=local,
        )
    )
    for number in range(1, 11):
        device.patch(f"/api/v1/contacts/{{local:{local}}}", {"phone": str(number)})
    sent: list[str | None] = []
    device.drain(lambda request: sent.append(request.headers.get("If-Match")))
    assert device.statuses() == ["succeeded"] * 11
    assert sent == [None, *(f'"{number}"' for number in range(1, 11))]


@pytest.mark.parametrize("how", ["base_version", "header", "with a second wake-up"])
def test_ten_edits_of_one_version_do_not_conflict_with_each_other(device: Device, how: str) -> None:
    path = device.make_elsewhere()
    version = {"headers": {"If-Match": '"1"'}} if how == "header" else {"base_version": '"1"'}
    for number in range(10):
        device.patch(path, {"phone": str(number)}, **version)
        if how == "with a second wake-up" and number == 4:
            device.drain()
            device.queue.close()
            device.queue = OutboxQueue.open(device.file, settings=SINGLY)
    device.drain()
    assert device.statuses() == ["succeeded"] * 10
    assert (device.read(path)["phone"], device.read(path)["version"]) == ("9", 11)


def test_edit_of_an_old_version_does_not_overwrite_a_newer_one(device: Device) -> None:
    path = device.make_elsewhere()
    device.write_elsewhere(path, city="Basel")
    entry = device.patch(path, {"city": "Chur"}, base_version='"1"')
    device.drain()
    assert device.queue.get(entry.id).status is Status.CONFLICT
    assert device.read(path)["city"] == "Basel"


@pytest.mark.parametrize("how", ["client_wins", "server_wins", "merge"])
def test_write_of_another_client_between_own_edits_is_one_conflict(
    device: Device, how: Any
) -> None:
    path = device.make_elsewhere()
    for number in range(10):
        device.patch(path, {"phone": str(number)}, base_version='"1"')
    sends = 0

    def interrupt(request: Request) -> None:
        nonlocal sends
        sends += request.method == "PATCH"
        if sends == 5 and request.method == "PATCH":
            device.write_elsewhere(path, phone="theirs")

    device.drain(interrupt)
    [conflict] = device.queue.entries(device.user, status=Status.CONFLICT)
    assert json.loads(conflict.payload or "") == {"phone": "4"}
    assert json.loads(conflict.base or "")["phone"] == "3"
    assert json.loads(conflict.theirs or "")["phone"] == "theirs"
    assert device.statuses().count("pending") == 5
    payload = {"phone": "both"} if how == "merge" else UNSET
    resolve_conflict(device.queue, conflict, how, payload=payload)
    device.drain()
    assert device.kinds.count(EventKind.CONFLICT) == 1
    last = "discarded" if how == "server_wins" else "succeeded"
    assert device.statuses() == [*["succeeded"] * 4, last, *["succeeded"] * 5]
    assert device.read(path)["phone"] == "9"


def test_server_wins_discards_every_edit_that_did_not_know_the_servers_side(
    device: Device,
) -> None:
    path = device.make_elsewhere()
    device.write_elsewhere(path, phone="theirs")
    for number in range(3):
        device.patch(
            path, {"phone": str(number)}, base_version='"1"', conflict_resolution="server_wins"
        )
    device.drain()
    assert device.statuses() == ["discarded"] * 3
    assert device.read(path)["phone"] == "theirs"


def test_edit_after_a_conflict_is_based_on_the_version_that_was_read(device: Device) -> None:
    path = device.make_elsewhere()
    device.write_elsewhere(path, city="Basel")
    device.patch(path, {"city": "Chur"}, base_version='"1"', conflict_resolution="server_wins")
    device.drain()
    later = device.patch(path, {"city": "Genf"})
    assert later.base_version == '"2"'
    device.drain()
    assert device.read(path)["city"] == "Genf"


def test_merge_strategy_merges_by_field_and_leaves_the_rest_to_a_person(device: Device) -> None:
    path = device.make_elsewhere()
    base = device.read(path)
    device.write_elsewhere(path, city="Basel")
    options = {"base": base, "base_version": '"1"', "conflict_resolution": "merge"}
    device.patch(path, {"phone": "1"}, **options)
    device.patch(path, {"phone": "2"}, **options)
    clash = device.patch(path, {"title": "Bea", "city": "Chur"}, **options)
    device.drain()
    assert device.statuses() == ["succeeded", "succeeded", "conflict"]
    assert (device.read(path)["phone"], device.read(path)["city"]) == ("2", "Basel")
    assert device.queue.get(clash.id).conflict_fields == ("/city",)


def test_conflict_that_waits_for_a_person_names_the_fields_of_both_sides(device: Device) -> None:
    path = device.make_elsewhere()
    base = device.read(path)
    device.write_elsewhere(path, city="Basel")
    mine = {"phone": "1", "city": "Chur"}
    clash = device.patch(path, mine, base=base, base_version=base["version"])
    device.drain()
    assert device.statuses() == ["conflict"]
    assert device.queue.get(clash.id).conflict_fields == ("/city",)


# -- with scripted responses ----------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        yield queue


def edit(queue: OutboxQueue, text: str = "x", **more: Any) -> Entry:
    fields: dict[str, Any] = {"operation": "patch", "endpoint": "/notes/5"} | more
    return queue.enqueue(
        NewEntry(user_id="ada", entity_type="note", payload={"text": text}, **fields)
    )


@pytest.mark.parametrize("version", [3, "3", '"3"'])
def test_base_version_may_be_the_number_of_the_body(queue: OutboxQueue, version: str | int) -> None:
    assert edit(queue, base_version=version).base_version == '"3"'


@pytest.mark.parametrize("version", [True, 3.0, ["3"]])
def test_base_version_of_another_type_is_refused(queue: OutboxQueue, version: Any) -> None:
    with pytest.raises(EntryInvalidError) as refused:
        edit(queue, base_version=version)
    assert refused.value.rule == "base_version_must_be_text"


def if_matches(server: Scripted) -> list[str | None]:
    return [request.headers.get("If-Match") for request in server.requests]


def test_retry_sends_the_same_version_even_if_another_edit_succeeded_meanwhile(
    queue: OutboxQueue,
) -> None:
    first = edit(queue, "first", base_version='"1"', lane="one")
    edit(queue, "second", base_version='"1"', lane="two")
    made = response(200, {"version": 2}, {"etag": '"2"'})
    replies: dict[str, list[Response | NoResponse]] = {
        "first": [NoResponse("cut off"), made],
        "second": [made],
    }

    def reply(request: Request) -> Response | NoResponse:
        return replies[json.loads(request.body or b"")["text"]].pop(0)

    server = Scripted(reply)
    drain(queue, "ada", server, retry=SOON, max_seconds=5)
    sent = [request for request in server.requests if b"first" in (request.body or b"")]
    assert [request.headers["If-Match"] for request in sent] == ['"1"', '"1"']
    assert len({request.headers["Idempotency-Key"] for request in sent}) == 1
    assert queue.get(first.id).sent_version == '"1"'


def test_retried_edit_keeps_its_version_if_a_later_one_may_have_happened(
    queue: OutboxQueue,
) -> None:
    """The later one has failed and is retried too: its version is not the one to overwrite."""
    older = edit(queue, "older", base_version='"1"')
    newer = edit(queue, "newer", base_version='"1"')
    queue.park(older.id, reason=Reason.REBUILD, error="set aside")
    claimed = queue.claim("ada")
    assert claimed is not None
    assert claimed.entry.id == newer.id
    fail(queue, claimed, reason=Reason.UNKNOWN, outcome_unknown=True)
    for entry in (older, newer):
        queue.retry(entry.id)
    made = response(200, {"version": 2}, {"etag": '"2"'})
    server = Scripted([made, response(412), made])
    drain(queue, "ada", server)
    assert if_matches(server)[:2] == ['"1"', '"1"']
    assert [queue.get(entry.id).status for entry in (older, newer)] == [
        Status.CONFLICT,
        Status.SUCCEEDED,
    ]


@pytest.mark.parametrize(
    ("headers", "body", "version"),
    [
        ({"etag": '"7"'}, {}, '"7"'),
        ({}, {"version": 7}, '"7"'),
        ({"etag": '"a"'}, {"version": 7}, '"a"'),
        ({"etag": 'W/"7"'}, {}, None),
        ({"etag": 'W/"7"'}, {"version": 8}, '"8"'),
        ({}, {"version": True}, None),
    ],
)
def test_version_is_read_from_the_tag_or_the_body(
    queue: OutboxQueue, headers: dict[str, str], body: Any, version: str | None
) -> None:
    edit(queue)
    drain(queue, "ada", Scripted([response(200, body, headers)]))
    edit(queue)
    server = Scripted([response(200)])
    drain(queue, "ada", server)
    assert if_matches(server) == [version]


def test_success_that_names_no_version_ends_the_chain(queue: OutboxQueue) -> None:
    """The next edit cannot be checked: with the old version it would conflict with the first."""
    edit(queue, base_version='"1"')
    edit(queue, base_version='"1"')
    server = Scripted([response(204), response(204)])
    drain(queue, "ada", server)
    assert if_matches(server) == ['"1"', None]


def test_parts_of_an_entity_have_their_own_versions(queue: OutboxQueue) -> None:
    edit(queue)
    drain(queue, "ada", Scripted([response(200, {"version": 2})]))
    edit(queue, endpoint="/notes/5/pin")
    edit(queue, endpoint="/notes/5/")
    edit(queue, endpoint="/notes/5?notify=no")
    server = Scripted(lambda _: response(200, {"version": 3}))
    drain(queue, "ada", server)
    assert if_matches(server) == [None, '"2"', '"3"']


def test_star_is_sent_as_it_is(queue: OutboxQueue) -> None:
    edit(queue)
    drain(queue, "ada", Scripted([response(200, {"version": 2})]))
    edit(queue, headers={"if-match": "*"})
    edit(queue)
    server = Scripted([response(200, {"version": 9}), response(200, {"version": 10})])
    drain(queue, "ada", server)
    assert [request.headers.get("if-match") for request in server.requests] == ["*", None]
    assert server.requests[1].headers["If-Match"] == '"9"'


def test_users_do_not_share_versions(queue: OutboxQueue) -> None:
    queue.add_user("bob")
    edit(queue)
    drain(queue, "ada", Scripted([response(200, {"version": 2})]))
    queue.enqueue(
        NewEntry(user_id="bob", operation="patch", entity_type="note", endpoint="/notes/5")
    )
    server = Scripted([response(200)])
    drain(queue, "bob", server)
    assert if_matches(server) == [None]


class OneNote:
    """A server with one note that checks ``If-Match``, and refuses some texts."""

    def __init__(self) -> None:
        self.text, self.version, self.refused = "first", 1, {"older"}

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            return response(200, {"id": 5, "text": self.text, "version": self.version})
        text = json.loads(request.body or b"{}")["text"]
        if text in self.refused:
            return response(400, {"code": "INVALID"})
        expected = request.headers.get("If-Match")
        current = f'"{self.version}"'
        if request.method != "POST" and expected not in (None, current):
            return response(409, {"details": {"currentVersion": self.version}})
        self.text, self.version = text, self.version + (request.method != "POST")
        return response(200, {"id": 5, "text": text, "version": self.version})


@pytest.mark.parametrize("base", ["named", "of a create"])
@pytest.mark.parametrize("how", ["retry", "edit", "retry and edit", "retry of a dependency"])
def test_refused_edit_that_is_sent_again_does_not_overwrite_a_newer_own_edit(
    queue: OutboxQueue, how: str, base: str
) -> None:
    note = OneNote()
    more: dict[str, Any] = {"base_version": '"1"'}
    if base == "of a create":
        local = str(uuid4())
        edit(queue, "first", operation="create", endpoint="/notes", local_id=local)
        more = {"endpoint": f"/notes/{{local:{local}}}"}
    if how == "retry of a dependency":
        first = edit(queue, "older", endpoint="/notes/6")
        older = edit(queue, "held", depends_on=[first.id], **more)
    else:
        first = older = edit(queue, "older", **more)
    newer = edit(queue, "newer", **more)
    drain(queue, "ada", Scripted(note))
    assert (queue.get(older.id).status, queue.get(newer.id).status) == ("failed", "succeeded")
    note.refused.clear()
    if how != "edit":
        queue.retry(first.id)
    if how.endswith("edit"):
        queue.edit_payload(first.id, {"text": "corrected"})
    drain(
        queue,
        "ada",
        Scripted(lambda sent: response(200) if sent.target == "/notes/6" else note(sent)),
    )
    assert (note.text, queue.get(older.id).status) == ("newer", Status.CONFLICT)
    queue.resolve(older.id, Resolution.CLIENT_WINS)
    later = edit(queue, "later", **more)
    sent = Scripted(note)
    drain(queue, "ada", sent)
    assert if_matches(sent) == ['"2"', '"3"']
    assert queue.get(later.id).status is Status.SUCCEEDED


@pytest.mark.parametrize("base", ["named", "of a create"])
def test_refused_edit_that_is_retried_during_a_newer_own_edit_does_not_overwrite_it(
    queue: OutboxQueue, base: str
) -> None:
    note = OneNote()
    more: dict[str, Any] = {"base_version": '"1"'}
    if base == "of a create":
        local = str(uuid4())
        edit(queue, "first", operation="create", endpoint="/notes", local_id=local)
        more = {"endpoint": f"/notes/{{local:{local}}}"}
    older = edit(queue, "older", **more)
    newer = edit(queue, "newer", **more)

    def respond(request: Request) -> Response:
        if b"newer" in (request.body or b""):
            note.refused.clear()
            queue.retry(older.id)
        return note(request)

    drain(queue, "ada", Scripted(respond))
    assert queue.get(newer.id).status is Status.SUCCEEDED
    assert (note.text, queue.get(older.id).status) == ("newer", Status.CONFLICT)


@pytest.mark.parametrize("is_edited", [False, True])
def test_refused_edit_that_is_retried_waits_for_a_newer_one_whose_outcome_is_unknown(
    queue: OutboxQueue, is_edited: bool
) -> None:
    note = OneNote()
    older = edit(queue, "older", base_version='"1"')
    drain(queue, "ada", Scripted(note))
    newer = edit(queue, "newer", base_version='"1"')
    claimed = queue.claim("ada")
    assert claimed is not None
    # The server does it, and the response is lost.
    note.text, note.version, note.refused = "newer", 2, set()
    replayed = response(200, {"id": 5, "text": "newer", "version": 2})
    retry_later(queue, claimed, delay_seconds=0, outcome_unknown=True)

    def respond(request: Request) -> Response:
        is_replay = request.headers.get("Idempotency-Key") == newer.idempotency_key
        return replayed if is_replay else note(request)

    queue.retry(older.id)
    if is_edited:
        queue.edit_payload(older.id, {"text": "corrected"})
    drain(queue, "ada", Scripted(respond))
    assert queue.get(newer.id).status is Status.SUCCEEDED
    assert (note.text, queue.get(older.id).status) == ("newer", Status.CONFLICT)
    queue.resolve(older.id, Resolution.CLIENT_WINS)
    later = edit(queue, "later")
    sent = Scripted(respond)
    drain(queue, "ada", sent)
    assert if_matches(sent) == ['"2"', '"3"']
    assert queue.get(later.id).status is Status.SUCCEEDED


def test_refused_edit_is_sent_again_with_the_current_version_if_none_was_newer(
    queue: OutboxQueue,
) -> None:
    note = OneNote()
    edit(queue, "one", base_version='"1"')
    refused = edit(queue, "older", base_version='"1"')
    drain(queue, "ada", Scripted(note))
    queue.edit_payload(refused.id, {"text": "corrected"})
    drain(queue, "ada", Scripted(note))
    assert [entry.status for entry in queue.entries("ada")] == [Status.SUCCEEDED] * 2
    assert note.text == "corrected"


@pytest.mark.parametrize(
    ("given", "stored"),
    [("3", '"3"'), ('"3"', '"3"'), ("abc", '"abc"'), (None, None)],
)
def test_base_version_is_stored_as_a_tag(
    queue: OutboxQueue, given: str | None, stored: str | None
) -> None:
    assert edit(queue, base_version=given).base_version == stored


@pytest.mark.parametrize(
    "named",
    [
        {"base_version": 'W/"3"'},
        {"headers": {"If-Match": 'W/"3"'}},
        {"headers": {"if-match": '"2", W/"3"'}},
    ],
)
def test_weak_version_is_refused_instead_of_sent_unchecked(
    queue: OutboxQueue, named: dict[str, Any]
) -> None:
    with pytest.raises(EntryInvalidError, match="weak") as refused:
        edit(queue, **named)
    assert refused.value.rule == "base_version_must_be_strong"
    assert queue.entries("ada") == []


def test_weak_version_is_refused_by_edit_payload(queue: OutboxQueue) -> None:
    entry = edit(queue, base_version='"3"')
    with pytest.raises(EntryInvalidError, match="weak"):
        queue.edit_payload(entry.id, {"text": "y"}, headers={"If-Match": 'W/"4"'})
    assert queue.get(entry.id) == entry


def test_edits_behind_a_create_do_not_overwrite_what_an_automatic_merge_has_kept(
    device: Device,
) -> None:
    """They name no base. Only the first is merged with the other client's write."""
    local = str(uuid4())
    device.queue.enqueue(
        NewEntry(
            user_id=device.user,
            operation="create",
            entity_type="contact",
            endpoint="/api/v1/contacts",
            payload={"title": "Bo", "phone": "0", "city": "Bern"},
            local_id=local,
        )
    )
    path = f"/api/v1/contacts/{{local:{local}}}"
    device.patch(path, {"phone": "1"}, conflict_resolution="merge")
    clash = device.patch(path, {"city": "Chur"}, conflict_resolution="merge")
    found: list[str] = []

    def interrupt(request: Request) -> None:
        if request.method == "PATCH" and not found:
            found.append(request.target)
            device.write_elsewhere(request.target, city="Basel")

    device.drain(interrupt)
    assert device.statuses() == ["succeeded", "succeeded", "conflict"]
    assert device.read(found[0])["city"] == "Basel"
    assert device.read(found[0])["phone"] == "1"
    assert device.queue.get(clash.id).conflict_fields == ("/city",)


def test_edit_without_a_base_follows_only_the_chain_it_was_made_on(lab: Lab) -> None:
    """Whether it is claimed together with the resolved edit before it, or later."""
    local, queue = str(uuid4()), lab.queue
    lab.add(local_id=local)
    fields = {"operation": "patch", "endpoint": f"/api/v1/activities/{{local:{local}}}"}
    lab.add(**fields, payload={"phone": "1"})
    lab.add(**fields, payload={"city": "Chur"})
    lab.send(server_id=7, produced=Produced('"1"'))
    first = lab.claim()
    conflict = record_conflict(queue, first, theirs={"city": "Basel"}, theirs_version='"2"')
    resolve_conflict(queue, conflict, "client_wins", adopts=False)
    assert lab.send(produced=Produced('"3"')).id == first.entry.id
    behind = lab.claim()
    assert behind.version == '"1"', "it would overwrite the other client's write"
    release(queue, behind)
    assert lab.add(**fields, payload={}).base_version == '"3"'


def test_edits_of_one_entity_in_two_lanes_do_not_conflict_with_each_other(lab: Lab) -> None:
    queue = lab.queue
    for text in ("first", "second"):
        edit(queue, text, base_version='"1"', lane=text, conflict_resolution="server_wins")
    first, second = queue.claim_some("ada", 2)
    assert (first.version, second.version) == ('"1"', '"1"')
    succeed(queue, first, produced=Produced('"2"'))
    refused = AttemptResult(409, "concurrency.version_mismatch")
    plan = ConflictPlan(theirs={"text": "first"}, version='"2"', how=Resolution.SERVER_WINS)
    again = queue.record(second, Conflicted(refused, plan))
    assert (again.status, again.attempt_count) == (Status.PENDING, 0)
    assert again.idempotency_key != second.entry.idempotency_key
    assert EventKind.CONFLICT not in [event.kind for event in lab.events]
    claimed = lab.claim()
    assert (claimed.entry.id, claimed.version) == (again.id, '"2"')
    # A version of another client is a conflict.
    foreign = ConflictPlan(theirs={"text": "theirs"}, version='"3"', how=Resolution.SERVER_WINS)
    assert queue.record(claimed, Conflicted(refused, foreign)).status is Status.DISCARDED


def test_edit_behind_a_conflict_about_an_unknown_base_is_sent_once(queue: OutboxQueue) -> None:
    """Its version was both the end of one chain and a link of the next: it was sent forever."""
    edit(queue)
    edit(queue, base_version='"999"')
    edit(queue)
    server = Scripted([response(200, {"version": 2}), response(409), response(200, {"version": 2})])
    drain(queue, "ada", server)
    [conflict] = queue.entries("ada", status=Status.CONFLICT)
    resolve_conflict(queue, conflict, "client_wins")
    server = Scripted([response(200, {"version": 3}), response(200, {"version": 4})])
    drain(queue, "ada", server)
    assert if_matches(server) == ['"2"', '"3"']
    assert [entry.status for entry in queue.entries("ada")] == [Status.SUCCEEDED] * 3


def test_discarding_a_conflict_takes_the_servers_side_for_later_edits(device: Device) -> None:
    path = device.make_elsewhere()
    device.write_elsewhere(path, phone="theirs")
    for number in range(3):
        device.patch(path, {"phone": str(number)}, base_version='"1"')
    device.drain()
    [conflict] = device.queue.entries(device.user, status=Status.CONFLICT)
    device.queue.discard(conflict.id)
    device.drain()
    assert device.statuses() == ["discarded", "succeeded", "succeeded"]


def test_what_is_made_again_after_a_delete_is_not_checked_against_the_old_one(
    queue: OutboxQueue,
) -> None:
    edit(queue, base_version='"1"')
    queue.enqueue(
        NewEntry(user_id="ada", operation="delete", entity_type="note", endpoint="/notes/5",
                 base_version='"1"')
    )  # fmt: skip
    edit(queue, operation="update", base_version='"1"')
    edit(queue)
    server = Scripted(
        [response(200, {"version": 2}), response(200, {"version": 2}), response(201), response(200)]
    )
    drain(queue, "ada", server)
    assert if_matches(server) == ['"1"', '"2"', None, None]
    edit(queue)
    again = Scripted([response(200)])
    drain(queue, "ada", again)
    assert if_matches(again) == [None]


def test_edit_of_the_path_takes_the_version_of_the_entity_that_it_names(
    queue: OutboxQueue,
) -> None:
    edit(queue)
    edit(queue, endpoint="/notes/6")
    drain(queue, "ada", Scripted([response(200, {"version": 2}), response(200, {"version": 30})]))
    moved, unknown = edit(queue, "moved"), edit(queue, "unknown")
    queue.edit_payload(moved.id, UNSET, endpoint="/notes/6")
    queue.edit_payload(unknown.id, UNSET, endpoint="/notes/7?notify=no")
    server = Scripted([response(200, {"version": 31}), response(200, {"version": 1})])
    drain(queue, "ada", server)
    assert if_matches(server) == ['"30"', None]
    assert (queue.get(moved.id).entity, queue.get(unknown.id).entity) == ("note/6", "note/7")


def test_read_of_a_base_that_lost_its_claim_changes_nothing(tmp_path: Path) -> None:
    with with_rule(tmp_path, "read") as queue:
        entry = edit(queue, profile="notes")
        claimed = queue.claim("ada")
        assert claimed is not None
        with queue.transaction(savepoints=False):
            release(queue, claimed)
            with pytest.raises(ClaimLostError):
                rebase(queue, claimed, base={"text": "theirs"}, version='"3"')
        assert queue.get(entry.id).base_version is None
        assert edit(queue, profile="notes").base_version is None


def test_pruning_keeps_versions_and_drops_bodies(lab: Lab) -> None:
    edit(lab.queue)
    drain(lab.queue, "ada", Scripted([response(200, {"text": "x", "version": 2})]))
    lab.clock.pass_by(days=40)
    assert lab.queue.prune() == 1
    assert edit(lab.queue).base_version == '"2"'
    with lab.queue.transaction() as connection:
        bodies = connection.execute("SELECT body FROM entity_versions").fetchall()
    assert bodies == [(None,)]


# -- edits without a known version ----------------------------------------------------------------


def with_rule(tmp_path: Path, rule: Any) -> OutboxQueue:
    queue = OutboxQueue.open(
        tmp_path / "outbox.db", profiles=[Profile(name="notes", unknown_base=rule)]
    )
    queue.add_user("ada")
    return queue


def test_unknown_base_is_sent_without_a_check_by_default(queue: OutboxQueue) -> None:
    entry = edit(queue)
    server = Scripted([response(428), response(200, {"text": "theirs", "version": 3})])
    drain(queue, "ada", server)
    assert if_matches(server) == [None, None]
    assert queue.get(entry.id).status is Status.CONFLICT


def test_unknown_base_is_read_first_where_the_profile_says_so(tmp_path: Path) -> None:
    with with_rule(tmp_path, "read") as queue:
        edit(queue, profile="notes")
        edit(queue, profile="notes")
        server = Scripted(
            [
                response(200, {"text": "theirs", "version": 3}),
                response(200, {"version": 4}),
                response(200, {"version": 5}),
            ]
        )
        drain(queue, "ada", server)
        assert [request.method for request in server.requests] == ["GET", "PATCH", "PATCH"]
        assert if_matches(server) == [None, '"3"', '"4"']


def test_unknown_base_becomes_a_conflict_where_the_profile_says_so(tmp_path: Path) -> None:
    with with_rule(tmp_path, "ask") as queue:
        entry = edit(queue, profile="notes")
        drain(queue, "ada", Scripted([response(200, {"text": "theirs", "version": 3})]))
        kept = queue.get(entry.id)
        assert (kept.status, kept.theirs_version) == (Status.CONFLICT, '"3"')
        resolve_conflict(queue, kept, "client_wins")
        server = Scripted([response(200, {"version": 4})])
        drain(queue, "ada", server)
        assert if_matches(server) == ['"3"']


def test_server_without_versions_is_sent_to_after_the_read(tmp_path: Path) -> None:
    with with_rule(tmp_path, "read") as queue:
        edit(queue, profile="notes")
        server = Scripted([response(200, {"text": "theirs"}), response(200)])
        drain(queue, "ada", server)
        assert [request.method for request in server.requests] == ["GET", "PATCH"]


def test_read_without_a_response_is_no_attempt_of_the_edit(tmp_path: Path) -> None:
    """Neither silence nor the page of a captive portal may fail what was never sent."""
    portal = Response(200, {"content-type": "text/html"}, b"<html>Sign in</html>")
    with with_rule(tmp_path, "read") as queue:
        entry = edit(queue, profile="notes", max_attempts=1)
        server = Scripted([NoResponse("the server took too long"), portal, response(404)])
        drain(queue, "ada", server)
        drain(queue, "ada", server)
        found = queue.get(entry.id)
        assert (found.status, found.outcome_unknown) == (Status.PENDING, False)


def test_base_is_read_again_after_a_limited_read(tmp_path: Path) -> None:
    """Nothing was sent, so no version may be kept for the retry: it would be sent unchecked."""
    with with_rule(tmp_path, "read") as queue:
        edit(queue, profile="notes")
        limited = response(429, {"code": "rate_limited"})
        read, written = response(200, {"version": 3}), response(200, {"version": 4})
        redirect = Response(302, {"location": "http://portal.example/"}, b"")
        server = Scripted([limited, redirect, read, written])
        drain(queue, "ada", server, retry=SOON, max_seconds=5)
        assert [request.method for request in server.requests] == ["GET"] * 3 + ["PATCH"]
        assert if_matches(server) == [None, None, None, '"3"']


def test_edits_of_one_entity_are_not_in_flight_together(queue: OutboxQueue) -> None:
    """Also in two lanes, and after a crash: the first may have happened, with its version."""
    first = edit(queue, "first", base_version='"1"', lane="one")
    second = edit(queue, "second", base_version='"1"', lane="two")
    other = edit(queue, "other", endpoint="/notes/6", lane="three")
    claimed = queue.claim("ada")
    assert claimed is not None
    assert claimed.entry.id == first.id
    found = queue.claim("ada")
    assert found is not None
    assert found.entry.id == other.id
    assert queue.claim("ada") is None
    release(queue, claimed)
    assert [one.entry.id for one in queue.claim_some("ada", 5)] == [first.id, second.id]
