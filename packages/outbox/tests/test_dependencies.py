"""Dependencies on entries and local ids: blocking, parking and reviving."""

import pytest

from onceward_outbox import Entry, Reason, Status
from onceward_outbox.errors import EntryInvalidError, TransitionError
from packages.outbox.tests.outcomes import expire, fail, record_conflict, retry_later
from packages.outbox.tests.queue_harness import Lab, local, new, walk


def statuses(lab: Lab, *entries: Entry) -> list[str]:
    return [lab.queue.get(entry.id).status.value for entry in entries]


def test_a_child_waits_until_all_its_parents_have_succeeded(lab: Lab) -> None:
    one, two = lab.add(), lab.add()
    child = lab.add(depends_on=(one.id, two.id), priority=99)
    assert child.waiting_for == 2
    lab.send()
    assert lab.queue.get(child.id).waiting_for == 1
    assert lab.queue.next_eligible("ada") == two
    lab.send()
    assert lab.claim().entry.id == child.id


def test_a_parent_that_has_succeeded_is_not_awaited(lab: Lab) -> None:
    parent = lab.add()
    lab.send()
    child = lab.add(depends_on=(parent.id,))
    assert (child.waiting_for, child.dependency_ids) == (0, (parent.id,))
    assert lab.claim().entry.id == child.id


def test_a_dependency_may_be_named_by_local_id(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref)
    child = lab.add(depends_on=(ref,), priority=99)
    assert child.dependency_ids == (parent.id,)
    assert lab.claim().entry.id == parent.id
    assert lab.queue.claim("ada") is None


def test_a_local_id_whose_entry_was_pruned_is_still_a_dependency_that_is_met(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    lab.send(server_id="s")
    lab.clock.pass_by(days=8)
    lab.queue.prune()
    child = lab.add(depends_on=(ref,), payload={"parent": ref})
    assert (child.dependency_ids, child.waiting_for, child.local_refs) == ((), 0, (ref,))


def test_the_same_dependency_twice_counts_once(lab: Lab) -> None:
    parent = lab.add(local_id=local())
    child = lab.add(depends_on=(parent.id, parent.id, str(parent.local_id)))
    assert (child.dependency_ids, child.waiting_for) == ((parent.id,), 1)
    lab.send()
    assert lab.claim().entry.id == child.id


def test_local_id_resolution_before_replay(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref, priority=1)
    in_body = lab.add(payload={"activity": ref})
    in_text = lab.add(payload={"note": f"see {{local:{ref}}}"})
    in_path = lab.add(operation="create", endpoint=f"/api/v1/activities/{{local:{ref}}}/notes")
    in_header = lab.add(headers={"X-Parent": f"{{local:{ref}}}"})
    bare_in_path = lab.add(endpoint=f"/api/v1/activities/{ref}/notes")
    children = [in_body, in_text, in_path, in_header, bare_in_path]
    assert [child.local_refs for child in children] == [(ref,)] * 5
    assert lab.claimable() == [parent.id]
    claimed = lab.queue.get(parent.id)
    assert claimed.status is Status.IN_FLIGHT


def test_the_mapping_and_the_success_commit_together(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    child = lab.add(payload={"activity": ref})
    done = lab.send(server_id="srv-7", http_status=201)
    assert (done.server_id, done.synced_at) == ("srv-7", lab.clock.now())
    assert lab.queue.mappings("ada", [ref, local()]) == {ref: "srv-7"}
    assert lab.claim().entry.id == child.id


def test_a_servers_number_stays_a_number(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    assert lab.send(server_id=7).server_id == 7
    assert lab.queue.mappings("ada", [ref]) == {ref: 7}


def test_a_mapping_is_never_changed(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    lab.send(server_id="first")
    lab.queue.map_local_id("ada", ref, "second", entity_type="activity")
    assert lab.queue.mappings("ada", [ref]) == {ref: "first"}


def test_only_a_create_maps_its_local_id(lab: Lab) -> None:
    ref = local()
    lab.add(operation="update", local_id=ref, endpoint="/api/v1/activities/x")
    lab.send(server_id="x")
    assert lab.queue.mappings("ada", [ref]) == {}


def test_an_unknown_local_id_blocks_until_it_is_mapped(lab: Lab) -> None:
    ref = local()
    entry = lab.add(payload={"activity": f"{{local:{ref}}}"})
    assert lab.queue.claim("ada") is None
    assert lab.queue.stats().blocked == 1
    lab.queue.map_local_id("ada", ref, "srv", entity_type="activity")
    assert lab.claim().entry.id == entry.id


def test_in_strict_order_an_unknown_local_id_is_refused(lab: Lab) -> None:
    with pytest.raises(EntryInvalidError) as caught:
        lab.queue.enqueue(walk(payload={"a": f"{{local:{local()}}}"}))
    assert caught.value.rule == "dependency_ids_must_exist_in_queue"


def test_a_create_without_an_id_in_its_response_leaves_references_blocked(lab: Lab) -> None:
    ref = local()
    lab.add(local_id=ref)
    child = lab.add(payload={"activity": ref})
    lab.send(server_id=None)
    assert lab.queue.claim("ada") is None
    lab.queue.map_local_id("ada", ref, "srv", entity_type="activity")
    assert lab.claim().entry.id == child.id


def test_a_uuid_that_is_no_local_id_is_a_plain_value(lab: Lab) -> None:
    entry = lab.add(payload={"server": local()})
    assert (entry.local_refs, entry.waiting_for) == ((), 0)


def test_local_ids_of_another_user_are_not_resolved(lab: Lab) -> None:
    lab.queue.add_user("bob")
    ref = local()
    mine = lab.add(local_id=ref)
    theirs = lab.add(user_id="bob", payload={"a": ref})
    assert theirs.local_refs == ()
    waiting = lab.add(user_id="bob", payload={"a": f"{{local:{ref}}}"})
    lab.send(server_id="mine")
    assert lab.queue.mappings("bob", [ref]) == {}
    assert lab.claimable("bob") == [theirs.id]
    assert lab.queue.get(waiting.id).waiting_for == 1
    assert lab.queue.get(mine.id).status is Status.SUCCEEDED


def test_a_create_may_contain_its_own_local_id(lab: Lab) -> None:
    ref = local()
    entry = lab.add(local_id=ref, payload={"clientId": ref})
    assert entry.local_refs == ()
    assert lab.claim().entry.id == entry.id


def test_a_create_cannot_hold_the_servers_id_of_itself(lab: Lab) -> None:
    ref = local()
    with pytest.raises(EntryInvalidError) as caught:
        lab.add(local_id=ref, payload={"self": f"{{local:{ref}}}"})
    assert caught.value.rule == "dependency_ids_must_not_be_cyclic"


def test_an_entry_cannot_depend_on_itself(lab: Lab) -> None:
    own, ref = local(), local()
    for fields in ({"id": own, "depends_on": (own,)}, {"local_id": ref, "depends_on": (ref,)}):
        with pytest.raises(EntryInvalidError) as caught:
            lab.add(**fields)
        assert caught.value.rule == "dependency_ids_must_not_be_cyclic"


@pytest.mark.parametrize("ending", ["fail", "attempts", "expire", "stale", "cancel", "park"])
def test_a_failed_parent_parks_its_dependents_transitively(lab: Lab, ending: str) -> None:
    ref = local()
    parent = lab.add(local_id=ref, max_attempts=1)
    child = lab.add(depends_on=(parent.id,))
    by_reference = lab.add(payload={"a": ref})
    grandchild = lab.add(depends_on=(child.id,))
    bystander = lab.add()
    queue = lab.queue
    if ending == "stale":
        lab.clock.pass_by(days=8)
        expired = queue.expire_stale("ada")
        # The children are as old; they are parked with their parent, not expired beside it.
        assert [entry.id for entry in expired] == [parent.id, bystander.id]
    elif ending == "cancel":
        queue.cancel(parent.id)
    elif ending == "park":
        queue.park(parent.id, reason=Reason.REBUILD)
    else:
        claimed = lab.claim()
        {
            "fail": lambda: fail(queue, claimed),
            "attempts": lambda: retry_later(queue, claimed),
            "expire": lambda: expire(queue, claimed),
        }[ending]()
    for entry in (child, by_reference, grandchild):
        parked = queue.get(entry.id)
        assert (parked.status, parked.reason) == (Status.FAILED, Reason.DEPENDENCY)
    told = {event.entry_id for event in lab.events if event.reason is Reason.DEPENDENCY}
    assert told == {child.id, by_reference.id, grandchild.id}
    if ending != "stale":
        assert queue.get(bystander.id).status is Status.PENDING


def test_retrying_the_parent_revives_its_children(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    grandchild = lab.add(depends_on=(child.id,))
    fail(lab.queue, lab.claim())
    assert statuses(lab, child, grandchild) == ["failed", "failed"]
    lab.queue.retry(parent.id)
    assert statuses(lab, parent, child, grandchild) == ["pending"] * 3
    assert lab.kinds()[-2:] == ["revived", "revived"]
    for entry in (parent, child, grandchild):
        assert lab.send().id == entry.id


def test_editing_the_parent_revives_its_children_too(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    fail(lab.queue, lab.claim())
    lab.queue.edit_payload(parent.id, {"name": "better"})
    assert statuses(lab, parent, child) == ["pending", "pending"]


def test_a_child_is_revived_only_when_no_parent_is_dead(lab: Lab) -> None:
    one, two = lab.add(), lab.add()
    child = lab.add(depends_on=(one.id, two.id))
    fail(lab.queue, lab.claim())
    fail(lab.queue, lab.claim())
    lab.queue.retry(one.id)
    assert statuses(lab, child) == ["failed"]
    lab.queue.retry(two.id)
    assert statuses(lab, child) == ["pending"]


def test_a_diamond_of_dependencies_is_revived(lab: Lab) -> None:
    top = lab.add()
    left, right = lab.add(depends_on=(top.id,)), lab.add(depends_on=(top.id,))
    bottom = lab.add(depends_on=(top.id, left.id, right.id))
    fail(lab.queue, lab.claim())
    assert statuses(lab, left, right, bottom) == ["failed"] * 3
    lab.queue.retry(top.id)
    assert statuses(lab, left, right, bottom) == ["pending"] * 3


def test_a_parked_child_cannot_be_retried_before_its_parent(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    fail(lab.queue, lab.claim())
    with pytest.raises(TransitionError, match=parent.id):
        lab.queue.retry(child.id)
    lab.queue.discard(parent.id)
    with pytest.raises(TransitionError):
        lab.queue.retry(child.id)


def test_a_child_edited_to_drop_its_dead_parent_is_pending(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref)
    child = lab.add(depends_on=(parent.id,), payload={"a": ref})
    fail(lab.queue, lab.claim())
    lab.queue.discard(parent.id)
    half = lab.queue.edit_payload(child.id, {"a": None})
    assert (half.status, half.reason) == (Status.FAILED, Reason.DEPENDENCY)
    free = lab.queue.edit_payload(child.id, depends_on=())
    assert (free.status, free.local_refs, free.waiting_for) == (Status.PENDING, (), 0)
    assert lab.claim().entry.id == child.id


def test_a_child_that_failed_itself_is_not_revived_by_its_parent(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    lab.queue.park(child.id, reason=Reason.REBUILD)
    fail(lab.queue, lab.claim())
    lab.queue.retry(parent.id)
    assert lab.queue.get(child.id).reason is Reason.REBUILD


def test_an_entry_added_to_a_dead_parent_is_parked_at_once_and_revived_with_it(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref)
    fail(lab.queue, lab.claim())
    by_id, by_reference = lab.add(depends_on=(parent.id,)), lab.add(payload={"a": ref})
    for entry in (by_id, by_reference):
        assert (entry.status, entry.reason) == (Status.FAILED, Reason.DEPENDENCY)
    assert lab.kinds()[-4:] == ["enqueued", "failed", "enqueued", "failed"]
    lab.queue.retry(parent.id)
    assert statuses(lab, by_id, by_reference) == ["pending", "pending"]


def test_children_of_a_conflict_wait(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    record_conflict(lab.queue, lab.claim())
    assert statuses(lab, child) == ["pending"]
    assert lab.queue.claim("ada") is None


def test_discarding_with_dependents_discards_parked_entries(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    grandchild = lab.add(depends_on=(child.id,))
    fail(lab.queue, lab.claim())
    lab.queue.discard(parent.id, with_dependents=True)
    assert statuses(lab, parent, child, grandchild) == ["discarded"] * 3


def test_discarding_alone_leaves_the_children_parked(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    record_conflict(lab.queue, lab.claim())
    lab.queue.discard(parent.id)
    assert statuses(lab, parent, child) == ["discarded", "failed"]


def test_a_parent_with_parked_children_is_not_pruned_before_them(lab: Lab) -> None:
    parent = lab.add()
    child = lab.add(depends_on=(parent.id,))
    lab.queue.cancel(parent.id)
    lab.clock.pass_by(days=31)
    assert lab.queue.prune() == 0
    lab.queue.discard(child.id)
    assert lab.queue.prune() == 1  # the child has only just been given up
    lab.clock.pass_by(days=30)
    assert lab.queue.prune() == 1


def test_dependents_are_listed_directly_and_transitively(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref)
    child, by_reference = lab.add(depends_on=(parent.id,)), lab.add(payload={"a": ref})
    grandchild = lab.add(depends_on=(child.id,))
    listed = lab.queue.dependents(parent.id)
    assert [entry.id for entry in listed] == [child.id, by_reference.id]
    listed = lab.queue.dependents(parent.id, transitive=True)
    assert [entry.id for entry in listed] == [child.id, by_reference.id, grandchild.id]
    assert lab.queue.dependents(grandchild.id) == []


def test_members_of_a_batch_may_depend_on_each_other_also_forward(lab: Lab) -> None:
    first, second, ref = local(), local(), local()
    batch = lab.queue.enqueue_many(
        [
            new(id=first, depends_on=(second,), priority=9),
            new(id=second, payload={"a": f"{{local:{ref}}}"}, priority=8),
            new(local_id=ref, priority=7),
            new(depends_on=(ref, first), payload={"a": ref}),
        ]
    )
    assert [entry.waiting_for for entry in batch] == [1, 1, 0, 3]
    assert [lab.send(server_id="s").id for _ in range(4)] == [
        batch[2].id,
        batch[1].id,
        batch[0].id,
        batch[3].id,
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 2000])
def test_cyclic_dependencies_are_refused(lab: Lab, length: int) -> None:
    ids = [local() for _ in range(length)]
    batch = [new(id=id_, depends_on=(ids[n - 1],)) for n, id_ in enumerate(ids)]
    with pytest.raises(EntryInvalidError) as caught:
        lab.queue.enqueue_many(batch)
    assert caught.value.rule == "dependency_ids_must_not_be_cyclic"
    assert lab.queue.stats().unsent == 0


def test_a_cycle_through_references_is_refused(lab: Lab) -> None:
    one, two = local(), local()
    with pytest.raises(EntryInvalidError):
        lab.queue.enqueue_many(
            [new(local_id=one, payload={"a": two}), new(local_id=two, payload={"a": one})]
        )
    assert lab.queue.stats().unsent == 0


def test_a_dependency_on_a_later_entry_of_the_same_lane_is_refused(lab: Lab) -> None:
    later = local()
    with pytest.raises(EntryInvalidError) as caught:
        lab.queue.enqueue_many([walk(depends_on=(later,)), walk(id=later)])
    assert caught.value.rule == "dependency_ids_must_not_be_cyclic"
    # In lanes of their own the same is fine.
    assert len(lab.queue.enqueue_many([new(depends_on=(later,)), new(id=later)])) == 2


def test_a_cycle_through_lanes_is_refused(lab: Lab) -> None:
    last, other = local(), local()
    with pytest.raises(EntryInvalidError):
        lab.queue.enqueue_many(
            [
                new(lane="x", depends_on=(last,)),
                new(lane="x", id=other),
                new(lane="y", depends_on=(other,)),
                new(lane="y", id=last),
            ]
        )
    assert lab.queue.stats().unsent == 0


def test_a_batch_behind_a_dead_parent_is_parked_forward_and_backward(lab: Lab) -> None:
    parent = lab.add()
    fail(lab.queue, lab.claim())
    doomed = local()
    batch = lab.queue.enqueue_many(
        [
            new(depends_on=(doomed,)),
            new(id=doomed, depends_on=(parent.id,)),
            new(depends_on=(doomed,)),
            new(),
        ]
    )
    assert statuses(lab, *batch) == ["failed", "failed", "failed", "pending"]
    lab.queue.retry(parent.id)
    assert statuses(lab, *batch) == ["pending"] * 4


def test_an_edit_cannot_make_a_cycle(lab: Lab) -> None:
    one = lab.add()
    two = lab.add(depends_on=(one.id,))
    with pytest.raises(TransitionError, match="queued later"):
        lab.queue.edit_payload(one.id, depends_on=(two.id,))
    assert lab.queue.get(one.id) == one
    assert lab.claim().entry.id == one.id


def test_an_edit_keeps_dependencies_it_does_not_mention(lab: Lab) -> None:
    ref = local()
    parent = lab.add(local_id=ref)
    child = lab.add(depends_on=(parent.id,), payload={"a": ref, "b": 1})
    edited = lab.queue.edit_payload(child.id, {"a": ref, "b": 2})
    assert edited.dependency_ids == (parent.id,)
    assert edited.local_refs == (ref,)
    lab.send(server_id="s")
    assert lab.claim().entry.id == child.id
