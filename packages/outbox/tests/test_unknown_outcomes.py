"""Unknown outcomes: sent again while the server knows the key, never after that."""

import json
from datetime import timedelta
from typing import Any

import pytest

from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import Reason, Status
from onceward_outbox.errors import OutcomeUnknownError
from onceward_outbox.transport import NoResponse, Request, Response
from packages.onceward.tests.support.outbox_harness import (
    Scripted,
    drain,
    response,
)
from packages.outbox.tests.queue_harness import Lab, walk

SILENCE = NoResponse("no response: the connection broke")


def dated(lab: Lab, status: int, body: Any = None, **headers: str) -> Response:
    """Response as the service does, with its time."""
    date = lab.clock.now().strftime("%a, %d %b %Y %H:%M:%S GMT")
    return response(status, body, {"date": date, "x-request-id": "r", **headers})


def lost(lab: Lab, **fields: Any) -> str:
    """Queue an entry, and lose the response to its first send."""
    entry = lab.add(**fields)
    drain(lab.queue, "ada", Scripted([SILENCE]))
    assert lab.queue.get(entry.id).outcome_unknown
    return entry.id


@pytest.mark.parametrize(("profile", "hours"), [("planning", 23), ("routes", 23), ("field", 166)])
def test_while_the_server_knows_the_key_the_entry_is_sent_again(
    lab: Lab, profile: str, hours: int
) -> None:
    entry_id = lost(lab, profile=profile)
    lab.clock.pass_by(hours=hours)
    assert drain(lab.queue, "ada", Scripted([response(201, {"id": 1})])).succeeded == 1
    assert lab.queue.get(entry_id).status is Status.SUCCEEDED


@pytest.mark.parametrize("profile", ["planning", "routes"])
def test_a_key_that_is_forgotten_is_not_sent_again_unless_a_person_says_so(
    lab: Lab, profile: str
) -> None:
    entry_id = lost(lab, profile=profile)
    lab.clock.pass_by(hours=24)
    server = Scripted([response(201, {"id": 1})])
    assert drain(lab.queue, "ada", server).failed == 1
    assert server.requests == []
    failed = lab.queue.get(entry_id)
    assert (failed.status, failed.reason) == (Status.FAILED, Reason.UNKNOWN)
    assert failed.outcome_unknown
    assert "look whether it happened" in (failed.last_error or "")
    lab.queue.retry(entry_id)
    assert drain(lab.queue, "ada", server).succeeded == 1


def test_the_key_lifetime_counts_from_the_first_send(lab: Lab) -> None:
    entry = lab.add(profile="planning")
    lab.clock.pass_by(days=3)
    drain(lab.queue, "ada", Scripted([SILENCE]))
    lab.clock.pass_by(hours=20)
    drain(lab.queue, "ada", Scripted([SILENCE]))
    lab.clock.pass_by(hours=3)
    assert drain(lab.queue, "ada", Scripted([response(201, {"id": 1})])).succeeded == 1
    assert lab.queue.get(entry.id).status is Status.SUCCEEDED


def test_a_conclusive_response_ends_the_key_lifetime(lab: Lab) -> None:
    lost(lab, profile="planning")
    lab.clock.pass_by(hours=20)
    drain(lab.queue, "ada", Scripted([response(422, code="surprise")]))
    lab.clock.pass_by(hours=20)
    assert drain(lab.queue, "ada", Scripted([response(201, {"id": 1})])).succeeded == 1


def test_the_key_lifetime_of_an_expired_claim_counts_from_the_claim(lab: Lab) -> None:
    entry = lab.add(profile="planning")
    lab.claim()
    lab.clock.pass_by(hours=24)
    server = Scripted([])
    assert drain(lab.queue, "ada", server).failed == 1
    assert lab.queue.get(entry.id).reason is Reason.UNKNOWN


def test_after_a_restart_the_servers_date_is_read_before_sending_again(lab: Lab) -> None:
    first = lab.add(profile="planning")
    drain(lab.queue, "ada", Scripted([dated(lab, 201, {"id": 1})]))
    entry_id = lost(lab, profile="planning")
    lab.clock.restart(days=2)
    server = Scripted([dated(lab, 405, {"code": "request.method_not_allowed"})])
    assert drain(lab.queue, "ada", server).failed == 1
    assert [request.method for request in server.requests] == ["GET"]
    assert lab.queue.get(entry_id).reason is Reason.UNKNOWN
    assert lab.queue.get(first.id).status is Status.SUCCEEDED


PAGE = {"content-type": "text/html"}


@pytest.mark.parametrize("said", [response(405), response(302)])
def test_a_server_without_a_date_does_not_block_entries(lab: Lab, said: Response) -> None:
    entry_id, other = lost(lab), lab.add()
    lab.clock.restart(hours=1)

    def reply(request: Request) -> Response:
        return said if request.method == "GET" else response(201, {"id": 1})

    # The device's clock says that the key is known still.
    assert drain(lab.queue, "ada", Scripted(reply)).succeeded == 2
    assert lab.queue.get(entry_id).status is Status.SUCCEEDED
    assert lab.queue.get(other.id).status is Status.SUCCEEDED


def test_an_outage_in_place_of_the_date_is_waited_for(lab: Lab) -> None:
    entry_id, other = lost(lab), lab.add()
    lab.clock.restart(hours=1)
    down = Scripted(lambda _: response(503))
    assert drain(lab.queue, "ada", down).ended is Ended.HELD
    assert [request.method for request in down.requests] == ["GET"]
    lab.clock.pass_by(minutes=10)
    assert drain(lab.queue, "ada", Scripted(lambda _: response(201, {"id": 1}))).succeeded == 2
    assert lab.queue.get(entry_id).status is Status.SUCCEEDED
    assert lab.queue.get(other.id).status is Status.SUCCEEDED


def test_an_entry_whose_key_may_be_expired_waits_for_the_servers_date(lab: Lab) -> None:
    entry_id, other = lost(lab), lab.add()
    lab.clock.restart(days=8)
    told = Response(405, PAGE, b"<html>")

    def reply(request: Request) -> Response:
        return told if request.method == "GET" else response(201, {"id": 1})

    assert drain(lab.queue, "ada", Scripted(reply)).succeeded == 1
    assert lab.queue.get(entry_id).status is Status.PENDING
    assert lab.queue.get(other.id).status is Status.SUCCEEDED


def test_a_retry_before_the_key_expired_does_not_reset_its_lifetime(lab: Lab) -> None:
    entry_id = lab.add(profile="planning", max_attempts=1).id
    drain(lab.queue, "ada", Scripted([response(500)]))
    assert lab.queue.get(entry_id).reason is Reason.ATTEMPTS
    lab.clock.pass_by(hours=1)
    lab.queue.retry(entry_id)
    lab.clock.pass_by(days=3)
    server = Scripted([response(201, {"id": 1})])
    assert drain(lab.queue, "ada", server).failed == 1
    assert lab.queue.get(entry_id).reason is Reason.UNKNOWN
    lab.queue.retry(entry_id)
    assert drain(lab.queue, "ada", server).succeeded == 1


def test_entries_found_too_old_during_a_drain_are_not_sent(lab: Lab) -> None:
    lab.add()
    drain(lab.queue, "ada", Scripted([dated(lab, 201, {"id": 1})]))
    for _ in range(5):
        lab.add()
    lab.clock.restart(days=10)
    server = Scripted(lambda _: dated(lab, 201, {"id": 2}))
    report = drain(lab.queue, "ada", server)
    # The first response shows that ten days have passed.
    assert (len(server.requests), report.succeeded, report.expired) == (1, 1, 4)


# -- what does not settle it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        *(response(status) for status in (400, 403, 405, 413)),
        response(307, headers={"location": "/api/v1/activities/"}),
        response(403, headers={"onceward-effect": "unheard of"}),
    ],
)
def test_a_refusal_before_the_key_lookup_leaves_the_outcome_unknown(
    lab: Lab, said: Response
) -> None:
    entry_id = lost(lab)
    lab.clock.pass_by(hours=1)
    drain(lab.queue, "ada", Scripted([said]))
    failed = lab.queue.get(entry_id)
    assert (failed.status, failed.outcome_unknown) == (Status.FAILED, True)
    with pytest.raises(OutcomeUnknownError):
        lab.queue.edit_payload(entry_id, {"title": "another"})


@pytest.mark.parametrize("status", [403, 405, 413])
def test_a_page_of_a_proxy_leaves_the_entry_pending(lab: Lab, status: int) -> None:
    entry_id = lost(lab)
    lab.clock.pass_by(hours=1)
    drain(lab.queue, "ada", Scripted([Response(status, PAGE, b"<html>")]))
    pending = lab.queue.get(entry_id)
    assert (pending.status, pending.outcome_unknown) == (Status.PENDING, True)


@pytest.mark.parametrize(
    "said", [response(404), response(409, code="IDEMPOTENCY_CONFLICT"),
             response(400, headers={"idempotency-replayed": "true"}),
             response(400, headers={"onceward-effect": "stored"}),
             *(response(status, headers={"onceward-effect": "none"}) for status in (400, 403))],
)  # fmt: skip
def test_a_refusal_after_the_key_lookup_makes_the_outcome_known(lab: Lab, said: Response) -> None:
    entry_id = lost(lab)
    lab.clock.pass_by(hours=1)
    drain(lab.queue, "ada", Scripted([said]))
    failed = lab.queue.get(entry_id)
    assert (failed.status, failed.outcome_unknown) == (Status.FAILED, False)


# -- whose time it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "portal",
    [
        response(302, headers={"date": "Wed, 01 Jan 2020 00:00:00 GMT", "location": "http://wifi/"}),
        response(502, headers={"date": "Wed, 01 Jan 2020 00:00:00 GMT"}),
        Response(403, {"date": "Wed, 01 Jan 2020 00:00:00 GMT"}, b"<html>"),
        response(200, {}, {"date": "Fri, 31 Dec 9999 23:59:59 GMT", "x-request-id": "r"}),
        response(200, {}, {"date": "Mon, 99999999999999999999 Jan 2020 00:00:00 GMT",
                         "x-request-id": "r"}),
    ],
)  # fmt: skip
def test_the_date_of_a_proxy_or_an_impossible_date_is_ignored(lab: Lab, portal: Response) -> None:
    lab.add()
    drain(lab.queue, "ada", Scripted([portal]))
    assert lab.queue.server_now() == lab.clock.now()
    assert lab.add().client_generated_at == lab.clock.now()


def test_client_submitted_at_is_never_before_client_generated_at(lab: Lab) -> None:
    made = lab.queue.enqueue(walk()).client_generated_at
    lab.clock.set_by(days=-1)

    def reply(request: Request) -> Response:
        body = json.loads(request.body or b"")
        assert body["clientSubmittedAt"] == body["clientGeneratedAt"]
        return response(200, {})

    assert drain(lab.queue, "ada", Scripted(reply)).ended is Ended.EMPTY
    assert made - lab.clock.now() == timedelta(days=1)


def test_an_id_too_large_for_sqlite_is_stored_as_text(lab: Lab) -> None:
    local = "0b3c0f6e-5f0e-4b4e-9d33-0d1f5f1f1f1f"
    entry = lab.add(local_id=local)
    drain(lab.queue, "ada", Scripted([response(201, {"id": 2**64})]))
    assert lab.queue.get(entry.id).status is Status.SUCCEEDED
    assert lab.queue.mappings("ada", [local]) == {local: str(2**64)}
