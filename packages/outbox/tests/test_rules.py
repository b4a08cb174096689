"""The rules about entries, by the names that ``EntryInvalidError.rule`` has."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward_outbox import NewEntry, OutboxQueue, QueueSettings, Reason, Status
from onceward_outbox.entry import TRANSITIONS
from onceward_outbox.errors import EntryInvalidError, QueueFullError, TransitionError
from packages.outbox.tests.outcomes import retry_later
from packages.outbox.tests.queue_harness import Lab, local, new, walk

KEY = "1b4e28ba-2fa1-4d2b-883f-0016d3cca427"


def refused(lab: Lab, rule: str, **fields: Any) -> EntryInvalidError:
    """Assert that this is refused by this rule and that nothing was written."""
    before = lab.queue.stats().counts
    with pytest.raises(EntryInvalidError) as caught:
        lab.queue.enqueue(new(**fields))
    assert caught.value.rule == rule
    assert lab.queue.stats().counts == before
    with pytest.raises(EntryInvalidError):
        lab.queue.enqueue_many([new(), new(**fields)])
    assert lab.queue.stats().counts == before
    assert lab.kinds() == []
    return caught.value


@pytest.mark.parametrize("verb", ["", "CREATE", "post", "upsert", "create "])
def test_operation_must_be_valid_verb(lab: Lab, verb: str) -> None:
    refused(lab, "operation_must_be_valid_verb", operation=verb)


@pytest.mark.parametrize(
    ("verb", "method"),
    [("create", "POST"), ("update", "PUT"), ("patch", "PATCH"), ("delete", "DELETE")],
)
def test_each_verb_is_queued_with_its_method(lab: Lab, verb: str, method: str) -> None:
    assert lab.add(operation=verb, endpoint="/api/v1/activities/7").method == method


@pytest.mark.parametrize(
    "endpoint",
    ["//evil", "http://evil", "/../x", "/a\r\nHost: b", "/%2e%2e/x", "/%2f%2fevil", "relative", ""],
)
def test_endpoint_must_be_relative_path(lab: Lab, endpoint: str) -> None:
    refused(lab, "endpoint_must_be_relative_path", endpoint=endpoint)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: Any = 1
for _ in range(129):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"\xff",
        b'"\\ud800"',
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": {1, 2}},
        {"a": object()},
        {"a": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"a": b"bytes"},
        {1: "a number for a name"},
        {None: 1},
        {"a": "\ud800"},
        {"deep": {(1, 2): 3}},
        CIRCLE,
        DEEP,
    ],
)
def test_payload_must_be_valid_json(lab: Lab, payload: Any) -> None:
    refused(lab, "payload_must_be_valid_json", payload=payload)


@pytest.mark.parametrize(
    "payload",
    [
        {"a": [1, 2.5, None, True, "é", {"b": {}}]},
        [],
        {},
        "text",
        0,
        False,
        12345678901234567890123,
        "\u2028 \U0001f600 \x00",
    ],
)
def test_a_json_value_is_stored_unchanged(lab: Lab, payload: Any) -> None:
    entry = lab.add(payload=payload)
    assert lab.queue.get(entry.id).decoded() == payload


def test_tuples_count_as_lists(lab: Lab) -> None:
    assert lab.add(payload={"a": (1, (2,))}).decoded() == {"a": [1, [2]]}


def test_the_bytes_of_a_json_text_are_stored_unchanged(lab: Lab) -> None:
    entry = lab.add(payload=b'{ "b": 1.50,  "a": 2 }')
    assert entry.payload == '{ "b": 1.50,  "a": 2 }'
    assert lab.queue.get(entry.id) == entry


def test_a_payload_above_the_maximum_size_is_refused(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", settings=QueueSettings(max_payload_bytes=20))
    lab.add(payload="x" * 18)
    refused_one = new(payload="x" * 19)
    with pytest.raises(EntryInvalidError, match="21 bytes"):
        lab.queue.enqueue(refused_one)
    lab.queue.close()


def test_a_profile_may_require_payloads_that_are_objects(lab: Lab) -> None:
    refused(lab, "payload_must_be_valid_json", payload=[1], profile="walk")
    assert lab.add(payload=None, profile="walk").payload is None


def test_sequence_number_must_be_monotonic(lab: Lab) -> None:
    assert lab.add().sequence_number == 1
    assert lab.add(sequence_number=7).sequence_number == 7
    assert lab.add().sequence_number == 8
    lab.events.clear()
    for number in (0, -1, 1, 7, 8):
        refused(lab, "sequence_number_must_be_monotonic", sequence_number=number)


def test_sequence_numbers_are_per_user(lab: Lab) -> None:
    lab.queue.add_user("bob")
    assert [lab.add(user_id=user).sequence_number for user in ("ada", "bob", "ada", "bob")] == [
        1,
        1,
        2,
        2,
    ]


def test_sequence_numbers_are_not_reused_after_pruning(lab: Lab) -> None:
    lab.add()
    lab.add()
    lab.send()
    lab.send()
    lab.clock.pass_by(days=8)
    assert lab.queue.prune() == 2
    assert lab.add().sequence_number == 3


def test_user_id_must_reference_existing_user(lab: Lab) -> None:
    refused(lab, "user_id_must_reference_existing_user", user_id="nobody")
    refused(lab, "user_id_must_reference_existing_user", user_id="")
    refused(lab, "user_id_must_reference_existing_user", user_id="a\nb")


def test_users_are_added_once_and_listed(lab: Lab) -> None:
    lab.queue.add_user("bob")
    lab.queue.add_user("bob")
    assert lab.queue.users() == ["ada", "bob"]


def test_status_transition_must_be_valid(lab: Lab) -> None:
    allowed = {
        ("pending", "in_flight"),
        ("in_flight", "succeeded"),
        ("in_flight", "pending"),
        ("in_flight", "failed"),
        ("in_flight", "conflict"),
        ("in_flight", "expired"),
        ("conflict", "pending"),
        ("conflict", "discarded"),
        ("conflict", "failed"),
        ("failed", "pending"),
        ("failed", "discarded"),
        # Edited where it stands, undone, past the cap, parked with its parent.
        ("pending", "pending"),
        ("pending", "discarded"),
        ("pending", "expired"),
        ("pending", "failed"),
        # Revived by a person: the device has expired it unsent.
        ("expired", "pending"),
    }
    assert {(a, b) for froms in TRANSITIONS.values() for a, b in froms.items()} == allowed
    entry = lab.add()
    with pytest.raises(TransitionError, match="pending cannot retry") as caught:
        lab.queue.retry(entry.id)
    assert caught.value.rule == "status_transition_must_be_valid"
    assert lab.queue.get(entry.id) == entry


def test_dependency_ids_must_exist_in_queue(lab: Lab) -> None:
    refused(lab, "dependency_ids_must_exist_in_queue", depends_on=(local(),))


def test_dependencies_of_another_user_do_not_exist(lab: Lab) -> None:
    lab.queue.add_user("bob")
    theirs = lab.add(user_id="bob", local_id=local())
    lab.events.clear()
    refused(lab, "dependency_ids_must_exist_in_queue", depends_on=(theirs.id,))
    refused(lab, "dependency_ids_must_exist_in_queue", depends_on=(str(theirs.local_id),))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer x"},
        {"cookie": "a=b"},
        {"Idempotency-Key": KEY},
        {"Host": "evil"},
        {"Content-Length": "3"},
        {"X-A": "a\r\nX-B: c"},
        {"X-A": "caf\u00e9"},
        {"X A": "b"},
        {"": "b"},
        {"X-A": 1},
    ],
)
def test_headers_that_carry_secrets_or_lines_are_refused(lab: Lab, headers: Any) -> None:
    refused(lab, "headers_must_be_plain_fields", headers=headers)


def test_headers_are_kept(lab: Lab) -> None:
    entry = lab.add(headers={"If-Match": '"3"', "Content-Type": "application/json"})
    assert lab.queue.get(entry.id).headers == {
        "If-Match": '"3"',
        "Content-Type": "application/json",
    }


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        ("idempotency_key_must_be_uuid4", {"key": "not a uuid"}),
        ("idempotency_key_must_be_uuid4", {"key": KEY.upper()}),
        ("idempotency_key_must_be_uuid4", {"key": "1b4e28ba-2fa1-11d2-883f-0016d3cca427"}),
        ("local_id_must_be_uuid", {"local_id": "1"}),
        ("id_must_be_uuid", {"id": "1"}),
        ("profile_must_be_known", {"profile": "run"}),
        ("conflict_resolution_must_be_known", {"conflict_resolution": "mine"}),
        ("max_attempts_must_be_positive", {"max_attempts": 0}),
        ("priority_must_be_a_number", {"priority": 2**70}),
        ("entity_type_must_be_text", {"entity_type": ""}),
        (
            "client_generated_at_must_be_aware",
            {"client_generated_at": datetime(2026, 1, 1)},  # noqa: DTZ001
        ),
    ],
)
def test_invalid_fields_are_refused(lab: Lab, rule: str, fields: dict[str, Any]) -> None:
    refused(lab, rule, **fields)


def test_a_profile_may_accept_keys_that_are_not_uuids(lab: Lab) -> None:
    assert lab.add(profile="planning", key="my-key-7").idempotency_key == "my-key-7"


def test_idempotency_key_unique_per_mutation(lab: Lab) -> None:
    first = lab.add(key=KEY)
    again = lab.add(key=KEY)
    assert again == first
    assert lab.queue.stats().unsent == 1
    assert lab.kinds() == ["enqueued"]
    assert lab.queue.by_key(KEY) == first
    # The same JSON in another spelling is the same request.
    assert lab.add(key=KEY, payload=b'{"name" : "a walk"}') == first


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"name": "another"}},
        {"payload": None},
        {"endpoint": "/api/v1/other"},
        {"operation": "update"},
        {"user_id": "bob"},
    ],
)
def test_a_key_that_is_queued_for_another_request_is_refused(
    lab: Lab, other: dict[str, Any]
) -> None:
    lab.queue.add_user("bob")
    first = lab.add(key=KEY)
    with pytest.raises(EntryInvalidError) as caught:
        lab.add(key=KEY, **other)
    assert caught.value.rule == "idempotency_key_unique_per_mutation"
    assert lab.queue.entries() == [first]


def test_the_same_key_twice_in_one_batch_is_one_entry(lab: Lab) -> None:
    one, two, three = lab.queue.enqueue_many([new(key=KEY), new(), new(key=KEY)])
    assert one == three != two
    assert lab.queue.stats().unsent == 2


def test_the_key_is_the_same_for_every_send(lab: Lab) -> None:
    entry = lab.add()
    keys = {entry.idempotency_key}
    for _ in range(3):
        claimed = lab.claim()
        keys.add(claimed.entry.idempotency_key)
        keys.add(retry_later(lab.queue, claimed, delay_seconds=0).idempotency_key)
    assert keys == {entry.idempotency_key}
    assert lab.add().idempotency_key != entry.idempotency_key


def test_an_id_that_is_taken_is_refused(lab: Lab) -> None:
    entry = lab.add(id=KEY)
    assert entry.id == KEY
    with pytest.raises(EntryInvalidError, match="already"):
        lab.add(id=KEY)
    other = local()
    with pytest.raises(EntryInvalidError, match="already"):
        lab.queue.enqueue_many([new(id=other), new(id=other)])
    assert lab.queue.stats().unsent == 1


def test_exponential_backoff_on_failure(lab: Lab) -> None:
    lab.add(max_attempts=100)
    delays = []
    for _ in range(14):
        entry = retry_later(lab.queue, lab.claim(), http_status=500)
        assert entry.next_retry_at is not None
        delays.append((entry.next_retry_at - lab.clock.now()).total_seconds())
        assert lab.queue.claim("ada") is None
        assert lab.queue.next_due_seconds("ada") == delays[-1]
        lab.clock.pass_by(seconds=delays[-1] - 0.001)
        assert lab.queue.claim("ada") is None
        lab.clock.pass_by(seconds=0.001)
    assert delays == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800, 1800, 1800, 1800]


def test_retry_after_seconds_is_a_floor(lab: Lab) -> None:
    lab.add()
    retry_later(lab.queue, lab.claim(), retry_after_seconds=3600, http_status=429)
    assert lab.queue.next_due_seconds("ada") == 3600
    lab.clock.pass_by(seconds=3600)
    retry_later(lab.queue, lab.claim(), delay_seconds=10, retry_after_seconds=5)
    assert lab.queue.next_due_seconds("ada") == 10


def test_a_very_long_retry_after_is_capped(lab: Lab) -> None:
    lab.add()
    entry = retry_later(lab.queue, lab.claim(), retry_after_seconds=2.0**31)
    assert entry.next_retry_at is not None
    assert entry.next_retry_at - lab.clock.now() <= timedelta(days=366)


def test_max_attempts_hard_stop(lab: Lab) -> None:
    entry = lab.add(max_attempts=3)
    for attempt in (1, 2):
        claimed = lab.claim()
        assert claimed.entry.attempt_count == attempt
        assert retry_later(lab.queue, claimed, delay_seconds=0).status is Status.PENDING
    last = retry_later(lab.queue, lab.claim(), error="still down", http_status=503)
    assert (last.status, last.reason) == (Status.FAILED, Reason.ATTEMPTS)
    assert (last.last_error, last.last_error_code) == ("still down", 503)
    lab.clock.pass_by(days=6)
    assert lab.queue.claim("ada") is None
    assert lab.queue.retry(entry.id).attempt_count == 0


def test_without_give_up_the_entry_stays_pending(lab: Lab) -> None:
    lab.add(max_attempts=1)
    entry = retry_later(lab.queue, lab.claim(), give_up=False)
    assert entry.status is Status.PENDING


def test_succeeded_entries_pruned_after_sync(lab: Lab) -> None:
    done, dropped, open_one = lab.add(), lab.add(), lab.add()
    lab.send()
    lab.queue.cancel(dropped.id)
    lab.clock.pass_by(days=6, hours=23)
    assert lab.queue.prune() == 0
    lab.clock.pass_by(hours=1)
    assert lab.queue.prune() == 1
    assert [entry.id for entry in lab.queue.entries()] == [dropped.id, open_one.id]
    lab.clock.pass_by(days=23)
    assert lab.queue.prune() == 1
    assert [entry.id for entry in lab.queue.entries()] == [open_one.id]
    assert done.id not in {entry.id for entry in lab.queue.entries()}
    assert lab.kinds().count("pruned") == 2


def test_pruning_in_batches_removes_everything_and_can_be_bounded(lab: Lab) -> None:
    lab.queue.enqueue_many([new() for _ in range(1200)])
    with lab.queue.transaction():
        for _ in range(1200):
            lab.send()
    lab.clock.pass_by(days=7)
    assert lab.queue.prune(limit=3) == 3
    assert lab.queue.prune() == 1197
    assert lab.queue.entries() == []


def test_an_entry_is_kept_exactly_as_given(lab: Lab) -> None:
    parent = lab.add()
    at = lab.clock.now() - timedelta(hours=1)
    entry = lab.queue.enqueue(
        NewEntry(
            user_id="ada",
            operation="patch",
            entity_type="expense",
            endpoint="/api/v1/expenses/9",
            payload={"amount": 12.5},
            headers={"If-Match": '"4"'},
            local_id=KEY,
            server_id=9,
            depends_on=(parent.id,),
            priority=3,
            key="c9b4e1a0-2fa1-4d2b-883f-0016d3cca427",
            profile="field",
            conflict_resolution="client_wins",
            max_attempts=5,
            client_generated_at=at,
            sequence_number=50,
            lane="money",
            base={"amount": 12},
            base_version="4",
        )
    )
    kept = lab.queue.get(entry.id)
    assert kept == entry
    assert json.loads(str(kept.base)) == {"amount": 12}
    assert (kept.client_generated_at, kept.created_at) == (at, lab.clock.now())
    assert (kept.server_id, kept.lane, kept.priority) == (9, "money", 3)
    assert kept.dependency_ids == (parent.id,)
    assert lab.queue.by_local_id(KEY) == [kept]


def test_a_full_queue_raises_queue_full(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", settings=QueueSettings(max_entries=3))
    lab.queue.add_user("bob")
    lab.queue.enqueue_many([new() for _ in range(3)])
    with pytest.raises(QueueFullError, match="ada has 3"):
        lab.add()
    # Another user can add, and so can this one after a send; other processes see the same.
    lab.add(user_id="bob")
    lab.send()
    lab.add()
    with lab.open() as other, pytest.raises(QueueFullError):
        other.enqueue(new())
    with pytest.raises(QueueFullError):
        lab.queue.enqueue_many([new(user_id="bob") for _ in range(3)])
    assert lab.queue.stats("bob").unsent == 1
    lab.queue.enqueue_many([new(user_id="bob") for _ in range(2)])
    lab.queue.close()


def test_a_far_sequence_number_does_not_fill_the_queue(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", settings=QueueSettings(max_entries=3))
    lab.add(sequence_number=1_000_000)
    assert lab.add().sequence_number == 1_000_001
    lab.add()
    with pytest.raises(QueueFullError):
        lab.add()
    lab.queue.close()


def test_the_table_has_the_attributes_and_indexes_by_their_names(lab: Lab) -> None:
    with lab.queue.transaction() as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(offline_sync_queue)")}
        indexes = {
            name: [row[2] for row in connection.execute(f"PRAGMA index_info({name})").fetchall()]
            for _, name, *_ in connection.execute(
                "PRAGMA index_list(offline_sync_queue)"
            ).fetchall()
        }
        unique = {
            row[1]: row[2]
            for row in connection.execute("PRAGMA index_list(offline_sync_queue)").fetchall()
        }
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema").fetchall()}
    assert columns >= {
        "id",
        "user_id",
        "operation",
        "entity_type",
        "local_id",
        "server_id",
        "endpoint",
        "payload",
        "headers",
        "idempotency_key",
        "status",
        "attempt_count",
        "max_attempts",
        "next_retry_at",
        "last_error",
        "last_error_code",
        "sequence_number",
        "dependency_ids",
        "created_at",
        "synced_at",
        "conflict_resolution",
        "priority",
        "client_generated_at",
    }
    prefix = "idx_offline_sync_queue_"
    assert indexes[prefix + "user_status"] == ["user_id", "status"]
    assert indexes[prefix + "status_next_retry"] == ["status", "next_retry_at"]
    assert indexes[prefix + "user_sequence"] == ["user_id", "sequence_number"]
    assert indexes[prefix + "idempotency_key"] == ["idempotency_key"]
    assert indexes[prefix + "entity_type"] == ["entity_type", "status"]
    assert indexes[prefix + "local_id"] == ["local_id"]
    assert unique[prefix + "idempotency_key"] == 1
    assert tables >= {"id_mappings", "users", "attempts"}


def test_entries_are_listed_by_user_status_and_entity_a_page_at_a_time(lab: Lab) -> None:
    lab.queue.add_user("bob")
    mine = [lab.add(entity_type="activity" if n % 2 else "contact") for n in range(5)]
    theirs = lab.add(user_id="bob")
    sent = lab.send("bob")
    queue = lab.queue
    assert queue.entries() == [*mine, sent]
    assert queue.entries("ada") == mine
    assert queue.entries(status=Status.SUCCEEDED) == [sent]
    assert queue.entries("ada", status=[Status.PENDING, Status.FAILED], entity_type="contact") == [
        mine[0],
        mine[2],
        mine[4],
    ]
    assert queue.entries(limit=2) == mine[:2]
    assert queue.entries(limit=2, after=mine[1].id) == mine[2:4]
    assert queue.entries(after=theirs.id) == []


def test_reopening_the_file_keeps_all_entries(lab: Lab) -> None:
    entries = [lab.add(), lab.queue.enqueue(walk())]
    assert lab.reopen().entries() == entries
    assert OutboxQueue.__name__ == type(lab.queue).__name__
