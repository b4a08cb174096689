"""Coalescing: fewer sends, the same result, nothing reordered."""

from typing import Any

import pytest

from onceward_outbox import Entry, Reason, Status
from onceward_outbox.errors import EntryInvalidError
from packages.outbox.tests.outcomes import fail, record_conflict, release, retry_later
from packages.outbox.tests.queue_harness import Lab, local, new

REF = "0b9f8c1e-4d5a-4b7c-8d9e-0f1a2b3c4d5e"
PATH = "/api/v1/activities/7"


def put(lab: Lab, **fields: Any) -> Entry:
    return lab.queue.enqueue(
        new(**{"operation": "update", "endpoint": PATH, **fields}), coalesce=True
    )


def patch(lab: Lab, payload: Any, **fields: Any) -> Entry:
    return put(lab, operation="patch", payload=payload, **fields)


def test_nothing_is_coalesced_by_default(lab: Lab) -> None:
    lab.add(operation="update", endpoint=PATH)
    lab.add(operation="update", endpoint=PATH)
    assert lab.queue.stats().unsent == 2


def test_an_update_is_merged_into_a_pending_update(lab: Lab) -> None:
    first = put(lab, payload={"name": "one"})
    lab.clock.pass_by(seconds=5)
    second = put(lab, payload={"name": "two"})
    assert second.id == first.id
    assert second.idempotency_key == first.idempotency_key
    assert (second.decoded(), second.sequence_number) == ({"name": "two"}, 1)
    assert (second.client_generated_at, second.created_at) == (lab.clock.now(), first.created_at)
    assert lab.queue.entries() == [second]
    assert lab.kinds() == ["enqueued", "merged"]


def test_two_patches_become_one(lab: Lab) -> None:
    patch(lab, {"a": 1, "b": 1, "d": {"x": 1}})
    merged = patch(lab, {"b": 2, "c": None, "d": 4, "e": {"y": 2}})
    assert merged.decoded() == {"a": 1, "b": 2, "c": None, "d": 4, "e": {"y": 2}}
    assert merged.operation == "patch"


def test_a_patch_is_merged_into_a_pending_update(lab: Lab) -> None:
    put(lab, payload={"a": 1, "b": 1})
    merged = patch(lab, {"b": 2})
    assert (merged.operation, merged.decoded()) == ("update", {"a": 1, "b": 2})


def test_an_update_replaces_a_pending_patch(lab: Lab) -> None:
    patch(lab, {"a": 1})
    merged = put(lab, payload={"b": 2})
    assert (merged.operation, merged.decoded()) == ("update", {"b": 2})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": {"x": 1}}, {"a": {"y": 2}}),
        ({"a": None}, {"a": {"y": 2}}),
        ([1], {"a": 1}),
        ({"a": 1}, [2]),
    ],
)
def test_patches_with_nested_objects_are_not_merged(lab: Lab, first: Any, second: Any) -> None:
    patch(lab, first)
    patch(lab, second)
    assert lab.queue.stats().unsent == 2


@pytest.mark.parametrize("second", [{"a": None}, {"a": {"x": 1}}])
def test_a_patch_with_null_is_not_merged_into_an_update(lab: Lab, second: Any) -> None:
    put(lab, payload={"a": 1})
    patch(lab, second)
    assert lab.queue.stats().unsent == 2


@pytest.mark.parametrize("then", ["in_flight", "retrying", "released", "failed", "conflict"])
def test_nothing_is_merged_into_an_entry_that_was_claimed(lab: Lab, then: str) -> None:
    first = put(lab, payload={"n": 1})
    claimed = lab.claim()
    if then == "retrying":
        retry_later(lab.queue, claimed)
    elif then == "released":
        release(lab.queue, claimed)
    elif then == "failed":
        fail(lab.queue, claimed)
    elif then == "conflict":
        record_conflict(lab.queue, claimed)
    second = put(lab, payload={"n": 2})
    assert second.id != first.id
    assert lab.queue.get(first.id).decoded() == {"n": 1}


def test_nothing_is_merged_across_an_entry_in_flight(lab: Lab) -> None:
    put(lab, payload={"n": 1})
    lab.claim()
    behind = put(lab, payload={"n": 2})
    merged = put(lab, payload={"n": 3})
    assert merged.id == behind.id
    assert [entry.decoded()["n"] for entry in lab.queue.entries()] == [1, 3]


def test_only_the_end_of_a_lane_is_merged_into(lab: Lab) -> None:
    put(lab, payload={"n": 1})
    lab.add(operation="delete", endpoint=PATH)
    last = put(lab, payload={"n": 2})
    assert last.sequence_number == 3
    assert lab.queue.stats().unsent == 3


def test_nothing_is_merged_into_an_entry_that_another_lane_waits_for(lab: Lab) -> None:
    first = put(lab, payload={"n": 1})
    waiting = lab.add(depends_on=(first.id,))
    second = put(lab, payload={"n": 2})
    assert second.id != first.id
    assert [entry.id for entry in lab.queue.entries()] == [first.id, waiting.id, second.id]


@pytest.mark.parametrize(
    "difference",
    [
        {"headers": {"If-Match": '"2"'}},
        {"key": "1b4e28ba-2fa1-4d2b-883f-0016d3cca427"},
        {"endpoint": PATH + "?force=1"},
        {"profile": "planning"},
    ],
)
def test_requests_that_differ_in_more_than_the_payload_are_not_merged(
    lab: Lab, difference: dict[str, Any]
) -> None:
    put(lab, payload={"n": 1})
    put(lab, payload={"n": 2}, **difference)
    assert lab.queue.stats().unsent == 2


def test_an_update_with_dependencies_is_not_merged(lab: Lab) -> None:
    put(lab, payload={"n": 1})
    other = lab.add()
    put(lab, payload={"n": 2}, depends_on=(other.id,))
    assert lab.queue.stats().unsent == 3


def test_an_update_with_new_references_is_not_merged(lab: Lab) -> None:
    lab.add(local_id=REF)
    first = put(lab, payload={"n": 1})
    second = put(lab, payload={"n": REF})
    assert second.id != first.id
    third = put(lab, payload={"n": REF, "m": 1})
    assert third.id == second.id
    assert (third.local_refs, third.waiting_for) == ((REF,), 1)


def test_changes_are_not_merged_into_old_entries(lab: Lab) -> None:
    first = put(lab, payload={"n": 1})
    lab.clock.pass_by(days=2)
    assert put(lab, payload={"n": 2}).id != first.id


def test_in_strict_order_only_adjacent_entries_are_merged(lab: Lab) -> None:
    first = put(lab, payload={"n": 1}, profile="walk")
    assert put(lab, payload={"n": 2}, profile="walk").id == first.id
    put(lab, payload={"n": 3}, profile="walk", endpoint=PATH + "8")
    assert put(lab, payload={"n": 4}, profile="walk").id != first.id


def delete(lab: Lab, **fields: Any) -> Entry:
    return lab.queue.enqueue(
        new(
            **{
                "operation": "delete",
                "endpoint": f"/api/v1/activities/{{local:{REF}}}",
                "payload": None,
                **fields,
            }
        ),
        coalesce=True,
    )


def test_a_delete_discards_a_create_that_was_never_sent(lab: Lab) -> None:
    made = lab.add(local_id=REF)
    gone = delete(lab)
    assert (gone.id, gone.status, gone.reason) == (made.id, Status.DISCARDED, Reason.COALESCED)
    assert lab.queue.entries() == [gone]
    assert lab.queue.claim("ada") is None
    assert lab.queue.stats().unsent == 0
    assert lab.kinds() == ["enqueued", "discarded"]


def test_a_delete_discards_changes_after_the_create_too(lab: Lab) -> None:
    path = f"/api/v1/activities/{{local:{REF}}}"
    made = lab.add(local_id=REF)
    lab.add(operation="patch", endpoint=path, local_id=REF)
    lab.add(operation="update", endpoint=path, local_id=REF)
    assert delete(lab).id == made.id
    assert {entry.status for entry in lab.queue.entries()} == {Status.DISCARDED}


def test_a_create_that_was_claimed_is_deleted_on_the_server(lab: Lab) -> None:
    lab.add(local_id=REF)
    release(lab.queue, lab.claim())
    entry = delete(lab)
    assert (entry.operation, entry.status) == ("delete", Status.PENDING)


def test_a_create_that_other_entries_refer_to_is_not_discarded(lab: Lab) -> None:
    lab.add(local_id=REF)
    child = lab.add(payload={"activity": REF})
    assert delete(lab).operation == "delete"
    assert lab.queue.get(child.id).status is Status.PENDING


def test_a_delete_of_another_entity_discards_nothing(lab: Lab) -> None:
    lab.add(local_id=local())
    assert delete(lab).operation == "delete"
    assert lab.queue.stats().unsent == 2


def test_members_of_a_batch_are_coalesced_with_each_other(lab: Lab) -> None:
    fields = {"operation": "update", "endpoint": PATH}
    entries = lab.queue.enqueue_many(
        [new(**fields, payload={"n": n}) for n in range(5)], coalesce=True
    )
    assert len({entry.id for entry in entries}) == 1
    (left,) = lab.queue.entries()
    assert left.decoded() == {"n": 4}


def test_a_merged_entry_is_found_by_the_request_its_key_was_given_for(lab: Lab) -> None:
    key = local()
    first = patch(lab, {"a": 1}, key=key)
    assert patch(lab, {"b": 2}).id == first.id
    again = patch(lab, {"a": 1}, key=key)  # as after a crash
    assert (again.id, again.decoded()) == (first.id, {"a": 1, "b": 2})
    with pytest.raises(EntryInvalidError, match="another request"):
        patch(lab, {"a": 1, "b": 2}, key=key)


def test_changes_with_another_conflict_strategy_are_not_merged(lab: Lab) -> None:
    put(lab, conflict_resolution="server_wins")
    put(lab, conflict_resolution="client_wins")
    assert lab.queue.stats().unsent == 2
