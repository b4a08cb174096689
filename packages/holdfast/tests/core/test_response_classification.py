"""What an answer means, case by case."""

from datetime import UTC, datetime

import pytest

from holdfast.core.outbox_entry import Entry, Operation, Status
from holdfast.core.response_classification import (
    BY_CODE,
    Conflicting,
    Done,
    Misdirected,
    OutOfOrder,
    Refused,
    SignInNeeded,
    TooOld,
    TryLater,
    Verdict,
    classify,
)

LATER = TryLater()
UNKNOWN = TryLater(outcome_unknown=True)


def entry(
    operation: Operation = Operation.CREATE,
    attempt: int = 1,
    last: int | None = None,
    *,
    outcome_unknown: bool = False,
) -> Entry:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    return Entry(
        id="e",
        user_id="ada",
        operation=operation,
        entity_type="activity",
        local_id=None,
        server_id=None,
        endpoint="/x",
        payload=None,
        headers={},
        idempotency_key="k",
        status=Status.IN_FLIGHT,
        attempt_count=attempt,
        max_attempts=12,
        next_retry_at=None,
        last_error=None,
        last_error_code=last,
        sequence_number=1,
        dependency_ids=(),
        created_at=now,
        synced_at=None,
        conflict_resolution=None,
        priority=5,
        client_generated_at=now,
        profile="default",
        lane=None,
        reason=None,
        local_refs=(),
        payload_version=0,
        base=None,
        base_version=None,
        theirs=None,
        theirs_version=None,
        forced=False,
        outcome_unknown=outcome_unknown,
        claim_number=1,
        waiting_for=0,
    )


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (200, None, Done()),
        (201, None, Done()),
        (202, None, Done()),
        (204, None, Done()),
        (409, "IDEMPOTENCY_CONFLICT", Refused()),
        (409, "idempotency.payload_mismatch", Refused()),
        (422, "idempotency.payload_mismatch", Refused()),
        (409, "IDEMPOTENCY_IN_PROGRESS", UNKNOWN),
        (409, "idempotency.in_progress", UNKNOWN),
        (409, "concurrency.version_mismatch", Conflicting()),
        (409, "SOMETHING_ELSE", Conflicting()),
        (409, None, Conflicting()),
        (412, None, Conflicting()),
        (422, "STALE_ACTION", TooOld()),
        (422, "action.stale", TooOld()),
        (422, "SOMETHING_ELSE", LATER),
        (422, None, LATER),
        (401, None, SignInNeeded()),
        (401, "ATTESTATION_INVALID", SignInNeeded()),
        (None, None, UNKNOWN),
        (408, None, UNKNOWN),
        (425, None, UNKNOWN),
        (429, None, UNKNOWN),
        (500, None, UNKNOWN),
        (502, None, UNKNOWN),
        (503, "STORE_UNAVAILABLE", UNKNOWN),
        (504, None, UNKNOWN),
        (599, None, UNKNOWN),
        (301, None, Misdirected()),
        (302, None, Misdirected()),
        (308, None, Misdirected()),
        (400, None, Refused()),
        (403, None, Refused()),
        (404, None, Refused()),
        (410, None, Refused()),
        (413, None, Refused()),
        (428, None, Conflicting()),
    ],
)
def test_an_answer_means(status: int | None, code: str | None, verdict: Verdict) -> None:
    assert classify(status, code, entry()) == verdict


def test_409_with_retry_after_is_a_conflict_only_if_its_code_says_so() -> None:
    for code in (None, "SOMETHING_ELSE"):
        assert classify(409, code, entry(), has_retry_after=True) == UNKNOWN
    mismatch = classify(409, "concurrency.version_mismatch", entry(), has_retry_after=True)
    assert mismatch == Conflicting()
    taken = classify(409, "TAKEN", entry(), {"TAKEN": Conflicting()}, has_retry_after=True)
    assert taken == Conflicting()


def test_a_code_counts_only_with_the_statuses_it_belongs_to() -> None:
    assert classify(400, "THINGS_DONE", entry(), {"THINGS_DONE": Done()}) == Refused()
    assert classify(500, "STALE_ACTION", entry()) == UNKNOWN


def test_codes_of_the_profile_take_precedence_over_those_of_the_protocol() -> None:
    codes: dict[str, Verdict] = {"NOT_YOUR_TURN": OutOfOrder(), "STALE_ACTION": Refused()}
    assert classify(422, "NOT_YOUR_TURN", entry(), codes) == OutOfOrder()
    assert classify(422, "STALE_ACTION", entry(), codes) == Refused()
    assert classify(422, "action.stale", entry(), codes) == TooOld()


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_gone_has_been_deleted(status: int) -> None:
    assert classify(status, None, entry(Operation.DELETE)) == Done()
    assert classify(status, None, entry(Operation.UPDATE)) == Refused()


def test_an_unknown_422_is_tried_once_more_and_then_refused() -> None:
    assert classify(422, "NEW", entry(attempt=1)) == LATER
    assert classify(422, "NEW", entry(attempt=2, last=422)) == Refused()


def test_a_failure_that_passed_does_not_count_as_the_first_unknown_422() -> None:
    assert classify(422, "NEW", entry(attempt=3, last=503)) == LATER


def test_an_entry_that_was_edited_has_its_second_try_again() -> None:
    assert classify(422, "NEW", entry(attempt=1, last=422)) == LATER


def test_the_table_has_exactly_the_codes_that_are_agreed_on() -> None:
    assert set(BY_CODE) == {
        "IDEMPOTENCY_CONFLICT",
        "idempotency.payload_mismatch",
        "IDEMPOTENCY_IN_PROGRESS",
        "idempotency.in_progress",
        "concurrency.version_mismatch",
        "STALE_ACTION",
        "action.stale",
    }
