"""Decisions of a person: late ones, retries of what was refused, and taps with ``once``."""

import dataclasses
from datetime import timedelta

import pytest

from onceward_outbox import Reason, Resolution, Status
from onceward_outbox.drain_state import DrainReport
from onceward_outbox.errors import TransitionError
from onceward_outbox.settings import QueueSettings
from onceward_services.field.outbox_profile import PROFILE as FIELD
from onceward_services.walk.outbox_profile import PROFILE as WALK
from packages.onceward.tests.support.outbox_harness import Scripted, drain, response
from packages.outbox.tests.outcomes import expire, fail, record_conflict
from packages.outbox.tests.queue_harness import Lab, local, new, walk

CAP = timedelta(days=7)


@pytest.fixture
def capped(lab: Lab) -> Lab:
    """A queue in which entries of field have a cap of 7 days."""
    lab.reopen(
        settings=QueueSettings(), profiles=[WALK, dataclasses.replace(FIELD, stale_after=CAP)]
    )
    return lab


def patch(server_id: str, **fields: object) -> dict[str, object]:
    path = f"/api/v1/activities/{server_id}"
    return {"operation": "patch", "endpoint": path, "server_id": server_id, **fields}


def test_only_profiles_with_a_cap_expire_by_age(lab: Lab) -> None:
    lab.reopen(settings=QueueSettings())
    there, gone = lab.add(), lab.queue.enqueue(walk())
    lab.clock.pass_by(days=7, hours=6)
    assert lab.queue.expire_stale("ada") == []
    lab.clock.pass_by(seconds=1)
    assert [entry.id for entry in lab.queue.expire_stale("ada")] == [gone.id]
    lab.clock.pass_by(days=80)
    assert lab.queue.expire_stale("ada") == []
    assert lab.claimable() == [there.id]


@pytest.mark.parametrize("decide", ["retry", "edit", "resolve"])
def test_the_age_begins_anew_with_a_decision(capped: Lab, decide: str) -> None:
    entry = capped.queue.enqueue(new(**patch("5")))
    if decide == "resolve":
        record_conflict(capped.queue, capped.claim(), theirs={"name": "theirs"})
    else:
        fail(capped.queue, capped.claim(), reason=Reason.RESPONSE)
    capped.clock.pass_by(days=20)
    match decide:
        case "retry":
            capped.queue.retry(entry.id)
        case "edit":
            capped.queue.edit_payload(entry.id, {"name": "mine"})
        case _:
            capped.queue.resolve(entry.id, Resolution.CLIENT_WINS)
    assert capped.queue.expire_stale("ada") == []
    capped.clock.pass_by(days=7)
    assert capped.queue.expire_stale("ada") == []
    capped.clock.pass_by(seconds=1)
    assert [one.id for one in capped.queue.expire_stale("ada")] == [entry.id]


def test_edits_behind_a_conflict_wait_for_its_resolution(capped: Lab) -> None:
    first = capped.queue.enqueue(new(**patch("5")))
    record_conflict(capped.queue, capped.claim(), theirs={"name": "theirs"})
    second = capped.queue.enqueue(new(**patch("5")))
    dependent = capped.queue.enqueue(new(depends_on=[second.id]))
    capped.clock.pass_by(days=20)
    assert capped.queue.expire_stale("ada") == []
    capped.queue.resolve(first.id, Resolution.SERVER_WINS)
    assert capped.queue.expire_stale("ada") == []
    assert capped.queue.get(dependent.id).status is Status.PENDING
    capped.clock.pass_by(days=7, seconds=1)
    assert {one.id for one in capped.queue.expire_stale("ada")} == {second.id}


def test_parked_dependents_begin_anew_with_their_parent(capped: Lab) -> None:
    parent = capped.add(local_id=local())
    child = capped.queue.enqueue(new(depends_on=[parent.id]))
    fail(capped.queue, capped.claim(), reason=Reason.RESPONSE)
    capped.clock.pass_by(days=8)
    capped.queue.retry(parent.id)
    assert capped.queue.expire_stale("ada") == []
    assert capped.queue.get(child.id).status is Status.PENDING


def test_time_without_a_sign_in_does_not_count(capped: Lab) -> None:
    entry = capped.add()
    capped.clock.pass_by(days=1)
    capped.queue.note_sign_in("ada", signed_in=False)
    capped.clock.pass_by(days=20)
    late = capped.add()
    assert capped.queue.expire_stale("ada") == []
    capped.queue.note_sign_in("ada", signed_in=True)
    capped.clock.pass_by(days=6)
    assert capped.queue.expire_stale("ada") == []
    capped.clock.pass_by(seconds=1)
    assert [one.id for one in capped.queue.expire_stale("ada")] == [entry.id]
    capped.clock.pass_by(days=1)
    assert [one.id for one in capped.queue.expire_stale("ada")] == [late.id]


def test_what_expired_unsent_is_revived_by_a_person_at_its_place(lab: Lab) -> None:
    first, second = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    dependent = lab.queue.enqueue(walk(depends_on=[first.id]))
    lab.clock.pass_by(days=8)
    assert len(lab.queue.expire_stale("ada")) == 2
    assert lab.queue.get(dependent.id).reason is Reason.DEPENDENCY
    key = first.idempotency_key
    lab.queue.retry(second.id)
    assert lab.queue.retry(first.id).idempotency_key == key
    assert lab.queue.expire_stale("ada") == []
    lab.send()
    lab.send()
    assert lab.send().id == dependent.id
    assert [lab.queue.get(one.id).status for one in (first, second)] == [Status.SUCCEEDED] * 2


def test_what_the_server_expired_is_not_revived(lab: Lab) -> None:
    entry = lab.queue.enqueue(walk())
    expire(lab.queue, lab.claim())
    with pytest.raises(TransitionError, match="expired cannot retry"):
        lab.queue.retry(entry.id)


def test_a_drain_that_needs_a_sign_in_stops_the_age(capped: Lab) -> None:
    entry, tokens = capped.add(), [None, "fresh"]
    server = Scripted([response(201, {"id": 1})])

    def run() -> DrainReport:
        return drain(capped.queue, "ada", server, lambda _user: tokens[0], clock=capped.clock)

    assert run().ended == "signed_out"
    capped.clock.pass_by(days=8)
    assert run().expired == 0
    tokens.reverse()
    assert run().succeeded == 1
    assert capped.queue.get(entry.id).status is Status.SUCCEEDED
    assert not capped.queue.unsettled_at_end("ada")[2]


# -- the key of a retry ---------------------------------------------------------------------------


def test_a_retry_of_a_conclusive_refusal_has_a_new_key(lab: Lab) -> None:
    given = local()
    entry = lab.add(key=given)
    refused = response(400, {"code": "expense.too_high"}, {"onceward-effect": "none"})
    server = Scripted([refused, response(201, {"id": 1})])
    assert drain(lab.queue, "ada", server, clock=lab.clock).failed == 1
    (retried,) = lab.queue.retry_all("ada", code="expense.too_high")
    assert retried.id == entry.id
    assert drain(lab.queue, "ada", server, clock=lab.clock).succeeded == 1
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == given != second
    # An app that enqueues with its own key again finds its entry.
    assert lab.add(key=given).id == entry.id


@pytest.mark.parametrize("reason", [Reason.ATTEMPTS, Reason.UNKNOWN, Reason.RESPONSE])
def test_a_retry_of_an_unknown_outcome_keeps_its_key(lab: Lab, reason: Reason) -> None:
    entry = lab.add()
    fail(lab.queue, lab.claim(), reason=reason, outcome_unknown=True)
    assert lab.queue.retry(entry.id).idempotency_key == entry.idempotency_key


# -- once -----------------------------------------------------------------------------------------


def test_a_tap_on_something_refused_is_a_new_entry(lab: Lab) -> None:
    first = lab.add(once="order.close:1")
    assert lab.add(once="order.close:1").id == first.id
    fail(lab.queue, lab.claim(), reason=Reason.RESPONSE)
    second = lab.add(once="order.close:1")
    assert second.id != first.id
    assert lab.add(once="order.close:1").id == second.id
    for decide in (lab.queue.retry, lambda id_: lab.queue.edit_payload(id_, {"name": "again"})):
        with pytest.raises(TransitionError, match=f"{second.id} .*'order.close:1'"):
            decide(first.id)
    assert lab.queue.retry_all("ada") == []
    fail(lab.queue, lab.claim(), reason=Reason.RESPONSE)
    assert [entry.id for entry in lab.queue.retry_all("ada")] == [first.id]
    lab.send()
    assert lab.add(once="order.close:1").id == first.id  # it has succeeded


def test_a_tap_on_something_that_may_still_happen_is_not_a_new_entry(lab: Lab) -> None:
    entry = lab.add(once="order.close:1")
    fail(lab.queue, lab.claim(), reason=Reason.ATTEMPTS, outcome_unknown=True)
    assert lab.add(once="order.close:1").id == entry.id
    lab.queue.retry(entry.id)
    lab.queue.cancel(entry.id, force=True)
    assert lab.add(once="order.close:1").id != entry.id
