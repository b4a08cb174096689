"""One user's view of a device's outbox, bulk decisions, once, and waiting for an outcome."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onceward.errors import UsageError
from onceward_outbox import (
    AsyncOutbox,
    Entry,
    Event,
    Outbox,
    OutboxQueue,
    Reason,
    Status,
    entries,
)
from onceward_outbox.errors import EntryInvalidError, EntryNotFoundError, TransitionError
from packages.onceward.tests.support.outbox_harness import Scripted, activity, response
from packages.outbox.tests.outcomes import fail, record_conflict
from packages.outbox.tests.queue_harness import Lab, local, new


@pytest.fixture
def outbox(quick_path: Path) -> Iterator[Outbox]:
    queue = OutboxQueue.open(quick_path / "shared.db")
    queue.add_user("ada")
    queue.add_user("bo")
    with Outbox(queue, Scripted(lambda _: response(201, {"id": 1}))) as outbox:
        yield outbox


def failed(lab: Lab, code: str, reason: Reason = Reason.RESPONSE, **fields: Any) -> Entry:
    lab.add(**fields)
    return fail(lab.queue, lab.claim(), reason=reason, http_status=422, code=code)


@contextmanager
def soon(action: Callable[[], object]) -> Iterator[None]:
    """Do something on another thread while the block waits for it."""
    timer = threading.Timer(0.05, action)
    timer.start()
    yield
    timer.join()


# -- enqueueing ---------------------------------------------------------------------------------


def test_enqueue_takes_five_arguments_or_an_entry(outbox: Outbox) -> None:
    path = "/api/v1/activities"
    made = outbox.enqueue("ada", "create", "activity", path, {"title": "a"})
    assert (made.user_id, made.method, made.entity_type) == ("ada", "POST", "activity")
    assert (made.endpoint, made.payload) == (path, '{"title":"a"}')
    more = outbox.enqueue("ada", "create", "activity", path, {}, lane="a", max_attempts=3)
    assert (more.lane, more.max_attempts) == ("a", 3)
    assert outbox.enqueue(new(payload={"title": "a"})).payload == made.payload
    assert outbox.enqueue("ada", "delete", "activity", f"{path}/7").payload is None
    with pytest.raises(TypeError, match="endpoint"):
        outbox.enqueue("ada", "create", "activity")  # type: ignore[call-overload]
    with pytest.raises(EntryInvalidError, match="another user_id"):
        outbox.for_user("bo").enqueue("ada", "create", "activity", path)


# -- one user -------------------------------------------------------------------------------------

OF_AN_ENTRY: dict[str, Callable[[Outbox, str], object]] = {
    "get": lambda mine, entry_id: mine.get(entry_id),
    "entries": lambda mine, entry_id: mine.entries(after=entry_id),
    "dependents": lambda mine, entry_id: mine.dependents(entry_id),
    "attempts": lambda mine, entry_id: mine.attempts(entry_id),
    "wait": lambda mine, entry_id: mine.wait(entry_id, 0),
    "retry": lambda mine, entry_id: mine.retry(entry_id),
    "edit_payload": lambda mine, entry_id: mine.edit_payload(entry_id, {}),
    "resolve": lambda mine, entry_id: mine.resolve(entry_id, "server_wins"),
    "cancel": lambda mine, entry_id: mine.cancel(entry_id),
    "discard": lambda mine, entry_id: mine.discard(entry_id),
}
"""Every method that takes the id of an entry."""


@pytest.mark.parametrize("name", OF_AN_ENTRY)
def test_an_entry_of_another_user_is_not_found(outbox: Outbox, name: str) -> None:
    theirs = outbox.enqueue(activity("bo", "visit"))
    with pytest.raises(EntryNotFoundError, match=f"there is no entry {theirs.id}"):
        OF_AN_ENTRY[name](outbox.for_user("ada"), theirs.id)
    assert outbox.queue.get(theirs.id) == theirs


def test_every_method_with_an_entry_id_is_tested() -> None:
    taking = {
        name
        for name, method in inspect.getmembers(Outbox, inspect.isfunction)
        if not name.startswith("_")
        and {"entry_id", "after"} & set(inspect.signature(method).parameters)
    }
    assert taking == set(OF_AN_ENTRY)


def test_queries_of_a_user_leave_out_entries_of_others(outbox: Outbox) -> None:
    shared = local()
    mine, theirs = outbox.for_user("ada"), outbox.for_user("bo")
    own = mine.enqueue(activity("ada", "visit", local_id=shared))
    other = theirs.enqueue(activity("bo", "visit", local_id=shared))
    outbox.queue.map_local_id("bo", shared, 7, entity_type="activity")
    assert mine.entries() == mine.by_local_id(shared) == [own]
    assert (mine.next_eligible(), mine.by_key(other.idempotency_key)) == (own, None)
    assert mine.by_key(own.idempotency_key) == own
    assert (mine.mappings([shared]), theirs.mappings([shared])) == ({}, {shared: 7})
    assert (mine.unsent(), mine.in_flight(), mine.stats().unsent) == (1, 0, 1)
    theirs.drain()
    assert mine.get(own.id).status is Status.PENDING
    assert mine.drain().succeeded == 1
    outbox.queue.retry_all("ada")
    mine.purge_user()
    assert theirs.get(other.id).status is Status.SUCCEEDED


def test_an_outbox_that_is_bound_to_a_user_refuses_the_name_of_another(outbox: Outbox) -> None:
    mine = outbox.for_user("ada")
    assert (mine.unsent("ada"), mine.stats("ada").unsent) == (0, 0)
    calls: list[Callable[[], object]] = [
        lambda: mine.unsent("bo"),
        lambda: mine.entries("bo"),
        lambda: mine.stats("bo"),
        lambda: mine.drain("bo"),
        lambda: mine.purge_user("bo", force=True),
        lambda: mine.retry_all("bo"),
        lambda: mine.for_user("bo"),
        lambda: mine.queue,
        outbox.unsent,
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()


def test_a_user_cannot_queue_for_another_or_depend_on_their_entries(outbox: Outbox) -> None:
    mine, other = outbox.for_user("ada"), outbox.enqueue(activity("bo", "visit"))
    for wrong in (activity("bo", "visit"), activity("ada", "visit", depends_on=(other.id,))):
        with pytest.raises(EntryInvalidError):
            mine.enqueue_many([activity("ada", "lunch"), wrong])
    assert mine.entries() == []


def test_bulk_decisions_and_events_are_those_of_the_user(outbox: Outbox) -> None:
    mine = outbox.for_user("ada")
    heard: list[Event] = []
    mine.subscribe(heard.append)
    with mine.events() as stream:
        for user in ("bo", "ada"):
            outbox.enqueue(activity(user, "visit"))
            claimed = outbox.queue.claim(user)
            assert claimed is not None
            fail(outbox.queue, claimed, http_status=422, code="SOLD_OUT")
        assert [one.user_id for one in mine.retry_all(code="SOLD_OUT", dry_run=True)] == ["ada"]
        assert [one.user_id for one in mine.discard_all(code="SOLD_OUT")] == ["ada"]
    kinds = ["enqueued", "claimed", "failed", "discarded"]
    assert [event.kind for event in heard] == [event.kind for event in stream] == kinds
    assert {event.user_id for event in heard} == {"ada"}
    assert len(outbox.for_user("bo").blocked_by()) == 1


# -- bulk -----------------------------------------------------------------------------------------


def test_retry_all_retries_failed_entries_with_the_reason_and_code(lab: Lab) -> None:
    sold = [failed(lab, "SOLD_OUT").id for _ in range(2)]
    gone = failed(lab, "GONE").id
    tired = failed(lab, "SOLD_OUT", Reason.ATTEMPTS).id
    child = lab.add(depends_on=(sold[0],)).id
    queue = lab.queue

    def ids(**options: Any) -> list[str]:
        return [entry.id for entry in queue.retry_all("ada", **options)]

    before = queue.entries()
    assert ids(code="SOLD_OUT", dry_run=True) == [*sold, tired]
    assert ids(reason="answer", dry_run=True) == [*sold, gone]
    assert queue.entries() == before
    assert ids(reason=Reason.RESPONSE, code="SOLD_OUT") == sold
    assert queue.get(child).status is Status.PENDING  # revived with its parent
    assert [queue.get(one).status for one in (gone, tired)] == [Status.FAILED] * 2
    assert ids() == [gone, tired]
    assert ids() == []


def test_discard_all_discards_failed_entries_and_conflicts_only_if_named(lab: Lab) -> None:
    first = failed(lab, "SOLD_OUT")
    child = lab.add(depends_on=(first.id,))
    lab.add()
    disputed = record_conflict(lab.queue, lab.claim(), code="SOLD_OUT")
    queue = lab.queue
    found = queue.discard_all("ada", code="SOLD_OUT", with_dependents=True)
    assert [one.id for one in found] == [first.id]
    assert queue.get(child.id).status is Status.DISCARDED
    assert queue.get(disputed.id).status is Status.CONFLICT
    assert [one.id for one in queue.discard_all("ada", status=("failed", "conflict"))] == [
        disputed.id
    ]
    with pytest.raises(TransitionError):
        queue.discard_all("ada", status="pending")
    with pytest.raises(UsageError):
        queue.retry_all("ada", reason="sold out")  # type: ignore[arg-type]


def test_bulk_decisions_work_in_batches(lab: Lab) -> None:
    lab.queue.enqueue_many([new() for _ in range(1001)])
    with lab.queue.transaction():
        for claimed in lab.queue.claim_some("ada", 1001):
            fail(lab.queue, claimed, http_status=422)
    commits: list[str] = []

    class Points:
        def reach(self, point: str) -> None:
            commits.append(point)

    lab.reopen(fault_points=Points())
    assert len(lab.queue.retry_all("ada")) == 1001
    assert commits.count("retry_all.after_commit") == 3
    assert lab.queue.stats("ada").ready == 1001


# -- once -----------------------------------------------------------------------------------------


def test_a_double_tap_is_one_entry_while_the_first_is_unsettled(lab: Lab) -> None:
    lab.queue.add_user("bo")
    first = lab.add(once="quest.complete:001")
    assert lab.add(once="quest.complete:001", payload={"name": "again"}) == first
    lab.reopen()
    assert lab.add(once="quest.complete:001").id == first.id
    others = [lab.add(once="quest.complete:002"), lab.add(user_id="bo", once="quest.complete:001")]
    assert len({first.id, *(one.id for one in others)}) == 3
    assert lab.kinds() == ["enqueued"] * 3
    fail(lab.queue, lab.claim(), reason=Reason.ATTEMPTS)  # still unsettled: the user decides
    assert lab.add(once="quest.complete:001").status is Status.FAILED
    lab.queue.retry(first.id)
    lab.send()
    assert lab.add(once="quest.complete:001").id == first.id


def test_entries_of_one_batch_with_the_same_once_are_one(lab: Lab) -> None:
    one, two, three = lab.queue.enqueue_many([new(once="a"), new(once="a"), new(once="b")])
    assert one.id == two.id != three.id
    assert lab.queue.unsent("ada") == 2


def test_an_entry_with_once_is_not_merged_into_another(lab: Lab) -> None:
    change = {"operation": "patch", "endpoint": "/api/v1/activities/5"}
    lab.add(**change)
    named = lab.queue.enqueue(new(**change, once="rename:5"), coalesce=True)
    assert (named.once, lab.queue.unsent("ada")) == ("rename:5", 2)
    with pytest.raises(EntryInvalidError, match="once must be 1 to 200 printable characters"):
        lab.add(once="\n")


# -- waiting --------------------------------------------------------------------------------------


def test_wait_returns_when_the_entry_has_an_outcome(outbox: Outbox) -> None:
    mine = outbox.for_user("ada")
    entry = mine.enqueue(activity("ada", "visit"))
    with soon(mine.drain):
        assert mine.wait(entry.id, timeout=5).status is Status.SUCCEEDED
    assert outbox.wait(entry.id).id == entry.id


def test_wait_notices_an_outcome_of_another_process(lab: Lab) -> None:
    entry = lab.add()
    with lab.open() as other, soon(lambda: other.cancel(entry.id)):
        assert lab.queue.wait(entry.id, timeout=5).status is Status.DISCARDED


def test_wait_raises_after_the_timeout_and_inside_a_transaction(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_POLL_SECONDS", 60)
    entry = lab.add()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"entry {entry.id} is still pending after 0\.05 s"):
        lab.queue.wait(entry.id, timeout=0.05)
    assert time.monotonic() - began < 30
    with lab.queue.transaction(), pytest.raises(UsageError):
        lab.queue.wait(entry.id, timeout=1)
    with pytest.raises(EntryNotFoundError):
        lab.queue.wait(local(), timeout=1)


async def test_wait_with_asyncio(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_POLL_SECONDS", 60)
    anyone = AsyncOutbox(outbox)
    mine = anyone.for_user("ada")
    entry = await mine.enqueue(activity("ada", "visit"))
    other = await anyone.enqueue(activity("bo", "visit"))
    with pytest.raises(TimeoutError):
        await mine.wait(entry.id, timeout=0.01)
    with pytest.raises(EntryNotFoundError):
        await mine.wait(other.id, timeout=1)
    began = time.monotonic()
    async with mine.events() as events:
        waiting = [asyncio.ensure_future(one.wait(entry.id, 60)) for one in (mine, anyone)]
        await asyncio.sleep(0.02)
        await mine.drain()
        assert {one.status for one in await asyncio.gather(*waiting)} == {Status.SUCCEEDED}
        assert (await anext(events)).user_id == "ada"
    assert time.monotonic() - began < 30  # woken by the event, not by the next look at the file
