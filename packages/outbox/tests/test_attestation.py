"""An attestation that the server refuses: about one entry, not about the sign-in."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onceward_outbox import Event, EventKind, OutboxQueue, Profile
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import Entry, NewEntry, OnRefusal, Status
from onceward_outbox.transport import Request, Response
from onceward_protocol.response_classification import AttestationNeeded
from packages.onceward.tests.support.outbox_harness import SOON, Scripted, drain, response

STRICT = Profile(
    name="strict",
    strict_order=True,
    chains=("/orders/{order}/*",),
    codes={"PROOF_INVALID": AttestationNeeded()},
)
LANES = dataclasses.replace(STRICT, name="lanes", strict_order=False)
STOPPING = dataclasses.replace(STRICT, name="stopping", on_refusal=OnRefusal.STOP)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[OutboxQueue]:
    profiles = [STRICT, LANES, STOPPING]
    with OutboxQueue.open(tmp_path / "outbox.db", profiles=profiles, chance=lambda: 0.5) as queue:
        queue.add_user("ada")
        yield queue


def order(endpoint: str, profile: str = "strict", **more: Any) -> NewEntry:
    new: dict[str, Any] = {"operation": "create", "payload": {}} | more
    return NewEntry(user_id="ada", entity_type="order", endpoint=endpoint, profile=profile, **new)


def needs_proof(request: Request) -> Response:
    if request.target.startswith("/proven") and request.headers.get("X-Proof") != "good":
        return response(401, code="PROOF_INVALID")
    return response(200, {})


def no_proof(_: Entry) -> Mapping[str, str]:
    return {}


def targets(server: Scripted) -> list[str]:
    return [request.target for request in server.requests]


def test_the_app_is_asked_again_at_once_and_sees_that_the_last_one_was_refused(
    queue: OutboxQueue,
) -> None:
    seen: list[int | None] = []
    events: list[Event] = []
    queue.subscribe(events.append)

    def prove(entry: Entry) -> Mapping[str, str]:
        seen.append(entry.last_error_code)
        return {"X-Proof": "good" if entry.last_error_code == 401 else "cached"}

    entry = queue.enqueue(order("/proven"))
    queue.enqueue(order("/plain"))
    server = Scripted(needs_proof)
    report = drain(queue, "ada", server, "token", at_send=prove)
    assert (report.ended, report.succeeded) == (Ended.EMPTY, 2)
    # Nothing has overtaken it.
    assert targets(server) == ["/proven", "/proven", "/plain"]
    assert len(set(server.keys)) == 2
    assert seen == [None, 401, None]
    kinds = [event.kind for event in events if event.entry_id == entry.id]
    assert EventKind.ATTESTATION in kinds
    assert EventKind.PAUSED not in kinds


def test_it_backs_off_alone_and_never_fails(queue: OutboxQueue) -> None:
    stuck = queue.enqueue(order("/proven", max_attempts=1))
    queue.enqueue_many([order(f"/plain/{number}") for number in range(3)])
    server = Scripted(needs_proof)
    report = drain(queue, "ada", server, "token", at_send=no_proof, retry=SOON)
    assert (report.succeeded, report.ended) == (3, Ended.WAITING)
    waiting = queue.get(stuck.id)
    assert (waiting.status, waiting.last_error_code) == (Status.PENDING, 401)
    for _ in range(3):
        drain(queue, "ada", server, "token", at_send=no_proof, retry=SOON, max_seconds=0.1)
    assert queue.get(stuck.id).status is Status.PENDING
    sent = len(server.requests)
    proof = {"X-Proof": "good"}
    good = drain(queue, "ada", server, "token", at_send=lambda _: proof, max_seconds=9)
    assert (good.ended, good.succeeded) == (Ended.EMPTY, 1)
    assert server.keys[sent:] == [stuck.idempotency_key]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # A later change of the same entity, what it creates, and a lane that is kept.
        (order("/proven/1", operation="patch"), order("/proven/1", operation="patch")),
        (
            order("/proven", local_id="5f0c0e3e-9d4c-4c8b-8a52-6d3d5b0a4a11"),
            order("/plain/{local:5f0c0e3e-9d4c-4c8b-8a52-6d3d5b0a4a11}", operation="patch"),
        ),
        (
            order("/proven", "lanes", local_id="5f0c0e3e-9d4c-4c8b-8a52-6d3d5b0a4a11"),
            order("/plain/7", "lanes", operation="patch",
                  local_id="5f0c0e3e-9d4c-4c8b-8a52-6d3d5b0a4a11"),
        ),
        (order("/proven", "stopping"), order("/plain", "stopping")),
    ],
)  # fmt: skip
def test_what_has_to_come_after_it_waits(
    queue: OutboxQueue, first: NewEntry, second: NewEntry
) -> None:
    queue.enqueue(first)
    behind = queue.enqueue(second)
    independent = queue.enqueue(order("/plain/9", "lanes"))
    server = Scripted(needs_proof)
    drain(queue, "ada", server, "token", at_send=no_proof)
    assert queue.get(behind.id).attempt_count == 0
    assert queue.get(independent.id).status is Status.SUCCEEDED


def test_a_chain_keeps_its_order(queue: OutboxQueue) -> None:
    queue.enqueue(order("/orders/1/a"))
    behind = queue.enqueue(order("/orders/1/b"))
    server = Scripted(lambda _: response(401, code="PROOF_INVALID"))
    drain(queue, "ada", server, "token", at_send=no_proof)
    assert set(targets(server)) == {"/orders/1/a"}
    assert queue.get(behind.id).status is Status.PENDING


def test_without_the_code_401_still_asks_for_a_sign_in(queue: OutboxQueue) -> None:
    queue.enqueue(order("/plain"))
    server = Scripted([response(401, code="expired")])
    report = drain(queue, "ada", server, "token", at_send=no_proof)
    assert report.ended is Ended.SIGNED_OUT
