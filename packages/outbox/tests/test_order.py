"""Order of sending among lanes, users and priorities."""

import pytest

from onceward_outbox import Entry, OutboxQueue, Resolution, Status
from onceward_outbox.entry import Reason
from packages.outbox.tests.outcomes import fail, record_conflict, retry_later, succeed
from packages.outbox.tests.queue_harness import ENDINGS, Lab, local, new, walk


def drained(lab: Lab, user: str = "ada") -> list[str]:
    """Send everything that can be sent, one after the other, and return the ids in that order."""
    sent = []
    while (claimed := lab.queue.claim(user)) is not None:
        sent.append(succeed(lab.queue, claimed).id)
    return sent


def test_causal_ordering_enforced(lab: Lab) -> None:
    entries = [lab.queue.enqueue(walk(priority=n)) for n in range(5)]
    assert drained(lab) == [entry.id for entry in entries]


def test_strict_order_has_one_entry_in_flight_whatever_the_entities_are(lab: Lab) -> None:
    lab.queue.enqueue(walk(local_id=local()))
    lab.queue.enqueue(walk(local_id=local(), entity_type="tree"))
    lab.claim()
    assert lab.queue.claim("ada") is None
    assert lab.queue.next_eligible("ada") is None
    assert lab.queue.stats().blocked == 1


def test_independent_entries_are_sent_by_priority_then_by_number(lab: Lab) -> None:
    kinds = ["contact", "expense", "activity", "contact", "activity"]
    entries = [lab.add(entity_type=kind) for kind in kinds]
    order = [entries[n].id for n in (2, 4, 1, 0, 3)]
    assert lab.queue.next_eligible("ada") == entries[2]
    assert lab.claimable() == order


def test_an_explicit_priority_overrides_the_profiles(lab: Lab) -> None:
    low, high = lab.add(entity_type="activity"), lab.add(entity_type="contact", priority=99)
    assert lab.claimable() == [high.id, low.id]


def test_entries_about_one_entity_stay_in_order(lab: Lab) -> None:
    ref = local()
    made = lab.add(local_id=ref, priority=1)
    changed = lab.add(operation="update", local_id=ref, priority=50)
    other = lab.add(priority=2)
    assert lab.claimable() == [other.id, made.id]
    assert changed.lane == made.lane is not None


def test_an_entity_is_the_same_by_server_id_path_and_local_id(lab: Lab) -> None:
    ref = local()
    made = lab.add(local_id=ref)
    lab.send(server_id=42)
    same = [
        lab.add(operation="update", local_id=ref, endpoint="/api/v1/activities/x"),
        lab.add(operation="patch", server_id=42, endpoint="/api/v1/activities/y"),
        lab.add(operation="patch", server_id="42", endpoint="/api/v1/activities/y"),
        lab.add(operation="update", endpoint="/api/v1/activities/42"),
        lab.add(operation="update", endpoint="/api/v1/activities/42?force=1"),
        lab.add(operation="delete", endpoint=f"/api/v1/activities/{{local:{ref}}}"),
    ]
    assert {entry.lane for entry in same} == {made.lane}
    assert drained(lab) == [entry.id for entry in same]


def test_updates_by_server_id_stay_in_order(lab: Lab) -> None:
    first = lab.add(operation="update", endpoint="/api/v1/activities/7", priority=1)
    second = lab.add(operation="update", endpoint="/api/v1/activities/7", priority=9)
    assert lab.claimable() == [first.id]
    assert second.lane == first.lane == "activity/7"


def test_creates_without_a_local_id_are_independent(lab: Lab) -> None:
    entries = [lab.add(), lab.add(), lab.add()]
    assert {entry.lane for entry in entries} == {None}
    assert lab.claimable() == [entry.id for entry in entries]


def test_the_app_can_name_lanes(lab: Lab) -> None:
    first, other, second = lab.add(lane="a"), lab.add(lane="b"), lab.add(lane="a")
    assert lab.claimable() == [first.id, other.id]
    assert lab.queue.get(second.id).status is Status.PENDING


@pytest.mark.parametrize("ending", ["fail", "conflict", "schedule_retry"])
def test_a_failed_head_blocks_its_lane_only_where_the_profile_stops_it(
    stopping_lab: Lab, ending: str
) -> None:
    lab = stopping_lab
    lab.queue.add_user("bob")
    ref = local()
    head = lab.add(local_id=ref)
    behind = lab.add(operation="update", local_id=ref)
    other_lane, other_user = lab.add(), lab.add(user_id="bob")
    ENDINGS[ending](lab.queue, lab.claim())
    assert lab.claimable() == [other_lane.id]
    assert lab.claimable("bob") == [other_user.id]
    stuck = [entry.id for entry in lab.queue.blocked_by("ada")]
    assert stuck == ([] if ending == "schedule_retry" else [head.id])
    assert lab.queue.get(behind.id).status is Status.PENDING


def retry(queue: OutboxQueue, entry: Entry) -> object:
    return queue.retry(entry.id)


def edit(queue: OutboxQueue, entry: Entry) -> object:
    return queue.edit_payload(entry.id, {"questId": 8})


def discard(queue: OutboxQueue, entry: Entry) -> object:
    return queue.discard(entry.id)


@pytest.mark.parametrize("unblock", [retry, edit, discard])
def test_retry_edit_and_discard_each_unblock_a_poisoned_head(
    stopping_lab: Lab, unblock: object
) -> None:
    lab = stopping_lab
    head, behind = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    fail(lab.queue, lab.claim(), http_status=422, code="PREREQUISITES_NOT_MET")
    assert lab.queue.claim("ada") is None
    assert [entry.id for entry in lab.queue.blocked_by("ada")] == [head.id]
    unblock(lab.queue, head)  # type: ignore[operator]
    expected = [behind.id] if unblock is discard else [head.id, behind.id]
    assert drained(lab) == expected
    assert lab.queue.blocked_by("ada") == []


@pytest.mark.parametrize(
    ("how", "head_goes_again"),
    [(Resolution.SERVER_WINS, False), (Resolution.CLIENT_WINS, True), (Resolution.GIVE_UP, None)],
)
def test_a_conflict_holds_its_lane_until_it_is_resolved(
    lab: Lab, how: Resolution, head_goes_again: bool | None
) -> None:
    head, behind = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    record_conflict(lab.queue, lab.claim())
    assert lab.queue.claim("ada") is None
    lab.queue.resolve(head.id, how)
    expected = {True: [head.id, behind.id], False: [behind.id], None: [behind.id]}
    assert drained(lab) == expected[head_goes_again]


def test_a_refused_entry_leaves_its_lane_and_a_retry_brings_it_back(lab: Lab) -> None:
    head, *behind = (lab.queue.enqueue(walk(endpoint=f"/quest/{n}/complete")) for n in range(3))
    fail(lab.queue, lab.claim(), http_status=422, code="PREREQUISITES_NOT_MET")
    assert lab.queue.get(head.id).lane is None
    claimed = lab.claim()
    assert claimed.entry.id == behind[0].id
    # It is not sent beside the one that is in flight, but before the one behind that.
    lab.queue.retry(head.id)
    assert lab.queue.claim("ada") is None
    succeed(lab.queue, claimed)
    assert drained(lab) == [head.id, behind[1].id]


def test_a_retried_entry_takes_the_turn_back_from_a_pending_one(lab: Lab) -> None:
    head, behind = (lab.queue.enqueue(walk(endpoint=f"/quest/{n}/complete")) for n in range(2))
    fail(lab.queue, lab.claim(), http_status=422)
    lab.queue.retry(head.id)
    assert drained(lab) == [head.id, behind.id]


def test_a_refusal_parks_the_rest_of_its_chain_only(lab: Lab) -> None:
    start, first, other, second = (
        lab.queue.enqueue(walk(endpoint=path))
        for path in ("/quest/1/start", "/quest/1/step", "/quest/2/start", "/quest/1/complete")
    )
    fail(lab.queue, lab.claim(), http_status=422, code="PREREQUISITES_NOT_MET")
    parked = [lab.queue.get(entry.id) for entry in (first, second)]
    assert {(entry.status, entry.reason) for entry in parked} == {(Status.FAILED, "dependency")}
    assert drained(lab) == [other.id]
    lab.queue.retry(start.id)
    assert drained(lab) == [start.id, first.id, second.id]


@pytest.mark.parametrize("name", ["succeed", "expire"])
def test_a_settled_entry_passes_the_turn_on(lab: Lab, name: str) -> None:
    lab.queue.enqueue(walk())
    behind = lab.queue.enqueue(walk())
    ENDINGS[name](lab.queue, lab.claim())
    assert lab.claim().entry.id == behind.id


def test_cancelling_in_the_middle_of_a_lane_does_not_pass_the_turn(lab: Lab) -> None:
    first, middle, last = (lab.queue.enqueue(walk()) for _ in range(3))
    lab.queue.cancel(middle.id)
    assert drained(lab) == [first.id, last.id]


def test_cancelling_the_head_passes_the_turn_on(lab: Lab) -> None:
    first, second = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    lab.queue.cancel(first.id)
    assert drained(lab) == [second.id]


def test_a_head_that_waits_for_its_retry_blocks_the_rest_in_strict_order(lab: Lab) -> None:
    lab.queue.enqueue(walk())
    lab.queue.enqueue(walk())
    retry_later(lab.queue, lab.claim(), delay_seconds=60)
    assert lab.queue.claim("ada") is None
    lab.clock.pass_by(seconds=60)
    assert lab.claim().entry.sequence_number == 1


def test_due_retries_are_claimed_by_priority(lab: Lab) -> None:
    entries = [lab.add(priority=n) for n in range(4)]
    for wait in (40, 30, 20, 10):
        retry_later(lab.queue, lab.claim(), delay_seconds=wait)
    lab.clock.pass_by(seconds=40)
    assert lab.queue.next_eligible("ada") is not None
    assert lab.claimable() == [entry.id for entry in reversed(entries)]


def test_users_are_independent_of_each_other(lab: Lab) -> None:
    lab.queue.add_user("bob")
    lab.queue.enqueue(walk())
    theirs = lab.queue.enqueue(walk(user_id="bob"))
    assert lab.queue.eligible_users() == ["ada", "bob"]
    fail(lab.queue, lab.claim("ada"))
    assert lab.queue.eligible_users() == ["bob"]
    assert lab.claim("bob").entry.id == theirs.id
    assert lab.queue.eligible_users() == []


def test_a_user_with_a_due_retry_is_eligible_again(lab: Lab) -> None:
    lab.add()
    retry_later(lab.queue, lab.claim(), delay_seconds=5)
    assert lab.queue.eligible_users() == []
    lab.clock.pass_by(seconds=5)
    assert lab.queue.eligible_users() == ["ada"]
    assert lab.queue.next_eligible("ada") is not None


def test_a_batch_is_queued_in_its_order(lab: Lab) -> None:
    entries = lab.queue.enqueue_many([walk(priority=n) for n in range(20)])
    assert [entry.sequence_number for entry in entries] == list(range(1, 21))
    assert lab.queue.entries() == entries
    assert drained(lab) == [entry.id for entry in entries]


def test_a_batch_of_several_users_and_lanes_gives_each_its_turn(lab: Lab) -> None:
    lab.queue.add_user("bob")
    lab.add(lane="a")
    batch = lab.queue.enqueue_many(
        [
            new(lane="a"),
            new(lane="b"),
            new(user_id="bob", lane="a"),
            new(lane="b"),
            new(user_id="bob", lane="a"),
        ]
    )
    assert [entry.sequence_number for entry in batch] == [2, 3, 1, 4, 2]
    assert lab.claimable("bob") == [batch[2].id]
    assert len(lab.claimable()) == 2


def test_an_empty_batch_writes_nothing(lab: Lab) -> None:
    assert lab.queue.enqueue_many([]) == []
    assert lab.events == []


def test_entries_about_a_part_of_an_entity_share_its_lane(lab: Lab) -> None:
    first = lab.add(operation="patch", endpoint="/api/v1/activities/5")
    lab.add(operation="update", endpoint="/api/v1/activities/5/notes")
    other = lab.add(operation="update", endpoint="/api/v1/activities/6/notes")
    assert lab.claimable() == [first.id, other.id]


def test_an_api_version_in_the_path_is_no_entity(lab: Lab) -> None:
    ids = [
        lab.add(operation="patch", endpoint=f"/api/v1/activities/{name}").id
        for name in ("alpha", "beta")
    ]
    assert lab.claimable() == ids


def test_entry_that_came_back_is_sent_when_the_later_one_ends_in_conflict(lab: Lab) -> None:
    first, second = lab.add(lane="a"), lab.add(lane="a")
    lab.queue.park(first.id, reason=Reason.REBUILD, error="set aside")
    retry_later(lab.queue, lab.claim(), delay_seconds=0, outcome_unknown=True)
    lab.queue.retry(first.id)
    later = lab.claim()
    assert later.entry.id == second.id, "it may have happened"
    record_conflict(lab.queue, later, theirs={"id": 7}, theirs_version='"3"')
    assert lab.claim().entry.id == first.id


def test_entry_that_may_have_happened_is_sent_before_one_that_came_back(lab: Lab) -> None:
    first, second, third = (lab.add(lane="a") for _ in range(3))
    lab.queue.park(first.id, reason=Reason.REBUILD, error="set aside")
    batch = lab.queue.claim_some("ada", 2, in_batch=True)
    assert [claimed.entry.id for claimed in batch] == [second.id, third.id]
    lab.queue.retry(first.id)
    succeed(lab.queue, batch[0])
    retry_later(lab.queue, batch[1], delay_seconds=0, outcome_unknown=True)
    assert drained(lab) == [third.id, first.id]


def test_turn_is_passed_to_one_that_may_have_happened_after_the_outcome_before_it(lab: Lab) -> None:
    first, second, third = (lab.add(lane="a") for _ in range(3))
    lab.queue.park(first.id, reason=Reason.REBUILD, error="set aside")
    batch = lab.queue.claim_some("ada", 2, in_batch=True)
    for claimed in batch:
        retry_later(lab.queue, claimed, delay_seconds=0, outcome_unknown=True)
    lab.queue.retry(first.id)
    assert drained(lab) == [second.id, third.id, first.id]


def test_of_several_that_came_back_none_is_sent_beside_one_that_may_have_happened(
    lab: Lab,
) -> None:
    first, second, third = (lab.add(lane="a") for _ in range(3))
    for entry in (first, second):
        lab.queue.park(entry.id, reason=Reason.REBUILD, error="set aside")
    retry_later(lab.queue, lab.claim(), delay_seconds=0, outcome_unknown=True)
    for entry in (first, second):
        lab.queue.retry(entry.id)
    claimed = lab.claim()
    assert claimed.entry.id == third.id
    assert lab.queue.claim("ada") is None, "two entries of a lane have the turn"
    succeed(lab.queue, claimed)
    claimed = lab.claim()
    assert claimed.entry.id == first.id
    assert lab.queue.claim("ada") is None, "two entries of a lane have the turn"
    succeed(lab.queue, claimed)
    assert drained(lab) == [second.id]
