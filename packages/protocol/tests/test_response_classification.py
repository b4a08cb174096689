"""The meaning of a response, case by case."""

from dataclasses import dataclass

import pytest

from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import (
    BY_CODE,
    SILENT,
    UNREACHABLE,
    UNRECOGNISED,
    AttestationNeeded,
    Conflicting,
    Done,
    Misdirected,
    NotTheService,
    OutOfOrder,
    Refused,
    SignInNeeded,
    TooOld,
    TryLater,
    Verdict,
    classify,
    counts_as_attempt,
    is_service_response,
)

LATER = TryLater()
UNKNOWN = TryLater(outcome_unknown=True)


@dataclass
class Sent:
    operation: Operation
    attempt_count: int
    last_error_code: int | None


def entry(
    operation: Operation = Operation.CREATE, attempt: int = 1, last: int | None = None
) -> Sent:
    return Sent(operation, attempt, last)


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


def test_401_is_about_an_attestation_only_with_a_code_that_says_so() -> None:
    codes: dict[str, Verdict] = {"NO_PROOF": AttestationNeeded(), "THINGS_DONE": Done()}
    assert classify(401, "NO_PROOF", entry(), codes) == AttestationNeeded()
    assert classify(401, "THINGS_DONE", entry(), codes) == SignInNeeded()
    assert classify(401, None, entry(), codes) == SignInNeeded()


@pytest.mark.parametrize(
    "status",
    [
        *(200, 201, 204, 400, 403, 404, 405, 407, 409, 410, 411, 412, 413, 414, 415, 421, 422),
        *(426, 428, 431, 451),
    ],
)
def test_a_response_of_another_than_the_service_leaves_the_outcome_unknown(status: int) -> None:
    for operation in Operation:
        assert classify(status, None, entry(operation), recognised=False) == NotTheService()


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (401, SignInNeeded()),
        (302, Misdirected()),
        (502, UNKNOWN),
    ],
)
def test_a_response_of_another_than_the_service_may_be_about_the_token_or_an_outage(
    status: int, verdict: Verdict
) -> None:
    assert classify(status, None, entry(), recognised=False) == verdict


HTML = {"content-type": "text/html; charset=utf-8"}


@pytest.mark.parametrize(
    ("headers", "body", "recognised"),
    [
        (HTML, b"<html>Sign in to the hotel", False),
        ({}, b"<html>Sign in to the hotel", False),
        ({"content-type": "text/plain"}, b"OK", False),
        ({"content-type": "text/plain"}, b"1", False),
        ({}, b"{not json", False),
        ({}, b"[" * 100_000, False),
        (HTML, b"", True),
        (HTML | {"x-request-id": "r"}, b"<html>", True),
        (HTML | {"idempotency-replayed": "true"}, b"<html>", True),
        ({"content-type": "application/problem+json"}, b'{"code": "x"}', True),
        ({"content-type": "Application/JSON"}, b"3", True),
        ({"content-type": "text/plain"}, b' {"id": 1}', True),
    ],
)
def test_a_response_of_the_service_is_json_or_empty_or_has_one_of_its_headers(
    headers: dict[str, str], body: bytes, *, recognised: bool
) -> None:
    assert is_service_response(200, headers, body) is recognised


@pytest.mark.parametrize(
    ("status", "code", "counts"),
    [
        (500, None, True),
        (408, None, True),
        (422, "NEW", True),
        (None, None, True),  # silence: it may be this very request that the server dies of
        (None, UNREACHABLE, False),
        (None, SILENT, False),
        (200, UNRECOGNISED, False),
        (500, UNRECOGNISED, False),
        *((status, "any", False) for status in (401, 429, 502, 503, 504)),
    ],
)
def test_only_attempts_that_say_something_about_the_entry_count(
    status: int | None, code: str | None, *, counts: bool
) -> None:
    assert counts_as_attempt(status, code) is counts


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
