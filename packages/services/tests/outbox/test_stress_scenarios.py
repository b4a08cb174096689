"""The stress scenarios of walk's offline queue, its table of responses, and days off-grid."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import Event, EventKind, OutboxQueue
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import Ended
from onceward_outbox.entry import Entry, NewEntry, Reason, Status
from onceward_outbox.transport import HttpTransport, NoResponse, Request, Response
from packages.onceward.tests.support.outbox_harness import Scripted, drain, response, token_of
from packages.protocol.tests.cli.conftest import here
from packages.protocol.tests.cli.harness import Here
from packages.services.tests.cli.conftest import Server

__all__ = ["here"]

NOW = datetime.now(UTC)
NETWORK_DOWN = NoResponse("could not connect: no network", may_have_been_sent=False)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def queue(tmp_path: Path, events: list[Event]) -> Iterator[OutboxQueue]:
    with OutboxQueue.open(
        tmp_path / "outbox.db", chance=lambda: 0.5, listeners=[events.append]
    ) as queue:
        queue.add_user("ada")
        yield queue


def action(endpoint: str, user: str = "ada", **more: Any) -> NewEntry:
    fields: dict[str, Any] = {"payload": {}} | more
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="quest",
        endpoint=endpoint,
        profile="walk",
        **fields,
    )


def step(number: int, quest: str = "quest.002") -> NewEntry:
    return action(f"/quest/{quest}/step/{number}/advance")


def refusal(status: int, code: str) -> Response:
    return response(status, {"error": code, "message": "", "details": {}, "requestId": "r"})


def kinds(events: list[Event]) -> list[EventKind]:
    return [event.kind for event in events]


def make_due(queue: OutboxQueue) -> None:
    with queue.transaction() as connection:
        connection.execute("UPDATE offline_sync_queue SET due_ms = NULL, next_retry_at = NULL")


# -- the seven scenarios ---------------------------------------------------------------------------


def test_1_clock_skew_device_sends_and_drops_what_the_server_finds_stale(
    queue: OutboxQueue, events: list[Event]
) -> None:
    # The device's clock was 30 days in the past when the user acted.
    entry = queue.enqueue(step(1, "quest.001"))
    skewed = queue.enqueue(
        action(
            "/quest/complete",
            payload={"questId": "quest.003"},
            client_generated_at=NOW - timedelta(days=30),
        )
    )
    server = Scripted([response(200, {}), refusal(422, "STALE_ACTION")])
    report = drain(queue, "ada", server)
    sent = json.loads(server.requests[1].body or b"")["clientGeneratedAt"]
    assert datetime.fromisoformat(sent) == NOW - timedelta(days=30), "it is sent as it was made"
    assert (report.ended, report.succeeded, report.expired) == (Ended.EMPTY, 1, 1)
    assert queue.get(entry.id).status is Status.SUCCEEDED
    assert queue.get(skewed.id).status is Status.EXPIRED
    assert [event.entry_id for event in events if event.kind is EventKind.EXPIRED] == [skewed.id]


def test_2_queue_drain_mid_disconnect_keeps_the_rest_with_their_keys(queue: OutboxQueue) -> None:
    entries = queue.enqueue_many([step(number) for number in range(1, 6)])
    server = Scripted([response(200, {}), response(200, {}), NETWORK_DOWN])
    report = drain(queue, "ada", server)
    assert (report.ended, report.succeeded, report.unsent) == (Ended.OFFLINE, 2, 3)
    left = [queue.get(entry.id) for entry in entries[2:]]
    # Only the one that was tried has one attempt more.
    assert [entry.attempt_count for entry in left] == [1, 0, 0]
    assert {entry.status for entry in left} == {Status.PENDING}
    again = Scripted(lambda _: response(200, {}))
    make_due(queue)
    assert drain(queue, "ada", again).succeeded == 3
    assert again.keys == [entry.idempotency_key for entry in entries[2:]]


def test_3_duplicate_enqueue_of_the_same_uuid_is_a_no_op(queue: OutboxQueue) -> None:
    key = str(uuid4())
    first = queue.enqueue(action("/quest/complete", payload={"questId": "quest.001"}, key=key))
    again = queue.enqueue(action("/quest/complete", payload={"questId": "quest.001"}, key=key))
    assert (again.id, len(queue.entries("ada"))) == (first.id, 1)
    server = Scripted(lambda _: response(200, {}))
    drain(queue, "ada", server)
    assert server.keys == [key]


def test_4_idempotency_conflict_drops_the_action_with_an_event(
    queue: OutboxQueue, events: list[Event]
) -> None:
    entry = queue.enqueue(step(1))
    server = Scripted([refusal(409, "IDEMPOTENCY_CONFLICT")])
    report = drain(queue, "ada", server)
    assert (report.failed, len(server.requests)) == (1, 1)
    assert queue.get(entry.id).status is Status.FAILED
    failed = next(event for event in events if event.kind is EventKind.FAILED)
    assert (failed.entry_id, failed.http_status) == (entry.id, 409)


def test_5_a_cached_replay_is_a_success_and_leaves_the_queue(queue: OutboxQueue) -> None:
    queue.enqueue(step(1))
    replay = response(200, {"pointsBanked": 1}, {"idempotency-replayed": "true"})
    report = drain(queue, "ada", Scripted([replay]))
    assert (report.ended, report.succeeded, report.unsent) == (Ended.EMPTY, 1, 0)


def test_6_errors_back_off_5_10_20_40_80_seconds_and_the_twelfth_defers(
    queue: OutboxQueue, events: list[Event]
) -> None:
    entry = queue.enqueue(step(1))
    server = Scripted(lambda _: response(500, {}))
    wake_up = Drain(queue, server)
    for _ in range(13):
        make_due(queue)
        report = wake_up.run("ada")
    delays = [event.delay_seconds for event in events if event.kind is EventKind.RETRYING]
    # Without jitter; a quarter more or less with it.
    assert delays == [5, 10, 20, 40, 80, 160, *[300] * 6]
    assert len(server.requests) == 12
    assert (report.ended, queue.get(entry.id).status) == (Ended.WAITING, Status.PENDING)
    assert queue.get(entry.id).attempt_count == 12
    make_due(queue)
    Drain(queue, server).run("ada")
    assert len(server.requests) == 13, "the next wake-up goes on"
    assert len(set(server.keys)) == 1


def test_7_step_out_of_order_reads_the_quests_drops_the_chain_and_reports(
    queue: OutboxQueue, events: list[Event]
) -> None:
    entries = queue.enqueue_many([step(3), step(4)])
    other = queue.enqueue(action("/tree/allocate", payload={"allocations": []}))
    quest = {"questId": "quest.002", "steps": 7, "currentStep": 2, "status": "in_progress"}

    def reply(request: Request) -> Response:
        if request.target == "/quest/available":
            return response(200, {"quests": [quest]})
        return response(200, {}) if "tree" in request.target else refusal(422, "STEP_OUT_OF_ORDER")

    server = Scripted(reply)
    drain(queue, "ada", server)
    targets = [request.target for request in server.requests]
    assert targets == ["/quest/quest.002/step/3/advance", "/quest/available", "/tree/allocate"]
    for entry in entries:
        parked = queue.get(entry.id)
        assert (parked.status, parked.reason) == (Status.FAILED, Reason.REBUILD)
        assert "waits for step 2 of 7" in (parked.last_error or "")
    assert queue.get(other.id).status is Status.SUCCEEDED
    assert kinds(events).count(EventKind.FAILED) == 2
    assert EventKind.PAUSED in kinds(events)


# -- the table of responses ------------------------------------------------------------------------

SUCCESS, DROP, EXPIRED, RETRY = "succeeded", "failed", "expired", "pending"


@pytest.mark.parametrize(
    ("said", "status", "sends"),
    [
        (response(200, {}), SUCCESS, 1),
        (refusal(409, "IDEMPOTENCY_CONFLICT"), DROP, 1),
        (refusal(409, "ALREADY_ALLOCATED"), SUCCESS, 1),
        (refusal(409, "QUEST_ALREADY_COMPLETED"), SUCCESS, 1),
        (refusal(409, "QUEST_ALREADY_IN_PROGRESS"), SUCCESS, 1),
        # The seed has no word for it: a first request that still runs is not a success yet.
        (refusal(409, "IDEMPOTENCY_IN_PROGRESS"), RETRY, 3),
        (refusal(422, "STALE_ACTION"), EXPIRED, 1),
        (refusal(422, "PREREQUISITES_NOT_MET"), DROP, 1),
        (refusal(422, "INSUFFICIENT_POINTS"), DROP, 1),
        (refusal(422, "INSUFFICIENT_ENERGY"), DROP, 1),
        (refusal(422, "A_CODE_OF_TOMORROW"), DROP, 2),
        (refusal(400, "BAD_REQUEST"), DROP, 1),
        (refusal(401, "UNAUTHENTICATED"), RETRY, 3),
        (refusal(401, "ATTESTATION_INVALID"), RETRY, 3),
        (refusal(403, "SOURCE_NOT_ALLOWED"), DROP, 1),
        (refusal(408, "TIMEOUT"), RETRY, 3),
        (refusal(429, "RATE_LIMITED"), RETRY, 3),
        (refusal(500, "INTERNAL"), RETRY, 3),
        (refusal(503, "STORE_UNAVAILABLE"), RETRY, 3),
        (response(599, {}), RETRY, 3),
        (NETWORK_DOWN, RETRY, 3),
    ],
)
def test_a_response_leads_to(
    queue: OutboxQueue, said: Response | NoResponse, status: str, sends: int
) -> None:
    entry = queue.enqueue(action("/tree/allocate", payload={"allocations": []}))
    server = Scripted(lambda _: said)
    for _ in range(3):
        drain(queue, "ada", server, "token")
        make_due(queue)
    assert (queue.get(entry.id).status, len(server.requests)) == (status, sends)
    assert set(server.keys) == {entry.idempotency_key}


# -- a refusal does not stop the queue -------------------------------------------------------------


def report_of(user: str, days_ago: int) -> NewEntry:
    day = (NOW - timedelta(days=days_ago)).replace(hour=6, minute=0, second=0, microsecond=0)
    return action(
        "/step/ingest",
        user,
        payload={
            "day": day.date().isoformat(),
            "count": 3000,
            "source": "HealthKit",
            "tz": "UTC",
            "sampleSpan": {
                "start": day.isoformat(),
                "end": (day + timedelta(hours=5)).isoformat(),
            },
            "sourceBundleId": "com.apple.health",
        },
    )


def test_nine_days_off_grid_the_first_report_is_refused_and_the_good_days_arrive(
    server: Server, tmp_path: Path, here: Here
) -> None:
    """By the command line: the App Check token comes from a command, the first one is no good."""
    user, file = f"user-{uuid4()}", tmp_path / "phone.db"
    with OutboxQueue.open(file) as queue:
        queue.add_user(user)
        first, *good = queue.enqueue_many([report_of(user, days) for days in (9, 6, 5, 4, 3, 2, 1)])
        quest = queue.enqueue(action("/quest/start", user, payload={"questId": "quest.001"}))
    directory = Path(server.errors.name).parent
    mint = tmp_path / "mint.py"
    mint.write_text(
        "import pathlib, runpy, sys\n"
        f"once = pathlib.Path({str(tmp_path / 'once')!r})\n"
        "if not once.exists():\n"
        "    once.touch()\n"
        "    print('refused')\n"
        "    sys.exit()\n"
        "sys.argv = ['onceward', 'token', '--app-check']\n"
        "runpy.run_module('onceward.cli', run_name='__main__')\n"
    )
    done = here(
        *("outbox", "--db", str(file), "drain", "--user", user, "--server", server.url, "--json"),
        *("--token", token_of(user), "--app-check-command", f"{sys.executable} {mint}"),
        ONCEWARD_HOME=str(directory / ".onceward"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ended"], report["succeeded"], report["failed"]) == ("empty", 7, 1)
    assert (report["unsent"], report["refused"]) == (0, 1)
    with OutboxQueue.open(file) as queue:
        assert [queue.get(entry.id).status for entry in (*good, quest)] == ["succeeded"] * 7
        refused = queue.get(first.id)
        assert (refused.status, refused.reason) == (Status.FAILED, Reason.RESPONSE)
        codes = [attempt.code for attempt in queue.attempts(first.id)]
    assert codes == ["ATTESTATION_INVALID", "OFFLINE_CAP_EXCEEDED"]
    with server.client(token_of(user)) as client:
        log = client.get("/step/log").json()["items"]
    assert len({item["day"] for item in log}) == len(good)


def test_a_quest_that_cannot_be_started_parks_its_steps_and_nothing_else(
    server: Server, queue: OutboxQueue
) -> None:
    user = f"user-{uuid4()}"
    queue.add_user(user)
    hidden = "quest.005"
    chain = [
        action("/quest/start", user, payload={"questId": hidden}),
        action(f"/quest/{hidden}/step/1/advance", user),
        action("/quest/complete", user, payload={"questId": hidden}),
    ]
    entries = queue.enqueue_many(chain)
    other = queue.enqueue(action("/quest/start", user, payload={"questId": "quest.001"}))
    with HttpTransport(server.url) as transport:
        report = drain(queue, user, transport, token_of(user))
    reasons = [(queue.get(entry.id).status, queue.get(entry.id).reason) for entry in entries]
    refused, parked = (Status.FAILED, Reason.RESPONSE), (Status.FAILED, Reason.DEPENDENCY)
    assert reasons == [refused, parked, parked]
    assert (queue.get(other.id).status, report.sent) == (Status.SUCCEEDED, 2)
    revived = _revived(queue, entries)
    assert {entry.status for entry in revived} == {Status.PENDING}


def _revived(queue: OutboxQueue, entries: list[Entry]) -> list[Entry]:
    queue.retry(entries[0].id)
    return [queue.get(entry.id) for entry in entries]
