"""Responses that are not the service's: captive portals, proxies and gateways."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from onceward_outbox import EventKind, OutboxQueue, Profile
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import NewEntry, Status
from onceward_outbox.errors import OutcomeUnknownError
from onceward_outbox.profile import DEFAULT_PROFILE
from onceward_outbox.transport import Request, Response
from onceward_protocol.response_classification import is_service_response
from packages.onceward.tests.support.outbox_harness import SOON, Scripted, activity, drain, response

PORTAL = Response(
    200, {"content-type": "text/html", "date": "Wed, 01 Jan 2020 00:00:00 GMT"}, b"<html>Sign in"
)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(tmp_path / "outbox.db", chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        yield queue


def edit(operation: str, **more: object) -> NewEntry:
    return NewEntry(
        user_id="ada",
        operation=operation,  # type: ignore[arg-type]
        entity_type="activity",
        endpoint="/api/v1/activities/7",
        payload=None if operation == "delete" else {"title": "mine"},
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("status", [200, 403, 404, 407, 410])
def test_the_page_of_a_captive_portal_is_no_success_and_no_refusal(
    queue: OutboxQueue, status: int
) -> None:
    page = Response(status, PORTAL.headers, PORTAL.body)
    made = queue.enqueue(activity("ada", "visit", max_attempts=1))
    gone = queue.enqueue(edit("delete", max_attempts=1))
    drain(queue, "ada", Scripted(lambda _: page), retry=SOON)
    for entry in (made, gone):
        waiting = queue.get(entry.id)
        assert (waiting.status, waiting.outcome_unknown) == (Status.PENDING, True)
    # It may have happened: a proxy can replace the response of the service.
    with pytest.raises(OutcomeUnknownError):
        queue.cancel(made.id)
    server = Scripted(lambda request: response(201 if request.method == "POST" else 204))
    report = drain(queue, "ada", server, retry=SOON, max_seconds=5)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 2)
    assert set(server.keys) == {made.idempotency_key, gone.idempotency_key}


def test_three_pages_in_a_row_hold_the_drain(queue: OutboxQueue) -> None:
    queue.enqueue_many([activity("ada", str(number)) for number in range(9)])
    server = Scripted(lambda _: PORTAL)
    report = drain(queue, "ada", server)
    assert (report.ended, len(server.requests), report.succeeded) == (Ended.OFFLINE, 3, 0)
    assert "not the service's" in (report.detail or "")


@pytest.mark.parametrize(
    "said",
    [
        PORTAL,
        Response(500, PORTAL.headers, PORTAL.body),
        *(response(status) for status in (429, 502, 503, 504)),
    ],
)
def test_pages_and_outages_use_up_no_attempts(queue: OutboxQueue, said: Response) -> None:
    entry = queue.enqueue(activity("ada", "visit", max_attempts=2))
    server = Scripted([*[said] * 5, response(500), *[said] * 3, response(500)])
    for _ in range(100):
        assert queue.get(entry.id).status is Status.PENDING
        drain(queue, "ada", server, retry=SOON, max_seconds=0.2, wait=True)
        if not server._answers:
            break
    assert queue.get(entry.id).status is Status.FAILED, "the two errors count"


def test_a_page_in_place_of_the_servers_side_of_a_conflict_forces_nothing(
    queue: OutboxQueue,
) -> None:
    """Read as an entity without a version, it would be overwritten with ``If-Match: *``."""
    entry = queue.enqueue(edit("update", conflict_resolution="client_wins"))

    def reply(request: Request) -> Response:
        return PORTAL if request.method == "GET" else response(409, code="changed")

    server = Scripted(reply)
    drain(queue, "ada", server)
    assert [request.method for request in server.requests] == ["PUT", "GET"]
    waiting = queue.get(entry.id)
    assert (waiting.status, waiting.forced) == (Status.PENDING, False)


def test_a_page_does_not_end_an_outage(queue: OutboxQueue) -> None:
    heard: list[EventKind] = []
    queue.subscribe(lambda event: heard.append(event.kind))
    queue.enqueue(activity("ada", "visit"))
    server = Scripted([response(503), PORTAL, response(201, {"id": 1})])
    worker = Drain(queue, server, retry=SOON)
    worker.run("ada", max_seconds=5)
    assert len(server.requests) == 3
    assert heard.count(EventKind.RESUMED) == 1
    assert (
        heard.index(EventKind.RESUMED)
        > [place for place, kind in enumerate(heard) if kind is EventKind.RETRYING][1]
    ), "the sign-in page of a network was taken for the server"


def test_a_page_does_not_set_the_clock(queue: OutboxQueue) -> None:
    queue.enqueue(activity("ada", "visit"))
    drain(queue, "ada", Scripted([PORTAL]))
    assert queue.server_now().year > 2020


def test_a_profile_can_accept_more(tmp_path: Path) -> None:
    def recognise(status: int, headers: Mapping[str, str], body: bytes) -> bool:
        return is_service_response(status, headers, body) or b"ours" in body

    ours = dataclasses.replace(DEFAULT_PROFILE, recognise=recognise)
    with OutboxQueue.open(tmp_path / "ours.db", profiles=[ours]) as queue:
        queue.add_user("ada")
        queue.enqueue(edit("update"))
        queue.enqueue(edit("update"))
        server = Scripted([Response(200, PORTAL.headers, b"<p>ours"), PORTAL])
        drain(queue, "ada", server)
        assert [entry.status for entry in queue.entries("ada")] == ["succeeded", "pending"]


def test_a_recogniser_that_raises_leaves_the_entry_in_the_queue(tmp_path: Path) -> None:
    def recognise(status: int, headers: Mapping[str, str], body: bytes) -> bool:
        raise LookupError

    broken = Profile(name="broken", recognise=recognise)
    with OutboxQueue.open(tmp_path / "broken.db", profiles=[broken]) as queue:
        queue.add_user("ada")
        entry = queue.enqueue(edit("update", profile="broken"))
        with pytest.raises(LookupError):
            drain(queue, "ada", Scripted([response(200, {})]))
        assert queue.get(entry.id).status is Status.PENDING
