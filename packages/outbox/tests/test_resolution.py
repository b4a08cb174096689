"""Decisions about entries: edit, retry, resolve, discard, cancel, purge."""

from pathlib import Path
from typing import Any

import pytest

from onceward_outbox import (
    PayloadMigration,
    QueueSettings,
    Reason,
    Resolution,
    Rewrite,
    Status,
)
from onceward_outbox.errors import EntryInvalidError, UnsentEntriesError
from onceward_protocol.keys import KeyFormat, check_key
from packages.outbox.tests.outcomes import fail, record_conflict, release, retry_later
from packages.outbox.tests.queue_harness import Lab, local, new, walk


def test_an_edit_is_a_new_request_with_a_new_key_in_the_same_place(lab: Lab) -> None:
    entry, behind = lab.queue.enqueue(walk()), lab.queue.enqueue(walk())
    fail(lab.queue, lab.claim(), http_status=422, error="no such quest")
    edited = lab.queue.edit_payload(
        entry.id, {"questId": 8}, endpoint="/quest/8/complete", headers={"X-A": "b"}
    )
    assert edited.idempotency_key != entry.idempotency_key
    assert check_key(edited.idempotency_key, KeyFormat.UUID4)
    assert (edited.status, edited.attempt_count, edited.reason) == (Status.PENDING, 0, None)
    assert (edited.decoded(), edited.endpoint) == ({"questId": 8}, "/quest/8/complete")
    assert (edited.headers, edited.sequence_number) == ({"X-A": "b"}, 1)
    assert lab.queue.get(entry.id) == edited
    assert lab.claim().entry.id == entry.id
    assert lab.queue.get(behind.id).status is Status.PENDING
    assert "edited" in lab.kinds()


def test_the_apps_own_key_stays_known_after_an_edit_and_a_resolved_conflict(lab: Lab) -> None:
    key = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    asked = new(key=key, payload={"a": 1})
    entry = lab.queue.enqueue(asked)
    lab.queue.edit_payload(entry.id, {"a": 2})
    edited = lab.queue.get(entry.id)
    assert edited.idempotency_key != key
    # The app crashed after its first enqueue, knows nothing of the edit, and enqueues again.
    assert lab.queue.enqueue(asked) == edited
    assert lab.queue.enqueue_many([asked, asked]) == [edited, edited]
    with pytest.raises(EntryInvalidError, match="another request"):
        lab.queue.enqueue(new(key=key, payload={"a": 3}))
    record_conflict(lab.queue, lab.claim(), http_status=409, theirs={"a": 9}, theirs_version="4")
    lab.queue.resolve(entry.id, Resolution.CLIENT_WINS)
    assert lab.queue.enqueue(asked).id == entry.id
    assert len(lab.queue.entries(user_id="ada")) == 1


def test_an_edit_ends_the_delay_of_a_retry(lab: Lab) -> None:
    entry = lab.add()
    retry_later(lab.queue, lab.claim(), http_status=500)
    edited = lab.queue.edit_payload(entry.id, {"b": 1})
    assert edited.next_retry_at is None
    assert lab.claim().entry.id == entry.id


@pytest.mark.parametrize(
    "change",
    [
        {"payload": {"a": float("nan")}},
        {"endpoint": "//evil"},
        {"headers": {"Authorization": "x"}},
        {"depends_on": ["nobody"]},
    ],
)
def test_an_invalid_edit_changes_nothing(lab: Lab, change: dict[str, Any]) -> None:
    entry = lab.add()
    with pytest.raises(EntryInvalidError):
        lab.queue.edit_payload(entry.id, **change)
    assert lab.queue.get(entry.id) == entry


def test_a_manual_retry_keeps_the_key_and_resets_the_attempts(lab: Lab) -> None:
    entry = lab.add(max_attempts=1)
    retry_later(lab.queue, lab.claim(), http_status=503)
    back = lab.queue.retry(entry.id)
    assert (back.status, back.attempt_count, back.reason) == (Status.PENDING, 0, None)
    assert back.idempotency_key == entry.idempotency_key
    assert len(lab.queue.attempts(entry.id)) == 1  # the history stays
    assert lab.claim().number == 2


def in_conflict(lab: Lab, **fields: Any) -> str:
    entry = lab.add(payload={"n": "mine"}, base={"n": "base"}, base_version="1", **fields)
    record_conflict(lab.queue, lab.claim(), theirs={"n": "theirs"}, theirs_version="2")
    return entry.id


def test_conflict_requires_resolution_strategy(lab: Lab) -> None:
    entry_id = in_conflict(lab, conflict_resolution="manual")
    assert lab.queue.get(entry_id).conflict_resolution == "manual"
    assert lab.queue.claim("ada") is None


def test_resolving_with_theirs_discards_the_entry(lab: Lab) -> None:
    resolved = lab.queue.resolve(in_conflict(lab), Resolution.SERVER_WINS)
    assert (resolved.status, resolved.reason) == (Status.DISCARDED, Reason.PERSON)


def test_resolving_with_mine_sends_it_forced_with_a_new_key(lab: Lab) -> None:
    entry_id = in_conflict(lab, headers={"If-Match": '"1"'})
    before = lab.queue.get(entry_id)
    resolved = lab.queue.resolve(entry_id, Resolution.CLIENT_WINS, headers={"If-Match": '"2"'})
    assert (resolved.status, resolved.forced) == (Status.PENDING, True)
    assert resolved.idempotency_key != before.idempotency_key
    assert (resolved.payload, resolved.headers) == (before.payload, {"If-Match": '"2"'})
    assert (resolved.base, resolved.base_version) == (before.base, "1")
    assert lab.claim().entry.forced


def test_resolving_with_merged_takes_the_servers_side_as_base(lab: Lab) -> None:
    entry_id = in_conflict(lab)
    resolved = lab.queue.resolve(entry_id, Resolution.MERGE, payload={"n": "both"})
    assert (resolved.status, resolved.forced) == (Status.PENDING, False)
    assert resolved.decoded() == {"n": "both"}
    assert (resolved.base, resolved.base_version) == ('{"n":"theirs"}', "2")
    assert (resolved.theirs, resolved.theirs_version) == (None, None)
    assert lab.events[-1].kind == "resolved"


def test_resolving_with_give_up_keeps_both_sides(lab: Lab) -> None:
    entry_id = in_conflict(lab)
    resolved = lab.queue.resolve(entry_id, Resolution.GIVE_UP)
    assert (resolved.status, resolved.theirs) == (Status.FAILED, '{"n":"theirs"}')
    assert lab.queue.retry(entry_id).status is Status.PENDING


def test_cancel_discards_a_pending_entry(lab: Lab) -> None:
    entry = lab.add()
    undone = lab.queue.cancel(entry.id)
    assert (undone.status, undone.reason) == (Status.DISCARDED, Reason.PERSON)
    assert lab.queue.claim("ada") is None
    assert lab.kinds() == ["enqueued", "discarded"]


def test_a_user_with_unsent_entries_is_not_purged_unless_forced(lab: Lab) -> None:
    lab.queue.add_user("bob")
    theirs = lab.add(user_id="bob")
    ref = local()
    lab.add(local_id=ref)
    child = lab.add(depends_on=(ref,))
    lab.send(server_id="s")
    with pytest.raises(UnsentEntriesError) as caught:
        lab.queue.purge_user("ada")
    assert caught.value.unsent == 1
    assert lab.queue.get(child.id).status is Status.PENDING
    assert lab.queue.purge_user("ada", force=True) == 2
    assert lab.queue.users() == ["bob"]
    assert lab.queue.entries() == [theirs]
    assert lab.queue.mappings("ada", [ref]) == {}
    with lab.queue.transaction() as connection:
        for table in ("attempts", "entry_waits", "id_mappings"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchall() == [(0,)]
    assert lab.events[-1].count == 2


@pytest.mark.parametrize("ending", ["failed", "unknown", "conflict", "in_flight"])
def test_what_may_still_be_sent_counts_as_unsent(lab: Lab, ending: str) -> None:
    lab.add()
    claimed = lab.claim()
    if ending == "failed":
        fail(lab.queue, claimed, reason=Reason.ATTEMPTS)
    elif ending == "unknown":
        fail(lab.queue, claimed, outcome_unknown=True)
    elif ending == "conflict":
        record_conflict(lab.queue, claimed)
    assert (*lab.queue.unsettled("ada"), lab.queue.stats().unsent) == (1, 0, 1)
    with pytest.raises(UnsentEntriesError):
        lab.queue.purge_user("ada")


def test_what_the_server_has_refused_for_good_is_not_unsent(lab: Lab) -> None:
    lab.add()
    fail(lab.queue, lab.claim())
    assert lab.queue.unsettled("ada") == (0, 1)
    stats = lab.queue.stats("ada")
    assert (stats.unsent, stats.refused) == (0, 1)
    assert lab.queue.purge_user("ada") == 1


def test_a_purged_user_leaves_no_trace_in_the_file(lab: Lab) -> None:
    lab.add(payload={"secret": "xyzzy-plugh"})
    lab.send()
    lab.queue.purge_user("ada")
    files = list(lab.path.parent.iterdir())
    assert files
    for file in files:
        assert b"xyzzy-plugh" not in file.read_bytes()


def test_a_user_can_come_back_after_a_purge(lab: Lab) -> None:
    lab.add()
    lab.queue.purge_user("ada", force=True)
    lab.queue.add_user("ada")
    entry = lab.add()
    assert lab.claim().entry.id == entry.id


def upgraded(entry: Any) -> Rewrite:
    body = entry.decoded()
    if body.get("name") == "cannot":
        raise ValueError("no idea what this is")
    return Rewrite(payload={"title": body["name"]}, endpoint="/api/v2/activities")


def test_queued_payloads_are_migrated_to_the_new_format(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db")
    fresh = lab.add(payload={"name": "fresh"})
    answered = lab.add(payload={"name": "answered"}, max_attempts=1)
    unknown = lab.add(payload={"name": "unknown"})
    broken = lab.add(payload={"name": "cannot"})
    child = lab.add(payload={"name": "child"}, depends_on=(broken.id,))
    done = lab.add(payload={"name": "done"}, priority=99)
    lab.send()
    queue = lab.queue
    first = lab.claim()
    second = lab.claim()
    third = lab.claim()
    assert [c.entry.id for c in (first, second, third)] == [fresh.id, answered.id, unknown.id]
    retry_later(queue, second, http_status=500)
    retry_later(queue, third, outcome_unknown=True)
    release(queue, first)
    queue = lab.reopen(
        settings=QueueSettings(payload_version=2), payloads=PayloadMigration(2, upgraded)
    )
    moved = queue.get(fresh.id)
    assert (moved.decoded(), moved.endpoint) == ({"title": "fresh"}, "/api/v2/activities")
    # It has been claimed, so it may have been sent: a server may know the old key.
    assert moved.idempotency_key != fresh.idempotency_key
    assert (moved.payload_version, moved.status) == (2, Status.PENDING)
    after_answer = queue.get(answered.id)
    assert after_answer.decoded() == {"title": "answered"}
    assert (after_answer.status, after_answer.reason) == (Status.FAILED, Reason.ATTEMPTS)
    kept = queue.get(unknown.id)
    assert (kept.payload, kept.idempotency_key) == (unknown.payload, unknown.idempotency_key)
    parked = queue.get(broken.id)
    assert (parked.status, parked.reason) == (Status.FAILED, Reason.MIGRATION)
    assert "no idea" in str(parked.last_error)
    assert queue.get(child.id).reason is Reason.DEPENDENCY
    assert queue.get(done.id).payload == done.payload
    assert lab.add().payload_version == 2
    queue.close()


def test_entries_that_were_never_claimed_keep_their_key_in_a_migration(lab: Lab) -> None:
    entry = lab.add(payload={"name": "a"})
    queue = lab.reopen(payloads=PayloadMigration(1, upgraded))
    assert queue.get(entry.id).idempotency_key == entry.idempotency_key
    assert queue.get(entry.id).decoded() == {"title": "a"}


def test_payloads_are_migrated_once_and_in_any_number(lab: Lab) -> None:
    lab.queue.enqueue_many([new(payload={"name": str(n)}) for n in range(450)])
    seen = []

    def count(entry: Any) -> Rewrite:
        seen.append(entry.id)
        return Rewrite(payload={"title": entry.decoded()["name"]})

    lab.reopen(payloads=PayloadMigration(1, count))
    assert len(set(seen)) == len(seen) == 450
    lab.reopen(payloads=PayloadMigration(1, count))
    assert len(seen) == 450


def test_a_migrated_payload_is_validated(lab: Lab) -> None:
    entry = lab.add()
    queue = lab.reopen(
        payloads=PayloadMigration(1, lambda _: Rewrite(payload={"a": f"{{local:{local()}}}"}))
    )
    assert queue.get(entry.id).reason is Reason.MIGRATION
