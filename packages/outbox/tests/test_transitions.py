"""Every operation in every status: the table allows it, or nothing changes."""

import itertools
from collections.abc import Callable

import pytest

from onceward.errors import UsageError
from onceward_outbox import Claimed, Entry, OutboxQueue, Reason, Resolution
from onceward_outbox.entry import Status, Transition, after
from onceward_outbox.errors import (
    ClaimLostError,
    EntryInvalidError,
    EntryNotFoundError,
    OutboxError,
    OutcomeUnknownError,
    TransitionError,
)
from packages.outbox.tests.outcomes import (
    expire,
    fail,
    record_conflict,
    release,
    retry_later,
    succeed,
)
from packages.outbox.tests.queue_harness import ENDINGS, Lab, local

# How an entry gets into each status. All go through a claim, so that there is one to speak of.
WAYS: dict[Status, Callable[[OutboxQueue, Claimed], object]] = {
    Status.PENDING: release,
    Status.IN_FLIGHT: lambda _queue, _claimed: None,
    Status.SUCCEEDED: succeed,
    Status.FAILED: fail,
    Status.CONFLICT: lambda queue, claimed: record_conflict(queue, claimed, theirs={"a": 1}),
    Status.EXPIRED: expire,
    Status.DISCARDED: lambda queue, claimed: queue.cancel(release(queue, claimed).id),
}

MANUAL: dict[str, tuple[Transition, Callable[[OutboxQueue, str], Entry]]] = {
    "retry": (Transition.RETRY, lambda queue, id_: queue.retry(id_)),
    "edit_payload": (Transition.EDIT, lambda queue, id_: queue.edit_payload(id_, {"b": 2})),
    "cancel": (Transition.CANCEL, lambda queue, id_: queue.cancel(id_)),
    "discard": (Transition.DISCARD, lambda queue, id_: queue.discard(id_)),
    "park": (Transition.PARK, lambda queue, id_: queue.park(id_, reason=Reason.REBUILD)),
    "resolve client_wins": (
        Transition.RESEND,
        lambda queue, id_: queue.resolve(id_, Resolution.CLIENT_WINS),
    ),
    "resolve merge": (
        Transition.RESEND,
        lambda queue, id_: queue.resolve(id_, Resolution.MERGE, payload={"c": 3}),
    ),
    "resolve give_up": (
        Transition.GIVE_UP,
        lambda queue, id_: queue.resolve(id_, Resolution.GIVE_UP),
    ),
}

ENDED_BY = {
    "succeed": Transition.SUCCEED,
    "schedule_retry": Transition.RETRY_LATER,
    "release": Transition.RELEASE,
    "fail": Transition.FAIL,
    "conflict": Transition.CONFLICT,
    "expire": Transition.EXPIRE,
}


def in_status(lab: Lab, status: Status) -> Claimed:
    lab.add()
    claimed = lab.claim()
    WAYS[status](lab.queue, claimed)
    assert lab.queue.get(claimed.entry.id).status is status
    return claimed


@pytest.mark.parametrize(("name", "status"), list(itertools.product(MANUAL, Status)))
def test_manual_actions_follow_the_transition_table(lab: Lab, name: str, status: Status) -> None:
    action, operation = MANUAL[name]
    entry_id = in_status(lab, status).entry.id
    before = lab.queue.get(entry_id)
    try:
        expected = after(action, status)
    except TransitionError:
        with pytest.raises(TransitionError):
            operation(lab.queue, entry_id)
        assert lab.queue.get(entry_id) == before
    else:
        assert operation(lab.queue, entry_id).status is expected
        assert lab.queue.get(entry_id).status is expected


@pytest.mark.parametrize("status", list(Status))
def test_resolve_needs_a_conflict(lab: Lab, status: Status) -> None:
    entry_id = in_status(lab, status).entry.id
    if status is Status.CONFLICT:
        assert lab.queue.resolve(entry_id, Resolution.SERVER_WINS).status is Status.DISCARDED
    else:
        with pytest.raises(TransitionError):
            lab.queue.resolve(entry_id, Resolution.SERVER_WINS)
        assert lab.queue.get(entry_id).status is status


@pytest.mark.parametrize(("name", "status"), list(itertools.product(ENDINGS, Status)))
def test_a_claim_ends_once(lab: Lab, name: str, status: Status) -> None:
    claimed = in_status(lab, status)
    before = lab.queue.get(claimed.entry.id)
    if status is Status.IN_FLIGHT:
        ended = ENDINGS[name](lab.queue, claimed)
        assert ended.status is after(ENDED_BY[name], status)
        assert lab.queue.get(ended.id) == ended
    else:
        with pytest.raises(ClaimLostError):
            ENDINGS[name](lab.queue, claimed)
        assert lab.queue.get(claimed.entry.id) == before


@pytest.mark.parametrize("status", list(Status))
def test_only_pending_entries_can_be_claimed(lab: Lab, status: Status) -> None:
    claimed = in_status(lab, status)
    again = lab.queue.claim("ada")
    if status is Status.PENDING:
        assert again is not None
        assert again.number == claimed.number + 1
    else:
        assert again is None


@pytest.mark.parametrize("status", list(Status))
def test_the_watchdog_changes_only_entries_in_flight(lab: Lab, status: Status) -> None:
    claimed = in_status(lab, status)
    lab.clock.pass_by(minutes=3)
    back = lab.queue.watchdog()
    assert [entry.id for entry in back] == (
        [claimed.entry.id] if status is Status.IN_FLIGHT else []
    )


@pytest.mark.parametrize("status", list(Status))
def test_only_pending_entries_expire(lab: Lab, status: Status) -> None:
    in_status(lab, status)
    lab.clock.pass_by(days=8)
    expired = lab.queue.expire_stale("ada")
    assert len(expired) == (1 if status is Status.PENDING else 0)


@pytest.mark.parametrize("name", list(MANUAL))
def test_actions_on_an_unknown_entry_raise_entry_not_found(lab: Lab, name: str) -> None:
    with pytest.raises(EntryNotFoundError):
        MANUAL[name][1](lab.queue, local())


@pytest.mark.parametrize("look", ["get", "dependents", "attempts"])
def test_queries_of_an_unknown_entry_raise_entry_not_found(lab: Lab, look: str) -> None:
    with pytest.raises(EntryNotFoundError):
        getattr(lab.queue, look)(local())


def test_unknown_keys_and_local_ids_find_nothing(lab: Lab) -> None:
    assert lab.queue.by_key("x") is None
    assert lab.queue.by_local_id("x") == []
    assert lab.queue.entries("nobody") == []


@pytest.mark.parametrize("how", ["watchdog", "no answer"])
@pytest.mark.parametrize("name", ["edit_payload", "cancel"])
def test_an_entry_with_unknown_outcome_is_changed_only_with_force(
    lab: Lab, how: str, name: str
) -> None:
    entry = lab.add()
    claimed = lab.claim()
    if how == "watchdog":
        lab.clock.pass_by(minutes=3)
        lab.queue.watchdog()
    else:
        retry_later(lab.queue, claimed, outcome_unknown=True)
    before = lab.queue.get(entry.id)
    assert before.outcome_unknown
    operation = getattr(lab.queue, name)
    with pytest.raises(OutcomeUnknownError, match="may have happened"):
        operation(entry.id)
    assert lab.queue.get(entry.id) == before
    assert operation(entry.id, force=True).status in (Status.PENDING, Status.DISCARDED)


def test_a_conclusive_response_makes_the_outcome_known(lab: Lab) -> None:
    entry = lab.add()
    retry_later(lab.queue, lab.claim(), outcome_unknown=True, delay_seconds=0)
    # Giving it back unsent tells nothing new.
    assert release(lab.queue, lab.claim()).outcome_unknown
    retry_later(lab.queue, lab.claim(), http_status=500, delay_seconds=0)
    assert not lab.queue.get(entry.id).outcome_unknown
    assert lab.queue.edit_payload(entry.id, {"b": 1}).status is Status.PENDING


def test_errors_of_the_queue_have_one_root() -> None:
    for kind in (ClaimLostError, EntryInvalidError, EntryNotFoundError, TransitionError):
        assert issubclass(kind, OutboxError)


def test_a_merge_needs_its_payload(lab: Lab) -> None:
    entry_id = in_status(lab, Status.CONFLICT).entry.id
    with pytest.raises(UsageError, match="merged payload"):
        lab.queue.resolve(entry_id, Resolution.MERGE)
    assert lab.queue.get(entry_id).status is Status.CONFLICT
